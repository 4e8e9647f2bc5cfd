"""Reward normalization by ppokit, on a whole batch, and by other libraries, step by step.

Each wrapper of another library gets an environment that plays recorded rewards back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count, islice, repeat
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torchrl.envs import VecNormV2

from ppokit import RewardNormalizer, kernels
from tests.benchmarks.data import GAMMA, QUICK_SHAPES, SHAPES, Data, reference_deviation
from tests.benchmarks.figures import draw_shapes
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, Shape, bullets, compare, pivot, ratio
from tests.benchmarks.timing import Call, interleave

TOLERANCE = 0.02  # of the scale: gymnasium's differs by up to 1%
LONGEST = 2048  # steps that the step-by-step wrappers are timed on; more are extrapolated
COPY = "copy of 9 bytes an element"


@dataclass(frozen=True)
class Normalizer:
    """A call over the whole record, and the divisor of the reward after the first call."""

    about: str
    call: Call
    scale: Callable[[], float]
    follows_returns: bool = True  #: divides by the deviation of the discounted return


def normalizers(data: Data) -> dict[str, Normalizer]:
    """Return the installed ones; all but ppokit's take at most ``LONGEST`` steps."""
    short = data.first(LONGEST)
    found = {"ppokit": _ppokit(data), "ppokit, without ids": _ppokit(data, ids=False)}
    if "native" in kernels.available():
        found["ppokit, torch kernel"] = _ppokit(data, kernel="torch")
    if find_spec("stable_baselines3"):
        found["Stable-Baselines3"] = _stable_baselines3(short)
    found["gymnasium"] = _gymnasium(short)
    found["torchrl VecNormV2"] = _torchrl(short)
    return found


def collected(data: Data) -> Iterator[TensorDict]:
    """Yield consecutive batches of a collector, with the same rewards and done flags in each.

    The last trajectory of a row continues in the next batch.
    """
    signals = {"reward": data.reward, "done": data.done, "terminated": data.terminated}
    done = data.done.squeeze(-1).long()
    before, rows = done.cumsum(1) - done, len(done)
    for number in count():
        of_row = before + number * done.sum(1, keepdim=True)
        ids = torch.arange(rows).unsqueeze(1) + rows * of_row
        yield TensorDict({"next": dict(signals), "collector": {"traj_ids": ids}}, done.shape)


def _ppokit(data: Data, *, ids: bool = True, kernel: str | None = None) -> Normalizer:
    normalizer, batches = RewardNormalizer(GAMMA), collected(data)
    ready: deque[TensorDict] = deque()

    def prepare(number: int) -> None:
        for batch in islice(batches, number):
            ready.append(batch if ids else batch.exclude("collector"))

    about = f"`ppokit.RewardNormalizer` on a batch, with{'' if ids else 'out'} trajectory ids"
    within = partial(kernels.use, kernel) if kernel else nullcontext
    return Normalizer(
        about + (f", the kernel in {kernel}" if kernel else ""),
        Call(lambda: normalizer(ready.popleft()), within, prepare),
        lambda: normalizer.scale.item(),
    )


class _Playback(gymnasium.vector.VectorEnv):
    """An environment of gymnasium, and of Stable-Baselines3, that plays a record back."""

    # The record has no steps that only reset.
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, data: Data) -> None:
        self.rewards, self.dones, self.terminated, self.truncated = (
            x.squeeze(-1).mT.contiguous().numpy()
            for x in (data.reward, data.done, data.terminated, data.done & ~data.terminated)
        )
        self.steps, self.num_envs = self.rewards.shape
        self.observations = np.zeros((self.num_envs, 1), np.float32)
        self.infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self.observation_space = self.action_space = gymnasium.spaces.Box(-1, 1, (1,))
        self.single_observation_space = self.single_action_space = self.action_space
        self.now = 0

    def next(self) -> int:
        step, self.now = self.now, (self.now + 1) % self.steps
        return step

    def step(self, actions: Any) -> tuple[Any, ...]:
        step = self.next()
        signals = self.rewards[step], self.terminated[step], self.truncated[step]
        return self.observations, *signals, {}

    def step_wait(self) -> tuple[Any, ...]:
        """Return a step in the form of Stable-Baselines3."""
        step = self.next()
        return self.observations, self.rewards[step], self.dones[step], self.infos

    def get_attr(self, *_: Any) -> list[Any]:
        return [None] * self.num_envs


def _each_step(step: Callable[[], object], steps: int) -> Call:

    def run() -> None:
        for _ in repeat(None, steps):
            step()

    return Call(run)


def _stable_baselines3(data: Data) -> Normalizer:
    kind: Any = import_module("stable_baselines3.common.vec_env").VecNormalize
    wrapped = kind(_Playback(data), norm_obs=False, gamma=GAMMA)
    return Normalizer(
        "`VecNormalize.step_wait` with `norm_obs=False`",
        _each_step(wrapped.step_wait, data.reward.shape[1]),
        lambda: float(np.sqrt(wrapped.ret_rms.var + wrapped.epsilon)),
    )


