"""The claims of the index of the benchmarks."""

from __future__ import annotations

from statistics import mean, median

from tests.benchmarks import claim_texts as texts
from tests.benchmarks.claims import (
    cell,
    column,
    groups,
    last,
    lines,
    one,
    reached,
    rounded,
    span,
    wide_span,
)

RLLIB, AGILERL = "ppokit, RLlib's settings", "ppokit, AgileRL's settings"
OWN, DAEMONS = "ppokit, own settings", "Ray's daemons"


def index() -> list[str]:
    """Return the claims, table by table."""
    return [
        *(*double_pendulum(), *learning(), *mujoco(), *minatar(), *memory_tasks()),
        *(*rllib(), *agilerl(), *distributed_learning(), *rl8()),
        *(*loop(), *trainer(), *isaac_lab()),
        *(*pixels(), *vector_environments(), *workers(), *ray_workers()),
        *(*gae(), *rewards(), *step(), *recurrent(), *device(), *memory(), *scale(), *soak()),
    ]


# -- learning ----------------------------------------------------------------------------


def double_pendulum() -> list[str]:
    arms = ("ppokit", "TorchRL's classes")
    frames = [median(reached("coding_ppo", "eval_return", 9_000, "frames", arm=x)) for x in arms]
    ends = [median(last("coding_ppo", "eval_return", arm=x)) for x in arms]
    return [
        f"A return of 9,000 after {frames[0]:,.0f} frames, with TorchRL's classes "
        f"{frames[1]:,.0f}. Final return {ends[0]:,.0f} and {ends[1]:,.0f}."
    ]


def learning() -> list[str]:
    tasks = groups("learning", "task")
    own, peer = (
        [f"{texts.final('learning', task, arm):,.0f}" for task in tasks]
        for arm in ("ppokit", "Stable-Baselines3")
    )
    shown = ["CartPole", "Pendulum", "LunarLander", "double pendulum", "HalfCheetah", "Hopper"]
    pairs = (f"{name} {x} and {y}" for name, x, y in zip(shown, own, peer, strict=True))
    speed = (cell("learning", task, "over Stable-Baselines3") for task in tasks)
    return [
        f"{', '.join(pairs)}.",
        f"Frames a second: {span(speed, '.2f')} times.",
    ]


def mujoco() -> list[str]:
    arms = "ppokit", "Stable-Baselines3"
    speed = {"what": "frames a second"}
    tasks = groups("mujoco", "task", **speed)
    own, peer = ([one("mujoco", "value", task=x, arm=arm, **speed) for x in tasks] for arm in arms)
    over = span((x / y for x, y in zip(own, peer, strict=True)), ".2f")
    return [f"{over} times the frames a second of Stable-Baselines3"]


def minatar() -> list[str]:
    games = groups("minatar", "task", what="final")
    own, peer = (
        [f"{texts.final('minatar', game, arm):.1f}" for game in games]
        for arm in ("ppokit, compiled", "Stable-Baselines3")
    )
    pairs = (f"{game} {x} and {y}" for game, x, y in zip(games, own, peer, strict=True))
    speed = (cell("minatar", game, "over Stable-Baselines3") for game in games)
    return [f"{', '.join(pairs)}.", f"Frames a second, compiled: {span(speed, '.2f')} times."]


def memory_tasks() -> list[str]:
    def ends(task: str, style: str) -> str:
        arms = "LSTM", "stack of 4", "no memory"
        found = (mean(last("memory_tasks", "eval_return", task=task, arm=arm)) for arm in arms)
        return "{}, {} and {}".format(*(f"{x:,{style}}" for x in found))

    return [
        "With an LSTM, four frames and one frame: Pendulum "
        f"{ends('Pendulum*', '.0f')}; CartPole {ends('CartPole*', '.0f')}; a cue "
        f"{ends('cue*', '.3f')}."
    ]


def rllib() -> list[str]:
    def until(arm: str) -> str:
        found = (reached("rllib", "return_100", 450, x, arm=arm) for x in ("frames", "seconds"))
        frames, seconds = map(median, found)
        return f"{rounded(frames):,.0f} frames, {seconds:.1f} s"

    head = "over the faster RLlib"
    same, own = (cell("rllib", arm, head) for arm in (RLLIB, OWN))
    return [
        f"With RLlib's settings {until(RLLIB)}; with own settings {until(OWN)}. RLlib in one "
        f"process {until('RLlib in one process')}; with workers {until('RLlib, its example')}.",
        f"Frames a second: {same:.1f} times the faster RLlib, with own settings {own:.1f}.",
    ]


