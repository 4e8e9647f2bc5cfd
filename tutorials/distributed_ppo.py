r"""
Distributed PPO
===============

One script, from a laptop to a cluster. What changes on the way is who collects and how many train;
the blocks are told nothing: they find the process group by themselves.

.. code-block:: bash

    python tutorials/distributed_ppo.py                                # one process
    torchrun --nproc-per-node=2 tutorials/distributed_ppo.py           # two that train together
    python tutorials/distributed_ppo.py --collector ray                # collected by Ray workers
    python tutorials/distributed_ppo.py --collector ray --asynchronous # without waiting for all
    torchrun --nproc-per-node=2 tutorials/distributed_ppo.py --collector ray
    python tutorials/distributed_ppo.py --env Pendulum-v1 --memory     # or with a GRU
    torchrun --nproc-per-node=4 tutorials/distributed_ppo.py --resume  # on as many as there are

Figures, a log and a checkpoint are written to ``--out``. A notebook is one process: several ranks
need a terminal, for ``torchrun`` starts the script once for each. Ray's workers can be had from
either, and are other processes in both.
"""

# %%
# Imports and options
# -------------------
from __future__ import annotations

import argparse
import itertools
import os
import pickle
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "RL_LOGGING_LEVEL", "WARNING"
)  # keep torchrl out of the progress bar

import gymnasium as gym
import torch
import torch.distributed as dist
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.envs import ExplorationType
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.record.loggers import get_logger
from tqdm import tqdm

import ppokit
from ppokit.distributed import sum_over_ranks
from ppokit.plotting import PANELS, plot_frames, plot_run, record_episode
from ppokit.scripts import begin_run, catch_interrupt, count, from_zero


@dataclass(frozen=True)
class Task:
    """What is learned, and for how long. Frames and minibatches are those of all ranks together."""

    total_frames: int
    gamma: float
    learning_rate: float
    epochs: int
    minibatch_size: int
    clip_epsilon: float


TASKS = {
    "CartPole-v1": Task(98_304, 0.98, 1e-3, 10, 256, 0.2),
    "Pendulum-v1": Task(98_304, 0.9, 1e-3, 20, 128, 0.2),
}


parser = argparse.ArgumentParser(
    description="PPO on one process, on many, and on a Ray cluster."
)
parser.add_argument("--env", choices=list(TASKS), default="CartPole-v1")
parser.add_argument("--collector", choices=["local", "ray"], default="local")
parser.add_argument(
    "--workers",
    type=count,
    default=2,
    help="of Ray, each with all environments",
)
parser.add_argument(
    "--asynchronous", action="store_true", help="of Ray, take what is ready"
)
parser.add_argument(
    "--num-envs", type=count, default=8, help="of each rank or worker"
)
parser.add_argument(
    "--ragged", action="store_true", help="each rank has one environment more"
)
parser.add_argument(
    "--memory", action="store_true", help="a GRU, trained on sequences"
)
parser.add_argument(
    "--accumulate", action="store_true", help="one optimizer step an epoch"
)
parser.add_argument(
    "--frames-per-batch",
    type=count,
    default=2_048,
    help="of all ranks together",
)
parser.add_argument(
    "--total-frames",
    type=count,
    help="environment steps; the task's unless --quick",
)
parser.add_argument("--seed", type=from_zero, default=0)
parser.add_argument(
    "--timeout",
    type=count,
    default=300,
    help="seconds to wait for a rank that died",
)
parser.add_argument("--out", type=Path, default=Path("outputs/distributed_ppo"))
parser.add_argument(
    "--resume", action="store_true", help="go on from the checkpoint in --out"
)
parser.add_argument(
    "--quick", action="store_true", help="a few seconds, to see that it runs"
)
# A notebook has no command line. There options are written here, as ["--env", "Pendulum-v1"].
argv = [] if "get_ipython" in globals() else None
args = parser.parse_args(argv)
task = TASKS[args.env]
if args.asynchronous and args.collector != "ray":
    parser.error(
        "--asynchronous: only --collector ray has workers to wait for."
    )
