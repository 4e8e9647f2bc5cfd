"""PPO on Pong: collection and updates of images, beside Stable-Baselines3 and plain torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks.figures import draw_bars
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import run_jobs
from tests.benchmarks.tables import (
    Row,
    bullets,
    markdown,
    speed_table,
    speeds,
    timed,
    write_lines,
)
from tests.benchmarks.timing import Call

Iterate = Callable[[], object]
GAME, STEPS, EPOCHS, SIZE = "pong", 128, 4, 256  # frames of a minibatch
RATE, EPSILON, CLIP, ENTROPY = 2.5e-4, 1e-5, 0.1, 0.01
PLAIN = "plain torch"
ABOUT = {
    "ppokit, compiled": "with `compile=True` and `compile_policy=True`",
    "ppokit": "`GymCollector` with `value_network` and `compact_obs`, `GAE`, `PPOUpdate`",
    "ppokit, two copies": "values by `GAE`, and each observation twice in a batch",
    "Stable-Baselines3": "its `PPO` over `make_atari_env`, with fused Adam",
    PLAIN: "one file in the manner of CleanRL's `ppo_atari.py`, over ALE's vector environment",
}
PEERS = ("Stable-Baselines3", PLAIN)


def make_envs(count: int) -> Any:
    """Return ALE's vector environment, on one thread."""
    kind = import_module("ale_py.vector_env").AtariVectorEnv
    return kind(GAME, num_envs=count, num_threads=1, autoreset_mode=AutoresetMode.SAME_STEP)


def of_ppokit(
    count: int, epochs: int = EPOCHS, *, compact: bool = True, compiled: bool = False
) -> Iterate:
    envs = make_envs(count)
    actor, value_head, critic = actor_critic(envs, hidden=(), shared=True)
    loss = ppokit.DualClipPPOLoss(
        actor, value_head, clip_epsilon=CLIP, entropy_coeff=ENTROPY, critic_coeff=0.5
    )
    optimizer = torch.optim.Adam(loss.parameters(), RATE, eps=EPSILON, fused=True)
    network = None if compact else critic
    frames = count * STEPS
    update = ppokit.PPOUpdate(
        ppokit.TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=compiled),
        advantage=ppokit.GAE(gamma=0.99, lmbda=0.95, value_network=network),
        epochs=epochs,
        minibatch_size=SIZE,
    )
    stored: Any = {"value_network": critic, "compact_obs": True} if compact else {}
    collector = ppokit.GymCollector(
        envs, actor, frames_per_batch=frames, compile_policy=compiled, **stored
    )
    return lambda: update(collector.rollout())


def of_stable_baselines3(count: int, epochs: int = EPOCHS) -> Iterate:
    gym.register_envs(import_module("ale_py"))
    make = import_module("stable_baselines3.common.env_util").make_atari_env
    stack = import_module("stable_baselines3.common.vec_env").VecFrameStack
    model = import_module("stable_baselines3").PPO(
        "CnnPolicy",
        stack(make("PongNoFrameskip-v4", count, seed=0), 4),
        learning_rate=RATE,
        n_steps=STEPS,
        batch_size=min(SIZE, count * STEPS),
        n_epochs=epochs,
        clip_range=CLIP,
        ent_coef=ENTROPY,
        policy_kwargs={"optimizer_kwargs": {"eps": EPSILON, "fused": True}},
        seed=0,
        device="cpu",
    )
    _, callback = model._setup_learn(10**9)

    def iterate() -> None:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, STEPS)
        model.train()

    return iterate


