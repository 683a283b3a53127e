"""Op chains: sequences of ops by name, each of which uses the result of the one before it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cache

from tessera.core.errors import ArgumentError, UnknownNameError, user_location
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import REGISTRY
from tessera.ops.tensor import basic, shape

# Ops that compute nothing: a chain goes through them.
VIEW_OPS = (basic.broadcast_to, shape.reshape, shape.permute, basic.recompute, basic.fusion_barrier)
CONSTANT_OPS = (basic.full, basic.dim_value, shape.iota)

# Names of functions and of other frameworks: the ops that a trace has of them, the longest form first.
_AFFINE_NORM = (("normalize", "mul", "add"), ("normalize", "mul"), ("normalize",))
SPELLINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("layernorm", "layer_norm", "rms_norm", "rmsnorm"), _AFFINE_NORM),
    **dict.fromkeys(("matmul", "mm", "bmm", "gemm"), (("dot",),)),
    "linear": (("dot", "add"), ("dot",)),
    **dict.fromkeys(
        ("attention", "flash_attention"), (("scaled_dot_product_attention",), ("positional_attention",))
    ),
    **dict.fromkeys(("bias", "bias_add", "residual"), (("add",),)),
    "conv2d": (("im2col", "dot"), ("dot",)),
    **{name: ((op,),) for name, op in (("divide", "div"), ("multiply", "mul"), ("subtract", "sub"))},
}  # fmt: skip


@cache
def find_spellings(name: str) -> tuple[tuple[str, ...], ...]:
    """The sequences of ops that a name stands for.

    Raises:
        UnknownNameError: no op has this name.
    """
    plain = name.removeprefix("ts.")
    if f"ts.{plain}" in REGISTRY and plain not in SPELLINGS:
        return ((plain,),)
    if plain in SPELLINGS:
        return SPELLINGS[plain]
    names = [*SPELLINGS, *(n.removeprefix("ts.") for n in REGISTRY if n.startswith("ts."))]
    close = difflib.get_close_matches(plain, names, 1)
    raise UnknownNameError(
        f'there is no op "{name}"', location=user_location(), expected="the name of an op, as in tessera inspect",
        received=name, suggestion=f"did you mean {close[0]}?" if close else None,
    )  # fmt: skip


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """A chain of names, each of which is that of an op.

    Raises:
        ArgumentError: it is empty, or holds something else than names.
        UnknownNameError: no op has one of the names.
    """
    if isinstance(names, str) or not names or not all(isinstance(n, str) for n in names):
        raise ArgumentError(
            "a chain of ops is a list of their names", location=user_location(), expected='["matmul", "add", "relu"]',
            received=repr(names),
        )  # fmt: skip
    for name in names:
        find_spellings(name)
    return tuple(names)


def strip_views(value: Value, uses: UseDef) -> Value:
    """The value below a chain of views."""
    while (node := uses.get(value)) is not None and node.op in VIEW_OPS:
        value = node.args[0]
    return value


def find_users(value: Value, uses: UseDef) -> Iterator[Node]:
    """The nodes that use a value, directly or through views."""
    for node in uses.users(value):
        if node.op in VIEW_OPS:
            yield from find_users(node.out, uses)
        else:
            yield node


def match_chain(names: Sequence[str], first: Node, uses: UseDef) -> list[Node] | None:
    """The nodes of a chain that starts at a node, in order; None where it does not match."""
    for ops in _list_sequences(tuple(names)):
        nodes = _match_ops(ops, first, uses)
        if nodes is not None:
            return nodes
    return None


@cache
def _list_sequences(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The sequences of op names that a chain stands for, the longest forms first."""
    if not names:
        return ((),)
    rest = _list_sequences(names[1:])
    return tuple((*form, *tail) for form in find_spellings(names[0]) for tail in rest)


def _match_ops(ops: tuple[str, ...], first: Node, uses: UseDef) -> list[Node] | None:
    if first.op.name != f"ts.{ops[0]}":
        return None
    nodes = [first]
    for op in ops[1:]:
        users = find_users(nodes[-1].out, uses) if len(nodes[-1].results) == 1 else iter(())
        node = next((u for u in users if u.op.name == f"ts.{op}" and not u.regions), None)
        if node is None:
            return None
        nodes.append(node)
    return nodes
