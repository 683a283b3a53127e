"""Collectives: ops by which the ranks of an SPMD program exchange tensors (MPI), with their derivatives and batching.

Every rank runs the same op on its own tensor. `groups` lists the ranks that communicate, as XLA's replica groups do:
each rank is in one group, and the order within a group is the order of parts. A derivative is that of the linear map
from the tensors of all ranks to the results of all ranks: `all_gather` and `reduce_scatter` are transposes of each
other. The host executes a collective between the kernels of a program, at every level and on every target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.hooks import exchange, find_rank_in_groups
from tessera.core.shapes import normalize_axis
from tessera.core.types import TensorType
from tessera.ir.rules import STORAGE, Op, batch, jvp, op, transpose
from tessera.ir.tensor import bind_op
from tessera.ops.tensor.basic import cast, coerce_plain, linear_jvp, splat
from tessera.ops.tensor.elementwise import equal, greater, where
from tessera.ops.tensor.reduce import prod
from tessera.ops.tensor.shape import expand_dims

REDUCTIONS = ("sum", "mean", "max", "min", "prod")
LINEAR_REDUCTIONS = ("sum", "mean")
COMMUNICATION = ("host", "collective")
LOCAL = ("host",)  # the result depends on the rank alone: nothing is sent
# Declarations of ops that move elements as they are stored, with and without communication.
exchange_op = functools.partial(op, coerce=coerce_plain, numerics=STORAGE, effects=COMMUNICATION)
local_op = functools.partial(op, coerce=coerce_plain, numerics=STORAGE, effects=LOCAL)


def check_reduction(kind: str, x: TensorType, kinds: tuple[str, ...] = REDUCTIONS) -> None:
    """Refuse a reduction that is none, or not defined for the elements.

    Raises:
        ArgumentError: there is no such reduction here.
        DTypeError: the mean of integers, or arithmetic on bools.
    """
    if kind not in kinds:
        raise ArgumentError(f"there is no reduction {kind!r} here", expected=", ".join(kinds), received=repr(kind))
    if (kind == "mean" and not x.dtype.is_float) or (x.dtype.kind == "bool" and kind in ("sum", "prod")):
        raise DTypeError(
            f"{kind} over ranks is not defined for {x.dtype}", expected="floats" if kind == "mean" else "numbers",
            received=str(x), suggestion="cast first with .to(ts.f32)",
        )  # fmt: skip


def _group_size(groups: tuple) -> int:
    return len(groups[0])


def _scale_axis(x: TensorType, axis: int, groups: tuple) -> TensorType:
    at = axis + x.rank
    return x.with_shape((*x.shape[:at], x.shape[at] * _group_size(groups), *x.shape[at + 1 :]))


def _divide_axis(x: TensorType, axis: int, groups: tuple) -> TensorType:
    at, count = axis + x.rank, _group_size(groups)
    size = x.shape[at]
    if isinstance(size, int) and size % count:
        raise ShapeError(
            f"axis {at} of size {size} has no {count} equal parts", expected=f"a multiple of {count}",
            received=str(x), suggestion="pad it to a multiple, or use a mesh axis that divides it",
        )  # fmt: skip
    return x.with_shape((*x.shape[:at], size // count, *x.shape[at + 1 :]))


def _canonicalise_axis(x: TensorType, *, axis: int, **attrs: Any) -> dict[str, Any]:
    if not x.rank:
        raise ShapeError("a scalar has no axis of parts", received=str(x), suggestion="ts.reshape(x, shape=(1,))")
    return {"axis": normalize_axis(axis, x.rank), **attrs}


# Reductions.


def _infer_all_reduce(x: TensorType, *, kind: str, groups: tuple, site: str) -> TensorType:
    check_reduction(kind, x)
    return x


@exchange_op(infer=_infer_all_reduce)
def all_reduce(x: Any, *, kind: str, groups: tuple, site: str = "") -> Any:
    """The elementwise `kind` ("sum", "mean", "max", "min", "prod") over the ranks of a group, for each of them.

    Shapes: that of `x`. 16-bit floats and narrower are reduced in f32 and rounded once.
    """
    return exchange("all_reduce", x, {"kind": kind, "groups": groups}, site)


def _infer_reduce_scatter(x: TensorType, *, axis: int, kind: str, groups: tuple, site: str) -> TensorType:
    check_reduction(kind, x, LINEAR_REDUCTIONS)
    return _divide_axis(x, axis, groups)


@exchange_op(infer=_infer_reduce_scatter, canonical=_canonicalise_axis)
def reduce_scatter(x: Any, *, axis: int, kind: str, groups: tuple, site: str = "") -> Any:
    """This rank's part along `axis` of the sum or mean over the ranks of its group."""
    return exchange("reduce_scatter", x, {"axis": axis, "kind": kind, "groups": groups}, site)


