"""Exclusive scans in a Graph function: what a constant and a running sum or product say together.

A program has no op for them. It may shift the elements and scan them, or scan all but the last element and put the
neutral number before; from the last element on, one flip is before the scan and one behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import elementwise, reduce, shape
from tessera.ops.tensor.basic import broadcast_to, full
from tessera.stdlib.row_scans import find_neutral

EXCLUSIVE = {reduce.cumsum: "sum", reduce.cumprod: "prod"}


@dataclass(frozen=True)
class ExclusiveScan:
    """A scan of the elements of `source` before each one, or after each one if `reverse`, from `initial` on."""

    scan: Node
    source: Value
    initial: Any
    reverse: bool = False


def match_shifted(uses: UseDef, node: Node) -> ExclusiveScan | None:
    """A sum or product of elements that a constant precedes, without the last one."""
    cut = uses.find(node.args[0], shape.slice_) if node.op in EXCLUSIVE else None
    joined = uses.find(cut.args[0], shape.concatenate) if cut is not None else None
    if cut is None or joined is None or len(joined.args) != 2 or any(n != 1 for n in cut.attrs["step"]):
        return None
    first, x = joined.args
    value, axis = find_constant(uses, first), node.attrs["axis"] % len(get_shape(x))
    shifted = joined.attrs["axis"] % len(get_shape(x)) == axis and get_shape(first)[axis] == 1
    whole = not any(cut.attrs["start"]) and get_shape(x) == get_shape(node.out)
    return ExclusiveScan(node, x, value) if value is not None and shifted and whole else None


def match_preceded(uses: UseDef, joined: Node, flipped: bool = False) -> ExclusiveScan | None:
    """The neutral number before the scan of all elements but the last one, or behind such a scan in the other
    direction. `flipped`: of the elements in the opposite order."""
    if len(joined.args) != 2 or get_tensor_type(joined.out).policy is not None:
        return None
    axis = joined.attrs["axis"] % len(get_shape(joined.out))
    for (first, rest), behind in ((joined.args, False), (joined.args[::-1], True)):
        value = find_constant(uses, first)
        found = _match_rest(uses, rest, axis, behind, flipped) if value is not None else None
        if found is None or get_shape(first)[axis] != 1 or get_shape(found.source) != get_shape(joined.out):
            continue
        if value == find_neutral(EXCLUSIVE[found.scan.op], get_tensor_type(joined.out).dtype):
            return ExclusiveScan(found.scan, found.source, value, found.reverse)
    return None


def _match_rest(uses: UseDef, value: Value, axis: int, turned: bool, flipped: bool) -> ExclusiveScan | None:
    """A scan without the last element that it reaches, whose result is flipped if `turned`: its operand is cut or its
    result. Nothing else may use what is between it and its source."""
    scan, now = None, False  # `now`: whether there was an odd number of flips so far
    cuts: list[str | None] = []
    while scan is None or not cuts or now != flipped:
        node = uses.find(value, shape.slice_, shape.gather, *EXCLUSIVE)
        if node is None or uses.count_uses(value) > 1 or len(cuts) > 1:
            return None
        value = node.args[0]
        if node.op is shape.slice_:
            cuts.append(find_left_out(node, axis) if now == turned else _turn(find_left_out(node, axis)))
        elif node.attrs["axis"] % len(get_shape(value)) != axis:
            return None
        elif node.op is not shape.gather:
            if scan is not None or now != turned:
                return None
            scan = node
        elif is_flip(uses, node):
            now = not now
        else:
            return None
    return ExclusiveScan(scan, value, None, turned != flipped) if cuts == ["last"] else None


def find_left_out(cut: Node, axis: int) -> str | None:
    """The element along an axis that a slice leaves out and no other: the first or the last one."""
    sizes, kept = list(get_shape(cut.args[0])), list(get_shape(cut.out))
    kept[axis] = kept[axis] + 1
    if sizes != kept or any(n != 1 for n in cut.attrs["step"]):
        return None
    return "last" if cut.attrs["start"][axis] == 0 else "first"


def _turn(end: str | None) -> str | None:
    return {"first": "last", "last": "first", None: None}[end]


def is_flip(uses: UseDef, node: Node) -> bool:
    """Whether the indices of a gather are those of its axis in the opposite order."""
    size, count = get_shape(node.args[0])[node.attrs["axis"]], uses.find(node.args[1], elementwise.sub)
    if count is None or get_shape(node.args[1]) != (size,):
        return False
    last, place = count.args
    spread = uses.find(last, broadcast_to)
    value = uses.find(spread.args[0] if spread is not None else last, full)
    return value is not None and value.attrs["value"] == size - 1 and uses.find(place, shape.iota) is not None


def find_constant(uses: UseDef, value: Value) -> Any:
    """The number that all elements of a tensor are, or None."""
    node = uses.find(value, broadcast_to, shape.reshape, full)
    while node is not None and node.op is not full:
        node = uses.find(node.args[0], broadcast_to, shape.reshape, full)
    return node.attrs["value"] if node is not None else None
