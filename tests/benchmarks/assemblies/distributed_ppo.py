"""PPO in one process, on several ranks, or with Ray workers; with a GRU or without.

``torchrun`` starts the script once for each rank. The first rank writes the log.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.record import CSVLogger
from tqdm import tqdm

import ppokit
from ppokit.distributed import sum_over_ranks
from ppokit.plotting import read_run
from tests.benchmarks.assemblies.harness import Run, catch_interrupt, count, options_of
from tests.benchmarks.networks import CELLS, body_of, policy_of, spaces_of

# Discount, epochs and minibatch of a task. Frames and minibatches are those of all ranks together.
TASKS = {"CartPole-v1": (0.98, 10, 256), "Pendulum-v1": (0.9, 20, 128)}
TOTAL_FRAMES, LEARNING_RATE, WORKERS = 98_304, 1e-3, 2
SEQ_LEN = 32

parser = options_of("distributed_ppo", "PPO on one process, on many, and on a Ray cluster.")
parser.add_argument("--env", choices=[*TASKS], default="CartPole-v1")
parser.add_argument("--collector", choices=["local", "ray"], default="local")
parser.add_argument("--asynchronous", action="store_true", help="of Ray, take what is ready")
parser.add_argument("--num-envs", type=count, default=8, help="of each rank or worker")
parser.add_argument("--ragged", action="store_true", help="each rank has one environment more")
parser.add_argument("--memory", action="store_true", help="a GRU, trained on sequences")
parser.add_argument("--frames-per-batch", type=count, default=2_048, help="of all ranks together")
parser.add_argument("--timeout", type=count, default=300, help="seconds to wait for another rank")
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
leads = rank == 0
# The seed is that of all ranks: they start with the same parameters.
run = Run(parser, TOTAL_FRAMES, 4_096, writes=leads)
args = run.args
gamma, epochs, minibatch_size = TASKS[args.env]
if ranks > 1:
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))

space, action_space = spaces_of(args.env)
# The statistics are buffers of the policy, and reach workers with its weights.
normalizer = ppokit.ObservationNormalizer(space.shape, out_key="normalized")


def body() -> list[Any]:
    """Return the modules from the observation to the features."""
    return [
        normalizer,
        *body_of(space, ppokit.GRUModule if args.memory else None, key="normalized"),
    ]


def make_networks() -> tuple[Any, Any, Any]:
    """Return the policy, the critic for the loss, and the critic.

    With a memory, which both share, the critic for the loss is the head: it reads what the policy
    wrote. ``actor_critic`` has a scale that does not depend on the observation: with it Pendulum
    learned less.
    """
    shared = body()

    def make_head(outputs: int) -> nn.Sequential:
        head = nn.Linear(CELLS, outputs)
        nn.init.orthogonal_(head.weight, 0.01)
        return nn.Sequential(head)

    policy = policy_of(make_head, action_space, key="hidden", before=shared)
    policy.register_buffer("policy_version", torch.tensor(0))  # with it there is a policy_lag
    value = ValueOperator(nn.Linear(CELLS, 1), in_keys=["hidden"])
    critic = TensorDictSequential(*(shared if args.memory else body()), value)
    return policy, value if args.memory else critic, critic


policy, value, critic = make_networks()
loss = ppokit.DualClipPPOLoss(
    policy,
    value,
    entropy_bonus=False,
    critic_coeff=0.5,
    loss_critic_type="l2",
    normalize_advantage=True,
)
optimizer = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
falling = ppokit.InterpSchedule([(0, LEARNING_RATE), (args.total_frames, 0.0)])
stopper = ppokit.KLEarlyStopper(0.05)
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, optimizer, stopper=stopper, max_grad_norm=0.5),
    reward_normalizer=ppokit.RewardNormalizer(gamma),
    advantage=ppokit.GAE(gamma=gamma, lmbda=0.95, value_network=critic),
    batcher=ppokit.SequenceBatcher(SEQ_LEN) if args.memory else None,
    scheduler=ppokit.ParameterScheduler({"lr": (optimizer, falling)}),
    epochs=2 if args.quick else epochs,
    minibatch_size=max(1, minibatch_size // ranks),
    seed=args.seed + rank,
)


def collect_here(seed: int) -> Generator[Any, None, None]:
    """Yield the batches of this rank, without end."""
    num_envs = args.num_envs + (rank if args.ragged else 0)
    steps = max(1, args.frames_per_batch // (ranks * args.num_envs))
    sizes = {"num_envs": num_envs, "frames_per_batch": steps * num_envs}
    # worker_idx: the ids of trajectories differ between ranks
    with ppokit.GymCollector(args.env, policy, worker_idx=rank, **sizes) as collector:
        collector.set_seed(seed)
        yield from collector


def make_ray_collector() -> Any:
    """Return torchrl's collector over Ray workers with the current weights."""
    from torchrl.collectors.distributed import RayCollector

    collector = RayCollector(
        [args.env] * WORKERS,
        policy,
        frames_per_batch=args.frames_per_batch // (WORKERS if args.asynchronous else 1),
        total_frames=2**62,
        sync=not args.asynchronous,
        collector_class=ppokit.GymCollector,
        num_workers_per_collector=args.num_envs,
        remote_configs={"num_cpus": 1, "num_gpus": 0},
    )
    collector.update_policy_weights_(policy)
    return collector


