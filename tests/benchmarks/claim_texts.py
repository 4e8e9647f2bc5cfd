"""The claims of each page: pieces of its text, with figures from CSV files and tables."""

from __future__ import annotations

from statistics import mean, median

from tests.benchmarks.claims import (
    cell,
    column,
    groups,
    last,
    lines,
    one,
    ratios,
    reached,
    rounded,
    span,
    wide_span,
)
from tests.benchmarks.curves import iqm

PEERS_OF_LOOP = [{"contender": "Stable-Baselines3"}, {"contender": "CleanRL-style"}]
TUTORIAL = "TorchRL's tutorial"
COMPILED = "ppokit's loss, compiled, in an update"
CALLED = "ppokit's loss, compiled, called"
EAGER, LOOP = "ppokit's loss, eager step", "torchrl's loss, loop"
GRAPH = "ppokit's loss, CUDA graph, in an update"


def claims() -> dict[str, list[str]]:
    """Return the claims of each page, by its path."""
    from tests.benchmarks import index_texts

    pages = {
        "dual_clip_ppo_loss": dual_clip_ppo_loss(),
        "functional": functional(),
        "gae": gae(),
        "gym_collector": gym_collector(),
        "kl_early_stopper": kl_early_stopper(),
        "ppo_update": ppo_update(),
        "reward_normalizer": reward_normalizer(),
        "sequence_batcher": sequence_batcher(),
        "training_step": training_step(),
    }
    howto = {
        "distributed": distributed(),
        "in_torchrl": in_torchrl(),
        "isaac_lab": isaac_lab(),
        "precision_and_compile": precision_and_compile(),
    }
    return {
        "README.md": readme(),
        "docs/benchmarks/index.md": index_texts.index(),
        **{f"docs/blocks/{name}.md": found for name, found in pages.items()},
        **{f"docs/howto/{name}.md": found for name, found in howto.items()},
    }


# -- figures that several pages cite -----------------------------------------------------


def step(part: str, contender: str, frames: int = 64) -> list[float]:
    """Return times of a step as multiples of the floor."""
    where = {"part": part, "contender": contender, "batch": frames}
    return column("step", "this_over_bound", **where)


def step_ratios(networks: str) -> str:
    """Return how many times as fast as TorchRL's loop a compiled step is."""
    pairs = zip(step(networks, LOOP), step(networks, COMPILED), strict=True)
    return span(peer / own for peer, own in pairs)


def loop_ratios(own: str, peers: list[dict[str, str]]) -> str:
    """Return frames a second as multiples of the better peer's, over the tasks."""
    above = [{"part": "whole"} | peer for peer in peers]
    below = {"part": "whole", "contender": own}
    return span(ratios("loop", "us_per_frame", "task", above, below))


def gae_ratios(kernel: str = "native") -> list[float]:
    """Return how many times as fast as the fastest other library the function is."""
    where = {"part": "function", "contender": f"ppokit, {kernel}"}
    return column("gae", "best_peer_over_this", **where)


def reward_ratios(contender: str = "ppokit") -> list[float]:
    return column("rewards", "best_peer_over_this", contender=contender)


def device_step(contender: str) -> list[float]:
    """Return times of a step of 64 frames on a GPU, as multiples of the floor."""
    return column("device", "this_over_bound", part="*x*", contender=contender, batch=64)


def device_update(arm: str, head: str = "times the first row's speed", shape: str = "[4096, 24]"):
    return cell("device", arm, head, after=f"## Updates of {shape}")


def frames_a_second(name: str, contender: str, part: str, batch: int) -> float:
    where = {"contender": contender, "part": part, "batch": batch}
    (line,) = lines(name, **where)
    return 1e6 * batch * float(line["steps"]) / float(line["median_us"])


def environments(contender: str) -> str:
    """Return the frames a second of 64 environments."""
    return f"{rounded(frames_a_second('vector_environments', contender, '*', 64)):,.0f}"


def over_peer(name: str, contender: str, **where: object) -> list[float]:
    return column(name, "best_peer_over_this", contender=contender, **where)


def final(name: str, task: str, arm: str) -> float:
    """Return the interquartile mean over the seeds of their mean return at the end."""
    where = {"task": task, "arm": arm, "what": "final*"}
    seeds = groups(name, "seed", **where)
    return float(iqm([mean(column(name, "value", seed=seed, **where)) for seed in seeds]))


# -- README ------------------------------------------------------------------------------


