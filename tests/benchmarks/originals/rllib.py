"""RLlib's ``cartpole_ppo.py``, until the last 100 episodes have a mean return, or for some frames.

Transcribed from ``rllib/examples/algorithms/ppo/cartpole_ppo.py`` of github.com/ray-project/ray at
commit 438af5cd942b736c1214703115e7d289ef3db776: the same configuration, without Tune around it.
Run in RLlib's own environment; ``argv[1]`` holds the arguments as JSON, ``argv[2]`` is the JSON
file to write.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def note_return(*, episode: Any, prev_episode_chunks: Any, metrics_logger: Any, **_: Any) -> None:
    value = sum(part.get_return() for part in [*(prev_episode_chunks or []), episode])
    metrics_logger.log_value("returns", value, reduce="item_series", window=100_000)


def configuration(workers: int, envs: int, learners: int, seed: int) -> PPOConfig:
    """Return the example's configuration: 4 workers, 16 environments each, and 1 learner."""
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=workers, num_envs_per_env_runner=envs)
        .learners(num_learners=learners)
        .training(lr=0.0003, num_epochs=6, vf_loss_coeff=0.01)
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True
            )
        )
        .callbacks(on_episode_end=note_return)
        .debugging(seed=seed, log_level="ERROR")
    )


def train(algorithm: Any, target: float | None, total_frames: int) -> list[dict[str, float]]:
    """Return frames, seconds since the first iteration began, and returns, iteration by iteration.

    RLlib's own mean, by which the example stops, is over the episodes that ended in the iteration,
    of each environment runner 100 / runners at most; ``"return_100"`` over the last 100.
    """
    rows: list[dict[str, float]] = []
    recent: deque[float] = deque(maxlen=100)
    started = time.perf_counter()
    while not rows or rows[-1]["frames"] < total_frames:
        results = algorithm.train()
        runners = results["env_runners"]
        ended = runners.get("returns", [])
        recent.extend([] if isinstance(ended, float) else ended)  # NaN where there is none
        row = {
            "frames": float(runners["num_env_steps_sampled_lifetime"]),
            "seconds": time.perf_counter() - started,
            "return": float(runners.get("episode_return_mean", "nan")),
            "return_100": sum(recent) / max(len(recent), 1),
        }
        rows.append(row)
        full = len(recent) == recent.maxlen
        if target is not None and full and row["return_100"] >= target:
            break
    return rows


def main() -> None:
    arguments = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.getLogger("ray").setLevel(logging.ERROR)
    # The example asks for more processes than a small machine has cores.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        names = ("workers", "envs", "learners", "seed")
        algorithm = configuration(**{name: arguments[name] for name in names}).build_algo()
        rows = train(algorithm, arguments.get("target"), arguments["total_frames"])
        algorithm.stop()
    finally:
        ray.shutdown()
    Path(sys.argv[2]).write_text(json.dumps({"version": ray.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
