"""What the numbers of a run mean, in words, and what to try."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ppokit._runs import Rows, Run, read_run

FEWEST = 5  # updates, below which nothing is said


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
    if last < FEWEST:
        raise ValueError(f"last must be at least {FEWEST} updates, got {last}.")
    rows = read_run(statistics)
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
    """Return the median of a statistic over the rows that have it."""
    values = [float(row[name]) for row in rows if name in row]
    return median(values) if values else None


def _skips(last: Rows, rows: Rows) -> str | None:
    skipped = sum(row.get("skipped", 0.0) for row in last)
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
    if loss < 0.05 * max(row.get("loss_critic", 0.0) for row in rows):
        return None  # targets that hardly vary, as where every episode is a perfect one
    return (
        f"The critic explains {explained:.2f} of the variance of its targets; 1 is all of it, and "
        "0 what a constant would explain."
    )


def _advantages_not_normalized(last: Rows, rows: Rows) -> str | None:
    sizes = sorted(abs(float(row["loss_objective"])) for row in rows if "loss_objective" in row)
    if not sizes or (size := sizes[len(sizes) * 3 // 4]) < 0.5:
        return None
    return (
        f"In a quarter of the updates the objective is {size:.2g} or more in size. It is the mean "
        "of advantage times ratio, near 0 for advantages of mean 0 and spread 1: they are neither."
    )


def _stops_early(last: Rows, rows: Rows) -> str | None:
    stopped = [row for row in last if row.get("stopped") and row.get("epochs", 2) <= 1]
    if len(stopped) < 0.8 * len(last):
        return None
    return (
        f"The KL stop ended {len(stopped)} of the last {len(last)} updates within their first "
        "epoch: most of what was collected was not trained on."
    )


def _moves_too_far(last: Rows, rows: Rows) -> str | None:
    kl, clipped = _median(last, "kl") or 0.0, _median(last, "clip_fraction") or 0.0
    if kl <= 0.2 and clipped <= 0.4:
        return None
    return (
        f"The policy leaves the one that collected the batch far behind: the KL between them is "
        f"{kl:.2g} nats, and {clipped:.0%} of the ratios are clipped."
    )


def _does_not_move(last: Rows, rows: Rows) -> str | None:
    kl, rates = _median(last, "kl"), [row["lr"] for row in rows if "lr" in row]
    annealed = bool(rates) and (_median(last, "lr") or 0.0) < 0.05 * max(rates)
    if kl is None or kl > 1e-6 or annealed or _median(last, "steps") == 1:
        return None  # of a single step there is no KL but that before it
    return f"The policy does not move: the KL of an update is {kl:.1g} nats."


def _entropy_collapsed(last: Rows, rows: Rows) -> str | None:
    entropy = [row["entropy"] for row in rows if "entropy" in row]
    now = _median(last, "entropy")
    if now is None or min(entropy) < 0:  # that of a density, where 0 means nothing
        return None
    if now > max(0.05 * max(entropy[:FEWEST]), 0.01):
        return None
    return (
        f"The entropy fell from {entropy[0]:.2g} to {now:.2g} nats: the policy always does the "
        "same, and learns nothing about anything else."
    )


def _bonus_dominates(last: Rows, rows: Rows) -> str | None:
    bonus, first = _median(last, "loss_entropy"), _median(rows[:FEWEST], "entropy")
    now = _median(last, "entropy")
    if bonus is None or first is None or now is None or len(rows) < 20:
        return None
    if abs(bonus) < 0.1 or now < first - 0.05 * abs(first):
        return None
    return (
        f"The entropy bonus is {abs(bonus):.2g}, beside advantages of spread 1, and the entropy "
        f"has not fallen ({first:.2g} at first, {now:.2g} now): randomness is paid for."
    )


def _scale_drifts(last: Rows, rows: Rows) -> str | None:
    scales = [row["reward_scale"] for row in last if "reward_scale" in row]
    if len(scales) < FEWEST or len(rows) < 3 * len(last):
        return None
    drift = max(scales) / min(scales)
    if drift < 1.5:
        return None
    return (
        f"The scale that rewards are divided by changed by a factor of {drift:.2f} within the last "
        f"{len(last)} updates: the critic's targets move under it."
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
        "weights that did not reach the collector.",
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
