"""scatter_add as one launch of an atomic kernel, where its dense lowering would be slower."""

from __future__ import annotations

import math

from tessera.core.types import RefType, f32, f64, int32, int64
from tessera.ir.core import Node, Value
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.lowering_plan import LibraryLaunch, LoweringPlan, library_rules
from tessera.ops.tensor.scatter import scatter_add
from tessera.stdlib.deterministic_reductions import specialise_scatter

# Narrower types sum in a wider one, which memory of theirs cannot hold between two updates.
ATOMIC_DTYPES = (f32, f64, int32, int64)
# Up to so many pairs of a place and an update the lowering is as fast, and may be fused.
MAX_DENSE_PAIRS = 256


@library_rules(scatter_add)
def _(node: Node, plan: LoweringPlan) -> LibraryLaunch | None:
    x, places, updates = node.args
    shape, at = get_shape(x), node.attrs["axis"] + len(get_shape(x))
    lead, rows, rest = math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :])
    count = math.prod(get_shape(places))
    if (
        0 in (lead, rows, rest, count)
        or get_tensor_type(x).dtype not in ATOMIC_DTYPES
        or rows * count <= MAX_DENSE_PAIRS
    ):
        return None
    shapes = ((lead, rows, rest), (count,), (lead, count, rest))
    refs = [_make_ref(v, s) for v, s in zip((x, places, updates), shapes, strict=True)]
    types = dict(zip(("x", "places", "updates"), refs, strict=True)) | {"out": _make_ref(node.out, shapes[0])}
    function = specialise_scatter(types).functions[1]
    return LibraryLaunch(function, tuple(function.attrs["grid"]), shapes, shapes[0])


def _make_ref(value: Value, shape: tuple[int, ...]) -> RefType:
    type = get_tensor_type(value)
    return RefType(shape, type.dtype, policy=type.policy)
