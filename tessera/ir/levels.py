"""IR levels: the functions that a module of each level may have, and the ops and types that are legal in each scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tessera.core.types import RefType, TensorType, Type
from tessera.ir.rules import Op

# Ops of one target alone, which its passes introduce; a generator fills this in when it is imported.
TARGET_OPS: dict[str, Op] = {}
# Ops are named, not imported: they are defined above this package.
CONTROL_OPS = frozenset(("ts.for", "ts.while", "ts.if"))
GRAPH_LAUNCH_OP = "ts.launch"
FLOW_OPS = frozenset(("ts.scan", "ts.cond", "ts.while_loop", GRAPH_LAUNCH_OP))  # their regions are closed
KERNEL_OP, LAUNCH_OP = "schedule.kernel", "host.launch"
_BLOCK_OPS = (
    "cast",
    "full",
    "broadcast",
    "reshape",
    "permute",
    "iota",
    "dim_value",
    "sum",
    "max",
    "min",
    "argmax",
    "argmin",
    "dot",
)
_BLOCK_OP_NAMES = CONTROL_OPS | {f"ts.{name}" for name in _BLOCK_OPS}
_HOST_OPS = frozenset(
    (
        "host.alloc",
        "host.view",
        "host.at",
        "host.call",
        "host.start",
        "host.wait",
        "host.loop",
        "host.while",
        "host.if",
        LAUNCH_OP,
    )
)
_POINT_OPS = frozenset(f"schedule.{name}" for name in ("index", "load", "store", "reduce", "contract")) | {
    "ts.full",
    "ts.dim_value",
}


@dataclass(frozen=True)
class LegalityScope:
    """A scope of a level: its name, the ops and parameters that are legal in it, and both in words."""

    name: str
    legal: Callable[[Op], bool]
    ops: str
    takes: Callable[[Type], bool]
    params: str
    returns: bool = False


@dataclass(frozen=True)
class IrLevel:
    """A level: the scopes of its entry function, of its other functions, and of the regions of ops.

    `rules` are the numbers of the checks that a module of this level must pass (see `verifier`).
    """

    name: str
    entry: LegalityScope
    rules: tuple[str, ...]
    others: LegalityScope | None = None
    regions: Mapping[str, LegalityScope] = field(default_factory=dict)


def _is_tensor(type: Type) -> bool:
    return isinstance(type, TensorType)


def _is_ref_or_scalar(type: Type) -> bool:
    return isinstance(type, RefType) or not type.shape


_GRAPH_FUNCTION = LegalityScope(
    "a graph function",
    lambda op: op.name.startswith("ts."),
    "ts ops",
    _is_tensor,
    "tensors",
    returns=True,
)
_TILE_FUNCTION = LegalityScope(
    "a tile function",
    lambda op: (
        (op.pointwise and op.name not in TARGET_OPS)
        or op.name in _BLOCK_OP_NAMES
        or op.name.startswith(("tile.", "mesh."))
    ),
    f"pointwise ops, {', '.join(_BLOCK_OPS)}, for, while, if, tile ops and mesh ops",
    _is_ref_or_scalar,
    "refs and scalars",
)
_TILE_ENTRY = LegalityScope(
    "the entry function of a tile module",
    lambda op: op.name in _HOST_OPS,
    ", ".join(sorted(_HOST_OPS)),
    _is_ref_or_scalar,
    "refs and scalars",
)
_SCHEDULE_ENTRY = LegalityScope(
    "the entry function of a schedule module",
    lambda op: op.name in _HOST_OPS or op.name == KERNEL_OP,
    ", ".join(sorted({*_HOST_OPS, KERNEL_OP})),
    _is_ref_or_scalar,
    "refs and scalars",
)
_KERNEL_BODY = LegalityScope(
    "the body of a schedule.kernel",
    lambda op: op.pointwise or op.name in _POINT_OPS,
    f"pointwise ops and {', '.join(sorted(_POINT_OPS))}",
    lambda type: isinstance(type, RefType),
    "refs",
)

# V1 first, since the others follow values; V7 and V4 before V2, whose type rules are called with attributes.
_COMMON_RULES = ("V1", "V7", "V3", "V4", "V2", "V6")
LEVELS: dict[str, IrLevel] = {
    "graph": IrLevel("graph", _GRAPH_FUNCTION, _COMMON_RULES, regions={GRAPH_LAUNCH_OP: _TILE_FUNCTION}),
    "schedule": IrLevel(
        "schedule", _SCHEDULE_ENTRY, (*_COMMON_RULES, "V5", "V8"), _TILE_FUNCTION, {KERNEL_OP: _KERNEL_BODY}
    ),
    "tile": IrLevel("tile", _TILE_ENTRY, (*_COMMON_RULES, "V5", "V8"), _TILE_FUNCTION),
}


def define_target_level(target: str) -> None:
    """A level below Tile: its functions may hold Tile ops and the ops of this target, named `<target>.*`."""
    scope = LegalityScope(
        f"a {target} function",
        lambda op: op.name.startswith(f"{target}.") or _TILE_FUNCTION.legal(op),
        f"{_TILE_FUNCTION.ops}, and {target} ops",
        _is_ref_or_scalar,
        "refs and scalars",
    )
    LEVELS[target] = IrLevel(target, _TILE_ENTRY, LEVELS["tile"].rules, scope)
