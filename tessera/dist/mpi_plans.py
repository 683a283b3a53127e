"""Exchange plans of MPI: of a collective on tensors of one type, what is sent, by which call, and what the result is.

A plan is made once for each kind, type and group. Parts along the first axis lie one after the other in memory as MPI
sends and receives them: they are copied neither before nor after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tessera.core.types import as_dtype
from tessera.dist.exchange import REDUCERS, combine, narrow

Shape = tuple[int, ...]
Change = Callable[[np.ndarray], np.ndarray]


class Plan(NamedTuple):
    """A collective: `call` completes it, `start` gives its request; both take what is sent and the memory that receives.

    `pack` makes what is sent of the operand, `unpack` the result of what was received; None where they are the same.
    """

    shape: Shape
    dtype: np.dtype
    call: Callable[[np.ndarray, np.ndarray], Any]
    start: Callable[[np.ndarray, np.ndarray], Any]
    pack: Change | None = None
    unpack: Change | None = None

    def run(self, x: np.ndarray) -> np.ndarray:
        """The result, when it is complete."""
        if not x.flags.c_contiguous:
            x = np.array(x, order="C")
        received = np.empty(self.shape, self.dtype)
        self.call(x if self.pack is None else self.pack(x), received)
        return received if self.unpack is None else self.unpack(received)


class Group(NamedTuple):
    """Who exchanges what: a communicator and its ranks, the type of each operand, the attributes of the collective."""

    mpi: Any
    comm: Any
    members: tuple[int, ...]
    shape: Shape
    dtype: np.dtype
    attrs: Mapping[str, Any]

    @property
    def is_root(self) -> bool:
        """Whether this rank is the one that the collective names."""
        return bool(self.comm.Get_rank() == self.attrs["root"])

    @property
    def part(self) -> Shape:
        """The shape of the part of a member along the axis that is cut."""
        return _scale(self.shape, self.attrs["axis"], 1, len(self.members))


def make_plan(kind: str, group: Group, reproducible: bool) -> Plan:
    """The plan of a collective; with `reproducible` reductions are computed in the order of the ranks."""
    if kind not in _PLANS or (reproducible and kind in ("all_reduce", "reduce_scatter", "reduce_to")):
        return _plan_combination(kind, group)
    return _PLANS[kind](group) or _plan_combination(kind, group)


# Types and shapes.


def _scale(shape: Shape, axis: int, times: int, parts: int = 1) -> Shape:
    """A shape whose axis is some times as long, cut into parts."""
    axis %= len(shape)
    return (*shape[:axis], shape[axis] * times // parts, *shape[axis + 1 :])


def _find_transport(dtype: np.dtype) -> np.dtype:
    """The element type as which MPI moves another: itself, or unsigned integers of as many bytes."""
    has = dtype.isbuiltin == 1 and (dtype.kind in "iu" or (dtype.kind == "f" and dtype.itemsize in (4, 8)))
    return dtype if has else np.dtype(f"u{dtype.itemsize}")


def _view(before: np.dtype, after: np.dtype) -> Change | None:
    return None if before == after else lambda x: x.view(after)


def _chain(*changes: Change | None) -> Change | None:
    """Some changes, one after the other."""
    found = [c for c in changes if c is not None]
    if len(found) < 2:
        return found[0] if found else None
    first, second = found
    return lambda x: second(first(x))


def _cut(shape: Shape, axis: int, count: int) -> Change | None:
    """What puts the parts along an axis one after the other; None where they lie so."""
    axis %= len(shape)
    if axis == 0:
        return None
    parted = (*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
    return lambda x: np.ascontiguousarray(np.moveaxis(x.reshape(parted), axis, 0))


def _join(part: Shape, axis: int, count: int) -> Change | None:
    """What concatenates parts that lie one after the other; None where that is their order in memory."""
    axis, whole = axis % len(part), _scale(part, axis, count)
    if axis == 0:
        return None
    return lambda x: np.moveaxis(x.reshape(count, *part), 0, axis).reshape(whole)


def _find_arithmetic(dtype: np.dtype) -> np.dtype | None:
    """The element type in which MPI reduces; None where it has none."""
    wide = np.dtype(np.float32) if as_dtype(dtype).is_float and dtype.itemsize < 4 else dtype
    wide = np.dtype(np.uint8) if wide == np.bool_ else wide
    return wide if wide.kind in "iuf" and wide.isbuiltin == 1 else None


def _round(kind: str, count: int, dtype: np.dtype) -> Change:
    def finish(total: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return total.view(np.bool_) if dtype == np.bool_ else narrow(total, kind, count, dtype)

    return finish


def _pack_operands(g: Group, wide: np.dtype) -> Change | None:
    if wide == g.dtype:
        return None
    return _view(g.dtype, wide) if g.dtype == np.bool_ else lambda x: x.astype(wide)


# Collectives.


def _plan_combination(kind: str, g: Group) -> Plan:
    """Any collective, by the simulator's rule on the tensors of all ranks."""
    own, count, moved = g.comm.Get_rank(), len(g.members), _find_transport(g.dtype)

    def unpack(rows: np.ndarray) -> np.ndarray:
        return combine(kind, list(rows.view(g.dtype)), g.members, g.attrs)[own]

    return Plan((count, *g.shape), moved, g.comm.Allgather, g.comm.Iallgather, _view(g.dtype, moved), unpack)


