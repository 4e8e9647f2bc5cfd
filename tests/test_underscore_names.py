"""Internals of torch, torchrl and tensordict that the package uses: all of them, with reasons.

Internals may change with any version of these libraries. There are four kinds, each with a list:
names with an underscore, reads of an object's namespace (``vars(x)``, ``x.__dict__``), names that
are put together (``getattr(x, f"{name}_params")``), and texts of error messages. A new use fails a
test until it is in its list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
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
    "_global_optimizer_pre_hooks": ("hooks of all optimizers have no public list", "ImportError"),
    "_global_optimizer_post_hooks": ("likewise", "ImportError"),
    "_autograd": ("hooks of saved tensors, which a failed trace disables", "AttributeError"),
    "_saved_tensors_hooks_enable": ("likewise", "AttributeError"),
    "_saved_tensors_hooks_get_disabled_error_message": ("likewise", "AttributeError"),
    "_buffers": ("a coefficient under two names, and without look-up", "AttributeError"),
    "_modules": ("TensorActor has its actor's children, by their names", "KeyError in TensorActor"),
    "_parameters": ("likewise", "KeyError in TensorActor"),
    "_metadata": ("a state that is restored is not checked", "RuntimeError in a load that fails"),
    "_orig_mod": ("what torch.compile wraps", "normalizers in it are not updated"),
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
    # -- torchrl: the base class of DualClipPPOLoss
    "_all_schedulable_buffers": ("coefficients that can be set", "AttributeError"),
    "_schedulable_buffers": ("likewise, those of a class", "ppokit's cannot be scheduled"),
    "_clip_bounds": ("torchrl's own lines", "AttributeError on torchrl's path"),
    "_critic_loss_inputs": ("a hook of torchrl's for subclasses", "AttributeError"),
    "_entropy_coeff_map": ("coefficients of several heads in the state", "they are not"),
    "_get_cur_log_prob": ("a hook of torchrl's for subclasses", "AttributeError"),
    "_get_entropy": ("torchrl's own lines, and a hook for subclasses", "AttributeError"),
    "_has_critic": ("whether there is a critic loss", "AttributeError"),
    "_loss_mask_keys": ("torchrl's names of masks", "AttributeError"),
    "_maybe_normalize_advantage": ("over all ranks", "each rank normalizes alone"),
    # -- torchrl: the base class of GAE
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
#: Reads of a namespace, by file and expression: the reason.
NAMESPACES = {
    "_calls.py: vars(module)": "whether modules have hooks or replaced methods",
    "_calls.py: vars(nn.Module())": "the dictionaries of hooks have no public list",
    "_calls.py: module.__dict__": "whether a module has hooks, or a forward of its own",
    "_calls.py: network.__dict__": "what torch.compile wraps, and methods of an instance",
    "_calls.py: part.__dict__": "whether an instance replaces a method of its class",
    "collectors/normalization.py: update.__func__": "a container's update counts nothing",
    "_compiling.py: numbered.__code__.replace": "Dynamo limits the graphs of one code object",
    "_compiling.py: numbered.__globals__": "likewise: a copy of the function",
    "_compiling.py: numbered.__closure__": "likewise",
    "policies/actor.py: vars(nn.Module()).items": "TensorActor shares its actor's children",
    "policies/actor.py: actor.__dict__[name]": "likewise",
    "policies/tensor_policy.py: vars(module)": "whether an instance replaces get_dist",
    "rewards/normalizer.py: transform.__dict__.get('_container')": "Transform.container raises",
    "update/optimizers.py: vars(optimizer).get('step')": "whether a wrapper replaces step",
    "update/optimizers.py: vars(lr_scheduler)": "a scheduler's wrapper does nothing more",
    "update/optimizers.py: vars(optimizer).items": "hooks of an optimizer have no public list",
    "update/compiled.py: vars(request.loss)": "whether the hooks of a loss changed",
}
#: Names that are put together.
COMPOSED = {
    "objectives/dual_clip.py: f'{name}_params'": "torchrl's functional parameters of a network",
}
#: Texts of messages: the reason, and what happens when the text is another one.
MESSAGES = {
    "_compiling.py: str(error).splitlines": ("shown to the user", "the reason is less readable"),
    "_calls.py: 'more than 1 value per channel' in str(error)": (
        *("an error has no class of its own", "the advice is not given"),
    ),
    "_calls.py: re.search('dtype|scalar type|input type|not implemented for', str(error), "
    "re.IGNORECASE)": ("likewise", "likewise"),
    "policies/compiled_policy.py: self._warn(str(error))": (
        *("the reason, of ppokit's own error", "the reason is less readable"),
    ),
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


def names_of_the_package() -> set[str]:
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
                names.update((node.module or "").split("."))
            elif isinstance(node, ast.Import):
                names.update(part for alias in node.names for part in alias.name.split("."))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(node.value.split("."))  # "torch.nn._x", of an import or a look-up
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    return {name for name in names if is_private(name)} - OF_PYTHON


def test_every_private_name_of_a_library_is_listed():
    own = names_of_the_package()
    inherited = {name for name in own if any(hasattr(base, name) for base in BASES)}
    # Suffixes of names, which are strings: "_log_prob" is added to a key.
    suffixes = {name for name in names_in_use() if name.strip("_") in SUFFIXES}
    libraries = {name for name in names_in_use() if name not in own or name in inherited}
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


# -- namespaces, composed names, messages --------------------------------------------------

LOOK_UPS = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")
INNER = ("__dict__", "__globals__", "__closure__", "__code__", "__wrapped__", "__func__")
OWN = ("self", "instance")  # a class may read its own instance


def uses_in(source: str) -> dict[str, set[str]]:
    """Return the reads of namespaces, composed names and texts of messages of a module."""
    tree = ast.parse(source)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    errors = {x.name for x in ast.walk(tree) if isinstance(x, ast.ExceptHandler)} - {None}
    for x in ast.walk(tree):
        if isinstance(x, ast.arg) and x.annotation is not None:
            errors |= {x.arg} if re.search(r"Error|Exception", ast.unparse(x.annotation)) else set()

    def whole(node: ast.AST) -> str:
        """Return the expression with the attributes and constant keys that are read of it."""
        up = above.get(node)
        if isinstance(up, ast.Attribute | ast.Subscript) and up.value is node:
            return whole(up)
        is_called = isinstance(up, ast.Call) and up.func is node
        if is_called and isinstance(node, ast.Attribute) and node.attr == "get":
            return f"{ast.unparse(node)}({ast.unparse(up.args[0])})"
        return ast.unparse(node)

    found: dict[str, set[str]] = {"namespaces": set(), "composed": set(), "messages": set()}
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "id", getattr(called, "attr", ""))
        if isinstance(node, ast.Call) and name in ("vars", "getattr_static", "getmembers"):
            if ast.unparse(node.args[0]) not in OWN:
                found["namespaces"].add(whole(node))
        elif isinstance(node, ast.Attribute) and node.attr in INNER:
            if ast.unparse(node.value) not in OWN:
                found["namespaces"].add(whole(node))
        elif isinstance(node, ast.Call) and name in LOOK_UPS:
            for argument in node.args:
                if isinstance(argument, ast.JoinedStr | ast.BinOp):
                    found["composed"].add(ast.unparse(argument))
        elif isinstance(node, ast.Call) and name in ("str", "repr") and node.args:
            up = above[node]
            if getattr(node.args[0], "id", None) not in errors:
                continue
            if isinstance(up, ast.Compare | ast.Call | ast.Attribute):
                found["messages"].add(ast.unparse(up))
        elif (
            isinstance(node, ast.Attribute)
            and node.attr == "args"
            and getattr(node.value, "id", None) in errors
        ):
            found["messages"].add(whole(node))
    return found


@pytest.mark.parametrize(
    ("kind", "listed"),
    [("namespaces", NAMESPACES), ("composed", COMPOSED), ("messages", MESSAGES)],
    ids=["namespaces", "composed", "messages"],
)
def test_every_other_internal_is_listed(kind: str, listed: dict[str, object]):
    found = {
        f"{path.relative_to(PACKAGE)}: {use}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for use in uses_in(path.read_text())[kind]
    }
    assert found - set(listed) == set(), "say in the list why these are needed"
    assert set(listed) - found == set(), "these are not in use"


def test_uses_are_found():
    source = """
def f(x, error: RuntimeError):
    a = vars(x).get("step"), vars(x)["_hidden"], x.__dict__["_own"], inspect.getattr_static(x, "y")
    b = getattr(x, f"_{a}"), attrgetter("_" + a), x.__class__.__name__, getattr(x, "plain")
    try:
        a = function.__wrapped__, vars(self), self.__dict__
    except (KeyError, ValueError) as caught:
        if "text" in str(caught) or re.search("text", str(error)) or caught.args[0] == "text":
            raise ValueError(f"It raised: {caught}, {str(caught)}") from caught
        return str(caught).startswith("text")
"""
    assert uses_in(source) == {
        "namespaces": {
            *("vars(x).get('step')", "vars(x)['_hidden']", "x.__dict__['_own']"),
            *("inspect.getattr_static(x, 'y')", "function.__wrapped__"),
        },
        "composed": {"f'_{a}'", "'_' + a"},
        "messages": {
            *("'text' in str(caught)", "re.search('text', str(error))", "caught.args[0]"),
            "str(caught).startswith",
        },
    }
