"""PPOUpdate: one update on one collected batch, composed of the blocks."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._batch import (
    VERSION_KEY,
    Parts,
    State,
    StateDict,
    check_tensordict,
    check_time_is_last,
    get_if_any,
    is_recurrent,
    key_named,
    mask_key_of,
    network_of,
    state_keys,
)
from ppokit._checks import choice, whole
from ppokit._state import (
    check_buffers,
    check_names,
    keep_state,
    load_all,
    state_dict_of,
    unchanged,
)
from ppokit.distributed import add_over_ranks, alone, raise_together
from ppokit.rewards import RewardNormalizer
from ppokit.rewards.episode_returns import EpisodeReturns
from ppokit.schedules import ParameterScheduler
from ppokit.sequences import SequenceBatcher
from ppokit.trust_region import AdaptiveKLCoeff, AdaptiveLearningRate
from ppokit.trust_region.early_stop import refuse_accumulated_gradients
from ppokit.update.checks import check_groups_of_ranks, loss_names
from ppokit.update.data_parallel import Outline, sizes_of_minibatches
from ppokit.update.keys import (
    check_mask_keys,
    check_names_of_observations,
    check_policy_keys,
    count_frames,
    keys_of_loss,
)
from ppokit.update.minibatches import FrameMinibatches, SequenceMinibatches
from ppokit.update.statistics import Means, MinibatchStatistics, coefficients, policy_lag, rates
from ppokit.update.training_step import TrainingStep

PARTS = {
    "advantage": (nn.Module,),
    "reward_normalizer": (RewardNormalizer,),
    "batcher": (SequenceBatcher,),
    "adaptive_kl": (AdaptiveKLCoeff, AdaptiveLearningRate),
    "scheduler": (ParameterScheduler,),
}
STEPS = 8  # of each row, for validate: enough for any block, little beside an update


class PPOUpdate:
    """One PPO update on one collected batch, composed of the blocks, each optional.

    ``update(batch)`` does, in this order: scale the rewards, compute the advantages, and for each
    epoch take every valid frame (or every sequence, with a batcher) once, in minibatches, each a
    :class:`~ppokit.TrainingStep`; then move the KL coefficient and the schedules. (Schulman et al.,
    2017, arXiv:1707.06347, algorithm 1.)

    Args:
        step: loss, optimizer, clipping, KL stop, mixed precision, compilation and process group.
        advantage: :class:`~ppokit.GAE`, torchrl's ``MultiAgentGAE`` or another module that writes
            what the loss reads; None if the batch has it.
        reward_normalizer: scales the rewards first, in place.
        batcher: cuts the batch into sequences, for recurrent networks. Minibatches hold sequences
            of similar length (unless the loss normalizes the advantage per minibatch). With
            ``burn_in`` the networks compute the states again.
        adaptive_kl: moves the coefficient of the KL penalty by the mean KL of the last epoch, or
            the learning rate (:class:`~ppokit.AdaptiveLearningRate`) by that of each epoch.
        scheduler: advances last, by the batch's valid frames.
        epochs: how often each frame is used.
        minibatch_size: in valid frames; None for the whole batch. The last minibatch may be
            smaller. With a batcher an epoch has min(sequences, ceil(frames / minibatch_size))
            minibatches, of nearly equal numbers of frames.
        shuffle: draw a new order in each epoch; on a device another one than on the CPU.
        accumulate_grads: one optimizer step an epoch, with the gradients of its minibatches
            weighted by their valid frames: the gradient of the whole epoch in the memory of a
            minibatch, if the loss is a mean (and does not normalize the advantage per minibatch).
            The minibatches run eagerly.
        recompute_advantage: compute the advantage before each epoch, with the critic of that time.
        seed: of the order of frames; None draws one from torch's global random numbers.

    With a compiled step, what a user's module changes during an update takes effect in the next
    update: the step looks at hooks, settings and parameters when an update begins.

    The statistics are a flat dictionary of numbers, with the same names in every update: the
    outputs of the loss, ``"grad_norm"``, ``"episode_return"``, ``"lr"`` and others. The page "PPO
    update" of the documentation lists them. A mean over nothing is NaN, such as the return if no
    episode ended. With several ranks they are of all ranks, except the seconds.

    Raises:
        ValueError: an option is out of range, two exclude each other, or networks are recurrent
            without a batcher.
        TypeError: a block is of the wrong kind, or ``step`` is no :class:`~ppokit.TrainingStep`.
        FloatingPointError: in an update, a loss or a gradient is not finite.

    Example:
        >>> import torch
        >>> from ppokit import GAE, DualClipPPOLoss, GymCollector, PPOUpdate, TrainingStep
        >>> from ppokit.networks import actor_critic
        >>> actor, critic = actor_critic("CartPole-v1")
        >>> loss = DualClipPPOLoss(actor, critic)
        >>> optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True)
        >>> gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        >>> step = TrainingStep(loss, optimizer, max_grad_norm=0.5)
        >>> update = PPOUpdate(step, advantage=gae, epochs=2, minibatch_size=4, seed=0)
        >>> with GymCollector("CartPole-v1", actor, frames_per_batch=10) as collector:
        ...     statistics = update(collector.rollout())
        >>> statistics["epochs"], statistics["minibatches"], statistics["frames"]
        (2.0, 6.0, 10.0)
    """

    epochs = whole()
    minibatch_size = whole(optional=True)
    accumulate_grads, recompute_advantage = choice(False, True), choice(False, True)

    def __init__(
        self,
        step: TrainingStep,
        *,
        advantage: nn.Module | None = None,
        reward_normalizer: RewardNormalizer | None = None,
        batcher: SequenceBatcher | None = None,
        adaptive_kl: AdaptiveKLCoeff | AdaptiveLearningRate | None = None,
        scheduler: ParameterScheduler | None = None,
        epochs: int = 4,
        minibatch_size: int | None = None,
        shuffle: bool = True,
        accumulate_grads: bool = False,
        recompute_advantage: bool = False,
        seed: int | None = None,
    ) -> None:
        if not isinstance(step, TrainingStep):
            raise TypeError(
                f"PPOUpdate takes a TrainingStep, got {type(step).__name__}. Write step = "
                "TrainingStep(loss, optimizer, max_grad_norm=...) and PPOUpdate(step, ...)."
            )
        self.step = step
        self.advantage, self.reward_normalizer = advantage, reward_normalizer
        self.batcher, self.adaptive_kl, self.scheduler = batcher, adaptive_kl, scheduler
        self.epochs, self.minibatch_size = epochs, minibatch_size
        self.accumulate_grads, self.recompute_advantage = accumulate_grads, recompute_advantage
        self._check_arguments()
        self._warn_of_gammas()
        self.generator = torch.Generator()
        self.generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else int(seed))
        options = {"shuffle": shuffle, "generator": self.generator}
        self.minibatches = (
            FrameMinibatches(step.loss, **options)
            if batcher is None
            else SequenceMinibatches(batcher, step.loss, **options)
        )
        self._episodes = EpisodeReturns()
        self._finished: float | None = None
        self._names: tuple[str, ...] = ()  # of all means so far
        self._has_warned = False

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has a new order."""
        return self.minibatches.shuffle

    @shuffle.setter
    def shuffle(self, value: bool) -> None:
        self.minibatches.shuffle = value

    def _check_arguments(self) -> None:
        """Raise where an option is of the wrong kind, out of range, or excludes another."""
        loss, step = self.step.loss, self.step
        blocks = {name: getattr(self, name) for name in PARTS}
        for name, kinds in PARTS.items():
            if not isinstance(blocks[name], kinds) and blocks[name] is not None:
                expected = " or ".join(kind.__name__ for kind in kinds)
                given = type(blocks[name]).__name__
                raise TypeError(f"{name} must be a {expected}, got {given}.")
        check_mask_keys(mask_key_of(loss), blocks)
        refuse_accumulated_gradients(self.accumulate_grads and step.stopper is not None)
        for name in ("actor_network", "critic_network"):
            network = network_of(loss, name)
            if self.batcher is None and is_recurrent(network) and state_keys(network):
                raise ValueError(
                    f"The loss's {name} is recurrent, and without a batcher the update shuffles "
                    "frames. Pass batcher=SequenceBatcher(seq_len)."
                )
        for name, of_step in (("loss", loss), ("optimizer", step.optimizer)):
            if getattr(self.adaptive_kl, name, of_step) is not of_step:
                raise ValueError(f"adaptive_kl belongs to another {name} than the step.")
        with_groups = "adaptive_kl", "reward_normalizer"
        check_groups_of_ranks({name: blocks[name] for name in with_groups}, step.group)
        is_averaged = self.accumulate_grads or step.ranks.count > 1
        if is_averaged and getattr(loss, "reduction", "mean") == "sum":
            raise ValueError(
                "The loss is a sum over frames (reduction='sum'), but gradients of ranks and "
                "accumulated ones are averaged. Build the loss with reduction='mean'."
            )
        if self.recompute_advantage and self.advantage is None:
            raise ValueError("recompute_advantage needs an advantage module.")
        has_none = hasattr(self.advantage, "value_network") and self.value_network is None
        if self.recompute_advantage and has_none:
            raise ValueError(
                "recompute_advantage computes values again, and the advantage module has no "
                "value_network: pass it the critic, and collect with compact_obs=False."
            )
        if self.adaptive_kl is not None and self.scheduler is not None:
            target, name = self.adaptive_kl.target
            if self.scheduler.drives(target, name):
                kind = type(target).__name__
                raise ValueError(
                    f"The adaptive_kl and the scheduler both drive {name!r} of the {kind}. Keep "
                    "one."
                )
        check_names_of_observations(loss, blocks)

    def _warn_of_gammas(self) -> None:
        """Warn where the reward normalizer scales by the returns of another discount."""
        blocks: Any = self.advantage, self.reward_normalizer
        found = [torch.as_tensor(x.gamma) for x in blocks if hasattr(x, "gamma")]
        gammas = [float(x) for x in found if x.numel() == 1]  # else of each agent
        if len(gammas) == 2 and not math.isclose(*gammas, rel_tol=1e-6):  # torchrl's is float32
            warnings.warn(
                f"gamma is {gammas[0]:g} in the advantage module and {gammas[1]:g} in the reward "
                "normalizer. Give both the same gamma.",
                stacklevel=3,
            )

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Train on a batch ``[*B, T]``, and return the statistics.

        The blocks write to the batch what they always write: scaled rewards, advantages.
        """
        check_tensordict(batch, who="PPOUpdate")
        started = time.perf_counter()
        outline, frames, count = self.step.ranks.agree(
            self.step.parameters_to_train, lambda: self._outline(batch)
        )
        size, largest = batch.batch_size.numel(), self.minibatch_size or 0
        if largest > size and not self._has_warned:  # once, since short episodes may be
            self._has_warned = True
            said = f"minibatch_size={largest} is larger than the batch of {size} frames"
            warnings.warn(f"{said}: each epoch makes one step.", stacklevel=2)
        undo, minibatches = self._undo(batch), MinibatchStatistics(self.step.mask_key)
        try:
            elements, sums, settings = raise_together(
                lambda: self._prepare(batch, outline), self.step.group
            )
            size = self.minibatch_size or len(elements)
            sizes = sizes_of_minibatches(len(elements), count, size)
            stopped = self._train(batch, elements, sizes, outline.frames, minibatches)
            sums |= minibatches.sums()
        except BaseException:  # Ctrl-C, too
            if not minibatches.has_stepped:
                undo()
            raise
        if isinstance(self.adaptive_kl, AdaptiveKLCoeff) and not minibatches.all_of_epoch_skipped:
            kl, weight = minibatches.kl_of_epoch("kl")
            self.adaptive_kl.update(kl, weight=weight)
        if self.scheduler is not None:
            self.scheduler.step(int(self.scheduler.frames) + frames)
        if (version := self._version) is not None:
            version.detach().add_(1)
        if (padded := self.minibatches.padded) is not None:
            sums["padded"] = padded
        sums = dict.fromkeys(self._names, (0.0, 0.0)) | add_over_ranks(sums, self.step.group)
        self._names = tuple(sums)
        means = {
            name: total / weight if weight else math.nan for name, (total, weight) in sums.items()
        }
        now = time.perf_counter()
        collecting = 0.0 if self._finished is None else started - self._finished
        self._finished = now
        return {
            **means,
            "epochs": float(minibatches.epochs),
            "minibatches": float(len(minibatches)),
            "steps": float(minibatches.steps),
            "skipped": float(minibatches.skipped),
            "stopped": float(stopped),
            **settings,
            "frames": float(frames),
            "episodes": sums["episode_return"][1],
            "seconds_collecting": collecting,
            "seconds_updating": now - started,
            "frames_per_second": frames / (now - started + collecting),
        }

    def validate(self, batch: TensorDictBase) -> str:
        """Run every block once on the first steps of a batch, and change nothing.

        A key, shape, dtype or device that does not fit is reported here, before hours are spent.
        Buffers, such as the statistics of batch normalization, and random numbers are as before.

        Returns:
            What ``repr`` says of the update: its parts, and which path each takes on this batch.

        Raises:
            KeyError: the batch lacks an entry; the block says which, and who would write it.
            ValueError: a shape does not fit, no frame is valid, a loss is not finite, or no loss
                has a gradient.
            TypeError: a dtype does not fit, or the loss returns no ``"loss_*"``.
            RuntimeError: the batch is on another device than the networks.
        """
        check_tensordict(batch, who="PPOUpdate")
        step = self.step
        step.check_settings(waits=True)  # a state that is rejected could not be restored
        if batch.device is not None and batch.device != step.device:
            raise RuntimeError(
                f"The batch is on {batch.device}, but the parameters are on {step.device}. Move "
                "the batch (batch.to(device)), or let the collector store it there "
                "(storing_device=...)."
            )
        steps: Any = batch[..., :STEPS]
        needs_ends = not getattr(self.advantage, "use_critic", True)  # whole episodes
        batch = (batch if needs_ends or not count_frames(steps, step.mask_key) else steps).clone()
        parts = step.loss, self.advantage, self.value_network, self.batcher
        with unchanged(*parts, device=step.device), alone():
            outline = self._outline(batch)
            if self.reward_normalizer is not None:
                batch = self.reward_normalizer.clone().freeze()(batch)
            losses = self._losses_of_first(self._elements(batch), outline)
        for name in loss_names(losses, type(step.loss).__name__):
            if not losses[name].isfinite():
                raise ValueError(
                    f"{name!r} is {losses[name].item()} on the first steps of this batch."
                )
        return repr(self)

    def reset_returns(self) -> None:
        """Drop the returns of open episodes, those of the reward normalizer included.

        Call it where trajectory ids repeat: with a new torchrl ``Collector``, and in a new process
        with a ``GymCollector`` whose state is not loaded.
        """
        if self.reward_normalizer is not None:
            self.reward_normalizer.reset_returns()
        self._episodes.clear()

    # -- one batch ---------------------------------------------------------------

    def _outline(self, batch: TensorDictBase) -> Outline:
        """Return the numbers of frames, elements and minibatches; change nothing."""
        self._check_arguments()
        self.step.check_settings(waits=True)
        if self.advantage is not None:
            check_buffers(self.advantage)
        if self.batcher is not self.minibatches.batcher:
            raise ValueError("The batcher of the update was replaced: build another PPOUpdate.")
        self.minibatches.loss = self.step.loss  # step or loss may have been replaced
        check_time_is_last(batch, who="PPOUpdate")
        dim = getattr(self.advantage, "time_dim", None)
        if dim is not None and dim % batch.ndim != batch.ndim - 1:
            raise ValueError(
                f"The advantage module has time_dim={dim}, and PPOUpdate takes the last dimension "
                f"of a batch, here of shape {list(batch.shape)}, for time: leave time_dim out."
            )
        key = self.step.mask_key
        if not (frames := count_frames(batch, key)):
            raise ValueError(
                f"The batch of shape {list(batch.shape)} has no valid frame: it is empty, or "
                f"{key!r} is False everywhere. The mask is True at frames to train on."
            )
        key = key_named(self.step.loss, "advantage")
        is_there = key is not None and get_if_any(batch, key) is not None
        if is_there and self.advantage is None and self.reward_normalizer is not None:
            raise ValueError(
                f"{key!r} was computed before the rewards are normalized: pass advantage=, too."
            )
        check_policy_keys(self.step.loss, batch)
        elements = self.minibatches.count(batch)
        size = self.minibatch_size or frames
        return Outline(frames, elements, min(elements, math.ceil(frames / size)))

    def _undo(self, batch: TensorDictBase) -> Callable[[], None]:
        """Return a function that restores the blocks and the batch as they are now."""
        parts = [self.reward_normalizer, self._episodes, self.minibatches, self.advantage]
        if self.step.ranks.count > 1:  # this rank's networks run before another raises
            parts += [self.step.loss, self.value_network]
        restore = [keep_state(part) for part in parts if hasattr(part, "state_dict")]
        entries = batch.clone(recurse=False)

        def undo() -> None:
            for restore_part in restore:
                restore_part()
            if not batch.is_locked:
                for key in {*batch.keys(True, True)} - {*entries.keys(True, True)}:
                    batch.del_(key)
                batch.update(entries)

        return undo

    def _prepare(
        self, batch: TensorDictBase, outline: Outline
    ) -> tuple[TensorDictBase, Means, dict[str, float]]:
        """Return the elements to train on, and the statistics that are known before training."""
        normalizer, raw_key = self.reward_normalizer, None
        if normalizer is not None:
            batch, raw_key = normalizer(batch), normalizer.raw_key
        settings = self._settings()
        mask_key, version = self.step.mask_key, self._version
        keys = {
            f"{name}_key": key_named(self.advantage, name, key_named(self.step.loss, name, name))
            for name in ("reward", "done")
        }
        sums = self._episodes(batch, **keys, mask_key=mask_key, raw_key=raw_key)
        if version is not None:
            sums |= policy_lag(version, batch, mask_key)
        elements = self._elements(batch)
        if self.step.ranks.count > 1:  # one process finds out in its first step
            self._losses_of_first(elements, outline)
        return elements, sums, settings

    @property
    def _version(self) -> Tensor | None:
        """The buffer ``policy_version`` of the loss's actor, or None."""
        version = getattr(network_of(self.step.loss, "actor_network"), VERSION_KEY, None)
        return version if isinstance(version, Tensor) else None

    def _settings(self) -> dict[str, float]:
        """Return learning rates, coefficients, limits and the reward scale of this update."""
        stopper, normalizer = self.step.stopper, self.reward_normalizer
        numbers = rates(self.step.optimizer) | coefficients(self.step.loss)
        settings = {name: float(x) for name, x in numbers.items()}
        if stopper is not None:
            settings["kl_limit"] = stopper.tolerance * stopper.target_kl
        if normalizer is not None:
            settings["reward_scale"] = float(normalizer.scale)
        return settings

    def _elements(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the frames ``[N]`` or sequences ``[N, L]`` to train on, with the advantage."""
        if self.advantage is not None:
            with torch.no_grad():
                batch = self.advantage(batch)
        elements = self.minibatches.elements(batch, keys_of_loss(self.step.loss, batch))
        if attached := [key for key, x in elements.items(True, True) if x.requires_grad]:
            raise ValueError(
                f"Entries of the batch have a gradient: {attached}. Compute them within "
                "torch.no_grad(), or pass batch.detach(): an update uses each frame several times."
            )
        return elements

    def _losses_of_first(self, elements: TensorDictBase, outline: Outline) -> TensorDictBase:
        """Return the checked losses of the first elements; change nothing, and ask no rank."""
        step = self.step
        with unchanged(step.loss, self.minibatches, device=step.device), alone():
            first: Any = elements[: math.ceil(outline.elements / outline.minibatches)]
            minibatch, _ = next(self.minibatches.epoch(first, [len(first)]))
            losses = step.eager_losses(minibatch)
        step.check_losses(losses, self._adaptive_key)
        return losses

    @property
    def _adaptive_key(self) -> NestedKey | None:
        return None if self.adaptive_kl is None else self.adaptive_kl.kl_key

    def _train(
        self,
        batch: TensorDictBase,
        elements: TensorDictBase,
        sizes: list[int],
        frames: int,
        statistics: MinibatchStatistics,
    ) -> bool:
        """Train on every minibatch once an epoch; return whether the KL stop ended the epochs."""
        step, stopper = self.step, self.step.stopper
        step.begin(adaptive_key=self._adaptive_key, accumulates=self.accumulate_grads)
        if stopper is not None:
            stopper.reset(wait=False)
        for epoch in range(self.epochs):
            if epoch and self.recompute_advantage:
                elements = raise_together(lambda: self._elements(batch), step.group)
                step.note_user_code()
            statistics.begin_epoch()
            if self.accumulate_grads:
                self._accumulate(elements, sizes, frames, statistics)
            else:
                self._run_epoch(elements, sizes, statistics)
            if stopper is not None or self.adaptive_kl is not None or epoch == self.epochs - 1:
                self._settle(statistics)
            self._move_rate(statistics, after="epoch")
            if stopper is not None and stopper.when == "epoch" and not stopper.stopped:
                kl, weight = statistics.kl_of_epoch(stopper.kl_key)
                stopper.update(kl, weight=weight)
            if step.stopped:
                break
        step.note_user_code(within=False)
        stopped = step.stopped
        if stopper is not None:
            stopper.reset()
        return stopped

    def _run_epoch(
        self, elements: TensorDictBase, sizes: list[int], statistics: MinibatchStatistics
    ) -> None:
        """Make one step on each minibatch."""
        step = self.step
        for minibatch, frames in self.minibatches.epoch(elements, sizes):
            if self.batcher is not None:  # which may have run the networks
                step.note_user_code()
            statistics.add(step.train_on(minibatch, frames), minibatch, frames)
            self._move_rate(statistics, after="minibatch")
            if step.must_settle:
                self._settle(statistics)
            if step.stopped:
                return

    def _accumulate(
        self,
        elements: TensorDictBase,
        sizes: list[int],
        total: int,
        statistics: MinibatchStatistics,
    ) -> None:
        """Make one step with the gradients of all minibatches."""
        losses = None
        for minibatch, frames in self.minibatches.epoch(elements, sizes):
            losses = self.step.add_gradients(minibatch, frames / total)
            if losses is None:  # an error, which is raised on all ranks
                break
            statistics.add_losses(losses, minibatch, frames)
        statistics.add_outcome(self.step.apply_gradients(elements, losses, total))

    def _settle(self, statistics: MinibatchStatistics) -> None:
        """Read the decisions of a device."""
        self.step.settle()
        if self.step.stopped:
            statistics.drop_after_stop()

    def _move_rate(self, statistics: MinibatchStatistics, *, after: str) -> None:
        """Move the learning rate by the KL of the last minibatch, or of the epoch."""
        rate, is_last = self.adaptive_kl, after == "minibatch"
        if isinstance(rate, AdaptiveLearningRate) and (rate.when == after or self.accumulate_grads):
            counts = self.step.counts if is_last else not statistics.all_of_epoch_skipped
            kl, weight = statistics.kl_of_epoch(rate.kl_key, last=is_last)
            rate.update(kl, weight=weight * counts)

    # -- state -------------------------------------------------------------------

    @property
    def value_network(self) -> nn.Module | None:
        """The value network of the advantage module, which torchrl's estimators do not register."""
        return network_of(self.advantage, "value_network")

    def _parts(self) -> Parts:
        network = self.value_network
        is_separate = network is not None and not _memory_of(network) <= _memory_of(self.step.loss)
        parts = {
            "value_network": network if is_separate else None,
            "loss": self.step.loss,
            **self.step.parts,
            "advantage": self.advantage,
            "reward_normalizer": self.reward_normalizer,
            "stopper": self.step.stopper,
            "adaptive_kl": self.adaptive_kl,
            "scheduler": self.scheduler,
            "episodes": self._episodes,
            "order": self.minibatches,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> StateDict:
        """Return the state of every block, the networks' and the optimizer's included."""
        return {name: state_dict_of(part) for name, part in self._parts().items()}

    def load_state_dict(self, state: State) -> None:
        """Go on where ``state_dict`` was taken, bit for bit.

        Raises:
            KeyError: it was taken with other blocks; the message names them.
            ValueError: a block rejects its state; nothing has changed then.
        """
        check_names(state, parts := self._parts(), "this PPOUpdate")
        load_all(parts, state)

    def __repr__(self) -> str:
        options = "epochs", "minibatch_size", "accumulate_grads", "recompute_advantage"
        given = ", ".join(f"{name}={getattr(self, name)}" for name in options)
        parts = {"step": self.step, "stopper": self.step.stopper}
        parts |= {name: getattr(self, name) for name in PARTS}
        lines = [f"{k}={' '.join(repr(x).split())}" for k, x in parts.items() if x is not None]
        return "\n  ".join([f"{type(self).__name__}({given}", *lines]) + "\n)"


def _memory_of(module: nn.Module) -> set[int]:
    # A functional loss has other tensors in the same memory.
    return {x.data_ptr() for x in (*module.parameters(), *module.buffers())}