def readme() -> list[str]:
    graph = one("device", "median_us", part="2x64*", batch=64, contender=LOOP)
    graph /= one("device", "median_us", part="2x64*", batch=64, contender=GRAPH)
    serial, native = (
        over_peer("vector_environments", f"ppokit, {x}", batch=64)[0] for x in ("serial", "native")
    )
    mujoco = {
        x: f"{final('mujoco', f'{x}-v5', 'ppokit'):,.0f}"
        for x in ("Hopper", "Walker2d", "HalfCheetah", "Ant")
    }
    return [
        f"steps a second: {step_ratios('2x64*')} times TorchRL's loss in a loop (2x64 units), "
        f"{step_ratios('3x256*')} (3x256)",
        f"{wide_span(gae_ratios())} times as fast as the fastest other library on the same work",
        f"{wide_span(reward_ratios())} times as fast as other libraries",
        f"{serial:.1f} times Stable-Baselines3's frames a second; {native:.1f} times over "
        "gymnasium's native vector environment",
        f"is {graph:.0f} times as fast as TorchRL's loss in a loop with 64 frames, and an update "
        f"of 4,096 x 24 frames {device_update('graph'):.1f} times as fast",
        f"Hopper ends at {mujoco['Hopper']}, Walker2d at {mujoco['Walker2d']}, HalfCheetah at "
        f"{mujoco['HalfCheetah']} and Ant at {mujoco['Ant']} after 1,000,000 frames",
        f"compiled, {loop_ratios('ppokit, compiled', PEERS_OF_LOOP)} times the frames a second of "
        "the better of",
        f"Eager loops make {loop_ratios('ppokit', PEERS_OF_LOOP)} times as many",
    ]


# -- pages of blocks ---------------------------------------------------------------------


def dual_clip_ppo_loss() -> list[str]:
    large = {name: step("*, tanh-normal", name, 4_096) for name in (EAGER, LOOP)}
    return [
        *(
            f"| {size} | {step(part, EAGER)[0]:.2f} | {step(part, LOOP)[0]:.2f} | "
            f"{step(part, COMPILED)[0]:.2f} |"
            for size in ("2x64", "3x256")
            for part in [f"{size}, tanh-normal"]
        ),
        f"At 4,096 frames an eager step with ppokit's loss takes {span(large[EAGER], '.2f')} times "
        "as long as the networks, clipping and Adam alone, and torchrl's loop "
        f"{span(large[LOOP], '.2f')}",
        "at 64 frames with an unshared tanh-normal policy",
    ]


def gae_us(contender: str, rows: int, steps: int) -> float:
    where = {"part": "function", "batch": rows, "steps": steps}
    return min(column("gae", "median_us", contender=contender, **where))


def functional() -> list[str]:
    copies = column("gae", "this_over_bound", part="function", contender="ppokit, native")
    return [
        "GAE of one row of 1,000 steps takes torchrl's loop "
        f"{gae_us('torchrl, loop', 1, 1_000):,.0f} microseconds and Stable-Baselines3 "
        f"{gae_us('Stable-Baselines3', 1, 1_000):,.0f}",
        f"GAE in the C kernel takes {min(copies):.1f} to {max(copies):.1f} times as long as a "
        "copy of the same bytes",
        f"It is {wide_span(gae_ratios())} times as fast as the fastest other library on the same "
        "work",
        f"It is then {min(gae_ratios('torch')):.2f} to {max(gae_ratios('torch')):.1f} times as "
        "fast as the fastest other library",
    ]


def gae() -> list[str]:
    forward = {"part": "critic", "contender": "one forward of the critic"}
    own = {"part": "critic", "contender": "ppokit.GAE"}
    peers = [{"part": "critic", "contender": f"torchrl GAE, {x}"} for x in ("loop", "vectorised")]
    contenders = "ppokit, native", "Tianshou", "Stable-Baselines3", "torchrl, *"
    copy = "copy of 22 bytes an element"

    def row(title: str, style: str, *shape: int) -> str:
        times = [
            f"{gae_us(x, *shape):,{style if k == 0 else '.0f'}}" for k, x in enumerate(contenders)
        ]
        return f"| {title} | {' | '.join(times)} | {gae_us(copy, *shape):{style}} |"

    return [
        "With a critic of three layers of 256 units, the call takes "
        f"{span(ratios('gae', 'median_us', 'batch', [own], forward), '.2f')} times as long as one "
        "forward pass of this critic. torchrl's default mode takes "
        f"{span(ratios('gae', 'median_us', 'batch', peers, own), '.2f')} times as long",
        row("4,096 rows of 32 steps", ".0f", 4_096, 32),
        row("one row of 1,000 steps", ".1f", 1, 1_000),
    ]


