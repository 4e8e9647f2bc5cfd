"""ppokit: independent PPO building blocks that drop into TorchRL training loops."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppokit import functional, networks, plotting
    from ppokit.advantages import GAE
    from ppokit.checkpoints import load_checkpoint, load_policy, save_checkpoint
    from ppokit.collectors import GymCollector, ObservationNormalizer
    from ppokit.diagnosis import Finding, diagnose
    from ppokit.evaluation import evaluate
    from ppokit.objectives import DualClipPPOLoss
    from ppokit.policies import TensorActor
    from ppokit.recurrent import GRUModule, LSTMModule, TransformerModule
    from ppokit.rewards import RewardNormalizer
    from ppokit.schedules import InterpSchedule, ParameterScheduler, StepSchedule
    from ppokit.sequences import SequenceBatcher
    from ppokit.trust_region import AdaptiveKLCoeff, AdaptiveLearningRate, KLEarlyStopper
    from ppokit.update import PPOUpdate, TrainingStep

__all__ = [
    "GAE",
    "AdaptiveKLCoeff",
    "AdaptiveLearningRate",
    "DualClipPPOLoss",
    "Finding",
    "GRUModule",
    "GymCollector",
    "InterpSchedule",
    "KLEarlyStopper",
    "LSTMModule",
    "ObservationNormalizer",
    "PPOUpdate",
    "ParameterScheduler",
    "RewardNormalizer",
    "SequenceBatcher",
    "StepSchedule",
    "TensorActor",
    "TrainingStep",
    "TransformerModule",
    "diagnose",
    "evaluate",
    "functional",
    "load_checkpoint",
    "load_policy",
    "networks",
    "plotting",
    "save_checkpoint",
]

# The module of each name; it is imported on first use.
_MODULES = {
    "advantages": ("GAE",),
    "checkpoints": ("load_checkpoint", "load_policy", "save_checkpoint"),
    "collectors": ("GymCollector", "ObservationNormalizer"),
    "diagnosis": ("Finding", "diagnose"),
    "evaluation": ("evaluate",),
    "objectives": ("DualClipPPOLoss",),
    "policies": ("TensorActor",),
    "recurrent": ("GRUModule", "LSTMModule", "TransformerModule"),
    "rewards": ("RewardNormalizer",),
    "schedules": ("InterpSchedule", "ParameterScheduler", "StepSchedule"),
    "sequences": ("SequenceBatcher",),
    "trust_region": ("AdaptiveKLCoeff", "AdaptiveLearningRate", "KLEarlyStopper"),
    "update": ("PPOUpdate", "TrainingStep"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

try:
    __version__ = version("ppokit")
except PackageNotFoundError:  # the sources alone, on the path
    __version__ = "0+unknown"


_OTHERS = ("distributed", "functional", "kernels", "networks", "plotting", "testing")
_lock = RLock()  # torchrl's modules import each other: two threads would wait for each other


def __getattr__(name: str) -> Any:
    if name not in (*_PLACES, *_MODULES, *_OTHERS):
        raise AttributeError(f"module 'ppokit' has no attribute {name!r}")
    with _lock:
        value = import_module(f"ppokit.{_PLACES.get(name, name)}")
        value = getattr(value, name) if name in _PLACES else value
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
