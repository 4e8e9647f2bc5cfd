"""What torchrl's trainers, loggers and weight synchronisation ask of a collector in one process."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector, Collector

from ppokit._keys import as_key
from ppokit._state import check_names, load_all

Self = TypeVar("Self", bound="LocalCollector")

# Values that describe GymCollector; None, False, 0, -1 and {} turn an argument off.
_ACCEPTED = {
    **dict.fromkeys(("auto_register_policy_transforms", "extend_buffer"), (True,)),
    **dict.fromkeys(("reset_when_done", "track_traj_ids"), (True,)),
    **dict.fromkeys(("no_cuda_sync", "trust_policy", "use_buffers"), (True, False)),
    "return_same_td": (True, False),  # what GymCollector yields to torchrl's workers
    "replay_write_mode": ("rollout",),
    "traj_format": ("padded",),
}


def take_arguments_of_torchrl(
    arguments: dict[str, Any], policy: Any, device: Any
) -> tuple[Any, torch.device | None]:
    """Return policy and device; raise if another argument asks for what GymCollector does not do.

    Args:
        arguments: those of torchrl's ``Collector`` that ``GymCollector`` does not name.
        policy: the policy, or None if the arguments have a ``policy_factory``.
        device: the device.
    """
    arguments.pop("traj_pool", None)  # ids are told apart by worker_idx
    factory = arguments.pop("policy_factory", None)
    if factory is not None:
        if policy is not None:
            raise ValueError("Pass a policy, or None beside a policy_factory; there are both.")
        policy = factory()
    names = ("storing_device", "policy_device", "env_device")
    devices = {name: arguments.pop(name, None) for name in names} | {"device": device}
    given = {name: torch.device(x) for name, x in devices.items() if x is not None}
    if given.get("env_device") == torch.device("cpu"):
        del given["env_device"]
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name}={str(value)!r}" for name, value in given.items())
        raise ValueError(
            f"GymCollector has one device, and got {said}. device= is "
            "that of the policy and of the batches; environments are on the CPU."
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
    return policy, next(iter(given.values()), None)


class LocalCollector(BaseCollector):
    """A collector whose policy and environments are in this process.

    It closes its environments once, also where an exception ends the work.
    """

    policy: Any
    replay_buffer: Any = None
    init_random_frames = 0
    closed: bool = True
    policy_version = 0  #: how often the weights were updated
    observation_transform: Any
    postproc: Any
    _frames: int
    _iter: int
    _envs: Any
    _wrapper: Any
    _episodes: Any
    _collector_progress: Any = None  # counters of stats(), which torchrl 0.15 makes
    _collector_progress_worker_idx: int

    # -- what is inside ----------------------------------------------------------

    @property
    def env(self) -> Any:
        """Torchrl's wrapper of the first environment, for its specs; do not step it."""
        return self._wrapper

    def get_policy_version(self) -> int:
        """Return how often the weights were updated."""
        return self.policy_version

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy."""
        return getattr(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of :attr:`env`."""
        return getattr(self.env, attr)

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)

    def _progress(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of torchrl's counters for this collector's row; torchrl 0.14 has none."""
        counters = self._collector_progress
        if counters is None:
            return {}
        return getattr(counters, method)(self._collector_progress_worker_idx, *args, **kwargs)

    # -- weights -------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write weights into the policy; without any there is nothing to do, it is the same.

        Args:
            policy_or_weights: a module, what ``TensorDict.from_module`` returns of it, or a
                ``state_dict``; of a policy with the same parameters and buffers as this one.
            weights: the same, by name.
            policy: the same, by name.
            worker_ids: ignored, there is one.
            model_id: ``"policy"`` or None.
            weights_dict: ``{"policy": weights}``.
            **kwargs: ignored, for scripts written for torchrl's collectors.

        Raises:
            ValueError: weights are given twice, or their names or shapes are not the policy's.
            KeyError: they are of another model.
            TypeError: they are no weights, or the policy is no module.
        """
        given = [x for x in (policy_or_weights, weights, policy) if x is not None]
        others = {*(weights_dict or ()), model_id} - {"policy", None}
        if others:
            raise KeyError(f"The collector has one model, 'policy', and none of {sorted(others)}.")
        given += [] if weights_dict is None else weights_dict.values()
        if len(given) > 1:
            raise ValueError(f"Give the weights once; there are {len(given)}.")
        if given:
            if not isinstance(self.policy, nn.Module):
                kind = type(self.policy).__name__
                raise TypeError(f"The policy is a {kind}, no module: it has no weights to write.")
            own: Any = TensorDict.from_module(self.policy)
            own.data.update_(_checked_weights(given[0], own, self.policy).data)
        self.policy_version += 1

    # -- state --------------------------------------------------------------------

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state of policy, transform and postproc, and the number of frames so far.

        The environments have no state that could be saved: a restart begins new episodes.
        """
        return OrderedDict(
            policy_state_dict=state_of(self.policy),
            env_state_dict=state_of(self.observation_transform),
            postproc_state_dict=state_of(self.postproc),
            frames=self._frames,
            iter=self._iter,
            traj_pool={"traj_id": torch.tensor(self._episodes.unused_id)},
            policy_version=self.policy_version,
            collector_progress=self._progress("snapshot"),
        )

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load what :meth:`state_dict` returned, completely or not at all; begin new episodes.

        Args:
            state_dict: all of it, whatever ``strict`` says, which ``RayCollector`` passes.
            strict: ignored.
        """
        # A collector of several processes keeps the ids of its workers to itself.
        others = {"policy_version": 0, "collector_progress": {}, "traj_pool": {"traj_id": 0}}
        state_dict = others | state_dict
        check_names(state_dict, self.state_dict(), "a GymCollector")
        parts = {
            "policy_state_dict": self.policy,
            "env_state_dict": self.observation_transform,
            "postproc_state_dict": self.postproc,
        }
        lost = [k for k, v in parts.items() if state_dict[k] and not isinstance(v, nn.Module)]
        if lost:
            raise KeyError(
                f"The state has {lost}, and this collector has no module to load it into."
            )
        load_all({k: v for k, v in parts.items() if isinstance(v, nn.Module)}, state_dict)
        self._frames, self._iter = state_dict["frames"], state_dict["iter"]
        self.policy_version = state_dict["policy_version"]
        self._progress("load_snapshot", state_dict["collector_progress"])
        self._episodes.take_new_ids(int(state_dict["traj_pool"]["traj_id"]))
        if not self.closed:
            with self._closing_on_error():
                self._episodes.begin()

    # -- the end -------------------------------------------------------------------

    def start(self) -> NoReturn:
        """Refuse to collect in the background."""
        raise NotImplementedError(
            f"{type(self).__name__} collects where it is iterated over, not in the background. "
            "Iterate over it, or use torchrl's MultiAsyncCollector, collector_class=GymCollector."
        )

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the environments; a second call does nothing."""
        self._progress("clear_pending")
        self._close(close_env, raise_on_error)

    def _close(self, close_env: bool = True, raise_on_error: bool = True) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            if close_env:
                self._envs.close()
        except Exception:
            if raise_on_error:
                raise

    def __bool__(self) -> bool:
        """Be true, where torchrl's length is an error: Ray asks before it reports an exception."""
        return True

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        try:  # noqa: SIM105  (contextlib's names are gone when the interpreter ends)
            self.shutdown()
        except Exception:
            pass

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.shutdown()
            raise


def _checked_weights(source: Any, own: TensorDictBase, policy: nn.Module) -> TensorDictBase:
    """Return weights by the names that the policy has, or raise a ValueError."""
    if isinstance(source, nn.Module):
        source = TensorDict.from_module(source)
    elif isinstance(source, Mapping):
        source = TensorDict(dict(source)).unflatten_keys(".")
    elif not isinstance(source, TensorDictBase):
        raise TypeError(
            f"Weights are a module, a TensorDict or a state_dict, not of type "
            f"{type(source).__name__}."
        )
    shapes, expected = (
        {key: tuple(value.shape) for key, value in x.items(True, True)} for x in (source, own)
    )
    states = {as_key(tuple(name.split("."))) for name in policy.state_dict()}
    optional = expected.keys() - states - shapes.keys()  # buffers that are no state
    wrong = [key for key in {**expected, **shapes} if shapes.get(key) != expected.get(key)]
    wrong = [key for key in wrong if key not in optional]
    if wrong:
        said = [f"{key!r}: {shapes.get(key)} for {expected.get(key)}" for key in wrong[:5]]
        raise ValueError(
            f"The weights are not those of the collector's policy (shape given for shape there): "
            f"{'; '.join(said)}. Pass the policy, TensorDict.from_module(policy) or its state_dict."
        )
    return source


def state_of(module: Any) -> dict[str, Any]:
    """Return the state of a module, empty for any other object."""
    return module.state_dict() if isinstance(module, nn.Module) else {}
