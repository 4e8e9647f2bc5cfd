"""Names of torch, torchrl and tensordict that begin with an underscore: all of them, with reasons.

They are not promised to stay. Subclassing these libraries' classes and looking at hooks need some;
whoever adds one says here why, and what happens when it is gone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.envs import Transform
from torchrl.modules import LSTMModule
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import ppokit

PACKAGE = Path(ppokit.__file__).parent

# Reason, and what happens when the name is gone.
NAMES: dict[str, tuple[str, str]] = {
    # -- torch: hooks, states and buffers of modules
    "_backward_hooks": ("hooks of a parameter have no public list", "AttributeError"),
    "_has_any_global_hook": ("global hooks have no public list", "they are not looked for"),
    "_post_accumulate_grad_hooks": (
        "hooks of a parameter have no public list",
        "a graph ignores them",
    ),
    "_buffers": ("a coefficient under two names, and without look-up", "AttributeError"),
    "_modules": ("TensorActor has its actor's children, by their names", "KeyError in TensorActor"),
    "_parameters": ("likewise", "KeyError in TensorActor"),
    "_apply": ("a cast must not round discounts, nor part two names", "they are rounded"),
    "_version": ("torch writes it into every state", "states of other versions are loaded"),
    "_load_from_state_dict": ("states are checked before they are loaded", "they are not"),
    # -- torch: what the kernels ask, with a slow way where a name is missing
    "_C": ("looked up by name", "the slow way"),
    "_len_torch_dispatch_stack": ("modes that see every operator", "the slow way"),
    "_are_functorch_transforms_active": ("torch.func", "the slow way"),
    "_current_level": ("forward-mode derivatives", "the slow way"),
    # -- tensordict: modules
    "_kwargs": ("a module with named arguments is called as it is", "AttributeError in a call"),
    "_get_kwargs": ("likewise, of its look-ups", "AttributeError in a call"),
    "_select_before_return": ("a sequence that selects is called as it is", "AttributeError"),
    "_generator": ("a generator draws other numbers", "AttributeError in the collector"),
    "_generator_key": ("likewise", "AttributeError in the collector"),
    "_out_keys": ("out_keys, which torchrl keeps there", "they are made in each access"),
    # -- torchrl: the loss that ours is a subclass of
    "_all_schedulable_buffers": ("coefficients that can be set", "AttributeError"),
    "_schedulable_buffers": ("likewise, those of a class", "ours cannot be scheduled"),
    "_clip_bounds": ("torchrl's own lines", "AttributeError on torchrl's path"),
    "_critic_loss_inputs": ("a hook of torchrl's for subclasses", "AttributeError"),
    "_entropy_coeff_map": ("coefficients of several heads in the state", "they are not"),
    "_get_cur_log_prob": ("a hook of torchrl's for subclasses", "AttributeError"),
    "_get_entropy": ("torchrl's own lines, and a hook for subclasses", "AttributeError"),
    "_has_critic": ("whether there is a critic loss", "AttributeError"),
    "_loss_mask_keys": ("torchrl's names of masks", "AttributeError"),
    "_maybe_normalize_advantage": ("over all ranks", "each rank normalizes alone"),
    # -- torchrl: the GAE that ours is a subclass of
    "_call_value_nets": ("torchrl's two passes", "AttributeError with shifted=False"),
    "_get_time_dim": ("torchrl's argument time_dim", "it is not checked"),
    "_normalize_advantage": ("torchrl's normalization", "AttributeError with average_gae"),
    "_normalize_shifted": ("shifted=None is allowed here", "it becomes False"),
    "_split_value_net_input": ("likewise", "AttributeError"),
    # -- torchrl: collectors, counters from 0.15 on
    "_maybe_fallback_update": ("a hook of torchrl's for subclasses", "RuntimeError in an update"),
    "_collector_progress": ("a worker's counters; an argument of workers", "stats() has none"),
    "_collector_progress_worker_idx": ("its row of them", "AttributeError in the collector"),
    # -- torchrl: transforms, buffers, environments, wrappers
    "_reset": ("a transform's method", "returns are not carried on in an environment"),
    "_step": ("a transform's method", "nothing is scaled in an environment"),
    "_call": ("a transform's method", "nothing is scaled in an environment"),
    "_inv_call": ("a transform's method", "nothing is scaled on write"),
    "_container": ("whose transform it is", "a second normalization goes unnoticed"),
    "_env": ("gymnasium's environment in torchrl's wrapper", "AttributeError at construction"),
    "_clear_prefetch_queue_locked": ("a sampler that stopped half way", "AttributeError"),
    "_futures_lock": ("likewise", "AttributeError at a stop"),
}
BASES = (
    BaseCollector,
    ClipPPOLoss,
    GAE,
    Transform,
    LSTMModule,
    TensorDictModule,
    TensorDictSequential,
    nn.Module,
)
OF_PYTHON = {"_replace", "_asdict", "_"}


def trees() -> Iterator[ast.AST]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


def names_of_ours() -> set[str]:
    """What the package itself defines or assigns, and its modules."""
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def names_in_use() -> set[str]:
    """Attributes, imports and strings of the package that begin with an underscore."""
    names: set[str] = set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("torch", "tensordict", "gymnasium")
            ):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    return {name for name in names if is_private(name)} - OF_PYTHON


def test_every_private_name_of_a_library_is_listed():
    ours = names_of_ours()
    inherited = {name for name in ours if any(hasattr(base, name) for base in BASES)}
    # Suffixes of names, which are strings: "_log_prob" is added to a key.
    suffixes = {name for name in names_in_use() if name.strip("_") in SUFFIXES}
    libraries = {name for name in names_in_use() if name not in ours or name in inherited}
    unknown = libraries - set(NAMES) - suffixes
    assert not unknown, f"say in NAMES why these are needed: {sorted(unknown)}"


# "_features" and "_latent" are entries that a collector does not return.
SUFFIXES = {"kl", "entropy", "log_prob", "params", "network_params", "l", "features", "latent"}


def test_every_listed_name_is_in_use():
    assert not set(NAMES) - names_in_use()


def test_no_name_of_torchs_compiler_is_in_the_package():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for name in ("torch._dynamo", "torch._inductor", "torch._C._dynamo", "from torch._"):
            lines = [x for x in text.splitlines() if name in x and not x.strip().startswith("#")]
            assert not lines, f"{path.name}: {lines}"
