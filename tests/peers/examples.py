"""Torchrl's own examples with ppokit's blocks in the place of theirs, line by line.

A replacement maps lines of the example to lines that stand in their place. ``ours`` is what a user
changes, and counted; ``both`` shortens the run, seeds it and writes down its losses.

``PPOKIT_TORCHRL=checkout python -m tests.peers.examples`` measures the speed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

CLONE = Path(__file__).parents[2]
RECORD = "from tests.peers.recording import clock, record, start\n"


@dataclass
class Example:
    """A script of torchrl's; ``needs`` are the packages that it imports and ppokit does not."""

    script: str
    frames: int  # of a timed run
    both: dict[str, str]
    ours: dict[str, str]
    arguments: list[str] = field(default_factory=list)
    needs: tuple[str, ...] = ()
    minibatches: int = 1  # of the first epoch, the losses of which are compared
    same_maths: bool = True

    def lines_changed(self) -> int:
        """Lines that are replaced, added or removed; a replaced one is one."""
        count = 0
        for old, new in self.ours.items():
            before, after = old.splitlines(), new.splitlines()
            while before and after and before[-1] == after[-1]:
                before, after = before[:-1], after[:-1]
            while before and after and before[0] == after[0]:
                before, after = before[1:], after[1:]
            count += max(len(before), len(after))
        return count

    def run(self, checkout: str | Path, ours: bool) -> tuple[list[dict[str, float]], float]:
        """Return the losses of every minibatch, and frames a second of the training loop."""
        source = Path(checkout) / self.script
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "example"
            shutil.copytree(source.parent, copy)
            text = replaced(source.read_text(), {**self.both, **(self.ours if ours else {})})
            (copy / source.name).write_text(text)
            out = Path(folder) / "record.jsonl"
            path = os.pathsep.join([str(CLONE), os.environ.get("PYTHONPATH", "")])
            settings = {"PYTHONPATH": path, "PPOKIT_RECORD": str(out), "OMP_NUM_THREADS": "1"}
            settings |= {"MPLBACKEND": "agg", "HYDRA_FULL_ERROR": "1"}
            command = [sys.executable, "-W", "ignore", source.name, *self.arguments]
            done = subprocess.run(
                command, cwd=copy, env=os.environ | settings, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{self.script} failed:\n{done.stderr[-4000:]}")
            entries = [json.loads(line) for line in out.read_text().splitlines()]
        clocks = {entry["clock"]: entry["seconds"] for entry in entries if "clock" in entry}
        losses = [entry["losses"] for entry in entries if "losses" in entry]
        return losses, self.frames / (clocks["end"] - clocks["start"])


def replaced(text: str, replacements: dict[str, str]) -> str:
    """Replace lines; each must be there exactly once."""
    for old, new in replacements.items():
        if text.count(old) != 1:
            raise ValueError(f"The example has these lines {text.count(old)} times:\n{old}")
        text = text.replace(old, new)
    return text


# -- coding_ppo.py -------------------------------------------------------------------

CODING = {
    "import torch\nfrom tensordict.nn": f"import torch\n{RECORD}from tensordict.nn",
    'GymEnv("InvertedDoublePendulum-v4"': 'GymEnv("InvertedDoublePendulum-v5"',
    "total_frames = 10_000\n": "total_frames = 4_000\ntorch.manual_seed(0)\n",
    "env.transform[0].init_stats": "env.set_seed(0)\nenv.transform[0].init_stats",
    "out_value = value_module(env.reset())\n": (
        "out_value = value_module(env.reset())\nenv.set_seed(0)\n"
    ),
    "logs = defaultdict(list)\n": "logs = defaultdict(list)\nstart(collector)\n",
    "loss_vals = loss_module(subdata.to(device))": (
        "loss_vals = record(loss_module(subdata.to(device)))"
    ),
    "    if i % 10 == 0:\n": "    if False:\n",
    "    scheduler.step()\n": "    scheduler.step()\nclock('end')\n",
}
CODING_BLOCKS = {
    "from torchrl.objectives import ClipPPOLoss\n": "",
    "loss_module = ClipPPOLoss(": "loss_module = DualClipPPOLoss(",
}
CODING_LEAN = {
    "from torchrl.objectives.value import GAE": (
        "from ppokit import GAE, DualClipPPOLoss, TensorActor"
    ),
    "    policy_module,\n    frames_per_batch": (
        "    TensorActor(policy_module),\n    frames_per_batch"
    ),
}
CODING_GYM = {
    "from torchrl.objectives.value import GAE": (
        "from ppokit import GAE, DualClipPPOLoss, GymCollector"
    ),
    "collector = Collector(\n    env,\n": """\
norm = env.transform[0]
collector = GymCollector(
    "InvertedDoublePendulum-v5",
""",
    "    split_trajs=False,\n": """\
    observation_dtype=None,
    observation_transform=TensorDictModule(
        lambda x: (x * norm.scale + norm.loc).float(), ["observation"], ["observation"]
    ),
    step_count=True,
""",
    'tensordict_data["step_count"].max()': 'tensordict_data["next", "step_count"].max()',
}

# -- ppo_mujoco.py -------------------------------------------------------------------

MUJOCO = {
    "import torch.optim\n": f"import torch.optim\n{RECORD}",
    "    # Create models (check utils_mujoco.py)\n": "    torch.manual_seed(0)\n",
    "    collector_iter = iter(collector)\n": (
        "    start(collector)\n    collector_iter = iter(collector)\n"
    ),
    "        loss = loss_module(batch)\n": "        loss = record(loss_module(batch))\n",
    "final = collected_frames >= cfg.collector.total_frames": "final = False",
    "    collector.shutdown()\n": "    clock('end')\n    collector.shutdown()\n",
    "        **env_kwargs,\n    )\n    collector =": (
        "        **env_kwargs,\n    )\n    train_env.set_seed(0)\n    collector ="
    ),
}
MUJOCO_BLOCKS = {
    "from torchrl.objectives import ClipPPOLoss, group": "from torchrl.objectives import group",
    "    loss_module = ClipPPOLoss(": "    loss_module = DualClipPPOLoss(",
}
MUJOCO_LEAN = {
    "from torchrl.objectives.value.advantages import GAE": (
        "from ppokit import GAE, DualClipPPOLoss, TensorActor"
    ),
    "        policy=actor,\n": "        policy=TensorActor(actor),\n",
}
MUJOCO_GYM = {
    "from torchrl.objectives.value.advantages import GAE": (
        "from ppokit import GAE, DualClipPPOLoss, GymCollector, ObservationNormalizer"
    ),
    "    collector = Collector(\n        create_env_fn=train_env,\n": """\
    collector = GymCollector(
        cfg.env.env_name,
""",
    "get_vecnorm_state(train_env) if train_env is not None else None,": (
        "None,  # the statistics are in collector.state_dict()"
    ),
    "        max_frames_per_traj=-1,\n": """\
        step_count=True,
        episode_reward=True,
        observation_transform=ObservationNormalizer(
            train_env.observation_spec["observation"].shape
        ),
""",
}
HALF_CHEETAH = [
    "env.env_name=HalfCheetah-v5",
    "collector.total_frames=4096",
    "logger.backend=null",
    "hydra.run.dir=.",
]

# -- multiagent_ppo.py ---------------------------------------------------------------

MULTIAGENT = {
    "from tensordict.nn import set_comp": f"{RECORD}from tensordict.nn import set_comp",
    "n_iters = 5 ": "n_iters = 2 ",
    "num_epochs = 30 ": "num_epochs = 5 ",
    "    n_agents=n_agents,  #": "    seed=0,\n    n_agents=n_agents,  #",
    "episode_reward_mean_list = []\n": "episode_reward_mean_list = []\nstart(collector)\n",
    "            loss_vals = loss_module(subdata)\n": (
        "            loss_vals = record(loss_module(subdata))\n"
    ),
    "    pbar.update()\n": "    pbar.update()\nclock('end')\n",
}
MULTIAGENT_OURS = {
    "from torchrl.objectives import ClipPPOLoss, ValueEstimators\n": (
        "from ppokit import GAE, DualClipPPOLoss, TensorActor\n"
    ),
    "    policy,\n    device=vmas_device,": "    TensorActor(policy),\n    device=vmas_device,",
    "loss_module = ClipPPOLoss(": "loss_module = DualClipPPOLoss(",
    """\
loss_module.make_value_estimator(
    ValueEstimators.GAE, gamma=gamma, lmbda=lmbda
)  # We build GAE
GAE = loss_module.value_estimator
""": """\
gae = GAE(gamma=gamma, lmbda=lmbda, value_network=critic)
gae.set_keys(
    reward=env.reward_key,
    value=("agents", "state_value"),
    done=("agents", "done"),
    terminated=("agents", "terminated"),
)
""",
    """\
        GAE(
            tensordict_data,
            params=loss_module.critic_network_params,
            target_params=loss_module.target_critic_network_params,
        )""": "        gae(tensordict_data)",
}

# -- the others ----------------------------------------------------------------------

RECURRENT = {
    'env = GymEnv("CartPole-v1", device=device)\n': (
        'env = GymEnv("CartPole-v1", device=device)\nenv.set_seed(0)\n'
    ),
    "import torch\nfrom tensordict import": f"import torch\n{RECORD}from tensordict import",
    "trainable_policy = make_policy()\n": ("trainable_policy = make_policy()\nstart(collector)\n"),
    "for _step in range(4):\n": "for _step in range(400):\n",
    "    losses.append(loss.item())\n": (
        "    losses.append(loss.item())\n    record({'loss': loss})\nclock('end')\n"
    ),
}
RECURRENT_OURS = {
    "from torchrl.modules import LSTMModule, set_recurrent_mode\n": (
        "from torchrl.modules import set_recurrent_mode\nfrom ppokit import LSTMModule\n"
    ),
}
COMPOSITE = {
    "import torch\nfrom tensordict": f"import torch\n{RECORD}from tensordict",
    "GROUPED_ACTIONS = False\n": "GROUPED_ACTIONS = False\ntorch.manual_seed(0)\n",
    "# Instantiate the loss": "start(None)\n# Instantiate the loss",
    "    loss_vals = ppo(data)\n": (
        "    torch.manual_seed(1)\n    loss_vals = record(ppo(data))\n    clock('end')\n"
    ),
}
COMPOSITE_OURS = {
    "from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss, PPOLoss\n": (
        "from ppokit import DualClipPPOLoss\nfrom torchrl.objectives import KLPENPPOLoss, PPOLoss\n"
    ),
    "in (PPOLoss, ClipPPOLoss, KLPENPPOLoss):": "in (PPOLoss, DualClipPPOLoss, KLPENPPOLoss):",
    # An advantage is estimated where the order of the frames is known.
    "data = policy(TensorDict(batch_size=[4]))": (
        'data = policy(TensorDict(batch_size=[4], names=["time"]))'
    ),
}

TUTORIALS, IMPLEMENTATIONS = "tutorials/sphinx-tutorials", "sota-implementations"
EXAMPLES = {
    "coding_ppo, TensorActor": Example(
        f"{TUTORIALS}/coding_ppo.py",
        frames=4_000,
        both=CODING,
        ours=CODING_BLOCKS | CODING_LEAN,
        minibatches=15,
    ),
    "coding_ppo, GymCollector": Example(
        f"{TUTORIALS}/coding_ppo.py",
        frames=4_000,
        both=CODING,
        ours=CODING_BLOCKS | CODING_GYM,
        minibatches=15,
    ),
    "ppo_mujoco, TensorActor": Example(
        f"{IMPLEMENTATIONS}/ppo/ppo_mujoco.py",
        frames=4_096,
        both=MUJOCO,
        ours=MUJOCO_BLOCKS | MUJOCO_LEAN,
        arguments=HALF_CHEETAH,
        needs=("hydra",),
        minibatches=32,
    ),
    "ppo_mujoco, GymCollector": Example(
        f"{IMPLEMENTATIONS}/ppo/ppo_mujoco.py",
        frames=4_096,
        both=MUJOCO,
        ours=MUJOCO_BLOCKS | MUJOCO_GYM,
        arguments=HALF_CHEETAH,
        needs=("hydra",),
        minibatches=32,
        same_maths=False,  # VecNorm's statistics move within a batch
    ),
    "multiagent_ppo": Example(
        f"{TUTORIALS}/multiagent_ppo.py",
        frames=12_000,
        both=MULTIAGENT,
        ours=MULTIAGENT_OURS,
        needs=("vmas",),
        minibatches=15,
    ),
    "recurrent_sequence_training": Example(
        f"{TUTORIALS}/recurrent_sequence_training.py",
        frames=400 * 32,
        both=RECURRENT,
        ours=RECURRENT_OURS,
        minibatches=4,  # of the tutorial
    ),
    "composite_ppo": Example(
        "examples/agents/composite_ppo.py",
        frames=3 * 4,
        both=COMPOSITE,
        ours=COMPOSITE_OURS,
        minibatches=3,
    ),
}


def main(checkout: str, rounds: int = 3) -> None:
    """Print frames a second, theirs and ours in turns and the medians."""
    for name, example in EXAMPLES.items():
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for ours, found in rates.items():
                found.append(example.run(checkout, ours)[1])
        theirs, ours = (statistics.median(found) for found in rates.values())
        ratio, lines = ours / theirs, example.lines_changed()
        print(
            f"{name}: {lines} lines, {theirs:.0f} -> {ours:.0f} frames/s, {ratio:.2f}x", flush=True
        )


if __name__ == "__main__":
    main(os.environ["PPOKIT_TORCHRL"])