def agilerl() -> list[str]:
    same, own = (
        f"{rounded(median(reached('agilerl', 'score_10', 250, 'frames', arm=arm))):,.0f}"
        for arm in (AGILERL, OWN)
    )
    speed = cell("agilerl", AGILERL, "over the faster AgileRL")
    return [
        f"With AgileRL's settings {same} frames; with own settings {own}.",
        f"Frames a second: {speed:.1f} times the faster AgileRL.",
    ]


def distributed_learning() -> list[str]:
    def score(arm: str, task: str = "Pendulum-v1") -> str:
        return f"{mean(column('distributed_learning', 'score', task=task, arm=arm)):.0f}"

    ranks, alone, late = "two ranks", "one process", "two Ray workers, asynchronous"
    return [
        f"CartPole {score(ranks, 'CartPole-v1')} and {score(alone, 'CartPole-v1')} with two ranks "
        f"and one process; Pendulum {score(ranks)} and {score(alone)}, with Ray "
        f"{score('two Ray workers')}.",
        f"Pendulum ends at {score(late)}.",
    ]


def rl8() -> list[str]:
    where = {"name": "rl8", "score": "return", "target": -50, "wanted": "seconds or ms"}
    own, peer = (
        median(reached(**where, by="number", table="curve", arm=arm)) for arm in ("ppokit", "rl8")
    )
    same = (cell("rl8", f"ppokit, {x}", "over rl8") for x in ("eager", "compiled"))
    return [
        f"With own settings {own:.1f} s; rl8 {peer:.1f} s.",
        "With rl8's settings {:.2f} times as fast, compiled {:.2f}.".format(*same),
    ]


# -- loops and collectors ----------------------------------------------------------------


def loop() -> list[str]:
    compiled, eager = (
        texts.loop_ratios(arm, texts.PEERS_OF_LOOP) for arm in ("ppokit, compiled", "ppokit")
    )
    tutorial = texts.loop_ratios("ppokit, compiled", [{"contender": texts.TUTORIAL}])
    frames = span((round(x, -3) for _, x in texts.captures().values()), ",.0f")
    return [
        f"Over the better of Stable-Baselines3 and the CleanRL-style loop: compiled {compiled} "
        f"times, eager {eager}. Compiled, over the tutorial: {tutorial}.",
        f"A compiled loop is ahead of an eager one after {frames} frames.",
    ]


def trainer() -> list[str]:
    own, actor, same, peer = map(texts.trainer_speed, groups("trainer", "arm"))
    return [
        f"| {own / peer:.1f} times; {same / peer:.1f} times doing the same work.",
        f"With `TensorActor` and torchrl's collector {actor / peer:.1f} times.",
    ]


def isaac_lab() -> list[str]:
    peer, own, eager = (
        [texts.isaac(task, arm) for task in ("CartPole", "Pendulum")]
        for arm in ("Isaac Lab's loop*", "ppokit, compiled", "ppokit, eager")
    )
    return [
        f"Iterations a second: compiled {own[0][1]:.2f} and {own[1][1]:.2f} times, eager "
        f"{eager[0][1]:.2f} and {eager[1][1]:.2f}.",
        f"Return on CartPole {own[0][0]:.0f} compiled, {eager[0][0]:.0f} eager, "
        f"{peer[0][0]:.0f} with TorchRL's classes.",
    ]


def pixels() -> list[str]:
    over = [texts.over_peer("pixels", f"ppokit{x}")[0] for x in (", compiled", "")]
    names = "ppokit", "ppokit, two copies", "Stable-Baselines3"
    peaks = [one("pixels_memory", "peak", contender=x) / 2**20 for x in names]
    return [
        "Pong: compiled {:.2f}, eager {:.2f} times the frames a second of the faster of "
        "Stable-Baselines3 and plain torch.".format(*over),
        "Peak memory with 64 environments: {:,.0f} MiB, with next observations {:,.0f}; "
        "Stable-Baselines3 {:,.0f}.".format(*peaks),
    ]


def vector_environments() -> list[str]:
    over = {x: texts.over_peer("vector_environments", f"ppokit, {x}") for x in ("native", "serial")}
    floor = (
        span(column("vector_environments", "this_over_bound", contender=f"ppokit, {x}"), style)
        for x, style in (("native", ".2f"), ("EnvPool", ".1f"))
    )
    return [
        f"Over gymnasium's native environments {span(over['native'])} times Stable-Baselines3, "
        f"over Python's {span(over['serial'], '.2f')} times.",
        "Native ones take {} of the floor's time, EnvPool's {}.".format(*floor),
    ]


def workers() -> list[str]:
    own = column("workers", "best_peer_over_this", contender="ppokit, 2 workers", batch=64)
    alone = texts.over_peer("workers", "ppokit, async")
    return [
        "64 environments in two workers: {:.1f} times torchrl's workers on HalfCheetah, {:.0f} on "
        "CartPole.".format(*own),
        f"A process for each environment (`AsyncVectorEnv`): {max(alone):.2f} times "
        "Stable-Baselines3.",
    ]


