"""Entries of a batch: keys, masks, time order, and the errors for missing entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDictBase, is_tensor_collection, unravel_key
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor, nn

from ppokit.functional._checks import check_bool, check_same_shape

MASK_KEY = ("collector", "mask")
TRAJ_KEY = ("collector", "traj_ids")
VERSION_KEY = "policy_version"
IS_INIT = "is_init"  #: whether an episode starts
#: of a transformer: the inputs of an episode before a frame; how many there are, and frames since
MEMORY, STEPS = "transformer_memory", "transformer_steps"
INDEX_KEY = ("sequence", "index")  #: of each frame in the batch that SequenceBatcher has cut
BURN_IN_KEY = ("sequence", "burn_in")  #: frames before a sequence, of SequenceBatcher
_CACHED = 2**23  # bytes

Entries = dict[NestedKey, Tensor]
Options = Mapping[str, object]  #: arguments of torch.compile, by name
State = Mapping[str, Any]  #: what load_state_dict() takes
StateDict = dict[str, Any]  #: what state_dict() returns
Parts = Mapping[str, Any]  #: objects with a state, and plain data, by name
Shapes = Mapping[NestedKey, tuple[Sequence[int], torch.dtype]]  #: and dtypes, by entry
Default = TypeVar("Default", NestedKey, None)
Method = TypeVar("Method", bound=Callable[..., Any])
Policy = Callable[[TensorDictBase], TensorDictBase]  #: any TensorDictModule, or a function

as_key: Callable[[NestedKey], NestedKey] = unravel_key  # the canonical form of a key


def get_tensor(tensordict: TensorDictBase, key: NestedKey, *, fix: str) -> Tensor:
    """Return the tensor at ``key``, or raise a KeyError that names the entries of the batch."""
    tensor = tensordict.get(key, None)
    if tensor is None:
        raise missing_entry(tensordict, key, fix)
    return tensor


def check_tensordict(batch: object, *, who: str) -> None:
    """Raise a TypeError for another object, such as a dictionary."""
    if not isinstance(batch, TensorDictBase):
        fix = "TensorDict(batch, batch_size=[...])" if isinstance(batch, Mapping) else "a batch"
        raise TypeError(f"{who} needs a TensorDict, got {type(batch).__name__}: pass {fix}.")


def check_critic(network: object) -> None:
    """Raise a TypeError for a network that does not say what it reads of a batch."""
    if network is not None and not hasattr(network, "in_keys"):
        raise TypeError(
            f"The critic is a {type(network).__name__}, and has no in_keys. Wrap it: torchrl's "
            "ValueOperator(network, in_keys=['observation'])."
        )


def takes_tensordict(forward: Method) -> Method:
    """Let a method that dispatches its arguments raise a TypeError for a dictionary."""

    @wraps(forward)
    def checked(self: object, *args: object, **kwargs: object) -> Any:
        if args and isinstance(args[0], dict):
            check_tensordict(args[0], who=type(self).__name__)
        return forward(self, *args, **kwargs)

    return cast("Method", checked)


def missing_entry(tensordict: TensorDictBase, key: NestedKey, fix: str) -> KeyError:
    """Return the error for an entry that is not there."""
    present = ", ".join(sorted(str(k) for k in tensordict.keys(True, True)))
    return KeyError(f"{as_key(key)!r} is not in the batch. {fix} The batch holds: {present}.")


def check_writable(tensordict: TensorDictBase, keys: Iterable[NestedKey], *, who: str) -> None:
    """Raise, before anything is counted, if a block could not write these keys into a batch."""
    check_tensordict(tensordict, who=who)
    for key in keys:
        holder = tensordict
        *outer, _ = key_parts(key)
        for depth, name in enumerate([*outer, None]):
            where = f"The entry {as_key(tuple(outer[:depth]))!r} of the batch"
            if holder is not None and not is_tensor_collection(holder):
                raise ValueError(
                    f"{where} is a {type(holder).__name__}, and {who} writes {as_key(key)!r}: "
                    "rename the entry."
                )
            if holder is not None and holder.is_locked:
                raise RuntimeError(
                    f"{where if depth else 'The batch'} is locked, and {who} writes {as_key(key)!r}"
                    ": unlock_() it, or pass batch.clone(recurse=False)."
                )
            holder = None if holder is None or name is None else holder.get(name, None)


def get_if_any(tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Return the tensor at ``key`` or None: for entries that are seldom there, faster than ``get``.

    The key must be in canonical form. Names are looked up level by level, so that a captured graph
    depends on the absence of an entry.
    """
    first, *others = (key,) if isinstance(key, str) else key
    found: Any = tensordict.get(first) if first in tensordict.keys() else None
    for name in others:
        if not is_tensor_collection(found) or name not in found.keys():
            return None
        found = found.get(name)
    return found


