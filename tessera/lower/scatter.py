"""scatter_add as one launch, where its dense lowering (every place looks at every update) would be slower."""

from __future__ import annotations

import math

from tessera.ir.core import Node, Value
from tessera.lower.launches import Launch, rules
from tessera.lower.plan import Plan
from tessera.lower.points import shape_of, type_of
from tessera.ops.update import scatter_add
from tessera.stdlib.scatter import specialized
from tessera.types import RefType, f32, f64, int32, int64

# Narrower types sum in a wider one, which memory of theirs cannot hold between two updates.
SUMMED = (f32, f64, int32, int64)
# Up to so many pairs of a place and an update the lowering is as fast, and may be fused.
FEW_PAIRS = 256


@rules(scatter_add)
def _(node: Node, plan: Plan) -> Launch | None:
    x, places, updates = node.args
    shape, at = shape_of(x), node.attrs["axis"] + len(shape_of(x))
    lead, rows, rest = math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :])
    count = math.prod(shape_of(places))
    if 0 in (lead, rows, rest, count) or type_of(x).dtype not in SUMMED or rows * count <= FEW_PAIRS:
        return None
    shapes = ((lead, rows, rest), (count,), (lead, count, rest))
    refs = [_ref(v, s) for v, s in zip((x, places, updates), shapes, strict=True)]
    types = dict(zip(("x", "places", "updates"), refs, strict=True)) | {"out": _ref(node.out, shapes[0])}
    function = specialized(types).functions[1]
    return Launch(function, tuple(function.attrs["grid"]), shapes, shapes[0])


def _ref(value: Value, shape: tuple[int, ...]) -> RefType:
    type = type_of(value)
    return RefType(shape, type.dtype, policy=type.policy)
