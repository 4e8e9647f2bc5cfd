"""ppokit: independent PPO building blocks that drop into TorchRL training loops."""

from importlib.metadata import PackageNotFoundError, version

from ppokit import functional, plotting
from ppokit.advantages import GAE
from ppokit.checkpoints import load_checkpoint, save_checkpoint
from ppokit.collectors import GymCollector, ObservationNormalizer, TensorActor
from ppokit.diagnosis import Finding, diagnose
from ppokit.objectives import DualClipPPOLoss
from ppokit.recurrent import GRUModule, LSTMModule
from ppokit.rewards import RewardNormalizer
from ppokit.schedules import InterpSchedule, ParameterScheduler, StepSchedule
from ppokit.sequences import SequenceBatcher
from ppokit.trust_region import AdaptiveKLCoeff, KLEarlyStopper
from ppokit.update import PPOUpdate, TrainingStep

__all__ = [
    "GAE",
    "AdaptiveKLCoeff",
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
    "diagnose",
    "functional",
    "load_checkpoint",
    "plotting",
    "save_checkpoint",
]

try:
    __version__ = version("ppokit")
except PackageNotFoundError:  # the sources alone, on the path
    __version__ = "0+unknown"
