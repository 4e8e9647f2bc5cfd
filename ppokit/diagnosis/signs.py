"""What the statistics of a run are signs of: a sentence with the numbers, or None."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from ppokit._runs import Rows

FEWEST = 5  # updates, below which nothing is said

# Each sign is looked for in the last rows of a run, and in all of them.


def _median(rows: Rows, name: str) -> float | None:
    """Return the median of a statistic over the rows that have it finite; None of too few."""
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    return median(values) if len(values) >= FEWEST else None


def _rate(row: Mapping[str, float]) -> float:
    """Return the largest learning rate of a row, of all parameter groups."""
    return max(
        [x for name, x in row.items() if name == "lr" or name.startswith("lr/")], default=0.0
    )


def _is_of_no_step(name: str, row: Mapping[str, float]) -> bool:
    """Return whether a statistic is NaN because there was no step, or every step was skipped."""
    return row.get("steps") == 0 and (name == "grad_norm" or row.get("skipped", 0) > 0)


def not_finite(last: Rows, rows: Rows) -> str | None:
    """A loss, the KL, the entropy or the norm of the gradients is NaN or infinite."""
    counts = dict.fromkeys(("kl", "loss_objective", "loss_critic", "entropy", "grad_norm"), 0)
    for name in counts:
        values = [row.get(name, 0.0) for row in last if not _is_of_no_step(name, row)]
        counts[name] = sum(not math.isfinite(value) for value in values)
    worst = max(counts, key=lambda name: counts[name])
    if not counts[worst]:
        return None
    return f"{worst} was not finite in {counts[worst]} of the last {len(last)} updates."


def skips(last: Rows, rows: Rows) -> str | None:
    """Steps were skipped, after the first update."""
    later = last[1:] if len(last) == len(rows) else last  # float16 looks for its scale at first
    skipped = sum(row["skipped"] for row in later if row.get("skipped", 0.0) > 0)
    if not skipped:
        return None
    return (
        f"{skipped:.0f} steps of the last {len(last)} updates were skipped: a loss or a gradient "
        "was not finite."
    )


def scores_differ(last: Rows, rows: Rows) -> str | None:
    """The first minibatch has a KL, before any step of an update."""
    kl, lag = _median(last, "first_kl"), _median(last, "policy_lag")
    if kl is None or kl < 1e-3 or lag:
        return None
    return (
        f"The KL of the first minibatch, before any step, is {kl:.2g} nats, and not 0: the loss "
        "scores the stored actions otherwise than collection did."
    )


def lags(last: Rows, rows: Rows) -> str | None:
    """Frames were collected with a policy of several updates ago."""
    lag = _median(last, "policy_lag")
    if lag is None or lag <= 1:
        return None
    return f"Frames were collected with policies that are {lag:.1f} updates old."


def large_targets(last: Rows, rows: Rows) -> str | None:
    """The critic's loss is that of targets far from unit scale."""
    loss = _median(last, "loss_critic")
    if loss is None or loss < 100:
        return None
    return f"The critic's loss is {loss:.3g}: the returns that it learns are far from unit scale."


def critic_clamped(last: Rows, rows: Rows) -> str | None:
    """The clamp on the critic's loss leaves hardly a frame a gradient."""
    loss, clip = _median(last, "loss_critic"), _median(last, "critic_loss_clip")
    coefficient = _median(last, "critic_coeff")
    if loss is None or not clip or not coefficient or loss < 0.9 * coefficient * clip:
        return None
    return (
        f"critic_loss_clip={clip:g} clamps nearly every frame (the mean critic loss is "
        f"{loss / coefficient:.3g}), and a clamped frame has no gradient: the critic cannot learn."
    )


def critic_explains_nothing(last: Rows, rows: Rows) -> str | None:
    """A constant would explain the targets as well."""
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