def _infer_rooted(x: TensorType, *, root: int, groups: tuple, site: str) -> TensorType:
    return x


@exchange_op(infer=_infer_rooted)
def reduce_to(x: Any, *, root: int, groups: tuple, site: str = "") -> Any:
    """The sum over the ranks of a group at its member number `root`; zeros at the others."""
    return exchange("reduce_to", x, {"root": root, "groups": groups}, site)


@exchange_op(infer=_infer_rooted)
def broadcast_from(x: Any, *, root: int, groups: tuple, site: str = "") -> Any:
    """The tensor of member number `root` of a group, for each member."""
    return exchange("broadcast_from", x, {"root": root, "groups": groups}, site)


# Parts of an axis.


@exchange_op(infer=lambda x, *, axis, groups, site: _scale_axis(x, axis, groups), canonical=_canonicalise_axis)
def all_gather(x: Any, *, axis: int, groups: tuple, site: str = "") -> Any:
    """The tensors of a group's ranks, concatenated along `axis` in the order of the group, for each of them."""
    return exchange("all_gather", x, {"axis": axis, "groups": groups}, site)


@exchange_op(infer=lambda x, *, axis, root, groups, site: _divide_axis(x, axis, groups), canonical=_canonicalise_axis)
def scatter_from(x: Any, *, axis: int, root: int, groups: tuple, site: str = "") -> Any:
    """This rank's part along `axis` of the tensor of member number `root`."""
    return exchange("scatter_from", x, {"axis": axis, "root": root, "groups": groups}, site)


@exchange_op(infer=lambda x, *, axis, root, groups, site: _scale_axis(x, axis, groups), canonical=_canonicalise_axis)
def gather_to(x: Any, *, axis: int, root: int, groups: tuple, site: str = "") -> Any:
    """The tensors of a group's ranks, concatenated along `axis`, at member number `root`; zeros at the others."""
    return exchange("gather_to", x, {"axis": axis, "root": root, "groups": groups}, site)


def _infer_all_to_all(x: TensorType, *, split: int, join: int, groups: tuple, site: str) -> TensorType:
    return _scale_axis(_divide_axis(x, split, groups), join, groups)


def _canonicalise_all_to_all(x: TensorType, *, split: int, join: int, **attrs: Any) -> dict[str, Any]:
    first = _canonicalise_axis(x, axis=split)["axis"]
    return {"split": first, "join": normalize_axis(join, x.rank), **attrs}


@exchange_op(infer=_infer_all_to_all, canonical=_canonicalise_all_to_all)
def all_to_all(x: Any, *, split: int, join: int, groups: tuple, site: str = "") -> Any:
    """Part number j of each rank along the axis `split` goes to member j, which concatenates its parts along `join`."""
    return exchange("all_to_all", x, {"split": split, "join": join, "groups": groups}, site)


def _infer_permute(x: TensorType, *, pairs: tuple, groups: tuple, site: str) -> TensorType:
    for side in (0, 1):
        ends = [p[side] for p in pairs]
        if len(set(ends)) != len(ends):
            raise ArgumentError(
                "two tensors of a permutation have one end", expected="each rank sends and receives at most once",
                received=str(pairs),
            )  # fmt: skip
    return x


@exchange_op(infer=_infer_permute)
def collective_permute(x: Any, *, pairs: tuple, groups: tuple, site: str = "") -> Any:
    """The tensor of the rank that `pairs` of (source, destination) send here; zeros where none does."""
    return exchange("collective_permute", x, {"pairs": pairs, "groups": groups}, site)


# Parts without communication.


@local_op(infer=lambda x, *, axis, groups: _divide_axis(x, axis, groups), canonical=_canonicalise_axis)
def local_part(x: Any, *, axis: int, groups: tuple) -> Any:
    """This rank's part of a tensor along `axis`; nothing is sent."""
    return np.split(x, _group_size(groups), axis)[find_rank_in_groups(groups)]


@local_op(infer=lambda x, *, axis, groups: _scale_axis(x, axis, groups), canonical=_canonicalise_axis)
def place_part(x: Any, *, axis: int, groups: tuple) -> Any:
    """Zeros with `x` in this rank's place along `axis`: the transpose of `local_part`; nothing is sent."""
    parts = [np.zeros_like(x)] * _group_size(groups)
    parts[find_rank_in_groups(groups)] = x
    return np.concatenate(parts, axis)


# Messages between two ranks.


@exchange_op(infer=lambda x, *, to, tag, site: x)
def send(x: Any, *, to: int, tag: int = 0, site: str = "") -> Any:
    """`x` itself, after it was sent to the rank `to`."""
    return exchange("send", x, {"to": to, "tag": tag}, site)


