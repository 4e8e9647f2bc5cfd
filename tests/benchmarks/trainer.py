"""torchrl's ``PPOTrainer`` with ppokit's blocks, and with torchrl's own pieces, on CartPole."""

from __future__ import annotations

import time
import warnings
from statistics import median
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811
from torchrl.trainers.algorithms import PPOTrainer
from tqdm import tqdm

import ppokit
from tests.benchmarks.figures import draw_runs
from tests.benchmarks.networks import actor_and_critic
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import markdown, when, with_range, write_runs

ENV, BATCH, MINIBATCH, EPOCHS, RATE = "CartPole-v1", 2_000, 100, 4, 1e-3
WHOLE = ("ppokit", "compiled", "TensorActor")  # arms with all blocks
SOLVED = 475.0  # mean return of the episodes that end in a batch
ARMS = {
    "ppokit": "all of ppokit's blocks: `GymCollector`, `RewardNormalizer`, `GAE`, "
    "`DualClipPPOLoss`, `KLEarlyStopper`, `ParameterScheduler`",
    "compiled": "the same with `step.register(trainer)`, step and policy compiled; the seconds "
    "include capturing",
    "TensorActor": "as the first, with torchrl's `Collector` over `TensorActor`",
    "same work": "`GymCollector`, `GAE` and `DualClipPPOLoss(dual_clip=None)` alone, which do "
    "the same work as torchrl's",
    "torchrl": "torchrl's `Collector`, `GAE` and `ClipPPOLoss`",
}
Rows = list[dict[str, float]]  # frames, seconds since the start and mean return of each batch


def make_collector(arm: str, actor: Any, total_frames: int) -> Any:
    options: Any = {
        "frames_per_batch": BATCH,
        "total_frames": total_frames,
        "postproc": ppokit.RewardNormalizer(gamma=0.99) if arm in WHOLE else None,
    }
    if arm in ("ppokit", "compiled", "same work"):
        options |= {"categorical_action_encoding": True, "compile_policy": arm == "compiled"}
        return ppokit.GymCollector(ENV, actor, episode_reward=True, **options)
    env = TransformedEnv(GymEnv(ENV, categorical_action_encoding=True), RewardSum())
    policy = ppokit.TensorActor(actor) if arm in WHOLE else actor
    return Collector(env, policy, auto_register_policy_transforms=False, **options)


def make_trainer(arm: str, seed: int, total_frames: int) -> PPOTrainer:
    actor, critic = actor_and_critic(ENV, seed=seed)
    of_loss: Any = {"entropy_coeff": 0.01, "critic_coeff": 0.5}
    of_gae: Any = {"gamma": 0.99, "lmbda": 0.95, "value_network": critic, "average_gae": True}
    if arm == "torchrl":
        loss, gae = ClipPPOLoss(actor, critic, **of_loss), TorchRLGAE(**of_gae)
    else:
        dual_clip = 5.0 if arm in WHOLE else None
        loss = ppokit.DualClipPPOLoss(actor, critic, dual_clip=dual_clip, **of_loss)
        gae = ppokit.GAE(**of_gae)
    optimizer = torch.optim.Adam(loss.parameters(), lr=RATE, fused=True)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(BATCH), sampler=SamplerWithoutReplacement(), batch_size=MINIBATCH
    )
    options: Any = {"frame_skip": 1, "progress_bar": False, "enable_logging": False, "seed": seed}
    trainer = PPOTrainer(
        collector=make_collector(arm, actor, total_frames),
        total_frames=total_frames,
        optim_steps_per_batch=BATCH // MINIBATCH,
        loss_module=loss,
        optimizer=optimizer,
        clip_norm=0.5,
        num_epochs=EPOCHS,
        replay_buffer=buffer,
        gae=gae,
        save_trainer_interval=10 * total_frames,
        **options,
    )
    if arm in WHOLE:
        stopper = ppokit.KLEarlyStopper(0.03, replay_buffer=buffer)
        if arm == "compiled":
            own: Any = {"max_grad_norm": 0.5, "stopper": stopper, "compile": True}
            ppokit.TrainingStep(loss, optimizer, **own).register(trainer)
        else:
            stopper.register(trainer)
        schedule = ppokit.InterpSchedule([(0, RATE), (total_frames, 0.1 * RATE)])
        ppokit.ParameterScheduler({"lr": (optimizer, schedule)}).register(trainer)
    return trainer


def train(arm: str, seed: int, total_frames: int) -> Rows:
    trainer = make_trainer(arm, seed, total_frames)
    rows: Rows = []
    started = time.perf_counter()

    def note(batch: TensorDictBase) -> TensorDictBase:
        returns = batch["next", "episode_reward"][batch["next", "done"]]
        value = returns.mean().item() if len(returns) else float(BATCH)
        rows.append({"frames": BATCH * (len(rows) + 1), "return": value})
        return batch

    def note_time() -> None:
        rows[-1]["seconds"] = time.perf_counter() - started

    trainer.register_op("batch_process", note)
    trainer.register_op("post_steps", note_time)
    trainer.train()
    return rows


def table(runs: dict[str, list[Rows]]) -> str:
    speeds = {
        arm: [rows[-1]["frames"] / rows[-1]["seconds"] for rows in seeds]
        for arm, seeds in runs.items()
    }
    lines = [
        [
            f"{arm}: {ARMS[arm]}",
            with_range(speed),
            f"{median(speed) / median(speeds['torchrl']):.1f}",
            *when(runs[arm], "return", SOLVED),
        ]
        for arm, speed in speeds.items()
    ]
    head = ["arm", "frames a second", "over torchrl", f"frames to {SOLVED:.0f}", "seconds"]
    return markdown(head, lines)


def main() -> None:
    bench = Benchmark("trainer")
    seeds, total_frames = (1, 2 * BATCH) if bench.quick else (3, 100_000)
    warnings.simplefilter("ignore")  # PPOTrainer is experimental, and its stages are deprecated
    runs: dict[str, list[Rows]] = {arm: [] for arm in ARMS}
    for _, arm in tqdm([(seed, arm) for seed in range(seeds) for arm in ARMS], unit="run"):
        runs[arm].append(train(arm, len(runs[arm]), total_frames))
    write_runs(bench.file("csv"), runs)
    title = f"{ENV} in torchrl's PPOTrainer, {EPOCHS} epochs a batch"
    label = "mean return of the episodes in a batch"
    draw_runs(bench.file("png"), runs, "return", SOLVED, title, label)
    bench.write_page(f"""# torchrl's trainer with ppokit's blocks

`PPOTrainer` on {ENV}: {total_frames:,} frames in batches of {BATCH:,}, minibatches of {MINIBATCH},
{EPOCHS} epochs with new advantages in each, networks of 2x64, Adam, entropy coefficient 0.01. The
arms take turns, on one thread. The task is solved with the first batch whose episodes have a mean
return of {SOLVED:.0f}.

![Returns over frames and over seconds](trainer.png)

Frames and seconds to a return of {SOLVED:.0f}: the median, and each seed.

{table(runs)}

With all blocks, an update ends when the KL divergence exceeds 1.5 times 0.03, which contributes to
their speed and changes learning. "same work" does not stop.
""")


if __name__ == "__main__":
    main()