if args.frames_per_batch < args.num_envs * 16:
    parser.error(
        f"--frames-per-batch: {args.num_envs} environments make less than 16 steps each."
    )

# %%
# The process group
# -----------------
# ``torchrun`` starts the script once for each rank, and tells it which one it is. The rest is one
# line. Every block that has to speak with other ranks does so over this group: the normalizer
# merges its statistics, the KL stop takes one decision for all, and the update averages gradients.
#
# A rank that dies leaves the others waiting for it: they end with an error after ``--timeout``.
rank, ranks = (
    int(os.environ.get("RANK", "0")),
    int(os.environ.get("WORLD_SIZE", "1")),
)
has_cuda = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if has_cuda
    else None
)
torch.set_num_threads(1)  # networks this small gain nothing from more
if ranks > 1:
    if device is not None:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
leads = rank == 0  # writes checkpoints, draws, and shows the progress

# %%
# Networks
# --------
# All ranks start from the same seed, hence from the same parameters; the update checks that. The
# buffer ``policy_version`` counts updates. It travels with the weights, and tells of each frame how
# old the policy was that collected it.
spaces = gym.make(args.env)
observation_space: Any = spaces.observation_space
action_space: Any = spaces.action_space
spaces.close()
cells, seq_len = 64, 32


# Actor and critic begin with the same normalizer. Its statistics are buffers of the policy, so they
# reach all workers with the weights; ``update`` merges the batches of all ranks.
normalizer = ppokit.ObservationNormalizer(
    observation_space.shape, out_key="normalized"
)


def body() -> list[Any]:
    """Return the modules from the observation to 64 features, with a GRU if there is a memory."""
    layers = nn.Sequential(
        nn.Linear(observation_space.shape[0], cells), nn.Tanh()
    )
    if not args.memory:
        layers = nn.Sequential(*layers, nn.Linear(cells, cells), nn.Tanh())
    modules: list[Any] = [
        normalizer,
        TensorDictModule(layers, ["normalized"], ["features"]),
    ]
    if args.memory:
        keys = {"in_key": "features", "out_key": "features"}
        modules.append(
            ppokit.GRUModule(input_size=cells, hidden_size=cells, **keys)
        )
    return modules


def make_networks() -> tuple[Any, Any, Any]:
    """Return the actor, the critic for the loss, and the whole critic.

    With a memory, which both share, the loss takes the value head: it reads what the actor wrote.
    """
    shared = body()
    if isinstance(action_space, gym.spaces.Box):
        head = nn.Sequential(
            nn.Linear(cells, 2 * action_space.shape[0]), NormalParamExtractor()
        )
        keys, distribution = ["loc", "scale"], TanhNormal
        bounds = {
            x: torch.as_tensor(getattr(action_space, x))
            for x in ("low", "high")
        }
    else:
        head = nn.Sequential(nn.Linear(cells, int(action_space.n)))
        keys, distribution, bounds = (
            ["logits"],
            torch.distributions.Categorical,
            {},
        )
    nn.init.orthogonal_(head[0].weight, 0.01)
    actor = ProbabilisticActor(
        TensorDictSequential(
            *shared, TensorDictModule(head, ["features"], keys)
        ),
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=bounds,
        return_log_prob=True,
    )
    value_head = ValueOperator(nn.Linear(cells, 1), in_keys=["features"])
    critic = TensorDictSequential(
        *(shared if args.memory else body()), value_head
    )
    actor.register_buffer("policy_version", torch.tensor(0))
    for network in (actor, critic):
        network.to(device or "cpu")
    return actor, value_head if args.memory else critic, critic


torch.manual_seed(args.seed)
actor, critic_of_loss, critic = make_networks()

