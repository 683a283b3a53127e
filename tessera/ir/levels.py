"""The levels: which functions a module of each may have, and which ops and types may stand where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tessera.op import Op
from tessera.types import RefType, TensorType, Type

# Ops are named, not imported: they are defined above this package.
CONTROL = frozenset(("ts.for", "ts.while", "ts.if"))
FLOW = frozenset(("ts.scan", "ts.cond", "ts.while_loop"))
KERNEL, LAUNCH = "schedule.kernel", "host.launch"
_BLOCK_OPS = ("cast", "full", "broadcast", "reshape", "permute", "iota", "sum", "max", "min", "argmax", "argmin", "dot")
_ON_BLOCKS = CONTROL | {f"ts.{name}" for name in _BLOCK_OPS}
_HOST = frozenset(("host.alloc", "host.view", "host.at", "host.call", "host.loop", "host.while", "host.if", LAUNCH))
_AT_AN_INDEX = frozenset(f"schedule.{name}" for name in ("index", "load", "store", "reduce", "contract")) | {"ts.full"}


@dataclass(frozen=True)
class Place:
    """Somewhere ops stand: its name, the ops and parameters that are legal there, and both in words."""

    name: str
    legal: Callable[[Op], bool]
    ops: str
    takes: Callable[[Type], bool]
    params: str
    returns: bool = False


@dataclass(frozen=True)
class Level:
    """A level: the place that its entry function is, that the other functions are, and that regions of an op are.

    `rules` are the numbers of the checks that a module of this level must pass (see `verifier`).
    """

    name: str
    entry: Place
    rules: tuple[str, ...]
    others: Place | None = None
    regions: Mapping[str, Place] = field(default_factory=dict)


def _is_tensor(type: Type) -> bool:
    return isinstance(type, TensorType)


def _is_ref_or_scalar(type: Type) -> bool:
    return isinstance(type, RefType) or not type.shape


_TENSORS = Place(
    "a graph function",
    lambda op: op.name.startswith("ts."),
    "ts ops",
    _is_tensor,
    "tensors",
    returns=True,
)
_TILE = Place(
    "a tile function",
    lambda op: op.pointwise or op.name in _ON_BLOCKS or op.name.startswith(("tile.", "mesh.")),
    f"pointwise ops, {', '.join(_BLOCK_OPS)}, for, while, if, tile ops and mesh ops",
    _is_ref_or_scalar,
    "refs and scalars",
)
_LAUNCHES = Place(
    "the entry function of a tile module",
    lambda op: op.name in _HOST,
    ", ".join(sorted(_HOST)),
    _is_ref_or_scalar,
    "refs and scalars",
)
_KERNELS = Place(
    "the entry function of a schedule module",
    lambda op: op.name in _HOST or op.name == KERNEL,
    ", ".join(sorted({*_HOST, KERNEL})),
    _is_ref_or_scalar,
    "refs and scalars",
)
_BODY = Place(
    "the body of a schedule.kernel",
    lambda op: op.pointwise or op.name in _AT_AN_INDEX,
    f"pointwise ops and {', '.join(sorted(_AT_AN_INDEX))}",
    lambda type: isinstance(type, RefType),
    "refs",
)

# V1 first, since the others follow values; V7 and V4 before V2, whose type rules are called with attributes.
_ALL = ("V1", "V7", "V3", "V4", "V2", "V6")
LEVELS: Mapping[str, Level] = {
    "graph": Level("graph", _TENSORS, _ALL),
    "schedule": Level("schedule", _KERNELS, (*_ALL, "V5", "V8"), _TILE, {KERNEL: _BODY}),
    "tile": Level("tile", _LAUNCHES, (*_ALL, "V5", "V8"), _TILE),
}
