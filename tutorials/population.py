r"""
A population of PPOs
====================

AgileRL tunes settings while it trains: a population of agents, of which the worse ones take over
the weights of the better ones, with settings a little different. That needs an engine that runs
trials, and a learner that can be stopped, copied and changed. The engine exists: Ray Tune's
``PopulationBasedTraining`` (Jaderberg et al., 2017, arXiv:1711.09846). The learner is a page of
ppokit's blocks, and ``save_checkpoint`` and ``load_checkpoint`` are the step in which one trial
takes over another. The same search space goes to Optuna, which stops trials that fall behind, in
one process and without a cluster.

.. code-block:: bash

    pip install 'ppokit[ray,tune]'
    python tutorials/population.py                    # eight trials on two workers
    python tutorials/population.py --engine optuna    # eight trials, one after the other
    python tutorials/population.py --resume           # go on after Ctrl-C, a crash, a power cut

It learns ``LunarLanderContinuous-v3``: 200 points is a good landing. In ``--out`` are figures, the
history of every trial, the best one's checkpoint, and its settings as code.

In a notebook it learns ``CartPole-v1`` by default, with four trials of four times 8,192 frames: one
minute or two. Ray's workers are other processes there, too.
"""

# %%
# Imports and options
# -------------------
from __future__ import annotations

import argparse
import json
import logging
import math
import os
import pickle
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "RL_LOGGING_LEVEL", "WARNING"
)  # keep torchrl out of the progress bar
os.environ.setdefault(
    "TUNE_GLOBAL_CHECKPOINT_S", "2"
)  # seconds between writing the state
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # no tables

import gymnasium as gym
import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import EngFormatter
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from tqdm import tqdm

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    ParameterScheduler,
    PPOUpdate,
    StepSchedule,
    TrainingStep,
    load_checkpoint,
    save_checkpoint,
)
from ppokit.plotting import plot_frames, record_episode
from ppokit.scripts import Interrupt, begin_run, catch_interrupt, count

parser = argparse.ArgumentParser(
    description="Tune PPO's settings with a population."
)
parser.add_argument("--engine", default="ray", choices=["ray", "optuna"])
parser.add_argument(
    "--env", default="LunarLanderContinuous-v3", help="a Gymnasium id"
)
parser.add_argument("--trials", type=count, default=8)
parser.add_argument(
    "--generations", type=count, default=5, help="evaluations of each trial"
)
parser.add_argument(
    "--interval", type=count, default=32_768, help="frames between them"
)
parser.add_argument(
    "--workers", type=count, default=2, help="trials at once (Ray only)"
)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("outputs/population"))
parser.add_argument(
    "--resume", action="store_true", help="go on with the run in --out"
)
parser.add_argument(
    "--quick", action="store_true", help="a few seconds, to see that it runs"
)
# A notebook has no command line. There options are written here, as ["--engine", "optuna"].
argv = [] if "get_ipython" in globals() else None
if argv is not None:
    parser.set_defaults(
        env="CartPole-v1", trials=4, generations=4, interval=8_192
    )
if parser.parse_known_args(argv)[0].quick:
    parser.set_defaults(
        env="CartPole-v1", trials=4, generations=2, interval=512
    )
args = parser.parse_args(argv)

num_envs, gamma, lmbda = 16, 0.999, 0.98
steps, episodes = (
    (32, 4) if args.quick else (512, 8)
)  # of a batch; of an evaluation
if not 0 <= args.seed < 2**31:
    parser.error(f"--seed must be from 0 to 2,147,483,647, got {args.seed}.")
if args.engine == "ray" and args.trials < 4:
    parser.error(
        f"--trials {args.trials}: of fewer than four, none can take over another."
    )
if args.interval % (num_envs * steps):
    parser.error(
        f"--interval {args.interval} is no multiple of a batch, {num_envs * steps}."
    )
try:
    spaces = gym.make(args.env)
except gym.error.Error as error:
    parser.error(f"--env {args.env}: {error}")
