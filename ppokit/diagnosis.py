"""What the numbers of a run mean, in words, and what to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ppokit._runs import Rows, Run, read_run

FEWEST = 5  # updates, below which nothing is said
# A row of a log may be of an evaluation, and is of an update where it has one of these.
OF_UPDATES = frozenset(
    [
        "kl",
        "first_kl",
        "clip_fraction",
        "entropy",
        "loss_objective",
        "loss_critic",
        "explained_variance",
        "grad_norm",
        "epochs",
        "steps",
        "stopped",
        "skipped",
        "padded",
        "policy_lag",
        "reward_scale",
    ]
)


@dataclass(frozen=True)
class Finding:
    """Something that the numbers of a run say.

    ``name`` is that of the rule, ``meaning`` says what the numbers mean and which they are,
    ``advice`` what to try, in the order in which to try it, and ``source`` where the rule is from.
    ``str(finding)`` is all of it in one paragraph.

    Example:
        >>> print(Finding("too_slow", "It crawls.", "Walk.", "Aesop, The Tortoise and the Hare"))
        too_slow: It crawls. Walk. [Aesop, The Tortoise and the Hare]
    """

    name: str
    meaning: str
    advice: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.meaning} {self.advice} [{self.source}]"


def diagnose(statistics: Run, *, last: int = 20) -> list[Finding]:
    """Return what is wrong with a run by its statistics, and what to try.

    Most rules read the median over the last updates of one or two statistics, so that a single odd
    batch says nothing. A rule whose statistics are missing is passed over. Findings are hints: a
    task may be one where half of the ratios clip for a while, and all is well.

    Args:
        statistics: what :class:`~ppokit.PPOUpdate` returned, update by update, from the beginning;
            or the folder of a log, as for :func:`ppokit.plotting.plot_run`.
        last: how many updates to read. There are none in less than five.

    Returns:
        Findings, the most telling first.

    Raises:
        ValueError: there are no rows, or ``last`` is less than five.
        TypeError: it is neither a sequence of dictionaries nor a path.

    Example:
        >>> healthy = [{"frames": 2048.0, "kl": 0.01, "clip_fraction": 0.1, "stopped": 0.0}] * 30
        >>> diagnose(healthy)
        []
        >>> stopped = [row | {"stopped": 1.0, "epochs": 1.0} for row in healthy]
        >>> [finding.name for finding in diagnose(stopped)]
        ['kl_stops_in_first_epoch']
    """
    if not isinstance(last, int) or last < FEWEST:
        raise ValueError(f"last must be a number of updates, at least {FEWEST}, got {last!r}.")
    rows = [row for row in read_run(statistics) if row.keys() & OF_UPDATES]
    if len(rows) < FEWEST:
        return []
    findings = []
    for rule in RULES:
        meaning = rule.test(rows[-last:], rows)
        if meaning is not None:
            findings.append(Finding(rule.name, meaning, rule.advice, rule.source))
    return findings


class Rule(NamedTuple):
    """A test of the last rows, and all, of a run; it returns what they mean, or None."""

    name: str
    test: Callable[[Rows, Rows], str | None]
    advice: str
    source: str


def _median(rows: Rows, name: str) -> float | None:
    """Return the median of a statistic over the rows that have it finite; None of too few."""
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    return median(values) if len(values) >= FEWEST else None


def _rate(row: Mapping[str, float]) -> float:
    """Return the largest learning rate of a row, of all parameter groups."""
    return max(
        [x for name, x in row.items() if name == "lr" or name.startswith("lr/")], default=0.0
    )


def _not_finite(last: Rows, rows: Rows) -> str | None:
    counts = dict.fromkeys(("kl", "loss_objective", "loss_critic", "entropy", "grad_norm"), 0)
    for name in counts:
        counts[name] = sum(not math.isfinite(row.get(name, 0.0)) for row in last)
    worst = max(counts, key=lambda name: counts[name])
    if not counts[worst]:
        return None
    return f"{worst} was not finite in {counts[worst]} of the last {len(last)} updates."


def _skips(last: Rows, rows: Rows) -> str | None:
    later = last[1:] if len(last) == len(rows) else last  # float16 looks for its scale at first
    skipped = sum(row["skipped"] for row in later if row.get("skipped", 0.0) > 0)
    if not skipped:
        return None
    return (
        f"{skipped:.0f} steps of the last {len(last)} updates were skipped: a loss or a gradient "
        "was not finite."
    )


def _scores_differ(last: Rows, rows: Rows) -> str | None:
    kl, lag = _median(last, "first_kl"), _median(last, "policy_lag")
    if kl is None or kl < 1e-3 or lag:
        return None
    return (
        f"The KL of the first minibatch, before any step, is {kl:.2g} nats, and not 0: the loss "
        "scores the stored actions otherwise than collection did."
    )


def _lags(last: Rows, rows: Rows) -> str | None:
    lag = _median(last, "policy_lag")
    if lag is None or lag <= 1:
        return None
    return f"Frames were collected with policies that are {lag:.1f} updates old."


def _large_targets(last: Rows, rows: Rows) -> str | None:
    loss = _median(last, "loss_critic")
    if loss is None or loss < 100:
        return None
    return f"The critic's loss is {loss:.3g}: the returns that it learns are far from unit scale."


def _critic_explains_nothing(last: Rows, rows: Rows) -> str | None:
    explained, loss = _median(last, "explained_variance"), _median(last, "loss_critic")
    if explained is None or loss is None or explained > 0.05 or len(rows) < 20:
        return None
    losses = [row["loss_critic"] for row in rows if math.isfinite(row.get("loss_critic", math.nan))]
    if loss < 0.05 * sorted(losses)[len(losses) * 9 // 10]:
        return None  # targets that hardly vary, as where every episode is a perfect one
    return (
        f"The critic explains {explained:.2f} of the variance of its targets; 1 is all of it, and "
        "0 what a constant would explain."
    )


def _advantages_not_normalized(last: Rows, rows: Rows) -> str | None:
    sizes = [abs(row["loss_objective"]) for row in last if "loss_objective" in row]
    sizes = sorted(filter(math.isfinite, sizes))
    if not sizes or (size := sizes[len(sizes) * 3 // 4]) < 0.5:
        return None
    return (
        f"In a quarter of the last updates the objective is {size:.2g} or more in size. It is the "
        "mean of advantage times ratio, near 0 for advantages of mean 0 and spread 1, which they "
        "are not."
    )


def _stops_early(last: Rows, rows: Rows) -> str | None:
    # A stop that is asked at the end of an epoch has trained on the whole of it.
    cut = [row for row in last if row.get("steps", 0) < row.get("minibatches", 1)]
    stopped = [row for row in cut if row.get("stopped") and row.get("epochs", 2) <= 1]
    if len(stopped) < 0.8 * len(last):
        return None
    return (
        f"The KL stop ended {len(stopped)} of the last {len(last)} updates within their first "
        "epoch: of what was collected, a part was not trained on."
    )


def _moves_too_far(last: Rows, rows: Rows) -> str | None:
    kl, clipped = _median(last, "kl"), _median(last, "clip_fraction") or 0.0
    moves = kl is None or kl > 1e-3  # a clip_epsilon of 0 clips all, and moves nothing
    if not (clipped > 0.4 and moves) and (kl is None or kl <= 0.2):
        return None
    known = "unknown" if kl is None else f"{kl:.2g} nats"
    return (
        f"The policy leaves the one that collected the batch far behind: the KL between them is "
        f"{known}, and {clipped:.0%} of the ratios are clipped."
    )


def _does_not_move(last: Rows, rows: Rows) -> str | None:
    kl, rates = _median(last, "kl"), list(map(_rate, rows))
    warms_up = rates[-1] > rates[-len(last)]
    annealed = median(rates[-len(last) :]) < 0.05 * max(rates)
    if kl is None or kl > 1e-6 or warms_up or annealed or _entropy_collapsed(last, rows):
        return None
    if _median(last, "steps") == 1:  # there is no KL but that before the step
        return None
    return f"The policy does not move: the KL of an update is {kl:.1g} nats."


def _entropies(rows: Rows) -> dict[str, list[float]]:
    """Return the entropies of the policy, or of each of its heads, where they are finite."""
    heads = [name for name in rows[0] if name.startswith("composite_entropy/")] or ["entropy"]
    values = {name: [row[name] for row in rows if name in row] for name in heads}
    return {name: list(filter(math.isfinite, found)) for name, found in values.items() if found}


def _entropy_collapsed(last: Rows, rows: Rows) -> str | None:
    kl = _median(last, "kl")
    for name, entropy in _entropies(rows).items():
        now, first = _median(last, name), max(entropy[:FEWEST], default=0.0)
        # Of a density 0 means nothing; it may pass through 0 while it learns.
        if now is None or min(entropy) < 0 or (name == "entropy" and kl is not None and kl > 1e-3):
            continue
        if now <= max(0.05 * first, 0.01):
            return (
                f"The {name} fell from {first:.2g} to {now:.2g} nats: the policy always does the "
                "same, and learns nothing about anything else."
            )
    return None


def _bonus_dominates(last: Rows, rows: Rows) -> str | None:
    bonus, values = _median(last, "loss_entropy"), _entropies(last)
    total = sum(median(map(abs, found)) for found in values.values() if found)
    if bonus is None or not total or len(rows) < 20 or (coefficient := abs(bonus) / total) < 0.1:
        return None
    for name in values:
        first, now = _median(rows[:FEWEST], name), _median(last, name)
        if first is not None and now is not None and now >= first - 0.05 * abs(first):
            return (
                f"The entropy has a coefficient of {coefficient:.2g}, beside advantages of spread "
                f"1, and the {name} has not fallen ({first:.2g} at first, {now:.2g} now): "
                "randomness is paid for."
            )
    return None


def _scale_drifts(last: Rows, rows: Rows) -> str | None:
    scales = [row["reward_scale"] for row in last if row.get("reward_scale", 0.0) > 0]
    if len(scales) < 2 * FEWEST or len(rows) < 3 * len(last):
        return None
    half = len(scales) // 2
    before, after = median(scales[:half]), median(scales[half:])  # of a batch's own it varies
    drift = max(before, after) / min(before, after)
    if drift < 1.25:
        return None
    return (
        f"The scale that rewards are divided by changed by a factor of {drift:.2f} from the first "
        f"to the second half of the last {len(last)} updates: the critic's targets move under it."
    )


def _padding(last: Rows, rows: Rows) -> str | None:
    padded = _median(last, "padded")
    if padded is None or padded < 0.5:
        return None
    return f"{padded:.0%} of what the networks compute is padding."


_ANDRYCHOWICZ = "Andrychowicz et al., 2021, arXiv:2006.05990"
_ENGSTROM = "Engstrom et al., 2020, arXiv:2005.12729"
_HUANG = "Huang et al., 2022, The 37 Implementation Details of PPO"

RULES: Sequence[Rule] = (
    Rule(
        "not_finite",
        _not_finite,
        'Leave PPOUpdate(nonfinite="raise") as it is, which keeps the minibatch; lower the '
        "learning rate, look for actions at the edge of a bounded distribution.",
        "how-to: when things break; RLlib warns of a KL that is not finite",
    ),
    Rule(
        "steps_skipped",
        _skips,
        "Look at update.nonfinite_minibatch; lower the learning rate, set max_grad_norm, look for "
        "log-probabilities at the edge of a bounded distribution.",
        "how-to: when things break",
    ),
    Rule(
        "actions_scored_differently",
        _scores_differ,
        "Look for dropout or batch normalisation in the actor, for observations that are "
        "normalised with other statistics by then, for a recurrent state that is not stored (a "
        "primer), for a log-probability of another action than the stored one (a clamped one), for "
        "weights that did not reach the collector; for a bounded distribution at its edge, "
        "whose scores rounding spoils (lower the learning rate).",
        _HUANG + " (debugging: the ratio is 1 in the first minibatch)",
    ),
    Rule(
        "policy_is_old",
        _lags,
        "Wait for the update (sync=True), or collect with fewer workers or larger batches.",
        "Espeholt et al., 2018, arXiv:1802.01561, section 4",
    ),
    Rule(
        "value_targets_are_large",
        _large_targets,
        "Scale rewards (reward_normalizer=RewardNormalizer(gamma)), or bound the critic's loss "
        "(critic_loss_clip); where actor and critic share layers, lower critic_coeff.",
        _ENGSTROM + ", section 3; RLlib warns above 100",
    ),
    Rule(
        "critic_explains_nothing",
        _critic_explains_nothing,
        "See that the optimizer has the critic's parameters and critic_coeff is about 0.5; scale "
        "rewards; raise the learning rate; give the critic what returns depend on.",
        _HUANG + ", detail 12; " + _ANDRYCHOWICZ + ", section 3.3",
    ),
    Rule(
        "advantages_not_normalized",
        _advantages_not_normalized,
        "Pass normalize_advantage=True to the loss, or average_gae=True to GAE; or scale rewards.",
        _ENGSTROM + ", section 3; " + _HUANG + ", detail 7",
    ),
    Rule(
        "kl_stops_in_first_epoch",
        _stops_early,
        "Lower the learning rate, take larger minibatches, or raise the stopper's target_kl.",
        "Dossa et al., 2021, doi:10.1109/ACCESS.2021.3106662; OpenAI Spinning Up, PPO",
    ),
    Rule(
        "policy_moves_too_far",
        _moves_too_far,
        "Lower the learning rate or the number of epochs, take larger minibatches, or stop by KL "
        "(stopper=KLEarlyStopper(0.02)).",
        "Schulman et al., 2017, arXiv:1707.06347, section 3; " + _HUANG + ", detail 12",
    ),
    Rule(
        "policy_does_not_move",
        _does_not_move,
        "Raise the learning rate; see that the optimizer has the actor's parameters, and that "
        "advantages are not all alike.",
        _ANDRYCHOWICZ + ", section 3.7",
    ),
    Rule(
        "entropy_collapsed",
        _entropy_collapsed,
        "If the return is not what it should be: raise entropy_coeff, lower the learning rate at "
        "the beginning, initialise the last layer near 0.",
        "Mnih et al., 2016, arXiv:1602.01783, section 4; " + _ANDRYCHOWICZ + ", section 3.2",
    ),
    Rule(
        "entropy_bonus_dominates",
        _bonus_dominates,
        "Lower entropy_coeff to 0.01 or 0, or schedule it down.",
        _ANDRYCHOWICZ + ", section 3.8",
    ),
    Rule(
        "reward_scale_drifts",
        _scale_drifts,
        "Freeze the normalizer once returns have settled (normalizer.freeze()), or use "
        'statistics="batch"; look for rewards that grow over the run.',
        _ENGSTROM + ", section 3",
    ),
    Rule(
        "mostly_padding",
        _padding,
        "Cut shorter sequences (SequenceBatcher(seq_len)), or take minibatches of similar length.",
        "how-to: sequences",
    ),
)