def advantages_not_normalized(last: Rows, rows: Rows) -> str | None:
    """The mean of advantage times ratio is far from 0."""
    sizes = [abs(row["loss_objective"]) for row in last if "loss_objective" in row]
    sizes = sorted(filter(math.isfinite, sizes))
    if not sizes or (size := sizes[len(sizes) * 3 // 4]) < 0.5:
        return None
    return (
        f"In a quarter of the last updates the objective is {size:.2g} or more in size. It is the "
        "mean of advantage times ratio, near 0 for advantages of mean 0 and spread 1, which they "
        "are not."
    )


def stops_early(last: Rows, rows: Rows) -> str | None:
    """Nearly every update is stopped before a step of its first epoch."""
    # A stop that is asked at the end of an epoch has trained on the whole of it.
    cut = [row for row in last if row.get("steps", 0) < row.get("minibatches", 1)]
    stopped = [row for row in cut if row.get("stopped") and row.get("epochs", 2) <= 1]
    if len(stopped) < 0.8 * len(last):
        return None
    return (
        f"The KL stop ended {len(stopped)} of the last {len(last)} updates within their first "
        "epoch: of what was collected, a part was not trained on."
    )


def moves_too_far(last: Rows, rows: Rows) -> str | None:
    """The KL of an update is large, or most ratios are clipped."""
    kl, clipped = _median(last, "kl"), _median(last, "clip_fraction") or 0.0
    moves = kl is None or kl > 1e-3  # a clip_epsilon of 0 clips all, and moves nothing
    if not (clipped > 0.4 and moves) and (kl is None or kl <= 0.2):
        return None
    known = "unknown" if kl is None else f"{kl:.2g} nats"
    return (
        f"The policy leaves the one that collected the batch far behind: the KL between them is "
        f"{known}, and {clipped:.0%} of the ratios are clipped."
    )


def does_not_move(last: Rows, rows: Rows) -> str | None:
    """The KL of an update is 0, with a learning rate that should move it."""
    kl, rates = _median(last, "kl"), list(map(_rate, rows))
    warms_up = rates[-1] > rates[-len(last)]
    annealed = median(rates[-len(last) :]) < 0.05 * max(rates)
    if kl is None or kl > 1e-6 or warms_up or annealed or entropy_collapsed(last, rows):
        return None
    if _median(last, "steps") == 1:  # there is no KL but that before the step
        return None
    return f"The policy does not move: the KL of an update is {kl:.1g} nats."


def _entropies(rows: Rows) -> dict[str, list[float]]:
    """Return the entropies of the policy, or of each of its heads, where they are finite."""
    heads = [name for name in rows[0] if name.startswith("composite_entropy/")] or ["entropy"]
    values = {name: [row[name] for row in rows if name in row] for name in heads}
    return {name: list(filter(math.isfinite, found)) for name, found in values.items() if found}


def entropy_collapsed(last: Rows, rows: Rows) -> str | None:
    """The entropy of discrete actions, or of a head of them, is gone."""
    kl = _median(last, "kl")
    for name, entropy in _entropies(rows).items():
        now, first = _median(last, name), max(entropy[:FEWEST], default=0.0)
        # Of a density 0 means nothing; it may pass through 0 while it learns.
        learns = name == "entropy" and kl is not None and 1e-3 < kl <= 0.2
        if now is None or min(entropy) < 0 or learns:
            continue
        if now <= max(0.05 * first, 0.01):
            return (
                f"The {name} fell from {first:.2g} to {now:.2g} nats: the policy always does the "
                "same, and learns nothing about anything else."
            )
    return None


def bonus_dominates(last: Rows, rows: Rows) -> str | None:
    """An entropy does not fall, and has a coefficient beside which advantages are small."""
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


def scale_drifts(last: Rows, rows: Rows) -> str | None:
    """What rewards are divided by differs between the halves of the last rows."""
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


def padding(last: Rows, rows: Rows) -> str | None:
    """Most of what the networks compute is padding."""
    padded = _median(last, "padded")
    if padded is None or padded < 0.5:
        return None
    return f"{padded:.0%} of what the networks compute is padding."