def collect_on_ray(seed: int) -> Generator[Any, None, None]:
    """Yield the batches of all workers ``[B, T]``, without end.

    The death of a worker ends torchrl's collector. A new one takes its place. What the old one was
    collecting is lost.
    """
    import ray
    from ray.exceptions import RayError

    ray.init(include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    failures = 0  # since the last batch
    for attempt in itertools.count():
        collector = None
        try:
            collector = make_ray_collector()
            collector.set_seed(seed + attempt)
            for batch in collector:
                failures = 0
                yield batch.reshape(-1, batch.shape[-1])
                collector.update_policy_weights_(policy)
        except (RayError, RuntimeError) as error:  # RuntimeError: weights cannot be sent
            failures += 1
            if failures == 3:
                raise
            reason = str(error).strip().splitlines()[0]
            lost = f"Up to {args.frames_per_batch} frames are lost, workers start again"
            tqdm.write(f"{lost}: {reason}")
        finally:
            if collector is not None:
                collector.shutdown()


def share_out(batches: Generator[Any, None, None] | None) -> Generator[Any, None, None]:
    """Yield each rank its rows of the batches that the first rank has."""
    while True:
        parts: list[Any] = [None] * ranks
        if batches is not None:
            parts = [part.clone() for part in next(batches).chunk(ranks)]
        own: list[Any] = [None]
        dist.scatter_object_list(own, parts if leads else None)
        yield own[0]


seed = args.seed + 1_000 * rank
torch.manual_seed(seed)  # of actions, which differ between ranks
if args.collector == "local":
    batches = collect_here(seed)
else:
    on_ray = collect_on_ray(seed) if leads else None
    batches = share_out(on_ray) if ranks > 1 or on_ray is None else on_ray
log = args.out / "logs"
logger: Any = CSVLogger("ppo", str(log)) if leads else None
progress = tqdm(total=args.total_frames, unit="frame", disable=not leads)
frames, is_last = 0, False
with catch_interrupt() as interrupt, progress:
    while not is_last:
        batch = next(batches)
        row = update(batch)
        normalizer.update(batch)  # after the update: it learns with the statistics of the batch
        frames += int(row["frames"])
        # All ranks end where one was interrupted.
        run.is_interrupted = bool(sum_over_ranks(torch.tensor(float(interrupt.pressed))))
        is_last = frames >= args.total_frames or run.is_interrupted
        is_last |= args.target is not None and row["episode_return"] >= args.target
        if leads:
            for name, x in row.items():
                logger.log_scalar(name, x, step=frames)
            logger.experiment.scalars.clear()  # a copy in memory of the files
            progress.update(int(row["frames"]))
            shown = {k: f"{row[k]:.3g}" for k in ("episode_return", "kl", "policy_lag")}
            progress.set_postfix(shown)
batches.close()

if leads:
    episodes = 5 if args.quick else 20
    options: Any = {"episodes": episodes, "num_envs": episodes, "seed": 10_000}
    returns, _ = ppokit.evaluate(args.env, policy, **options)
    print(f"Return of {episodes} episodes after {frames} frames: {returns.mean():.1f}")
    run.history = read_run(log)
    run.history[-1]["eval_return"] = returns.mean().item()
    panels = {"age of the policy (updates)": ["policy_lag"]}
    run.finish(f"{args.env}, {ranks} rank(s), {args.collector}, seed {args.seed}", panels)
# A rank that is gone makes others fail that still wait for a message. The threads of gloo may abort
# a process that ends while they run.
if ranks > 1:
    dist.barrier()
    dist.destroy_process_group()