observation_space: Any = spaces.observation_space
action_space: Any = spaces.action_space
spaces.close()
if (
    not isinstance(observation_space, gym.spaces.Box)
    or len(observation_space.shape) != 1
):
    parser.error(
        f"--env {args.env}: the observation is {observation_space}, not a vector (Box)."
    )
if not isinstance(action_space, gym.spaces.Box | gym.spaces.Discrete):
    parser.error(
        f"--env {args.env}: the action is {action_space}, neither Box nor Discrete."
    )
if getattr(action_space, "start", 0) or len(action_space.shape) > 1:
    parser.error(
        f"--env {args.env}: {action_space} has no head here: Box of one dimension, or "
        "Discrete from 0."
    )
settings_file = args.out / "settings.json"
settings = {
    name: getattr(args, name)
    for name in (
        "engine",
        "env",
        "trials",
        "generations",
        "interval",
        "seed",
        "quick",
    )
}
if args.resume:
    if not settings_file.exists():
        parser.error(
            f"--resume: there is no {settings_file}; run without --resume first."
        )
    try:
        before = json.loads(settings_file.read_text())
    except ValueError as error:
        parser.error(f"--resume: {settings_file} is damaged: {error}")
    if before != settings:
        parser.error(
            f"{args.out} is of another run, {before}; resume with its options."
        )
if find_spec(args.engine) is None:
    parser.error(
        f"--engine {args.engine} is not installed: pip install 'ppokit[ray,tune]'"
    )

# %%
# The search space
# ----------------
# Written once, for both engines: bounds of what is drawn on a logarithmic scale or evenly, and
# lists of choices. The ranges hold good settings and bad ones.
space: dict[str, tuple[str, list[Any]]] = {
    "lr": ("log", [1e-5, 3e-3]),
    "entropy_coeff": ("log", [1e-5, 3e-2]),
    "clip_epsilon": ("even", [0.05, 0.4]),
    "minibatch_size": ("choice", [32, 64, 128, 256]),
    "epochs": ("choice", [2, 4, 8, 16]),
}
Config = dict[str, Any]

# %%
# A member of the population
# --------------------------
# An actor, a critic, a collector and an update. ``configure`` puts settings on networks that have
# been trained with others: schedules of a single point set what has a place in the optimizer and
# in the loss, and the update reads its own two attributes in each call.


