"""What each block costs as environments, networks and ranks grow, and what ranks say to each other.

``python -m tests.benchmarks.scale`` writes ``docs/benchmarks/scale.{csv,md,png}``.
"""

from __future__ import annotations

from tests.benchmarks.timing import on_one_thread

if __name__ == "__main__":
    on_one_thread()

import argparse
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from tqdm import tqdm

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    KLEarlyStopper,
    PPOUpdate,
    RewardNormalizer,
    TrainingStep,
)
from tests.benchmarks.report import machine, output_folder
from tests.benchmarks.tables import Row, markdown, write_csv
from tests.benchmarks.timing import Call, interleave
from tests.ranks import run_on_two_ranks

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS, MINIBATCHES, EPOCHS = 32, 8, 4
ENVS, HIDDEN = (64, 512, 4096), (64, 256)
PARTS = ("collect", "scale rewards", "GAE", "update")
KINDS: dict[str, dict[str, Any]] = {
    "gradients and statistics": {},
    "and a KL stop in each minibatch": {"stopper": True},
    "and advantages standardised over ranks": {"stopper": True, "normalize": True},
    "and a reward normalizer": {"stopper": True, "normalize": True, "rewards": True},
}


def layers(outputs: int, hidden: int) -> nn.Sequential:
    """Return a network of two hidden layers."""
    inner = nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
    return nn.Sequential(*inner, nn.Linear(hidden, outputs))