# %%
# The update
# ----------
# Nothing in it speaks of ranks. A minibatch is as large as on one process, and each rank has its
# share of it. Ranks may have different numbers of frames (``--ragged``): gradients, statistics and
# the KL are means over the frames of all.
#
# The training step averages gradients itself, once per optimizer step.
# ``DistributedDataParallel`` is not needed, and the step does not accept it.
total_frames = args.total_frames
if total_frames is None:
    total_frames = 4_096 if args.quick else task.total_frames
loss = ppokit.DualClipPPOLoss(
    actor,
    critic_of_loss,
    clip_epsilon=task.clip_epsilon,
    entropy_coeff=0.0,
    entropy_bonus=False,
    critic_coeff=0.5,
    loss_critic_type="l2",
    normalize_advantage=True,
)
optimizer = torch.optim.Adam(
    loss.parameters(), lr=task.learning_rate, fused=True
)
schedule = ppokit.InterpSchedule([(0, task.learning_rate), (total_frames, 0.0)])
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(
        loss,
        optimizer,
        stopper=None if args.accumulate else ppokit.KLEarlyStopper(0.05),
        max_grad_norm=0.5,
    ),
    reward_normalizer=ppokit.RewardNormalizer(task.gamma),
    advantage=ppokit.GAE(gamma=task.gamma, lmbda=0.95, value_network=critic),
    batcher=ppokit.SequenceBatcher(seq_len) if args.memory else None,
    scheduler=ppokit.ParameterScheduler({"lr": (optimizer, schedule)}),
    epochs=2 if args.quick else task.epochs,
    minibatch_size=max(1, task.minibatch_size // ranks),
    accumulate_grads=args.accumulate,
    seed=args.seed + rank,
)

# %%
# Collecting in this process
# --------------------------
# Each rank has environments of its own. ``worker_idx`` keeps their trajectories apart, also from
# those of an earlier run: the normalizer follows a return by its trajectory's id.
options: dict[str, Any] = {"categorical_action_encoding": True}


def collect_here(seed: int) -> Generator[Any, None, None]:
    """Yield this rank's batches, for ever."""
    num_envs = args.num_envs + (rank if args.ragged else 0)
    collector = ppokit.GymCollector(
        args.env,
        actor,
        num_envs=num_envs,
        frames_per_batch=max(
            1, args.frames_per_batch // (ranks * args.num_envs)
        )
        * num_envs,
        worker_idx=rank,
        device=device,
        **options,
    )
    with collector:
        collector.set_seed(seed)
        yield from collector


# %%
# Collecting on a Ray cluster
# ---------------------------
# torchrl's ``RayCollector`` starts workers, and each of them is a ``GymCollector``. With several
# ranks the first one holds it, and hands every rank its share.
#
# A worker's death ends torchrl's collector. So does it here, and the loop builds a new one: it gets
# the weights as they are, and what the old one was collecting is lost. That is all; no frame comes
# twice, because a batch is trained on before the next one is asked for.


def make_ray_collector() -> Any:
    """Return torchrl's collector over Ray workers with the weights of now."""
    from torchrl.collectors.distributed import RayCollector

    collector = RayCollector(
        [args.env] * args.workers,
        actor,
        frames_per_batch=args.frames_per_batch
        // (args.workers if args.asynchronous else 1),
        total_frames=2**62,
        sync=not args.asynchronous,
        collector_class=ppokit.GymCollector,
        collector_kwargs=dict(options),
        num_workers_per_collector=args.num_envs,
        remote_configs={"num_cpus": 1, "num_gpus": 0},
    )
    collector.update_policy_weights_(actor)
    return collector


