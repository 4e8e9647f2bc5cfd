"""What the numbers of a run mean, in words, and what to try."""

from __future__ import annotations

from dataclasses import dataclass

from ppokit._runs import Run, read_run
from ppokit.diagnosis.rules import RULES
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