class Blocks:
    """The blocks of one assembly on CartPole."""

    def __init__(
        self,
        num_envs: int,
        hidden: int,
        *,
        stopper: bool = False,
        normalize: bool = False,
        rewards: bool = False,
    ) -> None:
        torch.manual_seed(0)
        actor = ProbabilisticActor(
            TensorDictModule(layers(2, hidden), ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        critic = ValueOperator(layers(1, hidden), ["observation"])
        loss = DualClipPPOLoss(actor, critic, normalize_advantage=normalize)
        self.collector = GymCollector(
            "CartPole-v1",
            actor,
            num_envs=num_envs,
            frames_per_batch=num_envs * STEPS,
            vectorization="vector_entry_point",
            categorical_action_encoding=True,
        )
        self.normalizer = RewardNormalizer(0.99)
        self.gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        self.update = PPOUpdate(
            TrainingStep(
                loss,
                torch.optim.Adam(loss.parameters(), fused=True),
                stopper=KLEarlyStopper(100.0) if stopper else None,
                max_grad_norm=0.5,
            ),
            advantage=self.gae,
            reward_normalizer=self.normalizer if rewards else None,
            minibatch_size=num_envs * STEPS // MINIBATCHES,
            epochs=EPOCHS,
        )
        self.parameters = sum(p.numel() for p in loss.parameters())

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return what is timed, each on a batch of its own."""
        batch = self.collector.rollout()
        return {
            "collect": self.collector.rollout,
            "scale rewards": lambda: RewardNormalizer(0.99)(batch.copy()),
            "GAE": lambda: self.gae(batch.copy()),
            "update": lambda: self.update(batch.copy()),
        }


def measure(num_envs: int, hidden: int, seconds: float) -> list[Row]:
    """Time the blocks, in turns."""
    calls = {name: Call(run) for name, run in Blocks(num_envs, hidden).calls().items()}
    times = interleave(calls, seconds=seconds, fewest=3)
    return [Row.of(f"{name}, 2x{hidden}", name, (num_envs, STEPS), times[name]) for name in PARTS]


def on_rank(hidden: int, rank: int) -> dict[str, Any]:
    """Return the messages and bytes of one update of each kind, as this rank sends them."""
    found: dict[str, Any] = {}
    said: Counter[str] = Counter()
    reduce, gather = dist.all_reduce, dist.all_gather_object

    def all_reduce(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        said.update(messages=1, bytes=x.nbytes)
        return reduce(x, *args, **kwargs)

    def all_gather_object(each: list[Any], own: Any, *args: Any, **kwargs: Any) -> Any:
        said.update(messages=2, bytes=len(pickle.dumps(own)) + 8)  # its length goes before it
        return gather(each, own, *args, **kwargs)

    dist.all_reduce, dist.all_gather_object = all_reduce, all_gather_object
    for kind, options in KINDS.items():
        blocks = Blocks(64, hidden, **options)
        blocks.update(blocks.collector.rollout())  # the first one compares parameters
        said.clear()
        blocks.update(blocks.collector.rollout())
        found[kind] = {**said, "parameters": blocks.parameters}
    return found


def messages() -> dict[int, dict[str, Any]]:
    """Return the messages of two real ranks, for each size of network."""
    found = {}
    for hidden in HIDDEN:
        with tempfile.TemporaryDirectory() as folder:
            found[hidden] = run_on_two_ranks(partial(on_rank, hidden), Path(folder))[0]
    return found


def time_table(rows: list[Row]) -> str:
    """Return microseconds a frame."""
    lines = []
    for hidden in HIDDEN:
        for envs in sorted({row.batch for row in rows}):
            own = {
                x.contender: x for x in rows if x.batch == envs and x.part.endswith(f"x{hidden}")
            }
            if own:
                cells = [f"{own[name].median_us / envs / STEPS:.2f}" for name in PARTS]
                lines.append([f"2x{hidden}, {envs:,}", *cells])
    return markdown(["networks, environments", *PARTS], lines)


def message_table(found: dict[int, dict[str, Any]]) -> str:
    """Return what one rank sends in an update."""
    lines = []
    for hidden, kinds in found.items():
        for kind, said in kinds.items():
            steps = EPOCHS * MINIBATCHES
            gradients = 4 * said["parameters"] * steps
            lines.append(
                [
                    f"2x{hidden}: {kind}",
                    f"{said['messages']:,}",
                    f"{said['messages'] / steps:.1f}",
                    f"{said['bytes']:,}",
                    f"{said['bytes'] - gradients:,}",
                ]
            )
    heads = ["", "messages an update", "a step", "bytes", "beside gradients"]
    return markdown(heads, lines)


def draw(path: Path, rows: list[Row]) -> None:
    """Draw microseconds a frame over the number of environments."""
    figure, axes = plt.subplots(1, len(HIDDEN), figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, hidden in zip(axes, HIDDEN, strict=True):
        for name in PARTS:
            own = [x for x in rows if x.part == f"{name}, 2x{hidden}"]
            each = [row.median_us / row.batch / row.steps for row in own]
            axis.plot([row.batch for row in own], each, marker="o", label=name)
        axis.set(title=f"networks of 2x{hidden}", xlabel="environments", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds a frame")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    rows: list[Row] = []
    sizes = [(envs, hidden) for hidden in HIDDEN for envs in (ENVS[:1] if args.quick else ENVS)]
    for envs, hidden in tqdm(sizes, unit="size"):
        rows += measure(envs, hidden, 1.0 if args.quick else 40.0)
    write_csv(folder / "scale.csv", rows)
    draw(folder / "scale.png", rows)
    text = f"""# What grows, and with what

CartPole-v1 as gymnasium's native vector environment, {STEPS} steps, {EPOCHS} epochs of
{MINIBATCHES} minibatches, one thread; microseconds a frame, medians. A number that stays the same
down a column grows with the frames. `python -m tests.benchmarks.scale`

![Microseconds a frame](scale.png)

{time_table(rows)}

What one of two ranks hands to `torch.distributed` in an update of {EPOCHS * MINIBATCHES} optimiser
steps, counted:

{message_table(messages())}

{machine()}
"""
    (folder / "scale.md").write_text(text)
    print(f"{folder / 'scale.md'}\n\n{text}")


if __name__ == "__main__":
    main()