def collect_on_ray(seed: int) -> Generator[Any, None, None]:
    """Yield the batches of all workers ``[B, T]``, for ever; a worker that dies is replaced."""
    import ray
    from ray.exceptions import RayError

    ray.init(
        include_dashboard=False, log_to_driver=False, ignore_reinit_error=True
    )
    failures = 0  # since the last batch
    for attempt in itertools.count():
        collector = None
        try:
            collector = make_ray_collector()
            collector.set_seed(seed + attempt)
            for batch in collector:
                failures = 0
                yield batch.reshape(-1, batch.shape[-1])
                collector.update_policy_weights_(actor)
        except (
            RayError,
            RuntimeError,
        ) as error:  # weights that cannot be sent raise the latter
            failures += 1
            if failures == 3:
                raise
            reason = str(error).strip().splitlines()[0]
            lost = f"Up to {args.frames_per_batch} frames are lost, workers start over"
            tqdm.write(f"{lost}: {reason}")
        finally:
            if collector is not None:
                collector.shutdown()


def share_out(batches: Iterator[Any] | None) -> Generator[Any, None, None]:
    """Yield each rank its rows of the batches that the first rank has."""
    while True:
        parts: list[Any] = [None] * ranks
        if batches is not None:
            parts = [part.clone() for part in next(batches).chunk(ranks)]
        own: list[Any] = [None]
        dist.scatter_object_list(own, parts if leads else None)
        yield own[0]


def batches_of_this_rank(seed: int) -> Generator[Any, None, None]:
    """Yield what this rank trains on."""
    if args.collector == "local":
        return collect_here(seed)
    collected = collect_on_ray(seed) if leads else None
    if ranks > 1:
        return share_out(collected)
    assert collected is not None
    return collected


# %%
# Checkpoints
# -----------
# The first rank writes them, and all load them: also on another number of ranks, since nothing in a
# checkpoint is one rank's own but the order of its minibatches.
checkpoint = args.out / "checkpoint.pt"
kind = [args.env, args.memory, args.accumulate]
frames = 0  # of all ranks
if args.resume and not checkpoint.exists():
    parser.error(
        f"--resume: there is no {checkpoint}; run without --resume first."
    )
