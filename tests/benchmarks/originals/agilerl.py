"""AgileRL's ``configs/training/ppo/ppo.yaml``, until the last ten evaluations have a mean score.

Transcribed from github.com/AgileRL/AgileRL at commit 549d85e488d478a734fe3fe4e3413720f60066c1: one
agent in place of four, without mutation and selection, trained by its ``LocalTrainer``, experiment
tracking off. Run in AgileRL's own environment; ``argv[1]`` holds the arguments as JSON, ``argv[2]``
is the JSON file to write.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agilerl.training.trainer import LocalTrainer

LAYER = {"hidden_size": [64], "activation": "ReLU", "min_mlp_nodes": 64, "max_mlp_nodes": 500}
LAYER |= {"layer_norm": True}
MANIFEST: dict[str, dict[str, Any]] = {
    "algorithm": {
        "name": "PPO",
        "batch_size": 128,
        "learn_step": 2048,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "action_std_init": 0.6,
        "clip_coef": 0.2,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "target_kl": None,
        "update_epochs": 4,
        "share_encoders": True,
    },
    "environment": {"name": "LunarLander-v3", "num_envs": 16},
    "network": {
        "latent_dim": 64,
        "encoder_config": LAYER,
        "head_config": {
            **LAYER,
            "min_hidden_layers": 1,
            "max_hidden_layers": 3,
            "output_vanish": True,
        },
    },
    "training": {"target_score": 250.0, "pop_size": 1, "evo_steps": 10_240, "eval_loop": 1},
}


def train(trainer: Any, target: float | None) -> list[dict[str, float | None]]:
    rows: list[dict[str, float | None]] = []
    agent = trainer.population[0]
    test = agent.test

    def noted_test(*args: Any, **options: Any) -> float:
        nonlocal testing
        began = time.perf_counter()
        score = test(*args, **options)
        frames, seconds = float(agent.steps), began - beginning - testing
        row = {"frames": frames, "seconds": seconds, "score": score, "score_10": None}
        rows.append(row)
        testing += time.perf_counter() - began
        if len(rows) >= 10:
            row["score_10"] = sum(row["score"] for row in rows[-10:]) / 10
            if target is not None and row["score_10"] > target:
                raise StopIteration  # AgileRL itself does not stop before its hundredth evaluation
        return score

    agent.test = noted_test
    testing, beginning = 0.0, time.perf_counter()
    try:
        trainer.train(verbose=False)
    except StopIteration:
        trainer.env.close()
    return rows


def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(arguments["seed"])
    np.random.seed(arguments["seed"])
    manifest = {name: dict(part) for name, part in MANIFEST.items()}
    manifest["algorithm"]["lr"] = arguments["lr"]
    manifest["environment"]["sync"] = arguments["sync"]
    manifest["training"]["max_steps"] = arguments["total_frames"]
    trainer = LocalTrainer.from_manifest(manifest)
    trainer.env.reset(seed=arguments["seed"])
    rows = train(trainer, arguments["target"])
    Path(sys.argv[2]).write_text(json.dumps({"version": version("agilerl"), "rows": rows}))


if __name__ == "__main__":
    main()
