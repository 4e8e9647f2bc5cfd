"""GymCollector: batches from gymnasium environments."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import finalize

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.envs.utils import ExplorationType

from ppokit._batch import (
    IS_INIT,
    VERSION_KEY,
    Options,
    Parts,
    Policy,
    State,
    as_key,
    check_own_states,
    in_keys_of,
    key_parts,
    out_keys_of,
    recurrent_states,
)
from ppokit._checks import Checked, whole
from ppokit._state import check_names, load_all, state_of
from ppokit.collectors.batch import FLAGS, EpisodeCounts
from ppokit.collectors.environments import MakeEnv, make_envs, seeds_from
from ppokit.collectors.episodes import LARGEST_ID, Episodes, first_trajectory_id
from ppokit.collectors.infos import info_names
from ppokit.collectors.normalization import is_frozen, updated_parts
from ppokit.collectors.policy import draws_indices
from ppokit.collectors.torchrl_interface import TorchrlInterface
from ppokit.collectors.values import VALUE_KEY, StoredValues
from ppokit.policies.compiled_policy import CompiledPolicy
from ppokit.spaces import gym_env


class GymCollector(TorchrlInterface):
    """Collects batches ``[num_envs, T]`` from gymnasium environments, at little over their cost.

    It is a torchrl collector, for its trainers and loggers. It yields what torchrl's ``Collector``
    yields over ``SerialEnv(num_envs, lambda: GymEnv(id))``, key for key, except the dtype
    of observations: the policy's entries, the observations as torchrl names and encodes them,
    ``done``, ``terminated`` and ``truncated`` ``[num_envs, T, 1]`` (bool),
    ``("collector", "traj_ids")`` ``[num_envs, T]`` (int64), and under ``"next"`` the observation,
    the reward ``[num_envs, T, 1]`` (float32) and the flags. An environment is reset in the step
    that ends its episode: the next observation of that step is the episode's true last one, and the
    step after it starts with the first one of the next episode.

    A vector environment that resets its members a step late (gymnasium's ``NEXT_STEP``) gives the
    true last observation, too; the step that resets a member belongs to no episode. Its frame is
    excluded by ``("collector", "mask")`` ``[num_envs, T]`` (bool) and not counted.

    A ``ProbabilisticActor`` over plain networks, LSTMs and GRUs without hooks is called on tensors
    if it has a ``Normal``, ``IndependentNormal``, ``TanhNormal``, ``Categorical``,
    ``OneHotCategorical``, ``MaskedCategorical`` or ``MaskedOneHotCategorical`` distribution. The
    same random numbers give the same actions and log-probabilities, to rounding. With a
    ``TanhNormal`` the stored action, which is rounded and kept away from the bounds, gives the
    log-probability: the loss scores the same action, so the KL before the first step of an update
    is 0. Other policies are called on a TensorDict, or compiled with ``compile_policy``. The states
    of a recurrent policy are zero where an episode starts; they are stored with ``"is_init"``, as
    by torchrl's ``TensorDictPrimer``.

    Args:
        make_env: id of an environment, or a function that makes one, for ``num_envs`` of them that
            are stepped one after the other; a list of these, one for each; or a gymnasium
            ``VectorEnv``, or a function that makes it. For environments whose step takes more than
            about a millisecond, use ``gymnasium.make_vec(id, n, vectorization_mode="async")``, a
            process for each.
        policy: writes ``"action"``; any TensorDictModule. Changes to it are seen at the next batch.
            The parts of a Dict action are its entries ``"gear"``, as in torchrl's environments, or
            ``("action", "gear")``. If it has a buffer ``policy_version``, each frame has that.
        frames_per_batch: frames of a batch, all environments together; rounded up, with a warning,
            to a multiple of ``num_envs``.
        total_frames: frames after which the iteration ends, with a whole batch; -1 for no end.
        num_envs: number of environments.
        observation_transform: TensorDictModule that is applied to every observation, those after
            the last step of an episode included, before the policy sees it. If it has a method
            ``update``, as :class:`ObservationNormalizer` has it, or is a (nested)
            ``TensorDictSequential`` of modules that have it, that is called with the TensorDict of
            raw observations ``[num_envs, T]`` after each batch.
        device: of the policy and of the batches; None for the CPU, without saying so in the batch.
        observation_dtype: of floating-point observations in the batch; None for the environment's.
        categorical_action_encoding: discrete spaces are indices if True, and one-hot if False, as
            in ``GymEnv``. None follows the policy's distribution: indices for ``Categorical`` and
            ``MaskedCategorical``, one-hot for any other, and for a policy without one.
        exploration_type: how the policy draws.
        compile_policy: True, or a mapping of ``torch.compile``'s arguments, calls transform and
            policy as one graph of networks and draw. A seed gives other actions than
            without a graph. If no graph can be captured, and for recurrent policies, a warning
            says why; another exploration type than ``RANDOM`` is not compiled.
        step_count: write ``("next", "step_count")`` ``[num_envs, T, 1]`` (int64), the steps of the
            episode so far, this one included, as torchrl's ``StepCounter`` does.
        episode_reward: write ``("next", "episode_reward")``, the sum of its rewards, of their
            shape, as ``RewardSum`` does.
        info_keys: entries of ``info`` that are stored, such as ``["lives"]``, arrays of numbers or
            flags: ``("next", "lives")`` ``[num_envs, T, ...]`` (of a number 1) is that of the step,
            and ``"lives"`` that of the reset or the step before; 0 where a reset returns none.
        value_network: TensorDictModule that writes ``"state_value"``, such as the critic. Each
            observation is evaluated once, and ``"state_value"`` and ``("next", "state_value")``
            ``[num_envs, T, 1]`` are stored, for ``GAE(value_network=None)``. What it shares with
            the policy, such as an encoder, is not computed again. Not for recurrent critics.
        compact_obs: leave out the next observations, for half the memory; needs ``value_network``.
            Release each batch, too, before the next is collected: ``del batch``.
        trajs_per_batch: yield so many whole episodes ``[trajs_per_batch, T]``, padded to the
            longest and masked at ``("collector", "mask")``, for ``GAE(use_critic=False)``. They
            are checked every ``frames_per_batch`` frames, and may have begun under an earlier
            policy. A second loop begins new ones.
        postproc: called on each batch or, with ``trajs_per_batch``, on the episodes that are
            yielded; such as :class:`~ppokit.RewardNormalizer`.
        replay_buffer: batches go there, and None is yielded.
        worker_idx: number of this collector among several workers, up to 4,095. torchrl's
            ``MultiSyncCollector``, ``MultiAsyncCollector`` and ``RayCollector`` give it, with
            ``collector_class=functools.partial(GymCollector, num_envs=n)``.
        **kwargs: other arguments of torchrl's ``Collector``: ``pre_collect_hook`` is called before
            each batch and ``post_collect_hook`` with it; others only where they are turned off.

    The environments are closed at the end of the iteration, by :meth:`shutdown`, at the end of a
    ``with`` block, and when policy or environment raise.

    Raises:
        ValueError: an option is out of range or not supported; environments have different spaces;
            an observation has a name that the policy or the collector writes; some heads of the
            policy draw indices and others one-hot vectors; or, in a batch, an observation or a
            reward has another shape than declared.
        TypeError: ``make_env`` makes no environment, or one that torchrl cannot encode.
        KeyError: the policy reads a key that nothing writes.

    Example:
        >>> from ppokit import GymCollector
        >>> from ppokit.networks import actor_critic
        >>> policy, _ = actor_critic("CartPole-v1")
        >>> collector = GymCollector(
        ...     "CartPole-v1", policy, frames_per_batch=64, total_frames=128, num_envs=2)
        >>> next_seed = collector.set_seed(0)
        >>> [batch["next", "reward"].shape for batch in collector]
        [torch.Size([2, 32, 1]), torch.Size([2, 32, 1])]
    """

    updates_transform = True  #: whether each batch moves the statistics of the transform

    frames_per_batch = whole()
    total_frames: Any = Checked(
        lambda x: x == -1 or (x % 1 == 0 and x > 0), "be positive, or -1 for no end"
    )
    trajs_per_batch = whole(optional=True)

    def __init__(
        self,
        make_env: MakeEnv | Sequence[MakeEnv] | VectorEnv,
        policy: Policy | None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        num_envs: int = 1,
        observation_transform: TensorDictModuleBase | None = None,
        device: torch.device | str | int | None = None,
        observation_dtype: torch.dtype | None = torch.float32,
        categorical_action_encoding: bool | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,  # pyright: ignore[reportArgumentType]
        compile_policy: bool | Options = False,
        step_count: bool = False,
        episode_reward: bool = False,
        info_keys: Collection[str] = (),
        value_network: TensorDictModuleBase | None = None,
        compact_obs: bool = False,
        trajs_per_batch: int | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        replay_buffer: ReplayBuffer | None = None,
        worker_idx: int | None = None,
        **kwargs: object,
    ) -> None:
        yields = replay_buffer is trajs_per_batch is None
        super().__init__(kwargs, policy, device, worker_idx=worker_idx, yields_batches=yields)
        num_envs = whole().check(num_envs, "num_envs")
        self.total_frames, self.frames_per_batch = total_frames, frames_per_batch
        self.observation_transform, self.postproc = observation_transform, postproc
        self.trajs_per_batch, self.replay_buffer = trajs_per_batch, replay_buffer
        self.exploration_type, self._frames, self._iter = exploration_type, 0, -1
        whole_episodes, is_worker = trajs_per_batch is not None, worker_idx is not None
        _check_options(
            observation_dtype,
            has_buffer=replay_buffer is not None,
            has_whole_episodes=whole_episodes,
            transform_of_worker=observation_transform if is_worker else None,
        )
        values = _values_of(value_network, compact_obs=compact_obs, is_worker=is_worker)
        counts = EpisodeCounts(step_count=step_count, episode_reward=episode_reward)
        encoding = draws_indices(self.policy) if (x := categorical_action_encoding) is None else x
        readers = self.policy, observation_transform
        reads = {key_parts(key) for x in readers for key in in_keys_of(x)}
        options = num_envs, encoding, reads, (infos := info_names(info_keys))
        made = make_envs(make_env, *options, whole_episodes=whole_episodes)
        self._envs, self.env, self._num_envs = made  # env is torchrl's wrapper of the first
        self._close_envs = finalize(self, self._envs.close)
        compiled = CompiledPolicy(compile_policy) if compile_policy is not False else None
        options = observation_dtype, first_trajectory_id(worker_idx), compiled, reads, infos
        with self._closing_on_error():
            given, n = self.frames_per_batch, self.num_envs
            self.frames_per_batch = self.requested_frames_per_batch = -(-given // n) * n
            if given % n:
                said = f"frames_per_batch={given} is no multiple of num_envs={n}: batches will have"
                warnings.warn(f"{said} {self.frames_per_batch} frames.", stacklevel=2)
            self._episodes = Episodes(*made, counts, self.device, *options, values, compact_obs)
            self.keep_episodes = self._episodes.keep_state
            names = self._episodes.keys, counts.wanted, infos
            _check_keys(self.policy, observation_transform, value_network, *names)

    @property
    def num_envs(self) -> int:
        """The number of environments."""
        return self._num_envs

    def iterator(self) -> Iterator[Any]:
        """Yield batches, or None with a replay buffer, until ``total_frames`` are collected."""
        if self.trajs_per_batch is not None and self._iter >= 0 and not self.closed:
            self.reset()  # episodes that were open when the last loop ended lost their start
        while not 0 <= self.total_frames <= self._frames:
            batch = self.rollout()
            if 0 <= self.total_frames <= self._frames:
                self._close_envs()  # which leaves the counters to shutdown(), as torchrl does
            if self.replay_buffer is None:
                yield batch
            else:
                self.replay_buffer.extend(batch)
                self._progress("record_replay_write", batch.numel())
                yield None
            del batch  # its memory is free before the next batch is collected

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, or whole episodes with ``trajs_per_batch``, through ``postproc``."""
        for batch in super().__iter__():
            if self.trajs_per_batch is not None and self.postproc is not None:
                with self._closing_on_error():
                    batch = self.postproc(batch)
            yield batch
            del batch

    def rollout(self) -> TensorDictBase:
        """Return one batch ``[num_envs, T]``; with ``trajs_per_batch``, iterate instead.

        Raises:
            RuntimeError: the collector is shut down.
            ValueError: an action has another shape than the environments expect.
        """
        if self.closed:
            raise RuntimeError("The collector is shut down: its environments are closed. Make one.")
        with self._closing_on_error(), torch.no_grad():
            if self.pre_collect_hook is not None:
                self.pre_collect_hook()
            steps = -(-self.frames_per_batch // self.num_envs)
            batch, frames = self._episodes.collect(
                *(steps, self.policy, self.observation_transform, self.exploration_type),
                updates_transform=self.updates_transform,
            )
            self._frames, self._iter = self._frames + frames, self._iter + 1
            pending = self.trajs_per_batch is not None
            if self._collector_progress is not None:
                self._progress("increment_stepped", frames, trajectory_pending=pending)
            if self.postproc is not None and not pending:
                batch = self.postproc(batch)
            if self._use_buffers:
                batch = self._as_one(batch)
            if self.post_collect_hook is not None:
                self.post_collect_hook(batch)
            return batch

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments as ``SerialEnv.set_seed`` does, and begin new episodes.

        Args:
            seed: the first environment's; each other's is drawn from the seed before it.
            static_seed: give ``seed`` to all.

        Returns:
            The seed that a further environment would get.
        """
        seeds = seeds_from(seed, self.num_envs + 1, static_seed)
        with self._closing_on_error():
            self._envs.seed(seeds[:-1])
            self._episodes.begin(new_ids=self._frames > 0)
        self._progress("clear_pending")
        return seeds[-1]

    def reset(self) -> None:
        """Reset all environments; the next batch starts with new episodes."""
        with self._closing_on_error():
            self._episodes.begin(new_ids=True)
        self._progress("clear_pending")

    @property
    def closed(self) -> bool:
        """Whether the environments are closed."""
        return not self._close_envs.alive

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state of policy, transform and postproc, and the number of frames so far.

        The environments have no state that could be saved: a restart begins new episodes.
        """
        return OrderedDict(
            {name: state_of(module) for name, module in self._modules().items()},
            frames=self._frames,
            iter=self._iter,
            traj_pool={"traj_id": torch.tensor(self._episodes.unused_id)},
            policy_version=self.policy_version,
            collector_progress=self._progress("snapshot"),
        )

    def load_state_dict(self, state_dict: State, strict: bool = True) -> None:
        """Load what :meth:`state_dict` returned, completely or not at all.

        The next batch begins new episodes.

        Args:
            state_dict: a complete state.
            strict: ignored; ``RayCollector`` passes it.
        """
        # A collector of several processes keeps the ids of its workers to itself.
        others = {"policy_version": 0, "collector_progress": {}, "traj_pool": {"traj_id": 0}}
        check_names(state := {**others, **state_dict}, self.state_dict(), "a GymCollector")
        least = {"frames": 0, "iter": -1, "policy_version": 0}
        counts = [whole(x).check(state[name], name) for name, x in least.items()]
        first_id, modules = (
            whole(0).check(state["traj_pool"]["traj_id"], "traj_id"),
            self._modules(),
        )
        if first_id >= LARGEST_ID:
            raise ValueError(f"traj_id is {first_id}, and must be below {LARGEST_ID}.")
        if lost := [k for k, x in modules.items() if state[k] and not isinstance(x, nn.Module)]:
            raise KeyError(f"The state has {lost}, and there is no module to load it into.")
        load_all({k: x for k, x in modules.items() if isinstance(x, nn.Module)}, state)
        self._frames, self._iter, self.policy_version = counts
        self._progress("load_snapshot", state["collector_progress"])
        self._episodes.take_new_ids(first_id)
        self._episodes.are_over = True

    def _modules(self) -> Parts:
        names = "policy_state_dict", "env_state_dict", "postproc_state_dict"
        modules = self.policy, self.observation_transform, self.postproc
        return dict(zip(names, modules, strict=True))

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the environments; a second call does nothing."""
        self._progress("clear_pending")
        with nullcontext() if raise_on_error else suppress(Exception):
            self._close_envs() if close_env else self._close_envs.detach()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> GymCollector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        options = self.policy, self.observation_transform, self.exploration_type
        path = self._episodes.policy.path(*options)
        return (
            f"{type(self).__name__}(env={gym_env(self.env)}, policy called {path}, "
            f"num_envs={self.num_envs}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, frames={self._frames})"
        )


def _check_options(
    observation_dtype: torch.dtype | None,
    *,
    has_buffer: bool,
    has_whole_episodes: bool,
    transform_of_worker: TensorDictModuleBase | None,
) -> None:
    """Raise a ValueError if an option is out of range, or workers would part statistics."""
    if observation_dtype not in (None, torch.float16, torch.float32, torch.float64):
        raise ValueError(
            "observation_dtype must be None, torch.float16, torch.float32 or torch.float64, "
            f"got {observation_dtype!r}."
        )
    if has_buffer and has_whole_episodes:
        raise ValueError("Pass replay_buffer (None is yielded) or trajs_per_batch, not both.")
    parts = updated_parts(transform_of_worker)
    if moving := [x for x in parts if not is_frozen(x)]:
        raise ValueError(
            f"Each worker would have its own copy of the {type(moving[0]).__name__}. Put it into "
            "policy and critic, whose weights carry it: TensorDictSequential("
            "ObservationNormalizer(shape, out_key='normalized'), network), and call "
            "normalizer.update(batch) where you train. Or freeze() it."
        )


def _values_of(
    network: TensorDictModuleBase | None, *, compact_obs: bool, is_worker: bool
) -> StoredValues | None:
    """Return what evaluates the network, or None without one.

    Raises:
        ValueError: the values cannot be stored, or next observations cannot be left out.
    """
    if network is not None and is_worker:
        raise ValueError(
            "Each worker would have its own copy of value_network, which no update changes: leave "
            "it out, and pass it to GAE."
        )
    if compact_obs and network is None:
        raise ValueError(
            "compact_obs leaves out the next observations, from which GAE computes values: pass "
            "value_network, so that they are stored."
        )
    return None if network is None else StoredValues(network)


def _check_keys(
    policy: Policy,
    transform: TensorDictModuleBase | None,
    value_network: TensorDictModuleBase | None,
    observed: Collection[NestedKey],
    counts: Iterable[str],
    info_keys: Iterable[str],
) -> None:
    """Raise where a module reads a name that nothing writes, or two write one entry."""
    for name, module, is_right in (
        ("observation_transform", transform, transform is None or hasattr(transform, "out_keys")),
        ("policy", policy, callable(policy)),
    ):
        if not is_right:
            raise TypeError(f"{name} must be a TensorDictModule, got {type(module).__name__}.")
    check_own_states(policy)
    states, made = recurrent_states(policy), out_keys_of(transform)
    own = [as_key(key) for key in (*states, *out_keys_of(policy))]
    there = [*observed, *map(as_key, made)]
    names = *FLAGS, IS_INIT, VERSION_KEY, "action", "reward", "collector", "next", *counts
    reserved = dict.fromkeys(names, "collector")
    of_gae = "advantage", "value_target", "shifted_valid"
    reserved |= dict.fromkeys(of_gae, "GAE of the update")
    reserved["raw_reward"] = "reward normalizer"
    reserved["steps_to_next_obs"] = "MultiStepTransform of torchrl"  # which GAE reads
    reserved |= dict.fromkeys(out_keys_of(value_network), "value network")
    others = {*reserved, VALUE_KEY, *EpisodeCounts.names}
    others |= {key_parts(x)[0] for x in (*own, *there)}
    for key in info_keys:
        if key in others or not key:
            raise ValueError(
                f"info_keys: a batch has another entry {key!r}, or may have. Rename that of info "
                "in an environment wrapper."
            )
    reserved |= dict.fromkeys(info_keys, "collector")
    if taken := [key for key in own if key_parts(key)[0] == "collector"]:
        raise ValueError(
            f"The policy writes {taken[0]!r}, over the collector's entries: rename it, or the part "
            "of a Dict action, with a gymnasium wrapper."
        )
    for key in there:
        who = reserved.get(key_parts(key)[0], "policy")
        if who != "policy" or key in own:
            raise ValueError(
                f"The {who} writes {key!r}, which would replace the observation of "
                "that name in the batch, or be taken for it. Rename the observation with a "
                "gymnasium wrapper, or the policy's entry by its out_keys; a module that changes "
                "observations for the policy belongs in observation_transform."
            )
    for name, module, keys in (
        ("observation_transform", transform, observed),
        ("policy", policy, [*there, *own, *FLAGS, IS_INIT]),  # composite parameters are its own
        ("value_network", value_network, there),
    ):
        names, reads = {key_parts(key)[0] for key in keys}, in_keys_of(module)
        if missing := [key for key in reads if key_parts(key)[0] not in names]:
            raise KeyError(
                f"The {name} reads {missing}, which neither the environments nor an "
                f"observation_transform write. There is: {', '.join(sorted(map(str, there)))}. "
                "(A recurrent module declares its states by make_tensordict_primer().)"
            )