def ray_workers() -> list[str]:
    def speeds(contender: str, batch: int) -> list[float]:
        tasks = groups("ray_workers", "part")
        return [texts.frames_a_second("ray_workers", contender, x, batch) for x in tasks]

    own, peer = speeds("Ray over GymCollector", 16), speeds("Ray over torchrl*", 16)
    alone = speeds("one GymCollector", 8)
    return [
        f"HalfCheetah {own[0] / peer[0]:.1f} and CartPole {own[1] / peer[1]:.1f} times torchrl's "
        "collector on Ray.",
        f"Two workers are {own[0] / alone[0]:.2f} and {own[1] / alone[1]:.2f} times one process.",
    ]


# -- parts -------------------------------------------------------------------------------


def gae() -> list[str]:
    own, torch = texts.gae_ratios(), texts.gae_ratios("torch")
    (line,) = lines("gae", part="function", contender="ppokit, native", batch=4_096, steps=32)
    return [
        f"{wide_span(own)} times the fastest; `[4096, 32]` takes "
        f"{float(line['median_us']):.0f} µs, {float(line['this_over_bound']):.1f} times a copy.",
        f"Without the C kernel {min(torch):.2f} to {max(torch):.1f} times the fastest.",
    ]


def rewards() -> list[str]:
    own, torch = texts.reward_ratios(), texts.reward_ratios("*torch kernel")
    return [
        f"| {wide_span(own, '.2f')} times the fastest. |",
        f"Without the C kernel {wide_span(torch, '.2f')} times.",
    ]


def step() -> list[str]:
    def both(contender: str) -> str:
        spans = (span(texts.step(part, contender), ".2f") for part in ("2x64*", "3x256*"))
        return " and ".join(spans)

    return [
        f"In an update, 2x64 and 3x256, of the floor: compiled {both(texts.COMPILED)}; TorchRL's "
        f"loop {both(texts.LOOP)}.",
        f"Called alone, a compiled step takes {both(texts.CALLED)}.",
    ]


def recurrent() -> list[str]:
    def over_plain(contender: str, part: str) -> str:
        return span(column("recurrent", "this_over_bound", contender=contender, part=part))

    return [
        f"{over_plain('ppokit', 'epoch')} times a plain `nn.LSTM`; torchrl "
        f"{over_plain('torchrl, recurrent mode', 'epoch')} times.",
        f"GRU: {over_plain('ppokit', 'epoch of a GRU')} times a plain `nn.GRU`.",
    ]


def device() -> list[str]:
    *small, large = column("device", "this_over_bound", part="scan", contender="ppokit, triton")
    peer = column("device", "this_over_bound", part="scan", contender="torchrl, *")
    updates = [texts.device_update("graph", shape=x) for x in ("[4096, 24]", "[64, 128]")]
    return [
        f"GAE takes {span(small, '.0f')} times the copy on small batches and {large:.2f} on "
        f"`[8192, 2048]`, TorchRL's {span(peer, ',.0f')}.",
        f"A step as a CUDA graph takes {span(texts.device_step(texts.GRAPH), '.2f')} of the floor, "
        f"TorchRL's {span(texts.device_step(texts.LOOP), '.2f')}.",
        f"Updates are {updates[0]:.2f} and {updates[1]:.2f} times as fast.",
    ]


def memory() -> list[str]:
    def multiples(block: str) -> list[float]:
        pairs = zip(*(column("memory", x, block=block) for x in ("peak", "batch")), strict=True)
        return [peak / batch for peak, batch in pairs]

    own, chunks, peer = map(multiples, ("ppokit `GAE`", "*in chunks*", "torchrl `GAE`"))
    epoch, of_peer = map(multiples, ("ppokit `PPOUpdate`*", "torchrl: replay*"))
    return [
        f"`GAE` takes {max(own):.1f} times the batch, with `value_chunk_size` "
        f"{span(chunks, '.2f')}; TorchRL's {max(peer):.1f}. An epoch takes {span(epoch)}, "
        f"TorchRL's {span(of_peer)}."
    ]


def scale() -> list[str]:
    times = column("scale", "median_us", part="2x64", batch=4_096)
    least, most = (cell("scale", x, "messages an update") for x in ("gradients", "and a reward"))
    return [
        f"{sum(times) / 4_096 / 32:.1f} µs a frame of 2x64 networks at 4,096 environments.",
        f"An update of 32 steps sends {least:.0f} messages; with every option that needs them, "
        f"{most:.0f}.",
    ]


def soak() -> list[str]:
    growth = cell("soak", DAEMONS, "MiB a minute, from minute 5")
    return [f"Ray's daemons grow by {growth:.1f} MiB a minute"]