@cache
def _find_reduction(mpi: Any, kind: str, dtype: np.dtype) -> Any:
    """The MPI operation of a reduction. MPI's own maximum of floats drops NaN; here it is that of NumPy."""
    if kind not in ("max", "min") or dtype.kind != "f":
        return {"sum": mpi.SUM, "mean": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN, "prod": mpi.PROD}[kind]

    def reduce(given: Any, total: Any, _: Any) -> None:
        out = np.frombuffer(total, dtype)
        REDUCERS[kind](np.frombuffer(given, dtype), out, out=out)

    return mpi.Op.Create(reduce, commute=True)


def _plan_all_reduce(g: Group) -> Plan | None:
    wide, kind = _find_arithmetic(g.dtype), g.attrs["kind"]
    if wide is None:
        return None
    reduction = _find_reduction(g.mpi, kind, wide)
    return Plan(
        g.shape, wide,
        lambda sent, out: g.comm.Allreduce(sent, out, reduction),
        lambda sent, out: g.comm.Iallreduce(sent, out, reduction),
        _pack_operands(g, wide),
        None if wide == g.dtype and kind != "mean" else _round(kind, len(g.members), g.dtype),
    )  # fmt: skip


def _plan_reduce_scatter(g: Group) -> Plan | None:
    wide, kind, count = _find_arithmetic(g.dtype), g.attrs["kind"], len(g.members)
    if wide is None:
        return None
    return Plan(
        g.part, wide,
        lambda sent, out: g.comm.Reduce_scatter_block(sent, out, g.mpi.SUM),
        lambda sent, out: g.comm.Ireduce_scatter_block(sent, out, g.mpi.SUM),
        _chain(_cut(g.shape, g.attrs["axis"], count), _pack_operands(g, wide)),
        None if wide == g.dtype and kind != "mean" else _round(kind, count, g.dtype),
    )  # fmt: skip


def _plan_all_gather(g: Group) -> Plan:
    whole, moved = _scale(g.shape, g.attrs["axis"], len(g.members)), _find_transport(g.dtype)
    unpack = _chain(_view(moved, g.dtype), _join(g.shape, g.attrs["axis"], len(g.members)))
    return Plan(whole, moved, g.comm.Allgather, g.comm.Iallgather, _view(g.dtype, moved), unpack)


