"""Diagnosis of a run: rules with the meaning of a sign, its source, and advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppokit._runs import Rows, Run, read_run
from ppokit.diagnosis import signs
from ppokit.diagnosis.signs import FEWEST

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


_ANDRYCHOWICZ = "Andrychowicz et al., 2021, arXiv:2006.05990"
_ENGSTROM = "Engstrom et al., 2020, arXiv:2005.12729"
_HUANG = "Huang et al., 2022, The 37 Implementation Details of PPO"

RULES: Sequence[Rule] = (
    Rule(
        "not_finite",
        signs.not_finite,
        'Leave TrainingStep(nonfinite="raise") as it is, which keeps the minibatch; lower the '
        "learning rate, look for actions at the edge of a bounded distribution.",
        "how-to: when things break; RLlib warns of a KL that is not finite",
    ),
    Rule(
        "steps_skipped",
        signs.skips,
        "Look at update.nonfinite_minibatch; lower the learning rate, set max_grad_norm, look for "
        "log-probabilities at the edge of a bounded distribution.",
        "how-to: when things break",
    ),
    Rule(
        "actions_scored_differently",
        signs.scores_differ,
        "Look for dropout or batch normalisation in the actor, for observations that are "
        "normalised with other statistics by then, for a recurrent state that is not stored (a "
        "primer), for a log-probability of another action than the stored one (a clamped one), for "
        "weights that did not reach the collector; for a bounded distribution at its edge, "
        "whose scores rounding spoils (lower the learning rate).",
        _HUANG + " (debugging: the ratio is 1 in the first minibatch)",
    ),
    Rule(
        "policy_is_old",
        signs.lags,
        "Wait for the update (sync=True), or collect with fewer workers or larger batches.",
        "Espeholt et al., 2018, arXiv:1802.01561, section 4",
    ),
    Rule(
        "value_targets_are_large",
        signs.large_targets,
        "Scale rewards (reward_normalizer=RewardNormalizer(gamma)), or bound the critic's loss "
        "(critic_loss_clip); where actor and critic share layers, lower critic_coeff.",
        _ENGSTROM + ", section 3; RLlib warns above 100",
    ),
    Rule(
        "critic_clamped",
        signs.critic_clamped,
        "Set critic_loss_clip above the square of the scale of the returns, scale rewards "
        "(RewardNormalizer), or leave critic_loss_clip out.",
        "RLlib warns of a vf_clip_param below the returns",
    ),
    Rule(
        "critic_explains_nothing",
        signs.critic_explains_nothing,
        "See that the optimizer has the critic's parameters and critic_coeff is about 0.5; scale "
        "rewards; raise the learning rate; give the critic what returns depend on.",
        _HUANG + ", detail 12; " + _ANDRYCHOWICZ + ", section 3.3",
    ),
    Rule(
        "advantages_not_normalized",
        signs.advantages_not_normalized,
        "Pass normalize_advantage=True to the loss, or average_gae=True to GAE; or scale rewards.",
        _ENGSTROM + ", section 3; " + _HUANG + ", detail 7",
    ),
    Rule(
        "kl_stops_in_first_epoch",
        signs.stops_early,
        "Lower the learning rate, take larger minibatches, or raise the stopper's target_kl.",
        "Dossa et al., 2021, doi:10.1109/ACCESS.2021.3106662; OpenAI Spinning Up, PPO",
    ),
    Rule(
        "policy_moves_too_far",
        signs.moves_too_far,
        "Lower the learning rate or the number of epochs, take larger minibatches, or stop by KL "
        "(stopper=KLEarlyStopper(0.02)).",
        "Schulman et al., 2017, arXiv:1707.06347, section 3; " + _HUANG + ", detail 12",
    ),
    Rule(
        "policy_does_not_move",
        signs.does_not_move,
        "Raise the learning rate; see that the optimizer has the actor's parameters, and that "
        "advantages are not all alike.",
        _ANDRYCHOWICZ + ", section 3.7",
    ),
    Rule(
        "entropy_collapsed",
        signs.entropy_collapsed,
        "If the return is not what it should be: raise entropy_coeff, lower the learning rate at "
        "the beginning, initialise the last layer near 0.",
        "Mnih et al., 2016, arXiv:1602.01783, section 4; " + _ANDRYCHOWICZ + ", section 3.2",
    ),
    Rule(
        "entropy_bonus_dominates",
        signs.bonus_dominates,
        "Lower entropy_coeff to 0.01 or 0, or schedule it down.",
        _ANDRYCHOWICZ + ", section 3.8",
    ),
    Rule(
        "reward_scale_drifts",
        signs.scale_drifts,
        "Freeze the normalizer once returns have settled (normalizer.freeze()), or use "
        'statistics="batch"; look for rewards that grow over the run.',
        _ENGSTROM + ", section 3",
    ),
    Rule(
        "mostly_padding",
        signs.padding,
        "Cut shorter sequences (SequenceBatcher(seq_len)), or take minibatches of similar length.",
        "how-to: sequences",
    ),
)
