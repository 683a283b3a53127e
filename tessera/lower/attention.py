"""Attention as one launch: the flash kernel of the standard library, on refs seen as [batch, heads, length, width]."""

from __future__ import annotations

from typing import Any

from tessera.ir.core import Node, Value
from tessera.lower.launches import Launch, rules
from tessera.lower.plan import Plan
from tessera.lower.points import shape_of, type_of
from tessera.ops import nn
from tessera.stdlib.attention import specialized
from tessera.types import RefType, f32

RANK = 4


LEAST = 16  # rows and columns of the smallest block
DEEP = {64, 128}  # features of heads for which there may be blocks of another size


@rules(nn.scaled_dot_product_attention)
def _(node: Node, plan: Plan) -> Launch | None:
    return _launch(node, plan, turned=False)


@rules(nn.positional_attention)
def _(node: Node, plan: Plan) -> Launch | None:
    return _launch(node, plan, turned=True)


def _launch(node: Node, plan: Plan, turned: bool) -> Launch | None:
    """The flash kernel for a node whose heads stand before positions, or `turned` after them."""
    shapes = [_viewed(shape_of(v)) for v in node.args]
    result = _viewed(shape_of(node.out))
    heads_first = [_swapped(s) if turned and i < 3 else s for i, s in enumerate(shapes)]
    if not _fits(node, heads_first):
        return None
    names = ("q", "k", "v", "mask")
    types = {n: _ref(v, s) for n, v, s in zip(names, node.args, shapes, strict=False)}
    types["out"] = _ref(node.out, result)
    wide = _narrow(node) and not turned and {heads_first[0][3], heads_first[2][3]} <= DEEP
    rows, columns = (plan.flash_deep,) * 2 if wide and plan.flash_deep else (plan.flash_m, plan.flash_n)
    blocks: dict[str, Any] = {"BM": _cut(rows, heads_first[0][2]), "BN": _cut(columns, heads_first[1][2])}
    attrs = {k: v for k, v in node.attrs.items() if k != "weights"}
    module = specialized(types, **attrs, narrow=_narrow(node), turned=turned, **blocks)
    function = module.functions[1]
    return Launch(function, tuple(function.attrs["grid"]), tuple(shapes), result)


def _cut(block: int, length: int) -> int:
    """A block no larger than a power of two that holds the whole length."""
    return min(block, max(LEAST, 1 << (length - 1).bit_length()))


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1], shape[3])


def _fits(node: Node, shapes: list[tuple[int, ...]]) -> bool:
    """Whether the kernel computes this node: its types, ranks and sizes, heads before positions."""
    q, k, v = shapes[:3]
    if any(len(shape_of(x)) > RANK or 0 in shape_of(x) for x in node.args):
        return False
    if any(x.type.dtype != f32 for x in node.args) and not _is_small_float(node):
        return False
    if node.attrs["weights"] not in (f32, node.args[2].type.dtype):
        return False
    batches = q[:2] == k[:2] == v[:2]
    return batches and all(_broadcasts(m, (*q[:3], k[2])) for m in shapes[3:])


def _narrow(node: Node) -> bool:
    """Whether weights are rounded to the type of v."""
    return node.attrs["weights"] != f32


def _is_small_float(node: Node) -> bool:
    dtypes = {x.type.dtype for x in node.args}
    return len(dtypes) == 1 and all(d.is_float and d.bits == 16 for d in dtypes)


def _broadcasts(mask: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """Whether a mask has every key and, along the other axes, everything or one for all."""
    return mask[-1] == scores[-1] and all(m in (1, s) for m, s in zip(mask, scores, strict=True))


def _viewed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of rank 4; a tensor of rank 3 has a batch of one."""
    return (1,) * (RANK - len(shape)) + shape


def _ref(value: Value, shape: tuple[int, ...]) -> RefType:
    type = type_of(value)
    return RefType(shape, type.dtype, policy=type.policy)
