"""Diagnosis of a run: rules over its statistics, with the meaning, the advice and the source."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from ppokit._checks import whole
from ppokit._runs import Rows, Run, read_run

FEWEST = 5  # updates that a rule needs
# A row of a log may be of an evaluation. A row of an update has one of these.
OF_UPDATES = {"kl", "first_kl", "entropy", "loss_objective", "loss_critic", "stopped", "grad_norm"}

_ANDRYCHOWICZ = "Andrychowicz et al., 2021, arXiv:2006.05990"
_ENGSTROM = "Engstrom et al., 2020, arXiv:2005.12729"
_HUANG = "Huang et al., 2022, The 37 Implementation Details of PPO"


@dataclass(frozen=True)
class Finding:
    """A sign of a fault in the statistics of a run.

    ``name`` is the rule's, ``meaning`` explains the numbers, ``advice`` lists what to try, in
    this order, and ``source`` is the origin of the rule. ``str(finding)`` joins them.

    Example:
        >>> from ppokit import Finding
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
    """Return signs of faults in the statistics of a run, and what to try.

    Most rules read the median of one or two statistics over the last updates, so that a single
    batch does not decide. Rules whose statistics are missing are skipped. Findings are hints: in
    some tasks a policy learns well although half of the ratios are clipped for a while.

    Args:
        statistics: what :class:`~ppokit.PPOUpdate` returned, update by update, from the beginning;
            or the folder of a log, as for :func:`ppokit.plotting.plot_run`.
        last: how many updates to read, at least five.

    Returns:
        Findings, the most important first; none for a run of less than five updates.

    Raises:
        ValueError: there are no rows, or ``last`` is less than five.
        TypeError: it is neither a sequence of dictionaries nor a path.

    Example:
        >>> from ppokit import diagnose
        >>> healthy = [{"frames": 2048.0, "kl": 0.01, "clip_fraction": 0.1, "stopped": 0.0}] * 30
        >>> diagnose(healthy)
        []
        >>> stopped = [row | {"stopped": 1.0, "epochs": 1.0} for row in healthy]
        >>> [finding.name for finding in diagnose(stopped)]
        ['kl_stops_in_first_epoch']
    """
    last = whole(FEWEST).check(last, "last")
    rows = [row for row in read_run(statistics) if row.keys() & OF_UPDATES]
    if len(rows) < FEWEST:
        return []
    found = [(rule(rows[-last:], rows), rule, *notes) for rule, *notes in _RULES]
    return [Finding(rule.__name__, x, *notes) for x, rule, *notes in found if x is not None]


Rule = Callable[[Rows, Rows], str | None]  # of the last rows and all rows: the meaning, or None
_RULES: list[tuple[Rule, str, str]] = []  # with advice and source


def _rule(advice: str, source: str) -> Callable[[Rule], Rule]:
    """Register a function; the finding has its name."""

    def register(rule: Rule) -> Rule:
        _RULES.append((rule, advice, source))
        return rule

    return register


def _median(rows: Rows, name: str) -> float:
    """Return the median of a statistic's finite values; NaN, which exceeds nothing, of too few."""
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    return median(values) if len(values) >= FEWEST else math.nan


@_rule(
    'Keep TrainingStep(nonfinite="raise"), which keeps the minibatch, or look at '
    "update.step.nonfinite_minibatch. Lower the learning rate, set max_grad_norm, look for "
    "log-probabilities at the edge of a bounded distribution.",
    "how-to: when things break; RLlib warns of a KL that is not finite",
)
def not_finite(last: Rows, rows: Rows) -> str | None:
    """A loss, the KL, the entropy or the norm of the gradients is NaN or infinite, or was."""
    for name in ("kl", "loss_objective", "loss_critic", "entropy", "grad_norm"):
        values = [
            row.get(name, 0.0)
            for row in last  # NaN without a step, or where every step was skipped
            if row.get("steps") != 0 or (name != "grad_norm" and row.get("skipped", 0) <= 0)
        ]
        if count := sum(not math.isfinite(value) for value in values):
            return f"{name} was not finite in {count} of the last {len(last)} updates."
    later = last[1:] if len(last) == len(rows) else last  # float16 looks for its scale at first
    skipped = sum(row["skipped"] for row in later if row.get("skipped", 0.0) > 0)
    if not skipped:
        return None
    return (
        f"{skipped:.0f} steps of the last {len(last)} updates were skipped: a loss or a gradient "
        "was not finite."
    )


