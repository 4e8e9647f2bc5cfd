"""torchrl's ``PPOTrainer`` with ppokit's blocks, and with torchrl's own pieces, on CartPole.

``python -m tests.benchmarks.trainer`` trains three seeds of each arm for 100,000 frames, one after
the other on one thread, and writes ``docs/benchmarks/trainer.{csv,md,png}``.
"""

from __future__ import annotations

from tests.benchmarks.timing import on_one_thread

if __name__ == "__main__":
    on_one_thread()

import argparse
import csv
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811
from torchrl.trainers.algorithms import PPOTrainer
from tqdm import tqdm

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    RewardNormalizer,
    TensorActor,
    TrainingStep,
)
from tests.benchmarks.report import machine, output_folder
from tests.benchmarks.tables import markdown

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ENV, BATCH, MINIBATCH, EPOCHS, RATE = "CartPole-v1", 2_000, 100, 4, 1e-3
SOLVED = 475.0  # mean return of the episodes that end in a batch
ARMS = {
    "ppokit": "all of ppokit's blocks: `GymCollector`, `RewardNormalizer`, `GAE`, "
    "`DualClipPPOLoss`, `KLEarlyStopper`, `ParameterScheduler`",
    "compiled": "the same with `step.register(trainer)`, step and policy compiled; the seconds "
    "include capturing",
    "TensorActor": "as the first with torchrl's `Collector` over `TensorActor`",
    "same work": "`GymCollector`, `GAE` and `DualClipPPOLoss(dual_clip=None)` alone: what "
    "torchrl's pieces do, and as often",
    "torchrl": "torchrl's `Collector`, `GAE` and `ClipPPOLoss`",
}


@dataclass
class Run:
    """One run of an arm: frames and seconds since the start, and mean return, batch by batch."""

    arm: str
    seed: int
    frames: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)

    def solved_at(self) -> tuple[int, float] | None:
        """Return after how many frames and seconds the return was reached, or None."""
        rows = zip(self.frames, self.seconds, self.returns, strict=True)
        return next(((n, s) for n, s, value in rows if value >= SOLVED), None)

    @property
    def speed(self) -> float:
        """Frames a second."""
        return self.frames[-1] / self.seconds[-1]


