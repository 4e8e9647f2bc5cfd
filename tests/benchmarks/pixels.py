"""PPO on Pong: collection and updates of images, beside other libraries and plain torch."""

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
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

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
PLAIN, TORCHRL = "plain torch", "torchrl's classes"
ABOUT = {
    "ppokit, compiled": "with `compile=True` and `compile_policy=True`",
    "ppokit": "`GymCollector` with `value_network` and `compact_obs`, `GAE`, `PPOUpdate`",
    "ppokit, two copies": "values by `GAE`, and each observation twice in a batch",
    "Stable-Baselines3": "its `PPO` over `make_atari_env`, with fused Adam",
    TORCHRL: "those of its `ppo_atari.py`, over gymnasium's wrappers, with the same networks",
    PLAIN: "one file in the manner of CleanRL's `ppo_atari.py`, over ALE's vector environment",
}
PEERS = ("Stable-Baselines3", TORCHRL, PLAIN)


def make_envs(count: int) -> Any:
    """Return ALE's vector environment, on as many threads as torch."""
    kind = import_module("ale_py.vector_env").AtariVectorEnv
    options = {"num_threads": torch.get_num_threads(), "autoreset_mode": AutoresetMode.SAME_STEP}
    return kind(GAME, num_envs=count, **options)


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


def make_single_env() -> GymWrapper:
    gym.register_envs(import_module("ale_py"))
    env = AtariPreprocessing(gym.make("PongNoFrameskip-v4"))
    return GymWrapper(FrameStackObservation(env, 4))


def of_torchrl(count: int, epochs: int = EPOCHS) -> Iterate:
    env, frames = SerialEnv(count, make_single_env), count * STEPS
    actor, _, critic = actor_critic(env, hidden=(), shared=True)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=CLIP,
        entropy_coeff=ENTROPY,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    parameters: Any = [*loss.parameters()]
    optimizer = torch.optim.Adam(parameters, RATE, eps=EPSILON, fused=True)
    advantage = TorchRLGAE(gamma=0.99, lmbda=0.95, value_network=critic)
    options: Any = {"storage": LazyTensorStorage(frames), "sampler": SamplerWithoutReplacement()}
    buffer = ReplayBuffer(**options, batch_size=min(SIZE, frames))
    batches = iter(Collector(env, actor, frames_per_batch=frames, total_frames=-1))

    def iterate() -> None:
        batch = next(batches)
        with torch.no_grad():
            batch = advantage(batch)
        for _ in range(epochs):
            buffer.extend(batch.reshape(-1))
            for minibatch in buffer:
                losses = loss(minibatch)
                sum(x for key, x in losses.items() if key.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
                optimizer.zero_grad()

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
    TORCHRL: of_torchrl,
    PLAIN: lambda *sizes: PlainPPO(*sizes).iterate,
}


def measure(count: int, threads: int, warm_up: int, seconds: float, fewest: int) -> list[Row]:
    """Time the contenders after so many iterations, in which graphs are captured."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    calls = {}
    for name, make in MAKE.items():
        with suppress(ImportError, gym.error.DependencyNotInstalled):  # the last one: OpenCV
            calls[name] = Call(iterate := make(count))
            for _ in range(warm_up):
                iterate()
    limits = {"seconds": seconds, "fewest": fewest}
    return timed(f"threads: {threads}", (count, STEPS), calls, peers=PEERS, **limits)


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
    cases = [(8, 1, 8, 150.0, 5), (8, 2, 8, 100.0, 5), (64, 1, 2, 150.0, 3), (64, 2, 2, 100.0, 3)]
    cases = [(1, 1, 2, 0.5, 2)] if bench.quick else cases
    rows = bench.measure(partial(measure, *case) for case in cases)

    def case_of(row: Row) -> str:
        return f"{row.batch} environments, {row.part}"

    groups = {name: [x for x in rows if case_of(x) == name] for name in map(case_of, rows)}
    draw_bars(bench.file("png"), {name: speeds(group) for name, group in groups.items()})
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
        "times the fastest peer": lambda row: f"{row.best_peer_over_this:.2f}",
    }
    sizes = [[x["contender"], f"{x['peak'] / 2**20:,.0f}"] for x in peaks]
    bench.write_page(f"""# Images: Pong

One iteration of PPO in CleanRL's setting: {STEPS} steps of each environment, then {EPOCHS} epochs
of minibatches of {SIZE} frames; the Nature CNN, shared by policy and critic, float32. Preprocessing
is in C++ (ALE), of Stable-Baselines3 and torchrl in Python wrappers.

![Frames a second](pixels.png)

{speed_table(rows, lambda row: f"{row.contender}; {case_of(row)}", ratios)}

{bullets(ABOUT)}

Peak of the resident memory in three iterations of {largest} environments with one epoch each, over
that before them:

{markdown(["", "MiB"], sizes)}
""")


if __name__ == "__main__":
    main()