def key_parts(key: NestedKey) -> tuple[str, ...]:
    """Return the names that a key is made of."""
    key = unravel_key(key)
    return (key,) if isinstance(key, str) else key  # pyright: ignore[reportReturnType]


def key_list(keys: NestedKey | list[NestedKey] | None) -> list[NestedKey]:
    """Return the keys of a loss's ``tensor_keys``: one, those of several action heads, or none."""
    if keys is None:
        return []
    return [as_key(key) for key in (keys if isinstance(keys, list) else [keys])]


def time_dim(tensordict: TensorDictBase, *, who: str) -> int:
    """Return the dimension that runs in time order: named "time", or the last of several."""
    if tensordict.batch_size.numel() == 0:
        raise ValueError(f"{who} got an empty batch of shape {list(tensordict.batch_size)}.")
    if "time" in (names := tensordict.names or []):
        return names.index("time")
    if tensordict.ndim >= 2:
        return tensordict.ndim - 1
    raise ValueError(
        f"{who} needs time order, and a batch of shape {list(tensordict.batch_size)} without a "
        'dimension named "time" may be shuffled. Call it before the batch goes through a replay '
        'buffer, name the dimension (batch.names = ["time"]), or pass [B, T].'
    )


def check_time_is_last(tensordict: TensorDictBase, *, who: str) -> None:
    """Raise a ValueError where a dimension named "time" is not the last one."""
    if "time" in (names := tensordict.names or [])[:-1]:
        dim = names.index("time")
        raise ValueError(
            f'The dimension named "time" of a batch of shape {list(tensordict.batch_size)} is '
            f"{dim}; {who} needs it to be the last. Use batch.transpose({dim}, -1)."
        )


def mask_key_of(loss: nn.Module) -> NestedKey | None:
    """Return the key of the mask of valid frames that a loss reads, or None if it reads none."""
    key = getattr(loss, "loss_mask_key", "auto")
    return MASK_KEY if key == "auto" else None if key is None else as_key(key)


def valid_mask(tensordict: TensorDictBase, key: NestedKey | None = MASK_KEY) -> Tensor | None:
    """Return the mask of valid frames, of the shape of the batch, or None if there is none."""
    mask = None if key is None else get_if_any(tensordict, key)
    if mask is None:
        return None
    if mask.dtype is not torch.bool:
        raise TypeError(f"{key!r} has dtype {mask.dtype}; a mask must be torch.bool.")
    if mask.shape == (*tensordict.batch_size, 1):
        mask = mask.squeeze(-1)
    if mask.shape != tensordict.batch_size:
        raise ValueError(
            f"{key!r} has shape {list(mask.shape)}, but the batch has shape "
            f"{list(tensordict.batch_size)}; a mask has one flag for each frame."
        )
    return mask


def last_valid_steps(mask: Tensor, dim: int) -> Tensor:
    """Return True where a step is valid and the one after it is not, or does not exist."""
    after, last = mask.narrow(dim, 1, mask.shape[dim] - 1), mask.narrow(dim, 0, 1)
    return mask & ~torch.cat([after, torch.zeros_like(last)], dim)