def _gymnasium(data: Data) -> Normalizer:
    wrapped = gymnasium.wrappers.vector.NormalizeReward(_Playback(data), gamma=GAMMA)
    return Normalizer(
        "`gymnasium.wrappers.vector.NormalizeReward.step`; it drops what an episode earned before "
        "its terminal step from that step's return, and does not clip",
        _each_step(partial(wrapped.step, None), data.reward.shape[1]),
        lambda: float(np.sqrt(wrapped.return_rms.var + wrapped.epsilon)),
    )


def _torchrl(data: Data) -> Normalizer:
    transform: Any = VecNormV2(in_keys=["reward"], reduce_batch_dims=True, decay=1.0)
    rows = len(data.reward)
    steps = [TensorDict({"reward": reward}, [rows]) for reward in data.reward.unbind(1)]
    empty = TensorDict({}, [rows])

    def run() -> None:
        for step in steps:
            transform._step(empty, step.copy())  # it writes into what it is given

    def scale() -> float:
        mean, square = (x["reward"].double() for x in (transform._loc, transform._var))
        return (square - mean.square()).sqrt().item()

    return Normalizer(
        "`torchrl.envs.VecNormV2` as an environment calls it (`_step`), `reduce_batch_dims=True`, "
        "`decay=1`; it standardizes the reward by the reward's own mean and standard deviation "
        "and follows no return",
        Call(run),
        scale,
        follows_returns=False,
    )


def shape_rows(shape: Shape, seconds: float) -> Sequence[Row]:
    data = Data.draw(*shape)
    short = data.first(LONGEST)
    found = normalizers(data)
    peers = [name for name in found if not name.startswith("ppokit")]
    scales = {n: checked_scale(n, x, short if n in peers else data) for n, x in found.items()}
    calls = {name: who.call for name, who in found.items()}
    # The bound reads a reward and a done flag, and writes a scaled reward.
    source, target = torch.ones(2, 9 * data.reward.numel() // 2, dtype=torch.uint8)
    calls[COPY] = Call(lambda: target.copy_(source))
    timings = interleave(calls, seconds=seconds)
    rows = []
    for name, timing in timings.items():
        scale = max(1.0, shape[1] / LONGEST) if name in peers else 1.0
        rows.append(Row.of("rewards", name, shape, timing, scale=scale))
        rows[-1].more["scale"] = scales.get(name)
    return compare(rows, peers=peers, bound=COPY)


def checked_scale(name: str, who: Normalizer, data: Data) -> float:
    """Return the divisor after one pass over the data.

    Raises:
        RuntimeError: it is not the standard deviation that the contender's rule divides by.
    """
    with who.call.within():
        who.call.prepare(1)
        who.call.run()
    scale = who.scale()
    reward = data.reward.double().std(correction=0).item()
    truth = reference_deviation(data) if who.follows_returns else reward
    if not abs(scale - truth) < TOLERANCE * truth:
        raise RuntimeError(f"{name} divides by {scale:.4g} instead of {truth:.4g}.")
    return scale


def main() -> None:
    bench = Benchmark("rewards", packages=("stable-baselines3",))
    shapes, seconds = (QUICK_SHAPES, 1.0) if bench.quick else (SHAPES, 12.0)
    rows = bench.measure(partial(shape_rows, shape, seconds) for shape in shapes)
    title = "Reward normalization, float32, one thread"
    draw_shapes(bench.file("png"), {"": rows}, [COPY], title)
    ours = [row for row in rows if row.contender.startswith("ppokit")]
    about = {name: who.about for name, who in normalizers(Data.draw(1, 2)).items()}
    about[COPY] = "`copy_` of half as many bytes between two buffers: the bound"
    bench.write_page(f"""# Reward normalization

Rewards `[B, T, 1]` in float32, 1% of the steps done; one thread. ppokit takes the batch at once;
the others take it step by step, and their time beyond {LONGEST:,} steps is extrapolated.

![Time per element over shapes](rewards.png)

Microseconds for the batch:

{pivot(rows, "median_us", ",.0f")}

The time of the fastest other library as a multiple of ppokit's; above 1, ppokit is faster:

{pivot(ours, "best_peer_over_this", ratio)}

Multiples of the bound, a copy that reads a reward and a done flag and writes a reward:

{pivot(ours, "this_over_bound", ratio)}

The divisor of the last timed step's reward, after one pass:

{pivot(rows, lambda row: row.more["scale"], ".3f")}

{bullets(about)}

ppokit divides the whole batch by the standard deviation after it; the others divide each step by
the standard deviation up to that step.
""")


if __name__ == "__main__":
    main()
