"""Collecting from many CartPoles: native vector environments beside lists of Python ones.

``python -m tests.benchmarks.vector_environments`` writes
``docs/benchmarks/vector_environments.{csv,md,png}``. EnvPool and Stable-Baselines3 take part where
they are installed (extra ``bench``).
"""

from __future__ import annotations

from tests.benchmarks.timing import on_one_thread

if __name__ == "__main__":
    on_one_thread()

import argparse
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import matplotlib
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, GymWrapper, SerialEnv
from torchrl.modules import ProbabilisticActor
from tqdm import tqdm

from ppokit import GymCollector
from tests.benchmarks.report import machine, output_folder
from tests.benchmarks.tables import Row, compare, markdown, versions, write_csv
from tests.benchmarks.timing import Call, interleave

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ENV, STEPS = "CartPole-v1", 32
FLOOR = "floor"
ABOUT = {
    "ppokit, EnvPool": "`GymCollector` over EnvPool's CartPole, one thread",
    "ppokit, native": "`GymCollector` over gymnasium's `CartPoleVectorEnv`",
    "ppokit, serial": "`GymCollector` over a list of `CartPoleEnv`",
    "torchrl, vector": "torchrl's `Collector` over `GymWrapper(SyncVectorEnv(...))`",
    "torchrl, serial": "torchrl's `Collector` over `SerialEnv`",
    "Stable-Baselines3": "its `collect_rollouts` over `DummyVecEnv`",
    FLOOR: "`CartPoleVectorEnv`, and the networks called and sampled from in plain torch",
}
PEERS = ("torchrl, vector", "torchrl, serial", "Stable-Baselines3")


def make_network() -> nn.Sequential:
    """From observations to logits."""
    torch.manual_seed(0)
    hidden = nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(64, 2))