def mlp(outputs: int) -> nn.Sequential:
    """Two hidden layers of 64."""
    hidden = nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def train(arm: str, seed: int, total_frames: int) -> Run:
    """Run a trainer to its end."""
    torch.manual_seed(seed)
    actor = ProbabilisticActor(
        TensorDictModule(mlp(2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(1), ["observation"])
    is_whole, compiled = arm in ("ppokit", "compiled", "TensorActor"), arm == "compiled"
    options: Any = {
        "frames_per_batch": BATCH,
        "total_frames": total_frames,
        "postproc": RewardNormalizer(gamma=0.99) if is_whole else None,
    }
    if arm in ("ppokit", "compiled", "same work"):
        options |= {"categorical_action_encoding": True, "compile_policy": compiled}
        collector: Any = GymCollector(ENV, actor, episode_reward=True, **options)
    else:
        env = TransformedEnv(GymEnv(ENV, categorical_action_encoding=True), RewardSum())
        policy = TensorActor(actor) if is_whole else actor
        collector = Collector(env, policy, auto_register_policy_transforms=False, **options)
    of_loss: Any = {"entropy_coeff": 0.01, "critic_coeff": 0.5}
    of_gae: Any = {"gamma": 0.99, "lmbda": 0.95, "value_network": critic, "average_gae": True}
    if arm == "torchrl":
        loss, gae = ClipPPOLoss(actor, critic, **of_loss), TorchRLGAE(**of_gae)
    else:
        dual_clip = 5.0 if is_whole else None
        loss, gae = DualClipPPOLoss(actor, critic, dual_clip=dual_clip, **of_loss), GAE(**of_gae)
    optimizer = torch.optim.Adam(loss.parameters(), lr=RATE, fused=True)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(BATCH), sampler=SamplerWithoutReplacement(), batch_size=MINIBATCH
    )
    trainer = PPOTrainer(
        collector=collector,
        total_frames=total_frames,
        frame_skip=1,
        optim_steps_per_batch=BATCH // MINIBATCH,
        loss_module=loss,
        optimizer=optimizer,
        clip_norm=0.5,
        progress_bar=False,
        seed=seed,
        num_epochs=EPOCHS,
        replay_buffer=buffer,
        gae=gae,
        save_trainer_interval=10 * total_frames,
        enable_logging=False,
    )
    if is_whole:
        stopper = KLEarlyStopper(0.03, replay_buffer=buffer)
        if compiled:
            own: Any = {"max_grad_norm": 0.5, "stopper": stopper, "compile": True}
            TrainingStep(loss, optimizer, **own).register(trainer)
        else:
            stopper.register(trainer)
        schedule = InterpSchedule.linear(RATE, 0.1 * RATE, frames=total_frames)
        ParameterScheduler({"lr": (optimizer, schedule)}).register(trainer)
    run, started = Run(arm, seed), time.perf_counter()

    def note(batch: TensorDictBase) -> TensorDictBase:
        ended = batch["next", "done"]
        returns = batch["next", "episode_reward"][ended]
        run.frames.append(BATCH * (len(run.frames) + 1))
        run.returns.append(returns.mean().item() if len(returns) else float(BATCH))
        return batch

    trainer.register_op("batch_process", note)
    trainer.register_op("post_steps", lambda: run.seconds.append(time.perf_counter() - started))
    trainer.train()
    return run


def write_csv(path: Path, runs: list[Run]) -> None:
    """Write every batch of every run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", "frames", "seconds", "return"])
        for run in runs:
            for row in zip(run.frames, run.seconds, run.returns, strict=True):
                writer.writerow([run.arm, run.seed, row[0], f"{row[1]:.3f}", f"{row[2]:.1f}"])


def table(runs: list[Run]) -> str:
    """Return speed and when the task was solved, an arm a line."""
    speed = {arm: median(run.speed for run in runs if run.arm == arm) for arm in ARMS}
    lines = []
    for arm in ARMS:
        own = [run for run in runs if run.arm == arm]
        solved = [run.solved_at() for run in own]
        found = [x for x in solved if x is not None]
        spread = f"{min(run.speed for run in own):,.0f} to {max(run.speed for run in own):,.0f}"
        lines.append(
            [
                f"{arm}: {ARMS[arm]}",
                f"{speed[arm]:,.0f} ({spread})",
                f"{speed[arm] / speed['torchrl']:.1f}",
                f"{len(found)} of {len(own)}",
                ", ".join("-" if x is None else f"{x[0]:,}" for x in solved),
                ", ".join("-" if x is None else f"{x[1]:.1f}" for x in solved),
            ]
        )
    head = ["arm", "frames a second", "over torchrl", f"reached {SOLVED:.0f}", "frames", "seconds"]
    return markdown(head, lines)


def draw(path: Path, runs: list[Run]) -> None:
    """Draw the returns over frames and over seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    colors = dict(zip(ARMS, ("#08306b", "#54278f", "#2171b5", "#6baed6", "#d62728"), strict=True))
    for axis, name in zip(axes, ("frames", "seconds"), strict=True):
        for run in runs:
            label = run.arm if run.seed == 0 else None
            axis.plot(getattr(run, name), run.returns, color=colors[run.arm], lw=1.2, label=label)
        axis.axhline(SOLVED, color="black", ls=":", lw=1)
        axis.set_xlabel("frames (environment steps)" if name == "frames" else "seconds")
        axis.grid(alpha=0.3)
    axes[1].set_xscale("log")
    axes[0].set_ylabel("mean return of the episodes in a batch")
    axes[0].set_ylim(0, 520)
    axes[1].legend()
    figure.suptitle(f"{ENV} in torchrl's PPOTrainer, {EPOCHS} epochs a batch")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder, seeds = output_folder(args.quick), 1 if args.quick else args.seeds
    total_frames = 2 * BATCH if args.quick else 100_000
    warnings.simplefilter("ignore")  # PPOTrainer is experimental, and its stages are deprecated
    torch.set_num_threads(1)
    cells = [(arm, seed) for seed in range(seeds) for arm in ARMS]
    runs = [train(arm, seed, total_frames) for arm, seed in tqdm(cells, unit="run")]
    write_csv(folder / "trainer.csv", runs)
    draw(folder / "trainer.png", runs)
    text = f"""# torchrl's trainer with ppokit's blocks

`PPOTrainer` on {ENV}: {total_frames:,} frames in batches of {BATCH:,}, minibatches of {MINIBATCH},
{EPOCHS} epochs (advantages are recomputed in each), networks of 2x64, Adam, entropy coefficient
0.01. The arms take turns, on one thread. The task counts as solved with the first batch whose
episodes have a mean return of {SOLVED:.0f}. `python -m tests.benchmarks.trainer`

![Returns over frames and over seconds](trainer.png)

{table(runs)}

With all blocks, an update ends as soon as the KL divergence exceeds 1.5 times 0.03: that is a part
of their speed, and of how they learn. "same work" does not stop.

{machine()}
"""
    (folder / "trainer.md").write_text(text)
    print(f"{folder / 'trainer.md'}\n\n{text}")


if __name__ == "__main__":
    main()