if args.resume:
    try:
        saved = ppokit.load_checkpoint(
            checkpoint,
            {"update": update, "frames": None, "kind": None},
            map_location=device,
        )
    except (
        EOFError,
        KeyError,
        RuntimeError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        parser.error(
            f"--resume: {checkpoint} is damaged, or of another run: {error!r}"
        )
    if saved["kind"] != kind:
        parser.error(
            f"--resume: {checkpoint} is of another run: {saved['kind']}."
        )
    frames = saved["frames"]
if frames >= total_frames:
    parser.error(
        f"{checkpoint} has {frames} frames already; raise --total-frames."
    )

# %%
# Evaluation
# ----------
# The first rank evaluates the most probable action, while the others wait for it.
eval_episodes, longest = (5, 200) if args.quick else (20, 500)
evaluator = ppokit.GymCollector(
    args.env,
    actor,
    num_envs=eval_episodes,
    frames_per_batch=eval_episodes * longest,
    exploration_type=ExplorationType.DETERMINISTIC,
    device=device,
    **options,
)


def evaluate() -> float:
    """Return the mean return of an episode of each environment."""
    evaluator.set_seed(10_000)  # begins new episodes
    batch = evaluator.rollout()
    done = batch["next", "done"].int()
    of_first = (
        done.cumsum(1) - done == 0
    )  # no episode has ended before this step
    return (batch["next", "reward"] * of_first).sum(1).mean().item()


# %%
# Training
# --------
# Ctrl-C (in a notebook: interrupt the kernel) ends all ranks after the batch at hand, with a
# checkpoint; a second one at once. What a long run remembers is in its log, and not in memory.
if leads:
    try:
        begin_run(args.out, "distributed_ppo", resume=args.resume)
    except OSError as error:
        parser.error(f"--out: {error}")
save_every = 10  # batches
torch.manual_seed(
    args.seed + frames + 1_000 * rank
)  # of actions, no longer the same on all ranks
batches = batches_of_this_rank(args.seed + frames + 1_000 * rank)
progress = tqdm(
    total=total_frames, initial=frames, unit="frame", disable=not leads
)
logger: Any = None
if leads:
    logger = get_logger(
        "csv", logger_name=str(args.out / "logs"), experiment_name="ppo"
    )
updates, is_last = 0, False
with catch_interrupt(None) as interrupt:
    while not is_last:
        batch = next(batches)
        row = update(batch)
        normalizer.update(
            batch
        )  # after training: the policy that collected is the one that learns
        frames += int(row["frames"])
        updates += 1
        # where any rank was asked to end, all do
        interrupts = sum_over_ranks(torch.tensor(float(interrupt.pressed)))
        is_last = frames >= total_frames or bool(interrupts)
        if not leads:
            continue
        for name, value in row.items():
            logger.log_scalar(name, value, step=frames)
        progress.update(int(row["frames"]))
        shown = {
            "reward": "episode_return",
            "kl": "kl",
            "lag": "policy_lag",
            "stopped": "stopped",
        }
        progress.set_postfix(
            {k: f"{row[v]:.3g}" for k, v in shown.items() if v in row}
        )
        if updates % save_every == 0 or is_last:
            ppokit.save_checkpoint(
                checkpoint, {"update": update, "frames": frames, "kind": kind}
            )
            logger.experiment.scalars.clear()  # a copy in memory of all that is in the files
batches.close()
progress.close()

# %%
# The result
# ----------
# The first rank evaluates and draws. In one process no frame is older than the policy that trains
# on it. Asynchronous workers go on with the weights that they have: that is the age in the last
# panel.
if leads:
    print(
        f"Return of {eval_episodes} episodes after {frames} frames: {evaluate():.1f}"
    )
    print(f"Figures: {args.out}/*.png, checkpoint: {checkpoint}")
    title = f"{args.env}, {ranks} rank(s), {args.collector} collector, seed {args.seed}"
    panels = {**PANELS, "age of the policy (updates)": ["policy_lag"]}
    log = args.out / "logs"
    plot_run(log, panels=panels, title=title).savefig(
        args.out / "figure.png", dpi=120
    )
    for finding in ppokit.diagnose(log):
        print(finding)
evaluator.shutdown()

# %%
# The policy at work, in the first 200 steps of an episode. Where nothing can be drawn, because
# pygame is missing, a warning says so.
if leads and (
    shown := record_episode(args.env, actor, every=5, device=device, **options)
):
    strip = plot_frames(shown, title=f"{args.env} after {frames} frames")
    strip.savefig(args.out / "frames.png", dpi=120)

# %%
# All ranks come here before any of them leaves: one that is gone while another still waits for a
# message makes that one fail. And the group is destroyed, because gloo's threads, left running,
# sometimes abort a process that ends. They stop with the last reference to the group.
if ranks > 1:
    dist.barrier()
    dist.destroy_process_group()

# %%
# What you learned
# ----------------
# - The blocks find the process group by themselves; the script says who collects, and nothing else
#   about ranks.
# - Frames, minibatches and schedules are those of all ranks together, so that a run on two ranks
#   learns what a run on one does.
# - The KL stop and the check of the losses take one decision for all ranks.
# - Ray workers are :class:`~ppokit.GymCollector` objects in processes of their own; without waiting
#   for all of them, frames are older than the policy, and ``"policy_lag"`` says by how much.
# - A checkpoint goes on with another number of ranks.
#
# Further reading
# ---------------
# - :doc:`../howto/distributed`, :doc:`../howto/scale`, :doc:`../howto/reliability` and
#   :doc:`../howto/checkpoints`.
# - Espeholt et al., 2018, "IMPALA", arXiv:1802.01561 (what old frames do to a policy gradient).
# - Wijmans et al., 2020, "DD-PPO", arXiv:1911.00357 (ranks that collect and train).