def make_actor() -> ProbabilisticActor:
    """The policy of all collectors."""
    return ProbabilisticActor(
        TensorDictModule(make_network(), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def of_ppokit(make_env: Any, num_envs: int, **options: Any) -> Callable[[], object]:
    """Return what collects a batch."""
    frames: Any = {"frames_per_batch": STEPS * num_envs, "num_envs": num_envs}
    encoding: Any = {"categorical_action_encoding": True}
    return GymCollector(make_env, make_actor(), **frames, **encoding, **options).rollout


def of_torchrl(env: Any, num_envs: int) -> Callable[[], object]:
    """Return what collects a batch."""
    collector = Collector(
        env,
        make_actor(),
        frames_per_batch=STEPS * num_envs,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    batches = iter(collector)
    return lambda: next(batches)


def of_sb3(num_envs: int) -> Callable[[], object]:
    """Return what collects a batch."""
    env = import_module("stable_baselines3.common.env_util").make_vec_env(ENV, num_envs, seed=0)
    layers = {"net_arch": [64, 64]}
    ppo = import_module("stable_baselines3").PPO
    model = ppo("MlpPolicy", env, n_steps=STEPS, policy_kwargs=layers, device="cpu")
    _, callback = model._setup_learn(10**9)
    buffer = model.rollout_buffer
    return lambda: model.collect_rollouts(model.env, callback, buffer, n_rollout_steps=STEPS)


def of_floor(num_envs: int) -> Callable[[], object]:
    """Return what steps the environment and draws from the network, and keeps nothing."""
    env: Any = gym.make_vec(ENV, num_envs, vectorization_mode="vector_entry_point")
    network, state = make_network(), [env.reset(seed=0)[0]]

    @torch.no_grad()
    def collect() -> None:
        for _ in range(STEPS):
            logits = network(torch.from_numpy(np.asarray(state[0])))
            action = torch.distributions.Categorical(logits=logits).sample()
            state[0] = env.step(action.numpy())[0]

    return collect


def contenders(num_envs: int) -> dict[str, Callable[[], object]]:
    """Return those that are installed, and bear so many environments."""
    make = lambda: GymEnv(ENV, categorical_action_encoding=True)  # noqa: E731
    found = {
        "ppokit, native": of_ppokit(ENV, num_envs, vectorization="vector_entry_point"),
        "ppokit, serial": of_ppokit(ENV, num_envs),
        FLOOR: of_floor(num_envs),
    }
    mode = AutoresetMode.SAME_STEP
    vector = SyncVectorEnv([lambda: gym.make(ENV)] * num_envs, autoreset_mode=mode)
    wrapper = GymWrapper(vector, categorical_action_encoding=True)
    found["torchrl, vector"] = of_torchrl(wrapper, num_envs)
    if num_envs <= 64:  # at 256, SerialEnv takes more than ten seconds a batch
        found["torchrl, serial"] = of_torchrl(SerialEnv(num_envs, make), num_envs)
    with suppress(ImportError):
        found["Stable-Baselines3"] = of_sb3(num_envs)
    try:
        envpool = import_module("envpool")
    except ImportError:
        return found
    options: Any = {"env_type": "gymnasium", "num_envs": num_envs, "num_threads": 1}
    found["ppokit, EnvPool"] = of_ppokit(envpool.make(ENV, **options), num_envs)
    return found


def measure(num_envs: int, seconds: float, fewest: int) -> list[Row]:
    """Time a batch of each contender, in turns."""
    calls = {name: Call(run) for name, run in contenders(num_envs).items()}
    times = interleave(calls, seconds=seconds, fewest=fewest)
    shape = num_envs, STEPS
    rows = [Row.of("collection", name, shape, times[name]) for name in ABOUT if name in times]
    compare(rows, peers=PEERS, bound=FLOOR)
    return rows


def table(rows: list[Row]) -> str:
    """Return frames a second, the spread, and the ratios."""
    lines = []
    for row in rows:
        frames = 1e6 * row.batch * row.steps
        slow, fast = (
            frames / (x or row.median_us) for x in (row.upper_quartile_us, row.lower_quartile_us)
        )
        ratio = "" if row.contender == FLOOR else f"{row.best_peer_over_this:.2f}"
        lines.append(
            [
                f"{row.batch}: {row.contender}",
                f"{frames / row.median_us:,.0f}",
                f"{slow:,.0f} to {fast:,.0f}",
                ratio,
                f"{row.this_over_bound:.2f}",
            ]
        )
    head = [
        "environments",
        "frames a second",
        "quartiles",
        "times the fastest peer",
        "time over floor",
    ]
    return markdown(head, lines)


def draw(path: Path, rows: list[Row]) -> None:
    """Draw frames a second over the number of environments."""
    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    for name in dict.fromkeys(row.contender for row in rows):
        own = [row for row in rows if row.contender == name]
        speed = [1e6 * row.batch * row.steps / row.median_us for row in own]
        style = {"ls": "--", "color": "black"} if name == FLOOR else {}
        width = 2.2 if name.startswith("ppokit") else 1.2
        axis.plot([row.batch for row in own], speed, marker="o", lw=width, label=name, **style)
    axis.set(xscale="log", yscale="log", xlabel="environments", ylabel="frames a second")
    counts = sorted({row.batch for row in rows})
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    axis.set_title(f"Collecting from {ENV}, one thread")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    counts = (8,) if args.quick else (64, 256, 1024)
    budget = (0.5, 2) if args.quick else (60.0, 7)
    rows = [row for count in tqdm(counts, unit="size") for row in measure(count, *budget)]
    write_csv(folder / "vector_environments.csv", rows)
    draw(folder / "vector_environments.png", rows)
    about = "\n".join(f"- **{name}**: {text}." for name, text in ABOUT.items())
    text = f"""# Many environments in one process

Batches of {STEPS} steps of {ENV}, a policy of 2x64; everything on one thread, in turns, medians.
`python -m tests.benchmarks.vector_environments`

![Frames a second over the number of environments](vector_environments.png)

{table(rows)}

{about}

Frames of native environments include the steps that reset a member, which no loss sees: one in
twenty for a policy that has learned nothing. torchrl's wrapper refuses native environments that
reset in the next step, and so is measured over Python's. {versions("envpool", "stable-baselines3")}

{machine()}
"""
    (folder / "vector_environments.md").write_text(text)
    print(f"{folder / 'vector_environments.md'}\n\n{text}")


if __name__ == "__main__":
    main()