def _plan_gather(g: Group) -> Plan:
    whole, moved = _scale(g.shape, g.attrs["axis"], len(g.members)), _find_transport(g.dtype)
    joined = _chain(_view(moved, g.dtype), _join(g.shape, g.attrs["axis"], len(g.members)))
    root, has_all = g.attrs["root"], g.is_root

    def begin(gather: Callable[..., Any], sent: np.ndarray, out: np.ndarray) -> Any:
        if not has_all:
            out.fill(0)
        return gather(sent, out if has_all else None, root)

    return Plan(
        whole, moved, lambda sent, out: begin(g.comm.Gather, sent, out), lambda s, o: begin(g.comm.Igather, s, o),
        _view(g.dtype, moved), joined,
    )  # fmt: skip


def _plan_scatter(g: Group) -> Plan:
    moved, root, has_all = _find_transport(g.dtype), g.attrs["root"], g.is_root
    cut = _cut(g.shape, g.attrs["axis"], len(g.members)) if has_all else None
    return Plan(
        g.part, moved,
        lambda sent, out: g.comm.Scatter(sent if has_all else None, out, root),
        lambda sent, out: g.comm.Iscatter(sent if has_all else None, out, root),
        _chain(_view(g.dtype, moved), cut), _view(moved, g.dtype),
    )  # fmt: skip


def _plan_broadcast(g: Group) -> Plan:
    moved, root, has_it = _find_transport(g.dtype), g.attrs["root"], g.is_root

    def begin(broadcast: Callable[..., Any], sent: np.ndarray, out: np.ndarray) -> Any:
        if has_it:
            out[...] = sent
        return broadcast(out, root)

    return Plan(
        g.shape, moved, lambda sent, out: begin(g.comm.Bcast, sent, out), lambda s, o: begin(g.comm.Ibcast, s, o),
        _view(g.dtype, moved), _view(moved, g.dtype),
    )  # fmt: skip


def _plan_all_to_all(g: Group) -> Plan:
    count, split, join = len(g.members), g.attrs["split"], g.attrs["join"]
    part, moved = _scale(g.shape, split, 1, count), _find_transport(g.dtype)
    return Plan(
        _scale(part, join, count), moved, g.comm.Alltoall, g.comm.Ialltoall,
        _chain(_view(g.dtype, moved), _cut(g.shape, split, count)), _chain(_view(moved, g.dtype), _join(part, join, count)),
    )  # fmt: skip


class _Messages:
    """Some messages under way, as a request."""

    def __init__(self, mpi: Any, requests: list[Any]) -> None:
        self.Wait: Callable[[], Any] = lambda: mpi.Request.Waitall(requests)


def _plan_permute(g: Group) -> Plan:
    moved, own = _find_transport(g.dtype), g.members[g.comm.Get_rank()]
    sources = [g.members.index(here) for here, there in g.attrs["pairs"] if there == own and here in g.members]
    targets = [g.members.index(there) for here, there in g.attrs["pairs"] if here == own and there in g.members]

    def start(sent: np.ndarray, out: np.ndarray) -> _Messages:
        if not sources:
            out.fill(0)
        requests = [g.comm.Irecv(out, source, _PERMUTE_TAG) for source in sources]
        return _Messages(g.mpi, requests + [g.comm.Isend(sent, target, _PERMUTE_TAG) for target in targets])

    return Plan(g.shape, moved, lambda s, o: start(s, o).Wait(), start, _view(g.dtype, moved), _view(moved, g.dtype))


_PERMUTE_TAG = 30000
_PLANS: dict[str, Callable[[Group], Plan | None]] = {
    "all_reduce": _plan_all_reduce,
    "all_gather": _plan_all_gather,
    "reduce_scatter": _plan_reduce_scatter,
    "broadcast_from": _plan_broadcast,
    "scatter_from": _plan_scatter,
    "gather_to": _plan_gather,
    "all_to_all": _plan_all_to_all,
    "collective_permute": _plan_permute,
}
