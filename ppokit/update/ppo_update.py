"""PPOUpdate: one update on one collected batch, composed of the blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import nn

from ppokit._keys import check_time_is_last, mask_key_of
from ppokit._state import check_names, keep_state, load_all, unchanged
from ppokit.distributed import add_over_ranks, alone, raise_together
from ppokit.rewards import RewardNormalizer
from ppokit.schedules import ParameterScheduler
from ppokit.sequences import SequenceBatcher
from ppokit.trust_region import AdaptiveKLCoeff, KLEarlyStopper
from ppokit.update.data_parallel import Outline, sizes_of_minibatches
from ppokit.update.episode_returns import EpisodeReturns
from ppokit.update.minibatches import FrameMinibatches, SequenceMinibatches
from ppokit.update.optimization import Optimization
from ppokit.update.statistics import (
    Means,
    MinibatchStatistics,
    count_update,
    policy_lag,
    settings_of,
)
from ppokit.update.validation import (
    PARTS,
    check_arguments,
    check_losses,
    check_mask_keys,
    check_not_empty,
    check_policy_keys,
    count_frames,
    keys_of_loss,
    nonfinite_error,
    refuse_sums,
    validate,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PPOUpdate:
    """One PPO update on one collected batch, composed of the blocks, each optional.

    ``update(batch)`` does, in this order: scale the rewards, compute the advantages, and for each
    epoch take every valid frame (or every sequence, with a batcher) once, in minibatches: loss, KL
    stop, gradients, clipping, optimiser step; then move the KL coefficient and the schedules.
    (Schulman et al., 2017, arXiv:1707.06347, algorithm 1.)

    Args:
        loss: :class:`~ppokit.DualClipPPOLoss`, torchrl's ``ClipPPOLoss``, of several agents also
            its ``IPPOLoss`` and ``MAPPOLoss``, or any module that takes a minibatch and returns its
            losses as ``"loss_*"``, which are summed, and names in its ``in_keys`` what it reads;
            compiled or wrapped by DistributedDataParallel, too.
        optimizer: of the parameters to train; ``fused=True`` is the fastest Adam.
        advantage: :class:`~ppokit.GAE`, torchrl's ``MultiAgentGAE`` or another module that writes
            what the loss reads; None if the batch has it.
        reward_normalizer: scales the rewards first, in place.
        batcher: cuts the batch into sequences, for recurrent networks. Minibatches hold sequences
            of similar length (but where the loss normalises the advantage per minibatch), and with
            ``burn_in`` the states that the networks have found anew.
        stopper: ends the update when the policy has moved too far.
        adaptive_kl: moves the coefficient of the KL penalty, by the mean KL of the last epoch.
        scheduler: advances last, by the batch's valid frames.
        epochs: how often each frame is seen.
        minibatch_size: in frames; None for the whole batch. With a batcher, as many sequences as
            have that many steps, at least one. The last minibatch may be smaller.
        shuffle: draw a new order in each epoch.
        max_grad_norm: largest norm of all gradients together.
        accumulate_grads: one optimiser step an epoch, with the gradients of its minibatches
            weighed by their valid frames: that of the whole epoch in the memory of a minibatch, if
            the loss is a mean (and does not normalise the advantage per minibatch). On the CPU a
            large batch takes less time so: minibatches of some 2,048 frames stay in the cache.
        recompute_advantage: before each epoch, with the critic as it then is, instead of once.
        amp_dtype: ``torch.bfloat16`` or ``torch.float16``: forward passes in mixed precision; with
            float16 the loss is scaled.
        nonfinite: where a loss or a gradient is not finite, on any rank, the parameters stay what
            they were: ``"raise"``, or ``"skip"`` that step; the minibatch is kept at
            :attr:`nonfinite_minibatch` either way. With ``None`` nobody looks, which on a device
            saves waiting for it in each step. In float16 the scaler's skipped steps are counted,
            and nothing is raised or kept: its scale is too large now and then. With a ``stopper`` a
            KL that is not finite stops the update instead, where the losses are finite.
        seed: of the order of frames; None draws one from torch's global random numbers.
        group: ranks that train the same parameters, each on batches of its own; gradients are
            averaged over all their frames. None for the default group, if there is one.

    Statistics are a flat dictionary of numbers, with the same names in every update. A mean over
    nothing is NaN: the return where no episode ended, the gradient norm where there was no step.
    Means over the minibatches, weighed by valid frames (the minibatch that triggers a stop counts,
    those of skipped steps do not): everything that the loss returns, under its own name, as
    ``"loss_objective"`` or ``"kl"`` (nats), or ``"a/b"`` where it is nested, over those minibatches
    that have it; and ``"grad_norm"`` before clipping. With sequences ``"padded"``, the share of
    padding. Then ``"epochs"`` begun, ``"minibatches"`` seen, ``"steps"`` of the optimiser and those
    ``"skipped"``, ``"stopped"`` (0 or 1), ``"lr"`` (``"lr/<name>"`` of groups with names,
    ``"lr/1"`` of further ones) and the loss's coefficients, as they were meanwhile, ``"kl_limit"``
    above which the stopper stops and ``"reward_scale"``, what the normalizer divides by (of
    several, their mean). ``"first_kl"`` is the KL of the first minibatch, before any step: 0 but
    for rounding, unless the batch was collected with another policy than the loss sees.
    Of the batch: ``"frames"``, ``"episodes"`` that ended in it, their mean ``"episode_return"`` in
    raw reward (of several agents or objectives, their mean) and ``"episode_length"`` in steps. And
    ``"seconds_collecting"`` since the update before, ``"seconds_updating"`` and
    ``"frames_per_second"`` of both together.

    Where the loss's actor has a buffer ``policy_version``
    (``actor.register_buffer("policy_version", torch.tensor(0))``), each update adds 1 to it, and
    our collectors write it into each frame: ``"policy_lag"`` is the mean number of updates that a
    frame's policy was behind, above 0 with asynchronous collectors. With several ranks frames,
    episodes and means are of all of them, and only seconds are each rank's own.

    Raises:
        ValueError: an option is out of range, two exclude each other, or the networks are recurrent
            and there is no batcher.
        TypeError: a block is of the wrong kind.
        FloatingPointError: in an update, a loss or a gradient is not finite.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor, ValueOperator
        >>> from ppokit import GAE, DualClipPPOLoss
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"]),
        ...     in_keys=["logits"], distribution_class=torch.distributions.Categorical,
        ...     return_log_prob=True)
        >>> critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
        >>> loss = DualClipPPOLoss(actor, critic)
        >>> optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True)
        >>> gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        >>> update = PPOUpdate(loss, optimizer, advantage=gae, epochs=2, minibatch_size=4, seed=0)
        >>> with torch.no_grad():
        ...     batch = actor(TensorDict({"observation": torch.randn(1, 10, 3)}, [1, 10]))
        >>> done = torch.zeros(1, 10, 1, dtype=torch.bool)
        >>> batch["next"] = {"observation": torch.randn(1, 10, 3), "reward": torch.ones(1, 10, 1),
        ...                  "done": done, "terminated": done}
        >>> statistics = update(batch)
        >>> statistics["epochs"], statistics["minibatches"], statistics["frames"]
        (2.0, 6.0, 10.0)
    """

    def __init__(
        self,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        advantage: nn.Module | None = None,
        reward_normalizer: RewardNormalizer | None = None,
        batcher: SequenceBatcher | None = None,
        stopper: KLEarlyStopper | None = None,
        adaptive_kl: AdaptiveKLCoeff | None = None,
        scheduler: ParameterScheduler | None = None,
        epochs: int = 4,
        minibatch_size: int | None = None,
        shuffle: bool = True,
        max_grad_norm: float | None = None,
        accumulate_grads: bool = False,
        recompute_advantage: bool = False,
        amp_dtype: torch.dtype | None = None,
        nonfinite: str | None = "raise",
        seed: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.loss, self.optimizer = loss, optimizer
        self.advantage, self.reward_normalizer = advantage, reward_normalizer
        self.batcher, self.stopper = batcher, stopper
        self.adaptive_kl, self.scheduler = adaptive_kl, scheduler
        self.epochs, self.minibatch_size = epochs, minibatch_size
        self.accumulate_grads, self.recompute_advantage = accumulate_grads, recompute_advantage
        self.nonfinite, self.group = nonfinite, group
        #: the last minibatch whose losses or gradients were not finite, if any
        self.nonfinite_minibatch: TensorDictBase | None = None
        check_arguments(self, max_grad_norm, amp_dtype)
        self.generator = torch.Generator()
        self.generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
        options: Any = {"shuffle": shuffle, "generator": self.generator}
        self._minibatches = (
            FrameMinibatches(self._bare_loss, **options)
            if batcher is None
            else SequenceMinibatches(batcher, self._bare_loss, **options)
        )
        self._optimization = Optimization(
            loss, optimizer, max_grad_norm, amp_dtype, group, check_finite=nonfinite is not None
        )
        self._episodes = EpisodeReturns(getattr(reward_normalizer, "raw_key", None))
        self._counted_resets = self._resets
        self._finished: float | None = None
        self._names: tuple[str, ...] = ()  # of all means so far

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Train on a batch ``[*B, T]``, and return the statistics.

        The blocks write to the batch what they always write: scaled rewards, advantages.
        """
        started = time.perf_counter()
        optimization = self._optimization
        outline, frames, fewest = optimization.ranks.agree(
            optimization.parameters, lambda: self._outline(batch)
        )
        undo, minibatches = self._undo(batch), MinibatchStatistics(self.mask_key)
        try:
            elements, sums, settings = raise_together(
                lambda: self._prepare(batch, outline), self.group
            )
            stopped = self._train(batch, elements, outline, fewest, minibatches)
        except BaseException:  # Ctrl-C, too
            if not minibatches.steps:
                undo()
            raise
        if self.adaptive_kl is not None and not minibatches.all_of_epoch_skipped:
            kl, weight = minibatches.kl_of_epoch("kl")
            self.adaptive_kl.update(kl, weight=weight)
        if self.scheduler is not None:
            self.scheduler.step(int(self.scheduler.frames) + frames)
        count_update(self._bare_loss)
        sums |= minibatches.sums()
        if (padded := self._minibatches.padded) is not None:
            sums["padded"] = padded
        sums = dict.fromkeys(self._names, (0.0, 0.0)) | add_over_ranks(sums, self.group)
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
        Buffers, such as the statistics of batch normalisation, and random numbers are as before.

        Returns:
            What ``repr`` says of the update: its parts, and which path each takes on this batch.

        Raises:
            KeyError: the batch lacks an entry; the block says which, and who would write it.
            ValueError: a shape does not fit, no frame is valid, a loss is not finite, or no loss
                has a gradient.
            TypeError: a dtype does not fit, or the loss returns no ``"loss_*"``.
            RuntimeError: the batch is on another device than the networks.
        """
        return validate(self, batch)

    def reset_returns(self) -> None:
        """Drop the returns of open episodes, as ``RewardNormalizer.reset_returns`` does."""
        if self.reward_normalizer is not None:
            self.reward_normalizer.reset_returns()
        self._episodes.clear()
        self._counted_resets = self._resets

    # -- one batch ---------------------------------------------------------------

    def _outline(self, batch: TensorDictBase) -> Outline:
        """Return the number of frames, elements and elements of a minibatch; change nothing."""
        check_mask_keys(self)
        check_time_is_last(batch, who="PPOUpdate")
        frames, minibatches = count_frames(batch, self.mask_key), self._minibatches
        check_not_empty(batch, frames, self.mask_key)
        check_policy_keys(self._bare_loss, batch)
        if self._optimization.ranks.count > 1:
            refuse_sums(self._bare_loss)
        elements, steps = minibatches.outline(batch)
        size = max(1, (self.minibatch_size or elements * steps) // steps)
        return Outline(frames, elements, min(size, elements))

    def _undo(self, batch: TensorDictBase) -> Callable[[], None]:
        """Return a function that restores the blocks and the batch as they are now."""
        parts = [self.reward_normalizer, self._episodes, self._minibatches, self.advantage]
        if self._optimization.ranks.count > 1:  # this rank's networks run before another raises
            parts += [self._bare_loss, self.value_network]
        restore = [keep_state(part, weights=False) for part in parts if hasattr(part, "state_dict")]
        entries, open_episodes = batch.clone(recurse=False), self._counted_resets

        def undo() -> None:
            for restore_part in restore:
                restore_part()
            self._counted_resets = open_episodes
            if not batch.is_locked:
                for key in {*batch.keys(True, True)} - {*entries.keys(True, True)}:
                    batch.del_(key)
                batch.update(entries)

        return undo

    def _prepare(
        self, batch: TensorDictBase, outline: Outline
    ) -> tuple[TensorDictBase, Means, dict[str, float]]:
        """Return the elements to train on, and the statistics that are known before training."""
        if self.reward_normalizer is not None:
            batch = self.reward_normalizer(batch)
        settings, sums = settings_of(self), self._sums_of_batch(batch)
        elements = self._elements(batch)
        if self._optimization.ranks.count > 1:  # one process finds out in its first step
            check_losses(self, self._first_losses(elements, outline.size))
        return elements, sums, settings

    @property
    def _resets(self) -> int:
        return getattr(self.reward_normalizer, "resets", 0)

    def _sums_of_batch(self, batch: TensorDictBase) -> Means:
        if self._counted_resets != self._resets:
            self._episodes.clear()
            self._counted_resets = self._resets
        names = [getattr(x, "tensor_keys", None) for x in (self.advantage, self._bare_loss)]
        episodes = self._episodes(batch, names[0] or names[1], mask_key=self.mask_key)
        return episodes | policy_lag(self._bare_loss, batch, self.mask_key)

    def _train(
        self,
        batch: TensorDictBase,
        elements: TensorDictBase,
        outline: Outline,
        fewest: int,
        statistics: MinibatchStatistics,
    ) -> bool:
        """Run the epochs, and return whether the KL stop ended them."""
        stopper = self.stopper
        sizes = sizes_of_minibatches(len(elements), outline.size, fewest)
        self._optimization.begin()
        if stopper is not None:
            stopper.reset(wait=False)
        for epoch in range(self.epochs):
            if epoch and self.recompute_advantage:
                elements = raise_together(lambda: self._elements(batch), self.group)
            statistics.begin_epoch()
            self._run_epoch(elements, sizes, outline.frames, statistics)
            if stopper is not None and stopper.when == "epoch" and not stopper.stopped:
                kl, weight = statistics.kl_of_epoch(stopper.kl_key)
                stopper.update(kl, weight=weight)
            if stopper is not None and stopper.stopped:
                break
        stopped = stopper is not None and stopper.stopped
        if stopper is not None:
            stopper.reset()
        return stopped

    def _run_epoch(
        self,
        elements: TensorDictBase,
        sizes: list[int],
        total: int,
        statistics: MinibatchStatistics,
    ) -> None:
        optimization, ranks = self._optimization, self._optimization.ranks
        stopper = self.stopper
        if stopper is not None and stopper.when != "minibatch":
            stopper = None
        share = ranks.loss_weight(total) / total if self.accumulate_grads else None
        minibatches = self._minibatches.epoch(elements, sizes)
        for number, (minibatch, frames) in enumerate(minibatches, 1):
            is_complete = share is None or number == len(sizes)
            with nullcontext() if is_complete else ranks.accumulating():
                losses, error = optimization.try_forward(minibatch)
                if losses is not None:
                    if not len(statistics):
                        check_losses(self, losses)
                    statistics.add(losses, minibatch, frames)
                if stopper is not None:
                    kl, weight = -1e30, 1.0  # all ranks skip this step, or raise, below: none stops
                    if losses is not None:
                        found, frames_of_kl = statistics.kl_of_epoch(stopper.kl_key, last=True)
                        if math.isfinite(found.item()) or optimization.is_finite(losses):
                            kl, weight = found, frames_of_kl
                    if stopper.update(kl, weight=weight):
                        return
                if losses is not None:
                    weight = ranks.loss_weight(frames) if share is None else share * frames
                    optimization.backward(losses, weight)
            if is_complete or losses is None:
                norm = optimization.step(frames if share is None else total, error)
                statistics.add_step(norm)
                if norm is None:
                    self._keep_nonfinite(minibatch if share is None else elements, losses)

    def _keep_nonfinite(self, minibatch: TensorDictBase, losses: Any) -> None:
        if self._optimization.scaler is not None:
            return  # whose scale is too large now and then
        self.nonfinite_minibatch = minibatch.clone()
        if self.nonfinite == "raise":
            raise nonfinite_error(minibatch, losses, self.mask_key)

    def _elements(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the frames ``[N]`` or sequences ``[N, L]`` to train on, with the advantage."""
        if self.advantage is not None:
            with torch.no_grad():
                batch = self.advantage(batch)
        return self._minibatches.elements(batch, keys_of_loss(self._bare_loss, batch))

    def _first_losses(self, elements: TensorDictBase, size: int) -> TensorDictBase:
        """Return the losses of the first elements. Change nothing, and involve no other rank."""
        device = self._optimization.device
        with unchanged(self._bare_loss, self._minibatches, device=device), alone():
            size = min(size, len(elements))
            first: Any = elements[:size]
            minibatch, _ = next(self._minibatches.epoch(first, [size]))
            return self._optimization.forward(minibatch, self._bare_loss)

    @property
    def mask_key(self) -> NestedKey | None:
        """The key of the mask of valid frames: that of the loss."""
        return mask_key_of(self._bare_loss)

    @property
    def _bare_loss(self) -> Any:
        """The loss itself, not what compiles it or synchronises its gradients."""
        loss: Any = self.loss
        while True:
            inner = getattr(loss, "_orig_mod", None) or (
                loss.module if isinstance(loss, nn.parallel.DistributedDataParallel) else None
            )
            if inner is None:
                return loss
            loss = inner

    # -- state -------------------------------------------------------------------

    @property
    def value_network(self) -> nn.Module | None:
        """The value network of the advantage module, which torchrl's estimators do not register."""
        network = getattr(self.advantage, "value_network", None)
        return network if isinstance(network, nn.Module) else None

    def _parts(self) -> dict[str, Any]:
        network = self.value_network
        is_separate = network and not _memory_of(network) <= _memory_of(self._bare_loss)
        parts = {
            "value_network": network if is_separate else None,
            "loss": self._bare_loss,
            "optimizer": self.optimizer,
            "advantage": self.advantage,
            "reward_normalizer": self.reward_normalizer,
            "stopper": self.stopper,
            "adaptive_kl": self.adaptive_kl,
            "scheduler": self.scheduler,
            "scaler": self._optimization.scaler,
            "episodes": self._episodes,
            "order": self._minibatches,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every block, the networks' and the optimiser's included."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, bit for bit.

        Raises:
            KeyError: it was taken with other blocks; the message names them.
            ValueError: a block refuses its state; nothing has changed then.
        """
        parts = self._parts()
        check_names(state, parts, "this PPOUpdate")
        load_all(parts, state)
        self._counted_resets = self._resets

    def __repr__(self) -> str:
        options = {
            "epochs": self.epochs,
            "minibatch_size": self.minibatch_size,
            "max_grad_norm": self._optimization.max_grad_norm,
            "amp_dtype": self._optimization.amp_dtype,
            "nonfinite": None if self.nonfinite == "raise" else repr(self.nonfinite),
            "accumulate_grads": self.accumulate_grads or None,
            "recompute_advantage": self.recompute_advantage or None,
        }
        given = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        parts = {name: getattr(self, name) for name in PARTS} | {"loss": self._bare_loss}
        lines = [f"{name}={_line_of(x)}" for name, x in parts.items() if x is not None]
        if self.loss is not self._bare_loss:
            lines[0] += f" in {type(self.loss).__name__}"
        return "\n  ".join([f"{type(self).__name__}({given}", *lines]) + "\n)"


def _memory_of(module: nn.Module) -> set[int]:
    """Return where its tensors lie; a functional loss has other tensors in the same memory."""
    return {x.data_ptr() for x in (*module.parameters(), *module.buffers())}


def _line_of(part: Any) -> str:
    """Return the ``repr`` of a part in one line: of a longer one what ``extra_repr`` says."""
    kind = type(part).__name__
    if isinstance(part, torch.optim.Optimizer):
        rates = ", ".join(f"{float(group['lr']):.4g}" for group in part.param_groups)
        tensors = sum(len(group["params"]) for group in part.param_groups)
        return f"{kind}(lr={rates}, {tensors} parameters)"
    text = repr(part)
    if "\n" in text and isinstance(part, nn.Module):
        text = f"{kind}({part.extra_repr()})"
    return " ".join(text.split())