class PlainPPO:
    """PPO in plain torch: no blocks, no TensorDict."""

    def __init__(self, count: int, epochs: int = EPOCHS) -> None:
        self.envs, self.count, self.epochs = make_envs(count), count, epochs
        layers: list[nn.Module] = []
        for inputs, outputs, size, stride in ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
            layers += [nn.Conv2d(inputs, outputs, size, stride), nn.ReLU()]
        self.encoder = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())
        self.policy, self.value = nn.Linear(512, 6), nn.Linear(512, 1)
        self.parameters = [
            p for x in (self.encoder, self.policy, self.value) for p in x.parameters()
        ]
        self.optimizer = torch.optim.Adam(self.parameters, RATE, eps=EPSILON, fused=True)
        self.next_obs = torch.as_tensor(self.envs.reset(seed=0)[0])
        self.next_done = torch.zeros(count)
        self.observations = torch.zeros((STEPS, count, 4, 84, 84), dtype=torch.uint8)

    def evaluate(self, images: Tensor) -> tuple[Any, Tensor]:
        features = self.encoder(images / 255.0)
        logits = self.policy(features)
        return torch.distributions.Categorical(logits=logits), self.value(features).flatten()

    def iterate(self) -> None:
        actions = torch.zeros((STEPS, self.count), dtype=torch.long)
        log_probs, rewards, dones, values = torch.zeros((4, STEPS, self.count))
        for step in range(STEPS):
            self.observations[step], dones[step] = self.next_obs, self.next_done
            with torch.no_grad():
                policy, values[step] = self.evaluate(self.next_obs)
                actions[step] = policy.sample()
                log_probs[step] = policy.log_prob(actions[step])
            observed, reward, terminated, truncated, _ = self.envs.step(actions[step].numpy())
            rewards[step] = torch.as_tensor(reward)
            self.next_obs = torch.as_tensor(observed)
            self.next_done = torch.as_tensor(terminated | truncated, dtype=torch.float32)
        advantages, last = torch.zeros_like(rewards), torch.zeros(self.count)
        with torch.no_grad():
            following, done = self.evaluate(self.next_obs)[1], self.next_done
        for step in reversed(range(STEPS)):
            delta = rewards[step] + 0.99 * following * (1 - done) - values[step]
            advantages[step] = last = delta + 0.99 * 0.95 * (1 - done) * last
            following, done = values[step], dones[step]
        returns = (advantages + values).flatten()
        images, actions = self.observations.flatten(0, 1), actions.flatten()
        log_probs, advantages, frames = log_probs.flatten(), advantages.flatten(), len(returns)
        for _ in range(self.epochs):
            for at in torch.randperm(frames).split(SIZE):
                policy, value = self.evaluate(images[at])
                ratio = (policy.log_prob(actions[at]) - log_probs[at]).exp()
                advantage = advantages[at]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gains = ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
                loss = -torch.minimum(*gains).mean() - ENTROPY * policy.entropy().mean()
                loss = loss + 0.5 * (value - returns[at]).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()


MAKE: dict[str, Callable[..., Iterate]] = {
    "ppokit, compiled": partial(of_ppokit, compiled=True),
    "ppokit": of_ppokit,
    "ppokit, two copies": partial(of_ppokit, compact=False),
    "Stable-Baselines3": of_stable_baselines3,
    PLAIN: lambda *sizes: PlainPPO(*sizes).iterate,
}


def measure(count: int, seconds: float, fewest: int) -> list[Row]:
    torch.manual_seed(0)
    calls = {}
    for name, make in MAKE.items():
        with suppress(ImportError):
            calls[name] = Call(iterate := make(count))
            for _ in range(2):  # captures, and the first touch of memory
                iterate()
    limits = {"seconds": seconds, "fewest": fewest}
    return timed("iteration", (count, STEPS), calls, peers=PEERS, **limits)


def peak(contender: str, count: int) -> dict[str, float]:
    """Return the peak of resident memory in three iterations over that before them, in bytes.

    An iteration has one epoch: others take no more memory.
    """
    status = Path("/proc/self/status")
    MAKE[contender](1, 1)()  # what is created once
    iterate = MAKE[contender](count, 1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here

    def read(name: str) -> float:
        return 1024.0 * int(re.findall(rf"{name}:\s+(\d+)", status.read_text())[0])

    before = read("VmRSS")
    for _ in range(3):
        iterate()
    return {"peak": read("VmHWM") - before}


def main() -> None:
    bench = Benchmark("pixels", packages=("ale-py", "stable-baselines3"))
    counts, budget = ((1,), (0.5, 2)) if bench.quick else ((8,), (150.0, 5))
    rows = bench.measure(partial(measure, count, *budget) for count in counts)
    draw_bars(bench.file("png"), {"": speeds(rows)})
    measured = {row.contender for row in rows} - {"ppokit, compiled", PLAIN}
    names = [name for name in MAKE if name in measured]
    largest = 2 if bench.quick else 64
    jobs = [{"contender": name, "count": largest} for name in names]
    # freed memory is given back, so that the peak is of what is held
    returned = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    returned |= {"MALLOC_MMAP_THRESHOLD_": "65536"}
    peaks = run_jobs("pixels.peak", jobs, None, OMP_NUM_THREADS="1", **returned)
    memory = bench.folder / "pixels_memory.csv"
    write_lines(memory, peaks)
    ratios = {
        "times the faster peer": lambda row: f"{row.best_peer_over_this:.2f}",
    }
    sizes = [[x["contender"], f"{x['peak'] / 2**20:,.0f}"] for x in peaks]
    bench.write_page(f"""# Images: Pong

One iteration of PPO in CleanRL's setting: {counts[0]} environments for {STEPS} steps, then {EPOCHS}
epochs of minibatches of {SIZE} frames; the Nature CNN, shared by policy and critic, float32, on one
thread. Preprocessing is in C++ (ALE) for all but Stable-Baselines3, which has Python wrappers.

![Frames a second](pixels.png)

{speed_table(rows, "{0.contender}".format, ratios)}

{bullets(ABOUT)}

Peak of the resident memory in three iterations of {largest} environments with one epoch each, over
that before them:

{markdown(["", "MiB"], sizes)}
""")


if __name__ == "__main__":
    main()
