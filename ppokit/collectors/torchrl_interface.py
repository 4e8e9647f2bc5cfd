"""The base class of a collector: what torchrl's workers and trainers need besides batches."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector, Collector

from ppokit._batch import Policy, memories_in
from ppokit._checks import check_device
from ppokit._state import write_weights

# Values that describe GymCollector; None, False, 0, -1 and {} turn an argument off.
_ACCEPTED = {
    **dict.fromkeys(("auto_register_policy_transforms", "extend_buffer"), (True,)),
    **dict.fromkeys(("reset_when_done", "track_traj_ids"), (True,)),
    **dict.fromkeys(("no_cuda_sync", "trust_policy", "use_buffers"), (True, False)),
    "return_same_td": (True, False),  # what GymCollector yields to torchrl's workers
    "replay_write_mode": ("rollout",),
    "traj_format": ("padded",),
}


class TorchrlInterface(BaseCollector):
    """The arguments, hooks, weights and counters of torchrl's collectors.

    Args:
        arguments: others of torchrl's ``Collector``, which the collector does not name. Each is
            accepted where it describes what the collector does anyway, or is turned off.
        policy: the policy, or None beside a ``policy_factory``.
        device: None if another argument names the device.
        worker_idx: number of the collector among several workers.
        yields_batches: whether batches are yielded as they are collected.
    """

    init_random_frames = 0
    policy_version = 0  #: how often the weights were updated
    _collector_progress: object = None  # counters of stats(), which torchrl 0.15 makes
    _collector_progress_worker_idx = 0

    def __init__(
        self,
        arguments: dict[str, Any],
        policy: Policy | None,
        device: torch.device | str | int | None,
        *,
        worker_idx: int | None,
        yields_batches: bool,
    ) -> None:
        hooks = "pre_collect_hook", "post_collect_hook"
        super().__init__(**{name: arguments.pop(name, None) for name in hooks})
        shared = arguments.pop("_collector_progress", None)
        if shared is not None:  # with other workers
            self._collector_progress, self._collector_progress_worker_idx = shared, worker_idx or 0
        # torchrl's workers, which read this attribute, yield one TensorDict, in shared memory.
        is_same = arguments.get("return_same_td") and arguments.get("use_buffers") is not False
        self._use_buffers = worker_idx is not None and yields_batches and bool(is_same)
        self._one: TensorDictBase | None = None
        arguments.pop("traj_pool", None)  # ids are told apart by worker_idx
        factory = arguments.pop("policy_factory", None)
        if factory is not None:
            if policy is not None:
                raise ValueError("Pass a policy, or None beside a policy_factory; there are both.")
            policy = factory()
        self.policy: Any = policy
        self.worker_idx, self.device = worker_idx, _device_of(arguments, device)

    def _as_one(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a batch, in the TensorDict of all batches."""
        if self._one is not None:
            return self._one.update_(batch)
        for key in memories_in(batch):  # which is one for all frames: it could not be written to
            batch.set(key, batch.get(key).contiguous())
        self._one = batch
        return batch

    def update_policy_weights_(self, *args: Any, weights_dict: Any = None, **kwargs: Any) -> None:
        """Write weights into the policy, as torchrl's collectors do."""
        for name, weights in (weights_dict or {}).items():
            super().update_policy_weights_(weights, model_id=name)
        if not weights_dict:
            super().update_policy_weights_(*args, **kwargs)

    def _maybe_fallback_update(
        self, policy_or_weights: object = None, *, model_id: str | None = None
    ) -> None:
        """Write weights, if any are given; without them the policy is the one that is trained."""
        if model_id not in (None, "policy"):
            raise KeyError(f"The collector has one model, 'policy', and no {model_id!r}.")
        if policy_or_weights is not None:
            write_weights(self.policy, policy_or_weights)
        self.policy_version += 1

    def _progress(self, method: str, *args: object, **kwargs: object) -> Any:
        """Call a method of torchrl's counters for this collector's row; torchrl 0.14 has none."""
        found = getattr(self._collector_progress, method, lambda *_, **__: {})
        return found(self._collector_progress_worker_idx, *args, **kwargs)

    def __bool__(self) -> bool:
        """Return True. torchrl's length raises, and Ray asks before it reports an exception."""
        return True


def _device_of(
    arguments: dict[str, Any], device: torch.device | str | int | None
) -> torch.device | None:
    """Return the device; raise if another argument asks for what GymCollector lacks."""
    names = ("storing_device", "policy_device", "env_device")
    devices = {name: arguments.pop(name, None) for name in names} | {"device": device}
    given = {name: torch.device(x) for name, x in devices.items() if x is not None}
    if given.get("env_device") == torch.device("cpu"):
        del given["env_device"]
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name}={str(value)!r}" for name, value in given.items())
        raise ValueError(
            f"GymCollector has one device, and got {said}. Environments are on the CPU."
        )
    known = inspect.signature(Collector.__init__).parameters
    for name, value in arguments.items():
        if name not in known and name not in _ACCEPTED:
            raise TypeError(f"GymCollector() got an unexpected keyword argument {name!r}.")
        if value not in _ACCEPTED.get(name, (0, -1)) and value not in (None, {}):
            raise ValueError(
                f"GymCollector does not support {name}={value!r} of torchrl's Collector. Leave it "
                "out; 'Arguments of Collector' in docs/howto/in_torchrl.md says what to use."
            )
    found = next(iter(given.values()), None)
    check_device(found)
    return found