@_rule(
    "Look for dropout or batch normalization in the actor, for observations that are normalized "
    "with other statistics than at collection, for a recurrent state that is not stored (a "
    "primer), for a log-probability of another action than the stored one (a clamped one), for "
    "weights that did not reach the collector; for a bounded distribution at its edge, where "
    "rounding changes log-probabilities (lower the learning rate).",
    _HUANG + " (debugging: the ratio is 1 in the first minibatch)",
)
def actions_scored_differently(last: Rows, rows: Rows) -> str | None:
    """The first minibatch has a KL, before any step of an update."""
    kl, lag = _median(last, "first_kl"), _median(last, "policy_lag")
    if not kl >= 1e-3 or lag > 0:
        return None
    return (
        f"The KL of the first minibatch, before any step, is {kl:.2g} nats, and not 0: the loss "
        "and the collector compute different log-probabilities of the stored actions."
    )


@_rule(
    "Scale rewards (reward_normalizer=RewardNormalizer(gamma)), or bound the critic's loss "
    "(critic_loss_clip); where actor and critic share layers, lower critic_coeff.",
    _ENGSTROM + ", section 3; RLlib warns above 100",
)
def value_targets_are_large(last: Rows, rows: Rows) -> str | None:
    """The critic's loss shows targets far from unit scale."""
    loss = _median(last, "loss_critic")
    said = f"The critic's loss is {loss:.3g}: its targets, the returns, are far from unit scale."
    return said if loss >= 100 else None


@_rule(
    "Set critic_loss_clip above the square of the scale of the returns, scale rewards "
    "(RewardNormalizer), or leave critic_loss_clip out.",
    "RLlib warns of a vf_clip_param below the returns",
)
def critic_clamped(last: Rows, rows: Rows) -> str | None:
    """The clamp on the critic's loss leaves few frames with a gradient."""
    names = ("loss_critic", "critic_loss_clip", "critic_coeff")
    loss, clip, coefficient = (_median(last, name) for name in names)
    if not (clip > 0 and coefficient > 0 and loss >= 0.9 * coefficient * clip):
        return None
    return (
        f"critic_loss_clip={clip:g} clamps nearly every frame (the mean critic loss is "
        f"{loss / coefficient:.3g}), and a clamped frame has no gradient: the critic cannot learn."
    )


