"""What each Graph op is at one index."""

from __future__ import annotations

from tessera.lower.affine import add, const
from tessera.lower.body import compute
from tessera.lower.points import POINTWISE, inside, shape_of
from tessera.op import ACCUMULATE
from tessera.ops import basic, linalg, reduce, schedule, shape
from tessera.ops import elementwise as e
from tessera.ops.recompute import recompute
from tessera.types import TensorType


def _scalar(value) -> TensorType:
    """The type of one element."""
    return value.type.with_shape(())


@compute(*POINTWISE)
def _(pull, node, point):
    args = pull.operands(node, point)
    return pull.builder.add(node.op, args, node.attrs, types=(_scalar(node.out),)).out


@compute(basic.full)
def _(pull, node, point):
    return pull.add(basic.full, [], shape=(), value=node.attrs["value"], dtype=node.attrs["dtype"])


@compute(shape.iota)
def _(pull, node, point):
    return pull.cast(pull.index(point.indices[node.attrs["axis"]]), node.attrs["dtype"])


@compute(shape.permute, shape.slice_, basic.broadcast_to, recompute)
def _(pull, node, point):
    return pull.operands(node, point)[0]


@compute(shape.reshape)
def _(pull, node, point):
    # Memory in row-major order has any shape with as many elements.
    if pull.is_leaf(node.args[0]):
        return pull.load(node.args[0], shape_of(node.out), point)
    return pull.operands(node, point)[0]


@compute(shape.pad)
def _(pull, node, point):
    (x,) = pull.operands(node, point)
    (at,) = pull.cluster.operands(node, point)
    guards = [g for i, n in zip(at.indices, shape_of(node.args[0]), strict=True) for g in inside(i, n)]
    if not guards:
        return x
    value = pull.add(basic.full, [], shape=(), value=node.attrs["value"], dtype=x.type.dtype)
    return pull.add(e.where, [pull.guard(guards), x, value])


@compute(shape.concatenate)
def _(pull, node, point):
    axis, start = node.attrs["axis"], 0
    parts = pull.operands(node, point)
    total = None
    for part, operand in zip(parts, node.args, strict=True):
        size = shape_of(operand)[axis]
        guards = inside(add(point.indices[axis], const(-start)), size)
        start += size
        if not size:
            continue
        total = part if total is None or not guards else pull.add(e.where, [pull.guard(guards), part, total])
    return total


@compute(shape.gather)
def _(pull, node, point):
    x, _ = pull.operands(node, point)
    return x


@compute(reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
def _(pull, node, point):
    (x,) = pull.operands(node, point)
    dims = pull.cluster.reduced[node.out]
    result = node.out.type.dtype
    if node.op is reduce.sum and not result.is_float:
        x = pull.cast(x, result)
    elif node.op.numerics == ACCUMULATE and len(dims) > 1:
        x = pull.cast(x, x.type.accumulate)
    for dim in dims:
        x = pull.add(schedule.reduce, [x], kind=node.op.__name__, dim=pull.place[dim])
    return pull.cast(x, result)


@compute(linalg.dot)
def _(pull, node, point):
    (dim,) = pull.cluster.reduced[node.out]
    args = pull.operands(node, point)
    return pull.add(schedule.contract, args, dim=pull.place[dim], dtype=node.attrs["dtype"])