def check_trajectories(
    tensordict: TensorDictBase, done: Tensor, dim: int, *, mask: Tensor | None, key: NestedKey
) -> None:
    """Raise where a trajectory id changes although the step before was not done (in any flag).

    Such data is shuffled, or was cut out of a buffer across a seam.
    """
    ids = get_if_any(tensordict, key)
    if ids is None or ids.is_meta or torch.compiler.is_compiling():
        return
    if ids.shape != tensordict.batch_size:
        raise ValueError(
            f"{key!r} has shape {list(ids.shape)}, but the batch has shape "
            f"{list(tensordict.batch_size)}; there is one trajectory id for each frame."
        )
    ends = per_frame(done, tensordict.ndim).movedim(dim, -1).clone()
    ends[..., -1] = True
    # Operations on flat tensors, and any() of bytes, take a tenth of the time.
    ids = ids.movedim(dim, -1).flatten()
    lost = (ids[1:] != ids[:-1]) > ends.flatten()[:-1]
    if mask is not None:
        lost &= mask.movedim(dim, -1).flatten()[1:]
    if lost.view(torch.uint8).any():
        where = [int(x) for x in torch.unravel_index(lost.nonzero()[0], ends.shape)]
        where.insert(dim, where.pop())
        raise ValueError(
            f"{key!r} changes after {where} although that step is not done, in "
            f"{int(lost.sum())} place(s): the batch has lost its time order. Use it before any "
            "shuffling or sampling; from MultiSyncCollector, with cat_results='stack'."
        )


def check_flags(key: NestedKey, flag: Tensor) -> None:
    """Raise unless an entry holds flags."""
    check_bool(repr(key), flag)
    if not flag.numel():
        raise ValueError(f"{key!r} has shape {list(flag.shape)}: it has no flag of a frame.")