@_rule(
    "See that the optimizer has the critic's parameters and critic_coeff is about 0.5; scale "
    "rewards; raise the learning rate; give the critic the observations that returns depend on.",
    _HUANG + ", detail 12; " + _ANDRYCHOWICZ + ", section 3.3",
)
def critic_explains_nothing(last: Rows, rows: Rows) -> str | None:
    """The critic predicts its targets no better than a constant."""
    explained, loss = _median(last, "explained_variance"), _median(last, "loss_critic")
    if not explained <= 0.05 or math.isnan(loss) or len(rows) < 20:
        return None
    losses = [row["loss_critic"] for row in rows if math.isfinite(row.get("loss_critic", math.nan))]
    if loss < 0.05 * sorted(losses)[len(losses) * 9 // 10]:
        return None  # targets hardly vary, as where every episode has the highest return
    return (
        f"The critic explains {explained:.2f} of the variance of its targets; 1 is all of it, and "
        "a constant explains 0."
    )


@_rule(
    "Pass normalize_advantage=True to the loss, or average_gae=True to GAE; or scale rewards.",
    _ENGSTROM + ", section 3; " + _HUANG + ", detail 7",
)
def advantages_not_normalized(last: Rows, rows: Rows) -> str | None:
    """The mean of advantage times ratio is far from 0."""
    sizes = [abs(row["loss_objective"]) for row in last if "loss_objective" in row]
    sizes = sorted(filter(math.isfinite, sizes))
    if not sizes or (size := sizes[len(sizes) * 3 // 4]) < 0.5:
        return None
    return (
        f"In a quarter of the last updates the objective is {size:.2g} or more in size. It is the "
        "mean of advantage times ratio, which is near 0 for normalized advantages."
    )


@_rule(
    "Lower the learning rate, take larger minibatches, or raise the stopper's target_kl.",
    "Dossa et al., 2021, doi:10.1109/ACCESS.2021.3106662; OpenAI Spinning Up, PPO",
)
def kl_stops_in_first_epoch(last: Rows, rows: Rows) -> str | None:
    """Nearly every update is stopped within its first epoch."""
    # A stop at the end of an epoch has trained on the whole of it.
    cut = [row for row in last if row.get("steps", 0) < row.get("minibatches", 1)]
    stopped = [row for row in cut if row.get("stopped") and row.get("epochs", 2) <= 1]
    if len(stopped) < 0.8 * len(last):
        return None
    return (
        f"The KL stop ended {len(stopped)} of the last {len(last)} updates within their first "
        "epoch: a part of each batch was not trained on."
    )


@_rule(
    "Lower the learning rate or the number of epochs, take larger minibatches, or stop by KL "
    "(stopper=KLEarlyStopper(0.02)).",
    "Schulman et al., 2017, arXiv:1707.06347, section 3; " + _HUANG + ", detail 12",
)
def policy_moves_too_far(last: Rows, rows: Rows) -> str | None:
    """The KL of an update is large, or most ratios are clipped."""
    kl, clipped = _median(last, "kl"), _median(last, "clip_fraction")
    # With a clip_epsilon of 0 all ratios are clipped, and the policy does not move.
    if not (kl > 0.2 or (clipped > 0.4 and not kl <= 1e-3)):
        return None
    return (
        "The policy moves far from the one that collected the batch: the KL between them is "
        f"{kl:.2g} nats, and {clipped:.0%} of the ratios are clipped."
    )


@_rule(
    "Raise the learning rate; see that the optimizer has the actor's parameters, and that "
    "advantages differ.",
    _ANDRYCHOWICZ + ", section 3.7",
)
def policy_does_not_move(last: Rows, rows: Rows) -> str | None:
    """The KL of an update is 0, at a learning rate that is not annealed."""
    groups = ([x for name, x in row.items() if name.split("/")[0] == "lr"] for row in rows)
    kl, rates = _median(last, "kl"), [max(of_row, default=0.0) for of_row in groups]
    warms_up = rates[-1] > rates[-len(last)]
    annealed = median(rates[-len(last) :]) < 0.05 * max(rates)
    if not kl <= 1e-6 or warms_up or annealed or entropy_collapsed(last, rows):
        return None
    if _median(last, "steps") == 1:  # the only KL is that before the step
        return None
    return f"The policy does not move: the KL of an update is {kl:.1g} nats."


@_rule(
    "If the return is too low: raise entropy_coeff, lower the learning rate at the beginning, "
    "initialize the last layer near 0.",
    "Mnih et al., 2016, arXiv:1602.01783, section 4; " + _ANDRYCHOWICZ + ", section 3.2",
)
def entropy_collapsed(last: Rows, rows: Rows) -> str | None:
    """The entropy of discrete actions, or of a head of them, is near 0."""
    kl = _median(last, "kl")
    for name, entropy in _entropies(rows).items():
        now, first = _median(last, name), max(entropy[:FEWEST], default=0.0)
        # The entropy of a density may be negative, and passes 0 while the policy learns.
        learns = name == "entropy" and 1e-3 < kl <= 0.2
        if now <= max(0.05 * first, 0.01) and min(entropy) >= 0 and not learns:
            return (
                f"The {name} fell from {first:.2g} to {now:.2g} nats: the policy became "
                "deterministic and stopped learning."
            )
    return None


def _entropies(rows: Rows) -> dict[str, list[float]]:
    """Return the finite entropies of the policy, or of each of its heads."""
    heads = [name for name in rows[0] if name.startswith("composite_entropy/")] or ["entropy"]
    values = {name: [row[name] for row in rows if name in row] for name in heads}
    return {name: list(filter(math.isfinite, found)) for name, found in values.items() if found}


@_rule("Lower entropy_coeff to 0.01 or 0, or schedule it down.", _ANDRYCHOWICZ + ", section 3.8")
def entropy_bonus_dominates(last: Rows, rows: Rows) -> str | None:
    """An entropy does not fall, and its coefficient is large beside normalized advantages."""
    values = _entropies(last)
    total = sum(median(map(abs, found)) for found in values.values() if found)
    coefficient = abs(_median(last, "loss_entropy")) / total if total else 0.0
    if not coefficient >= 0.1 or len(rows) < 20:
        return None
    for name in values:
        first, now = _median(rows[:FEWEST], name), _median(last, name)
        if now >= first - 0.05 * abs(first):
            return (
                f"The coefficient of the entropy is {coefficient:.2g}, and the {name} has not "
                f"fallen ({first:.2g} at first, {now:.2g} now): the bonus outweighs the advantages."
            )
    return None