@exchange_op(infer=lambda x, *, source, tag, site: x)
def receive(x: Any, *, source: int, tag: int = 0, site: str = "") -> Any:
    """The tensor of the type of `x` that the rank `source` sent with this tag."""
    return exchange("receive", x, {"source": source, "tag": tag}, site)


COMMUNICATING = (
    all_reduce, reduce_scatter, reduce_to, broadcast_from, all_gather, scatter_from, gather_to, all_to_all,
    collective_permute, local_part, place_part, send, receive,
)  # fmt: skip
# The ops that an engine may run in the memory of a device.
EXCHANGES = frozenset(each.name for each in COMMUNICATING)
# Collectives of a whole group, which may be started before their results are needed.
ASYNCHRONOUS = frozenset(each.name for each in COMMUNICATING if each not in (local_part, place_part, send, receive))
# Messages between two ranks: a program's order of them and of collectives is what the other ranks rely on.
MESSAGES = frozenset((send.name, receive.name))


# Derivatives: most collectives are linear, and come in pairs of transposes.


for _op in (
    reduce_scatter, reduce_to, broadcast_from, all_gather, scatter_from, gather_to, all_to_all, collective_permute,
    local_part, place_part,
):  # fmt: skip
    jvp(_op)(linear_jvp(_op))


@jvp(all_reduce)
def _(out, primals, tangents, *, kind, groups, site):
    (x,), (t,) = primals, tangents

    def total(value):
        return all_reduce(value, kind="sum", groups=groups, site=site)

    if kind in LINEAR_REDUCTIONS:
        return all_reduce(t, kind=kind, groups=groups, site=site)
    if kind == "prod":
        return total(t * _product_of_others(x, groups, site))
    chosen = cast(equal(x, out), dtype=x.dtype)  # the gradient of a tied maximum is shared evenly
    return total(t * chosen) / total(chosen)


def _product_of_others(x: Any, groups: tuple, site: str) -> Any:
    """The product of the tensors of a group's other ranks."""
    row = expand_dims(x, 0)
    own = place_part(splat(1, row.type), axis=0, groups=groups)
    gathered = all_gather(row, axis=0, groups=groups, site=site)
    return prod(where(greater(own, 0.0), splat(1, gathered.type), gathered), axis=0)


@transpose(all_reduce)
def _(g, x, *, kind, groups, site):
    return (all_reduce(g, kind=kind, groups=groups, site=site),)


@transpose(reduce_scatter)
def _(g, x, *, axis, kind, groups, site):
    if kind == "mean":
        g = g / float(_group_size(groups))
    return (all_gather(g, axis=axis, groups=groups, site=site),)


@transpose(all_gather)
def _(g, x, *, axis, groups, site):
    return (reduce_scatter(g, axis=axis, kind="sum", groups=groups, site=site),)


@transpose(reduce_to)
def _(g, x, *, root, groups, site):
    return (broadcast_from(g, root=root, groups=groups, site=site),)


@transpose(broadcast_from)
def _(g, x, *, root, groups, site):
    return (reduce_to(g, root=root, groups=groups, site=site),)


@transpose(scatter_from)
def _(g, x, *, axis, root, groups, site):
    return (gather_to(g, axis=axis, root=root, groups=groups, site=site),)


@transpose(gather_to)
def _(g, x, *, axis, root, groups, site):
    return (scatter_from(g, axis=axis, root=root, groups=groups, site=site),)


@transpose(all_to_all)
def _(g, x, *, split, join, groups, site):
    return (all_to_all(g, split=join, join=split, groups=groups, site=site),)


@transpose(collective_permute)
def _(g, x, *, pairs, groups, site):
    back = tuple((there, here) for here, there in pairs)
    return (collective_permute(g, pairs=back, groups=groups, site=site),)


@transpose(local_part)
def _(g, x, *, axis, groups):
    return (place_part(g, axis=axis, groups=groups),)


@transpose(place_part)
def _(g, x, *, axis, groups):
    return (local_part(g, axis=axis, groups=groups),)


@jvp(send, receive)
def _(out, primals, tangents, **attrs):
    raise ArgumentError(
        "a message between two ranks has no derivative: the other rank's program is not part of it",
        expected="a collective", suggestion="use ts.dist.collective_permute, which every rank calls",
    )  # fmt: skip


# Batching: axes are counted from the end, so that a leading axis of lanes changes nothing.


def _batch_unchanged(own: Op) -> Callable[..., Any]:
    return lambda lanes, **attrs: bind_op(own, lanes.spread(), attrs)


for _op in COMMUNICATING:
    batch(_op)(_batch_unchanged(_op))