def gym_collector() -> list[str]:
    task = "InvertedDoublePendulum-v5, 1 environment, 3x256"
    parts = {x: one("loop", "us_per_frame", task=task, part=x) for x in ("environment", "acting")}
    speeds = {
        x: 1e6 / one("loop", "us_per_frame", task=task, part="whole", contender=x)
        for x in ("ppokit, torchrl's Collector", "ppokit")
    }
    with_torchrl, own = map(rounded, speeds.values())
    return [
        f"On the double pendulum these take {parts['environment']:.0f} and {parts['acting']:.0f} "
        f"microseconds a frame. The same update makes {with_torchrl:,.0f} frames a second with "
        f"torchrl's `Collector` and {own:,.0f} with",
        f"{over_peer('workers', 'ppokit, async')[0]:.2f} times the speed of Stable-Baselines3",
        "| ppokit, gymnasium's native vector environment of 64 | "
        f"{environments('ppokit, native')} |",
        f"| ppokit, 64 Python environments | {environments('ppokit, serial')} |",
        f"| Stable-Baselines3 | {environments('Stable-Baselines3')} |",
        f"| torchrl, a vector environment | {environments('torchrl, vector')} |",
        f"| torchrl, `SerialEnv` | {environments('torchrl, serial')} |",
    ]


def kl_early_stopper() -> list[str]:
    head = "messages an update"
    return [
        "with a stop in each of 32 minibatches, an update sends "
        f"{cell('scale', 'and a KL stop', head):.0f} messages instead of "
        f"{cell('scale', 'gradients and', head):.0f}"
    ]


def ppo_update() -> list[str]:
    arms, tutorial = ("ppokit", "ppokit, compiled"), [{"contender": TUTORIAL}]
    return [
        "| Stable-Baselines3 or a CleanRL-style loop, whichever is faster | "
        f"{' | '.join(loop_ratios(arm, PEERS_OF_LOOP) for arm in arms)} |",
        f"| torchrl's tutorial | {' | '.join(loop_ratios(arm, tutorial) for arm in arms)} |",
    ]


def reward_normalizer() -> list[str]:
    large = {"contender": "ppokit", "batch": 8_192, "steps": 32}
    small = {"contender": "ppokit", "batch": 1, "steps": 1_000}
    scale = one("scale", "median_us", part="2x64", contender="scale rewards", batch=4_096)
    return [
        f"A batch of 8,192 rows of 32 steps takes {one('rewards', 'median_us', **large):,.0f} "
        f"microseconds, {one('rewards', 'best_peer_over_this', **large):.2f} times as fast as",
        "On one row of 1,000 steps the ratio is "
        f"{one('rewards', 'best_peer_over_this', **small):.1f}",
        f"At 4,096 environments the normalizer takes {scale / 4_096 / 32:.2f} microseconds a frame",
    ]


def sequence_batcher() -> list[str]:
    zeroed = last("memory_tasks", "eval_return", task="cue*", arm="LSTM, zeroed at cuts")
    draws = {"part": "draw", "dones": "0.01"}
    draw = column("recurrent", "median_us", contender="ppokit", **draws)
    peers = column("recurrent", "median_us", contender="torchrl, *", **draws)
    padded = column("recurrent", "padded", part="epoch", contender="ppokit")
    cuts = {"part": "cut", "batch": 8_192}
    cut = column("recurrent", "median_us", contender="ppokit, batcher*", **cuts)
    forward = column("recurrent", "median_us", contender="nn.LSTM, forward", **cuts)
    return [
        f"is then guessed ({sum(zeroed) / len(zeroed):.3f} right); with the stored states it is "
        "right in all of 400 episodes",
        f"A minibatch of 512 frames takes {span(draw, '.0f')} microseconds; torchrl's slice "
        f"samplers take {span(peers, '.0f')}. Padding is {100 * min(padded):.0f} to "
        f"{100 * max(padded):.0f}% of the minibatches",
        f"Cutting a batch of 8,192 rows of 128 steps takes {min(cut) / 1e3:.0f} to "
        f"{max(cut) / 1e3:.0f} ms, where a forward pass of an LSTM takes {min(forward) / 1e6:.1f} "
        "s",
    ]