class Member:
    """What one trial trains, and how far it is."""

    def __init__(self, config: Config, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        inputs = observation_space.shape[0]
        if isinstance(action_space, gym.spaces.Box):
            scale = AddStateIndependentNormalScale(action_space.shape[0])
            network = nn.Sequential(
                mlp(inputs, action_space.shape[0], last_gain=0.01), scale
            )
            keys, distribution = ["loc", "scale"], IndependentNormal
        else:
            network = mlp(inputs, int(action_space.n), last_gain=0.01)
            keys, distribution = ["logits"], torch.distributions.Categorical
        self.policy = ProbabilisticActor(
            TensorDictModule(network, ["observation"], keys),
            in_keys=keys,
            distribution_class=distribution,
            return_log_prob=True,
        )
        self.critic = ValueOperator(
            mlp(inputs, 1, last_gain=1.0), in_keys=["observation"]
        )
        self.collector = GymCollector(
            make_env,
            self.policy,
            frames_per_batch=num_envs * steps,
            num_envs=num_envs,
        )
        self.collector.set_seed(seed)
        self.batches: Iterator[Any] = iter(self.collector)
        self.loss = DualClipPPOLoss(
            self.policy,
            self.critic,
            loss_critic_type="l2",
            critic_coeff=0.5,
            entropy_coeff=config["entropy_coeff"],
            normalize_advantage=True,
        )
        self.optimizer = torch.optim.Adam(self.loss.parameters(), fused=True)
        self.update = PPOUpdate(
            TrainingStep(self.loss, self.optimizer, max_grad_norm=0.5),
            advantage=GAE(gamma=gamma, lmbda=lmbda, value_network=self.critic),
            seed=seed,
        )
        self.frames, self.score = 0, -math.inf
        self.lineage = [(0, config)]  # the settings so far, and since when
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go on with these settings."""
        ParameterScheduler(
            {
                "lr": (self.optimizer, StepSchedule([(0, config["lr"])])),
                "entropy_coeff": (
                    self.loss,
                    StepSchedule([(0, config["entropy_coeff"])]),
                ),
                "clip_epsilon": (
                    self.loss,
                    StepSchedule([(0, config["clip_epsilon"])]),
                ),
            }
        )
        self.update.minibatch_size, self.update.epochs = (
            config["minibatch_size"],
            config["epochs"],
        )
        # settings that nothing was trained with are no part of the course
        self.lineage = [
            x for x in self.lineage if x[0] < self.frames or x[1] == config
        ]
        if not self.lineage or config != self.lineage[-1][1]:
            self.lineage.append((self.frames, config))

    def train(self, frames: int) -> None:
        """Train for so many frames, and evaluate."""
        end = self.frames + frames
        while self.frames < end:
            self.update(next(self.batches))
            self.frames += num_envs * steps
        self.score = evaluate(self.policy)

    def state(self) -> dict[str, Any]:
        """Return everything that a trial needs to go on, of its own run or of another's."""
        return {
            "policy": self.policy,
            "critic": self.critic,
            "update": self.update,
            "collector": self.collector,
            "frames": self.frames,
            "score": self.score,
            "lineage": self.lineage,
        }

    def save(self, folder: Path, trial: str) -> None:
        """Write the state to a folder, and whose it is."""
        save_checkpoint(
            folder / "checkpoint.pt", self.state() | {"trial": trial}
        )

    def load(self, folder: Path, config: Config) -> str:
        """Take over a state, and go on with these settings; return whose state it was."""
        saved = load_checkpoint(
            folder / "checkpoint.pt", self.state() | {"trial": ""}
        )
        for name in ("frames", "score", "lineage"):
            setattr(self, name, saved[name])
        self.configure(config)
        return saved["trial"]


def mlp(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    """Return two hidden layers of 64 with tanh, and orthogonal initial weights."""
    layers = nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
    for layer, gain in zip(
        layers, (math.sqrt(2), math.sqrt(2), last_gain), strict=True
    ):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def make_env(**options: Any) -> gym.Env:
    """Return an environment that clips actions to their range."""
    env = gym.make(args.env, **options)
    return (
        gym.wrappers.ClipAction(env)
        if isinstance(action_space, gym.spaces.Box)
        else env
    )


@torch.no_grad()
def evaluate(policy: nn.Module) -> float:
    """Return the mean return of episodes under the deterministic policy."""
    envs = gym.vector.SyncVectorEnv([make_env] * episodes)
    observation, _ = envs.reset(seed=10_000)
    running, returns = (
        torch.ones(episodes, dtype=torch.bool),
        torch.zeros(episodes),
    )
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        while running.any():
            batch = TensorDict(
                {"observation": torch.as_tensor(observation)}, [episodes]
            )
            action = policy(batch.float())["action"].numpy()
            observation, reward, terminated, truncated, _ = envs.step(action)
            returns += torch.as_tensor(reward).float() * running
            running &= ~torch.as_tensor(terminated | truncated)
    envs.close()
    return returns.mean().item()


# %%
# Ray Tune's population
# ---------------------
# A trial trains for an interval, evaluates, and reports its score with a checkpoint. When all have
# done so, the scheduler has the worst quarter go on from the checkpoints of the best quarter, with
# settings that are a little larger, a little smaller or drawn again. A trial that begins with
# another's checkpoint is no special case: it loads it, and puts its own settings on it.
#
# A worker that dies is retried from its last checkpoint (``FailureConfig``). The driver writes the
# population's state every two seconds, so that ``--resume`` loses at most the interval since the
# last checkpoint, whatever it was that ended it. A power cut may leave Ray's file of that state
# half written: the last whole one is kept beside it.
History = dict[str, list[dict[str, Any]]]
"""Of each trial, what it reported: frames, score, settings, and whose weights it took over."""
reports, ray_folder = (
    args.out.absolute() / "reports",
    args.out.absolute() / "ray",
)


def train_member(config: Config) -> None:
    """Train a trial, from its own last checkpoint or from another's."""
    from ray import tune

    name = trial_name(tune.get_context().get_trial_id())
    member, parent = Member(config, seed=args.seed + int(name)), name
    is_new = (checkpoint := tune.get_checkpoint()) is None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            parent = member.load(Path(folder), config)
    while member.frames < args.generations * args.interval or not is_new:
        if is_new:
            member.train(args.interval)
        is_new = True  # a state that was loaded is reported first: a scheduler that was restored
        with (
            tempfile.TemporaryDirectory() as folder
        ):  # waits for all trials, and has seen none
            member.save(Path(folder), name)
            row = {
                "frames": member.frames,
                "score": member.score,
                "parent": parent,
            }
            with (reports / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps(row | {"config": config}) + "\n")
            tune.report(row, checkpoint=tune.Checkpoint.from_directory(folder))
        parent = name


def trial_name(trial_id: str) -> str:
    """Return the number of a trial of Ray Tune, of an id as ``1a2b3_00004``."""
    return str(int(trial_id.rsplit("_", 1)[-1]))


def keep_state(folder: Path, kept: Path) -> None:
    """Copy what Ray wrote of the population's state, where it is whole."""
    for file in folder.glob("*state-*.json"):
        unfinished = kept / f"{file.name}.part"
        shutil.copy(file, unfinished)
        if is_whole(unfinished):
            unfinished.replace(kept / file.name)


def is_whole(file: Path) -> bool:
    """Return whether one of Ray's files, JSON or a pickle, was written to its end."""
    data = file.read_bytes()
    if not data.startswith(b"{"):
        return data.endswith(pickle.STOP)
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def within_space(config: Config) -> Config:
    """Keep settings that were enlarged or reduced within the search space."""
    bounds = {
        name: values
        for name, (kind, values) in space.items()
        if kind != "choice"
    }
    return config | {
        name: min(max(config[name], a), b) for name, (a, b) in bounds.items()
    }


def run_population() -> tuple[History, str, Path]:
    """Run the population to its end; return its history, the best trial and its checkpoint."""
    import ray
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    class Progress(tune.Callback):
        """A bar of the frames of all trials, with the best score so far."""

        def __init__(self) -> None:
            self.bar: tqdm | None = None
            self.best = -math.inf

        def on_trial_result(
            self,
            iteration: int,
            trials: list[Any],
            trial: Any,
            result: dict[str, Any],
            **_: Any,
        ) -> None:
            done = sum(
                (x.last_result or {}).get("frames", 0)
                for x in trials
                if x is not trial
            )
            total = args.trials * args.generations * args.interval
            self.bar = self.bar or tqdm(total=total, unit="frame", initial=done)
            self.bar.update(done + result["frames"] - self.bar.n)
            keep_state(ray_folder, reports)
            self.best = max(self.best, result["score"])
            self.bar.set_postfix(best=f"{self.best:.1f}")

        def __getstate__(self) -> dict[str, Any]:
            return {"bar": None, "best": self.best}

    reports.mkdir(exist_ok=True)
    draw = {
        "log": lambda x: tune.loguniform(*x),
        "even": lambda x: tune.uniform(*x),
    }
    draw["choice"] = tune.choice
    domains = {
        name: draw[kind](values) for name, (kind, values) in space.items()
    }
    choices = {
        name: values
        for name, (kind, values) in space.items()
        if kind == "choice"
    }
    scheduler = PopulationBasedTraining(
        time_attr="frames",
        perturbation_interval=args.interval,
        hyperparam_mutations=domains | choices,
        custom_explore_fn=within_space,
        synch=True,  # fewer workers than trials: compare them at the same number of frames
    )
    if args.resume and not list(reports.glob("experiment_state-*.json")):
        parser.error(
            f"--resume: no trial had reported to {args.out}; run without --resume."
        )
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    ray.init(
        num_cpus=args.workers, include_dashboard=False, log_to_driver=False
    )
    if args.resume:
        for file in reports.glob("*state-*.json"):
            if not is_whole(ray_folder / file.name):
                shutil.copy(file, ray_folder)
        tuner = tune.Tuner.restore(
            str(ray_folder), train_member, restart_errored=True
        )
    else:
        tuner = tune.Tuner(
            tune.with_resources(train_member, {"cpu": 1}),
            param_space=domains,
            tune_config=tune.TuneConfig(
                metric="score",
                mode="max",
                num_samples=args.trials,
                scheduler=scheduler,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="ray",
                storage_path=str(args.out.absolute()),
                failure_config=tune.FailureConfig(max_failures=3),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
                callbacks=[Progress()],
                verbose=0,
            ),
        )
    results = tuner.fit()
    ray.shutdown()
    if results.errors:
        raise RuntimeError(
            f"{len(results.errors)} trials failed; --resume retries them."
        )
    end = args.generations * args.interval
    if (
        sum(
            (result.metrics or {}).get("frames", 0) >= end for result in results
        )
        < args.trials
    ):
        sys.exit("\nInterrupted; --resume goes on.")
    history, checkpoints = {}, {}
    for result in results:
        assert result.metrics is not None
        assert result.checkpoint is not None
        name = trial_name(result.metrics["trial_id"])
        checkpoints[name] = Path(result.checkpoint.path)
        rows = map(
            json.loads, (reports / f"{name}.jsonl").read_text().splitlines()
        )
        # A trial reports again what it loads; an interval that was repeated counts as it ended.
        unique = {(row["frames"], row["parent"]): row for row in rows}
        # What is taken over after the last generation trains no more.
        kept = [
            x
            for x in unique.values()
            if x["frames"] < end or x["parent"] == name
        ]
        history[name] = sorted(kept, key=lambda row: row["frames"])
    best = max(history, key=lambda name: history[name][-1]["score"])
    return history, best, checkpoints[best]


# %%
# Optuna's pruning
# ----------------
# The same members and the same space, one after the other in this process. A trial whose score is
# below the median of the trials before it, after as many frames, ends there; where the others
# were good is where the next settings are drawn. Each trial keeps a checkpoint of its own: one that
# was interrupted goes on from it. Ctrl-C ends the study after the interval at hand, a second one at
# once.


def run_study() -> tuple[History, str, Path]:
    """Run the study to its end; return its history, the best trial and its checkpoint."""
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = args.out / "optuna"
    folder.mkdir(exist_ok=True)
    study = optuna.create_study(
        study_name="population",
        storage=f"sqlite:///{folder / 'study.db'}",
        sampler=optuna.samplers.TPESampler(
            seed=args.seed, n_startup_trials=args.trials // 2
        ),
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=max(2, args.trials // 4)
        ),
        direction="maximize",
        load_if_exists=True,
    )
    for killed in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(killed.number, state=TrialState.FAIL)
    trials = study.get_trials()
    went_on = {
        x.user_attrs.get("folder") for x in trials if x.state != TrialState.FAIL
    }
    lost = {
        x.user_attrs.get("folder"): x.params
        for x in trials
        if x.state == TrialState.FAIL
    }
    for name, params in lost.items():
        if name is not None and name not in went_on:
            study.enqueue_trial(params, user_attrs={"folder": name})
    bar = tqdm(
        total=args.trials * args.generations * args.interval, unit="frame"
    )

    def objective(trial: Any, interrupt: Interrupt) -> float:
        config = {
            name: trial.suggest_categorical(name, values)
            if kind == "choice"
            else trial.suggest_float(name, *values, log=kind == "log")
            for name, (kind, values) in space.items()
        }
        own = folder / trial.user_attrs.get("folder", str(trial.number))
        trial.set_user_attr("folder", own.name)
        own.mkdir(exist_ok=True)
        member, rows = Member(config, seed=args.seed + int(own.name)), []
        if (own / "checkpoint.pt").exists():
            member.load(own, config)
            rows = json.loads((own / "rows.json").read_text())
            for row in rows:
                trial.report(row["score"], row["frames"])
        while member.frames < args.generations * args.interval:
            member.train(args.interval)
            rows.append({"frames": member.frames, "score": member.score})
            (own / "rows.json").write_text(json.dumps(rows))
            member.save(own, str(trial.number))
            bar.update(args.interval)
            bar.set_postfix(
                trial=trial.number, score=f"{rows[-1]['score']:.1f}"
            )
            trial.report(rows[-1]["score"], member.frames)
            if interrupt.pressed:
                raise KeyboardInterrupt
            if trial.should_prune():
                bar.update((args.generations - len(rows)) * args.interval)
                raise optuna.TrialPruned
        return rows[-1]["score"]

    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    left = args.trials - len(study.get_trials(states=ended))
    try:
        with catch_interrupt(
            "Interrupted: ending after this interval."
        ) as interrupt:
            study.optimize(
                partial(objective, interrupt=interrupt), n_trials=left
            )
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; --resume goes on.")
    bar.close()
    history = {
        str(trial.number): [
            {
                "frames": frames,
                "score": score,
                "config": trial.params,
                "parent": str(trial.number),
            }
            for frames, score in sorted(trial.intermediate_values.items())
        ]
        for trial in study.get_trials(states=ended)
    }
    best = study.best_trial
    return history, str(best.number), folder / best.user_attrs["folder"]


try:
    begin_run(args.out, "population", resume=args.resume)
    settings_file.write_text(json.dumps(settings))
except OSError as error:
    parser.error(f"--out: {error}")
history, best, checkpoint = (
    run_population() if args.engine == "ray" else run_study()
)
(args.out / "history.json").write_text(json.dumps(history))
checkpoint = Path(shutil.copy(checkpoint / "checkpoint.pt", args.out))

# %%
# The figure
# ----------
# A line is a trial: its score, and its settings as they were when it reported. A ring is where it
# took over another one's weights; a line that ends early was pruned.


def draw(history: History, best: str, path: Path) -> None:
    """Draw scores and settings of all trials over frames, the best one in red."""
    figure, axes = plt.subplots(
        2, 3, figsize=(13, 7), sharex=True, layout="constrained"
    )
    for axis, name in zip(axes.flat, ("score", *space), strict=True):
        for trial, rows in history.items():
            color, order = ("tab:red", 3) if trial == best else ("tab:blue", 2)
            xs = [row["frames"] for row in rows]
            ys = [
                row["score"] if name == "score" else row["config"][name]
                for row in rows
            ]
            style = {
                "color": color,
                "zorder": order,
                "alpha": 1 if trial == best else 0.45,
            }
            axis.plot(xs, ys, marker=".", **style)
            taken = [i for i, row in enumerate(rows) if row["parent"] != trial]
            ring = {
                "facecolors": "none",
                "edgecolors": color,
                "s": 60,
                "zorder": order,
            }
            axis.scatter([xs[i] for i in taken], [ys[i] for i in taken], **ring)
        axis.set_title("return of the evaluation" if name == "score" else name)
        if name != "score" and space[name][0] != "even":
            axis.set_yscale("log", base=2 if space[name][0] == "choice" else 10)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("frames of the trial (environment steps)")
    figure.suptitle(
        f"{args.env}, {args.engine}: {len(history)} trials, the best one in red"
    )
    figure.savefig(path, dpi=110)


draw(history, best, args.out / "figure.png")

# %%
# The best configuration
# ----------------------
# A population finds no settings but a course of settings: what the best trial and those whose
# weights it took over had, one after the other. That is what a ``ParameterScheduler`` says; number
# of epochs and size of minibatches are the last ones.


def as_code(lineage: Sequence[tuple[int, Config]]) -> str:
    """Return a lineage's settings as Python that makes the same update."""
    last = lineage[-1][1]

    def schedule(name: str) -> str:
        points = [(frames, config[name]) for frames, config in lineage]
        changes = [
            p
            for i, p in enumerate(points)
            if i == 0 or p[1] != points[i - 1][1]
        ]
        return ", ".join(
            f"({frames}, {value:.3g})" for frames, value in changes
        )

    return f"""import torch
from ppokit import GAE, DualClipPPOLoss, ParameterScheduler, PPOUpdate, StepSchedule, TrainingStep

loss = DualClipPPOLoss(
    actor, critic, loss_critic_type="l2", critic_coeff=0.5, entropy_coeff=1e-3,
    normalize_advantage=True,
)
optimizer = torch.optim.Adam(loss.parameters(), fused=True)
scheduler = ParameterScheduler({{
    "lr": (optimizer, StepSchedule([{schedule("lr")}])),
    "entropy_coeff": (loss, StepSchedule([{schedule("entropy_coeff")}])),
    "clip_epsilon": (loss, StepSchedule([{schedule("clip_epsilon")}])),
}})
update = PPOUpdate(
    TrainingStep(loss, optimizer, max_grad_norm=0.5),
    advantage=GAE(gamma={gamma}, lmbda={lmbda}, value_network=critic),
    scheduler=scheduler, epochs={last["epochs"]}, minibatch_size={last["minibatch_size"]},
)
"""


code = as_code(torch.load(args.out / "checkpoint.pt")["lineage"])
(args.out / "best.py").write_text(code)
first = statistics.median(rows[0]["score"] for rows in history.values())
print(
    f"\nBest configuration, of trial {best} ({args.out / 'best.py'}):\n\n{code}"
)
print(
    f"Median score of the first generation: {first:.1f}; "
    f"trial {best} ended with {history[best][-1]['score']:.1f}."
)
print(f"Figures: {args.out}/*.png, checkpoint: {args.out / 'checkpoint.pt'}")

# %%
# The best policy at work
# -----------------------
# An episode from left to right, at most 400 steps of it. Where nothing can be drawn, because pygame
# or OpenGL is missing, a warning says so.
member = Member(history[best][-1]["config"], args.seed)
member.load(args.out, history[best][-1]["config"])
picture_env = partial(make_env, render_mode="rgb_array")
if shown := record_episode(picture_env, member.policy, steps=400, every=5):
    strip = plot_frames(
        shown, title=f"{args.env}, trial {best} after {member.frames} frames"
    )
    strip.savefig(args.out / "frames.png", dpi=120)

# %%
# What you learned
# ----------------
# - ``save_checkpoint`` and ``load_checkpoint`` on the parts of a learner are the step in which a
#   trial takes over another; nothing else is needed for a population.
# - Settings of a trained learner change in place: schedules of one point set what has a place in
#   the optimizer and the loss, and epochs and minibatch size are attributes of the update.
# - What a population finds is a course of settings, which a ``ParameterScheduler`` says.
# - The same search space serves Ray Tune's population and Optuna's pruning.
#
# Further reading
# ---------------
# - :doc:`../howto/checkpoints`, :doc:`../howto/scale` and :doc:`../blocks/schedules`;
#   :doc:`agilerl_ppo`, the learner that AgileRL tunes in this way.
# - Jaderberg et al., 2017, "Population Based Training of Neural Networks", arXiv:1711.09846.
# - Akiba et al., 2019, "Optuna", arXiv:1907.10902.
# - Li et al., 2018, "Hyperband", arXiv:1603.06560 (ending trials early).