def in_parts(batch: TensorDictBase, frames: int | None = None) -> Sequence[TensorDictBase]:
    """Return a batch in parts of so many frames ``[N]``, or as itself if it has no more.

    None: so many that their entries, as float32, stay in a processor's cache.
    """
    if frames is None:
        tensors = [x for x in batch.values(True, True) if isinstance(x, Tensor)]
        held = 4 * sum(x.numel() for x in tensors)
        most = _CACHED if all(x.is_cpu for x in tensors) else 64 * _CACHED
        frames = max(1, most * batch.numel() // max(held, 1))
    return [batch] if frames >= batch.numel() else batch.reshape(-1).split(frames)


def per_frame(flag: Tensor, batch_ndim: int) -> Tensor:
    """Reduce the trailing dimensions of a flag: True where any is."""
    if flag.ndim == batch_ndim + 1 and flag.shape[-1] == 1:
        return flag.squeeze(-1)
    return flag.flatten(batch_ndim).any(-1) if flag.ndim > batch_ndim else flag


def check_shapes(tensors: Mapping[NestedKey, Tensor], *, fix: str | None = None) -> None:
    """Raise unless all tensors have one shape; the message names their keys, and the fix."""
    first, *others = tensors.values()
    for tensor in others:  # a loop that graphs of dynamic shapes can hold
        if tensor.shape != first.shape:
            check_same_shape({repr(as_key(key)): x for key, x in tensors.items()}, fix=fix)


def version_of(policy: Policy) -> Tensor | None:
    """Return a copy of the policy's buffer ``policy_version``, or None."""
    version = getattr(policy, VERSION_KEY, None)
    return version.detach().clone() if isinstance(version, Tensor) else None


def write_policy_version(version: Tensor | None, batch: TensorDictBase) -> TensorDictBase:
    """Write ``"policy_version"`` of each frame, if there is one."""
    if version is not None:
        batch.set(VERSION_KEY, version.expand(batch.batch_size).clone())
    return batch


# -- recurrent networks

STATE_FIX = (
    "A recurrent network reads it, so it must be stored at every step. Collect with GymCollector, "
    "or append InitTracker() and the module's make_tensordict_primer() to the environment; a "
    "recurrent critic must run in the policy, too: TensorDictSequential(critic, actor)."
)


def in_keys_of(module: object) -> Sequence[NestedKey]:
    """Return the keys of the entries that a module reads; none of other objects."""
    return getattr(module, "in_keys", ())


def out_keys_of(module: object) -> Sequence[NestedKey]:
    """Return the keys of the entries that a module writes; none of other objects."""
    return getattr(module, "out_keys", ())


def key_named(module: object, name: str, default: Default = None) -> NestedKey | Default:
    """Return the key in a torchrl module's ``tensor_keys`` of this name, or the default."""
    return getattr(getattr(module, "tensor_keys", None), name, default)


def network_of(module: object, name: str) -> nn.Module | None:
    """Return a network of a loss or an advantage module by its name, or None."""
    network = getattr(module, name, None)
    return network if isinstance(network, nn.Module) else None


def is_functional(loss: nn.Module) -> bool:
    """Return whether a torchrl loss keeps the parameters of its networks apart from them."""
    return getattr(loss, "functional", False)


def is_recurrent(network: nn.Module | None) -> bool:
    """Return whether the network reads episode starts, so that it has a state to reset."""
    return any(is_init(key) for key in in_keys_of(network))


def state_keys(network: nn.Module | None) -> list[NestedKey]:
    """Return the keys of the states that the network reads before a step and writes after it."""
    out_keys = out_keys_of(network)
    return [k for k in in_keys_of(network) if ("next", *key_parts(k)) in out_keys]


def is_private(key: NestedKey) -> bool:
    """Return whether a name begins with an underscore: collectors leave such entries out."""
    return key_parts(key)[-1].startswith("_")


def is_init(key: NestedKey) -> bool:
    """Return whether a key names episode starts."""
    return key_parts(key)[-1] == IS_INIT


def stored_keys(*networks: nn.Module | None) -> list[NestedKey]:
    """Return the keys of the states and episode starts that recurrent networks read."""
    keys: dict[NestedKey, None] = {}
    for network in networks:
        if states := state_keys(network):
            keys |= dict.fromkeys(map(as_key, [*states, *filter(is_init, in_keys_of(network))]))
    return list(keys)


def check_stored(tensordict: TensorDictBase, keys: Sequence[NestedKey]) -> None:
    """Raise unless these states are there; without, torchrl's modules start from zero silently."""
    for key in keys:
        get_tensor(tensordict, key, fix=STATE_FIX)


def recurrent_states(policy: Policy) -> dict[NestedKey, tuple[torch.Size, torch.dtype]]:
    """Return shapes and dtypes of a policy's states: the parameters', not the primer's.

    The memory of a transformer holds inputs, and has their dtype.
    """
    modules: Any = policy.modules() if isinstance(policy, torch.nn.Module) else ()
    found: dict[NestedKey, tuple[torch.Size, torch.dtype]] = {}
    for module in modules:
        if hasattr(module, "make_tensordict_primer"):
            for key, spec in module.make_tensordict_primer().primers.items(True, True):
                own = () if is_of_transformer(key) else module.parameters()
                found[as_key(key)] = spec.shape, next((p.dtype for p in own), spec.dtype)
    return found


def check_not_cut(tensordict: TensorDictBase, *, who: str) -> None:
    """Raise a ValueError for sequences, all of whose frames hold the state of the first one."""
    if get_if_any(tensordict, INDEX_KEY) is not None:
        raise ValueError(
            f"{who} was given sequences of SequenceBatcher, and its frames would begin with the "
            "state of the first one. The order is advantage, then SequenceBatcher, once; "
            "SequenceBatcher.unbatch makes a batch of sequences."
        )


# -- transformers


def is_memory(key: NestedKey) -> bool:
    """Return whether an entry is the memory of a transformer, which is stored once for a row."""
    return key_parts(key)[0].endswith(MEMORY)


def is_of_transformer(key: NestedKey) -> bool:
    """Return whether an entry is the memory of a transformer, or the numbers of its inputs."""
    return key_parts(key)[0].endswith((MEMORY, STEPS))


def memories_in(batch: TensorDictBase) -> list[NestedKey]:
    """Return the entries of a batch with inputs that transformers remember.

    They hold the memory before the first frame of a row ``[*B, T, context, ...]``, which is the
    same at each of its frames, and is stored once.
    """
    groups = [x for x, y in batch.items() if x.endswith(MEMORY) and is_tensor_collection(y)]
    return [as_key((key, *key_parts(x))) for key in groups for x in batch.get(key).keys(True, True)]


def steps_key(memory: NestedKey) -> NestedKey:
    """Return the entry ``[*B, T, 2]`` with the numbers of the inputs in a transformer's memory.

    They are the earlier frames of the episode, and those of the row since the memory was stored.
    """
    return key_parts(memory)[0].removesuffix(MEMORY) + STEPS


def copy_frames(batch: TensorDictBase) -> TensorDictBase:
    """Return a copy of a batch, whose memories of transformers are not copied for each frame."""
    memories = {key: batch.get(key) for key in memories_in(batch)}
    if not memories:
        return batch.clone()
    copy = batch.exclude(*memories).clone()
    for key, memory in memories.items():
        copy.set(key, memory)
    return copy


def memory_at(
    batch: TensorDictBase, memory: NestedKey, places: Tensor, *, after: int = 0
) -> tuple[Tensor, Tensor]:
    """Return a transformer's memory ``[K, context, ...]`` before some frames, or after them.

    ``places`` ``[K]`` are those of the frames in the flattened batch. Inputs come from the earlier
    frames of the row, and from the memory before its first frame. Returned, too, is how many
    inputs the memory of each place has ``[K]``; what is behind them is not to be read.

    Raises:
        KeyError: the batch lacks the inputs, or their number.
        ValueError: the row lacks earlier frames, or the episode is longer than the context.
    """
    of_input, width = as_key(key_parts(memory)[1:]), batch.batch_size[-1]
    steps = get_tensor(batch, steps_key(memory), fix=STATE_FIX).reshape(-1, 2)[places]
    if (starts := get_if_any(batch, IS_INIT)) is not None:
        steps = steps.masked_fill(starts.reshape(-1, 1)[places], 0)
    count, since = (steps + after).unbind(1)
    time = places % width + after
    stored = batch.get(memory)[torch.unravel_index(places, batch.batch_size)]
    check_context(count, context := stored.shape[1])
    if (torch.minimum(count, since) > time).any():
        raise ValueError(
            f"{as_key(memory)!r} is the memory before the first frame of a row, and the batch of "
            f"shape {list(batch.batch_size)} lacks the frames between: it was cut along time. Cut "
            "it with SequenceBatcher, or at episode starts."
        )
    x = get_tensor(batch, of_input, fix="A transformer remembers it.").flatten(0, batch.ndim - 1)
    slots = torch.arange(context, device=places.device)
    count, since = count.unsqueeze(1), since.unsqueeze(1)
    source = (places // width * width + time).unsqueeze(1) - count + slots
    seen = x[source.clamp(0, len(x) - 1)]
    in_row = expand_as_right((slots >= count - since) & (slots < count), seen)
    return torch.where(in_row, seen, stored.to(seen.dtype)), count.squeeze(1)


def check_context(count: Tensor, context: int) -> None:
    """Raise a ValueError if a frame has more earlier frames in its episode than are remembered."""
    if count.numel() and (most := int(count.max())) > context:
        raise ValueError(
            f"A transformer with context={context} remembers {context} frames, and an episode has "
            f"{most} before this one. Pass actor_critic(context=...) the number of steps of the "
            "longest episode (a transformer of your own: max_seq_len, that number plus 1), or end "
            "episodes earlier, by gymnasium's TimeLimit."
        )


def breaks_graphs(*networks: nn.Module | None) -> bool:
    """Return whether networks hold a recurrent module of torchrl's that no graph can hold.

    torch captures no ``nn.LSTM`` or ``nn.GRU``, and torchrl's default backend splits episodes by
    the values of the data. The backends "scan" and "triton" can be captured.
    """
    for module in networks:
        if module is None or (hasattr(module, "graph_weights") and module.graph_weights):
            continue
        if getattr(module, "recurrent_backend", None) in ("pad", "auto"):
            return True
        if breaks_graphs(*module.children()):
            return True
    return False


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules that read states of a batch and write them."""
    inner = [x for child in module.children() for x in _owners(child)]
    own = {*map(as_key, state_keys(module))}
    # With names of its own, a module calls its parts with other entries than those of the batch.
    is_outer = not own or any(own & {*map(as_key, state_keys(x))} for x in inner)
    yield from inner if is_outer else [module]


def check_own_states(*networks: Policy | None) -> None:
    """Raise a ValueError if two modules keep their states under one name."""
    owners: dict[NestedKey, tuple[Sequence[NestedKey], list[int]]] = {}
    for module in (x for net in networks if isinstance(net, nn.Module) for x in _owners(net)):
        outputs: list[NestedKey] = [*out_keys_of(module)]
        weights = [id(parameter) for parameter in module.parameters()]
        for key in map(as_key, state_keys(module)):
            others, of_owner = owners.setdefault(key, (outputs, weights))
            if of_owner != weights:
                raise ValueError(
                    f"Two recurrent modules keep their state at {key!r}, those that write "
                    f"{others[0]!r} and {outputs[0]!r}. Give one of them names of its own, "
                    "such as 'critic_state' and ('next', 'critic_state')."
                )
