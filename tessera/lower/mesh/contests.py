"""Where the largest or smallest element is: the extreme over all pieces, then the first place that holds it."""

from __future__ import annotations

from tessera.ir.core import Value
from tessera.lower.mesh.lowering import Lowering
from tessera.lower.mesh.pieces import CONSTANT, tensor
from tessera.lower.mesh.rules import identity, joined, rules
from tessera.ops import basic, reduce
from tessera.ops import elementwise as e
from tessera.ops.mesh import WHOLE
from tessera.types import bool_, int32

_EXTREME = {reduce.argmax: reduce.max, reduce.argmin: reduce.min}


@rules(*_EXTREME)
def _(lowering, node, x):
    axis, best = node.attrs["axis"] % x.type.rank, _EXTREME[node.op]
    split = list(lowering.settle(x))
    split[axis] = WHOLE if split[axis] == CONSTANT else split[axis]
    kind, cut, type = best.__name__, split[axis], x.type
    value = lowering.filled(x, tuple(split), axis, identity(kind, type))
    if type.dtype == bool_:
        value = lowering.add(basic.cast, value, dtype=int32)
    extreme = lowering.add(best, value, axis=(axis - type.rank,), keepdims=True)
    extreme = lowering.repeated(joined(lowering, extreme, [cut], kind), tensor(value))
    places = lowering.repeated(lowering.places(tensor(value), axis, cut, int32), tensor(value).with_dtype(int32))
    none = lowering.full(tensor(places), int(type.shape[axis]))
    first = lowering.add(e.where, _same(lowering, value, extreme), places, none)
    found = lowering.add(reduce.min, first, axis=(axis - type.rank,), keepdims=node.attrs["keepdims"])
    found = lowering.add(basic.cast, joined(lowering, found, [cut], "min"), dtype=node.out.type.dtype)
    kept = [CONSTANT if a == axis else s for a, s in enumerate(split) if a != axis or node.attrs["keepdims"]]
    return lowering.hold(node, tuple(kept), found)


def _same(lowering: Lowering, x: Value, y: Value) -> Value:
    """Where two blocks hold the same; NaNs are the same."""
    equal = lowering.add(e.equal, x, y)
    if not tensor(x).dtype.is_float:
        return equal
    both = [lowering.add(e.not_equal, v, v) for v in (x, y)]
    return lowering.add(e.bitwise_or, equal, lowering.add(e.bitwise_and, *both))