def training_step() -> list[str]:
    return [
        f"a step of small minibatches takes {span(device_step(GRAPH), '.2f')} of the time of "
        "networks, clipping and Adam run eagerly, and TorchRL's loss in a loop "
        f"{span(device_step(LOOP), '.2f')}",
        "Time of a step in an update at 64 frames",
        *(
            f"| {size} | {step(part, COMPILED)[0]:.2f} | {step(part, EAGER)[0]:.1f} | "
            f"{step(part, LOOP)[0]:.1f} |"
            for size in ("2x64", "3x256")
            for part in [f"{size}, tanh-normal"]
        ),
    ]


# -- how-to ------------------------------------------------------------------------------


def distributed() -> list[str]:
    peers = [{"contender": "Ray over torchrl's Collector"}]
    own, one_process = {"contender": "Ray over GymCollector"}, {"contender": "one GymCollector"}
    cheetah = {"part": "HalfCheetah-v5"}
    speeds = [
        frames_a_second("ray_workers", x["contender"], cheetah["part"], batch)
        for x, batch in ((own, 16), (one_process, 8))
    ]
    over = ratios("ray_workers", "median_us", "part", peers, own)
    return [
        f"two such workers collect {speeds[0] / speeds[1]:.1f} times the frames of one process on "
        f"HalfCheetah-v5, and {min(over):.0f} to {max(over):.0f} times as many as"
    ]


def trainer_speed(arm: str) -> float:
    ends = zip(last("trainer", "frames", arm=arm), last("trainer", "seconds", arm=arm), strict=True)
    return median(frames / seconds for frames, seconds in ends)


def in_torchrl() -> list[str]:
    torchrl, solved = (
        trainer_speed("torchrl"),
        reached("trainer", "return", 475, "frames", arm="ppokit"),
    )
    native = over_peer("vector_environments", "ppokit, native", batch=1_024)[0]
    return [
        f"On CartPole this trainer is {trainer_speed('ppokit') / torchrl:.1f} times as fast as "
        f"with torchrl's classes, and {trainer_speed('same work') / torchrl:.1f} times with the "
        f"same work. It reaches a return of 475 within {max(solved):,.0f} frames in each of three "
        "seeds",
        f"With 1,024 CartPoles in one process this is {native:.0f} times as fast as",
    ]


def isaac(task: str, arm: str) -> tuple[float, float]:
    """Return the mean return of the last tenth, and the speed over that of Isaac Lab's loop."""
    where, peer = {"task": task, "arm": arm}, {"task": task, "arm": "Isaac Lab's loop*"}
    ends = []
    for seed in groups("isaac_lab", "seed", **where):
        scores = column("isaac_lab", "return", seed=seed, **where)
        ends.append(mean(x for x in scores[-(len(scores) // 10) :] if x == x))
    seconds = [one("isaac_lab", "seconds", **x) for x in (peer, where)]
    return mean(ends), seconds[0] / seconds[1]


def isaac_lab() -> list[str]:
    arms = {"Isaac Lab's loop, on TorchRL": "Isaac Lab's loop*"}
    arms |= {arm: arm for arm in ("ppokit, compiled", "ppokit, eager")}
    found = {
        title: [*isaac("CartPole", arm), *isaac("Pendulum", arm)] for title, arm in arms.items()
    }
    ratio = {x: f"{device_update(x):.2f}" for x in ("eager", "compiled", "graph")}
    return [
        *(
            f"| {title} | {a:.0f} | {b:.2f} | {c:.0f} | {d:.2f} |"
            for title, (a, b, c, d) in found.items()
        ),
        "an update of [4096, 24] frames of CartPole with networks of [256, 256, 256] units is "
        f"{ratio['eager']} (eager), {ratio['compiled']} (compiled) and {ratio['graph']} times "
        '(`"cudagraphs"`) as fast as TorchRL\'s',
    ]


def captures() -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return seconds of the capture, and frames until it pays, of each loop."""
    found = {}
    for row in groups("loop", "task"):
        cells = (cell("loop", row, head) for head in ("capture, s", "frames"))
        task, environments, networks = row.split(", ")
        found[task, environments, networks] = tuple(cells)
    return found


def precision_and_compile() -> list[str]:
    return [
        f"| {networks} networks, {count}, {task.rpartition('-')[0]} | {seconds:.1f} | "
        f"{frames:,.0f} |"
        for (task, count, networks), (seconds, exact) in captures().items()
        for frames in [round(exact, -3)]
    ]
