"""Pure tensor maths: no TensorDict, no module, no state."""

from ppokit.functional.advantages import gae, linear_scan, reversed_discounted_returns
from ppokit.functional.moments import masked_mean, masked_std, merge_moments
from ppokit.functional.surrogates import clipped_critic_loss, clipped_surrogate, kl_estimate

__all__ = [
    "clipped_critic_loss",
    "clipped_surrogate",
    "gae",
    "kl_estimate",
    "linear_scan",
    "masked_mean",
    "masked_std",
    "merge_moments",
    "reversed_discounted_returns",
]
