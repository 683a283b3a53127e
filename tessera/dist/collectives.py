"""Collectives for users: the ops of `tessera.ops.tensor.collectives` along axes of a mesh, and their async forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray, Donated
from tessera.core.errors import ArgumentError, AsyncCopyError, ShapeError, TesseraError, user_location
from tessera.core.shapes import normalize_axis
from tessera.core.types import DType, TensorType, as_dtype, f32
from tessera.dist.direct_calls import direct
from tessera.dist.mesh import Mesh, MeshAxis
from tessera.dist.ranks import Pending, current_axes, require_rank, start_exchange, takes_device_arrays
from tessera.dist.routing import exchange_tokens
from tessera.dist.sharding import Dims, ShardSpec
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor, as_tensor, wrap_array
from tessera.ops.api.creation import zeros
from tessera.ops.tensor import collectives as ops
from tessera.ops.tensor import reduce as reductions
from tessera.ops.tensor.rearrange import split
from tessera.ops.tensor.shape import reshape, stack

Where = Mesh | MeshAxis | None


def _site() -> str:
    found = user_location()
    return f"{found.file}:{found.line}"


def _split_axis(axis: Any, mesh: Where, what: str) -> tuple[int, MeshAxis]:
    """The axis of the tensor and the part of the mesh: `axis` is a number, or names mesh axes."""
    if isinstance(axis, (str, tuple, list, MeshAxis)):
        return 0, current_axes(mesh, axis, what)
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise ArgumentError(
            f"{axis!r} is no axis", location=user_location(),
            expected="a number (of the tensor), or the name of a mesh axis, or several",
        )  # fmt: skip
    return int(axis), current_axes(mesh, None, what)


@direct
def all_reduce(x: Any, op: str = "sum", mesh: Where = None, axis: Any = None) -> Tensor:
    """The elementwise sum, mean, max, min or prod of `x` over ranks, for each of them.

    `mesh` is a mesh or a part of one (`mesh.axis("data")`), `axis` the name of a mesh axis, or several; by default all
    ranks, or those along the axes of a `with mesh.axis(...)` block. Shapes: that of `x`. Differentiable.

    Raises:
        ArgumentError: there is no such reduction or axis, or the caller is not a rank of an SPMD function.
        DTypeError: the mean of integers, or the sum of bools.
    """
    where = current_axes(mesh, axis, "all_reduce")
    return ops.all_reduce(x, kind=op, groups=where.groups, site=_site())  # type: ignore[no-any-return]


def mesh_reduce(x: Any, axis: Any = None, op: str = "sum", mesh: Where = None) -> Tensor:
    """`all_reduce` with the mesh axis first: `ts.mesh_reduce(x, axis="data", op="mean")`."""
    return all_reduce(x, op, mesh, axis)


def reduce(x: Any, over: Any = None, op: str = "sum", mesh: Where = None, axis: Any = None) -> Any:
    """`all_reduce` along a part of a mesh: `ts.reduce(x, mesh.axis("gpu"), op="sum")`.

    A list of tensors is reduced to one: `ts.reduce(outputs, op="mean", axis=0)` of the results of `parallel_map`.
    """
    if isinstance(x, (list, tuple)) and x and all(isinstance(each, Tensor) for each in x):
        return _reduce_list(x, op, 0 if axis is None else axis)
    return all_reduce(x, op, mesh, axis if over is None else over)


def _reduce_list(tensors: Sequence[Tensor], op: str, axis: int) -> Tensor:
    if op not in ops.REDUCTIONS or axis != 0:
        raise ArgumentError(
            f"a list of tensors has no reduction {op!r} along axis {axis}", location=user_location(),
            expected=f"{', '.join(ops.REDUCTIONS)}, along axis 0",
        )  # fmt: skip
    return getattr(reductions, op)(stack(list(tensors), axis=0), axis=0)  # type: ignore[no-any-return]


@direct
def all_gather(x: Any, mesh: Where = None, axis: Any = 0) -> Tensor:
    """The tensors of the ranks, concatenated along `axis` in the order of the ranks, for each of them.

    `axis` is the axis of the tensor, or the name of the mesh axis, or several, to gather along (the tensor's first axis
    then; `ts.all_gather(x, mesh.axis("tp"), axis=1)` gives both).

    Raises:
        ShapeError: a scalar has no axis.
        ArgumentError: as `all_reduce`.
    """
    at, where = _split_axis(axis, mesh, "all_gather")
    return ops.all_gather(x, axis=at, groups=where.groups, site=_site())  # type: ignore[no-any-return]


@direct
def reduce_scatter(x: Any, mesh: Where = None, axis: Any = 0, op: str = "sum") -> Tensor:
    """This rank's part along `axis` of the reduction of `x` over ranks.

    Raises:
        ShapeError: the axis has no equal parts.
        ArgumentError, DTypeError: as `all_reduce`.
    """
    at, where = _split_axis(axis, mesh, "reduce_scatter")
    if op in ops.LINEAR_REDUCTIONS:
        return ops.reduce_scatter(x, axis=at, kind=op, groups=where.groups, site=_site())  # type: ignore[no-any-return]
    whole = ops.all_reduce(x, kind=op, groups=where.groups, site=_site())
    return ops.local_part(whole, axis=at, groups=where.groups)  # type: ignore[no-any-return]


@direct
def broadcast(x: Any, src: int = 0, mesh: Where = None, axis: Any = None) -> Tensor:
    """The tensor of member number `src`, for each rank.

    Raises:
        ArgumentError: there is no such member, or as `all_reduce`.
    """
    where = current_axes(mesh, axis, "broadcast")
    return ops.broadcast_from(x, root=_check_root(src, where), groups=where.groups, site=_site())  # type: ignore[no-any-return]


def scatter(x: Any, mesh: Where = None, axis: Any = 0, src: int = 0) -> Tensor:
    """This rank's part along `axis` of the tensor of member number `src`; `x` has the whole shape on every rank.

    Raises:
        ShapeError: the axis has no equal parts.
        ArgumentError: as `broadcast`.
    """
    at, where = _split_axis(axis, mesh, "scatter")
    root = _check_root(src, where)
    return ops.scatter_from(x, axis=at, root=root, groups=where.groups, site=_site())  # type: ignore[no-any-return]


def gather(x: Any, mesh: Where = None, axis: Any = 0, dst: int = 0) -> Tensor:
    """The tensors of the ranks, concatenated along `axis`, at member number `dst`; zeros at the others.

    Raises:
        ArgumentError: as `broadcast`.
    """
    at, where = _split_axis(axis, mesh, "gather")
    return ops.gather_to(x, axis=at, root=_check_root(dst, where), groups=where.groups, site=_site())  # type: ignore[no-any-return]


def _check_root(root: Any, where: MeshAxis) -> int:
    if not isinstance(root, (int, np.integer)) or isinstance(root, bool) or not 0 <= root < where.size:
        raise ArgumentError(
            f"the group has no member {root}", location=user_location(), expected=f"0 to {where.size - 1}"
        )
    return int(root)


@direct
def all_to_all(
    x: Any, mesh: Any = None, split_axis: int = 0, concat_axis: int = 0, axis: Any = None, *,
    src_axis: str | None = None, dst_axis: str | None = None,
) -> Any:  # fmt: skip
    """Part number j of `x` along `split_axis` goes to member number j, which concatenates what it gets.

    Shapes: `split_axis` is divided by the number of ranks, `concat_axis` multiplied by it. With `src_axis` and
    `dst_axis` tokens go to experts or back, in a function of `ts.expert_parallel`: `tessera.dist.routing`.

    Raises:
        ShapeError: the axis has no equal parts.
        ArgumentError: as `all_reduce`.
    """
    if src_axis is not None or dst_axis is not None:
        return exchange_tokens(x, mesh, str(src_axis), str(dst_axis))
    where = current_axes(mesh, axis, "all_to_all")
    return ops.all_to_all(x, split=split_axis, join=concat_axis, groups=where.groups, site=_site())


def collective_permute(x: Any, pairs: Sequence[tuple[int, int]], mesh: Where = None, axis: Any = None) -> Tensor:
    """The tensor of the member that `pairs` of (source, destination) send here; zeros where none does.

    Members are numbered within the group; each is at most once a source and once a destination.

    Raises:
        ArgumentError: two pairs have one end, a member does not exist, or as `all_reduce`.
    """
    where = current_axes(mesh, axis, "collective_permute")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError(
                f"{pair!r} is no pair", location=user_location(), expected="(source, destination)", received=repr(pairs)
            )
    members = [(_check_root(here, where), _check_root(there, where)) for here, there in pairs]
    listed = tuple((g[a], g[b]) for g in where.groups for a, b in members)
    return ops.collective_permute(x, pairs=listed, groups=where.groups, site=_site())  # type: ignore[no-any-return]


def mesh_shift(x: Any, axis: Any = 0, shift: int = 1, wrap: bool = True, mesh: Where = None) -> Tensor:
    """The tensor of the rank `shift` steps before this one along a mesh axis (a name or a number).

    A number counts the axes of the mesh, or of the part of one that is given. Without `wrap` the first ranks get zeros.

    Raises:
        ArgumentError: the mesh has no such axis, or the caller is not a rank.
    """
    whole = mesh or current_axes(None, None, "mesh_shift").mesh
    names, whole = (whole.names, whole.mesh) if isinstance(whole, MeshAxis) else (whole.axis_names, whole)
    if isinstance(axis, int) and not -len(names) <= axis < len(names):
        raise ArgumentError(f"the mesh has no axis {axis}", location=user_location(), expected=f"0 to {len(names) - 1}")
    where = whole.axis(names[axis] if isinstance(axis, int) else axis)
    count = where.size
    pairs = [(i, (i + shift) % count) for i in range(count) if wrap or 0 <= i + shift < count]
    return collective_permute(x, pairs, where)


def send(x: Any, dst: int, tag: int = 0) -> None:
    """Send a tensor to a rank, which calls `recv`; the message is buffered.

    Raises:
        ArgumentError: there is no such rank, or the caller is not a rank.
    """
    ops.send(x, to=dst, tag=tag, site=_site())


def recv(shape: Any, src: int, dtype: DType | Any = f32, tag: int = 0) -> Tensor:
    """The tensor that a rank sends here: of a shape and element type, or like a tensor.

    Raises:
        CollectiveError: it is of another type.
        ArgumentError: there is no such rank, or the caller is not a rank.
    """
    like = shape if isinstance(shape, Tensor) else zeros(shape, dtype=as_dtype(dtype))
    return ops.receive(like, source=src, tag=tag, site=_site())  # type: ignore[no-any-return]


# Shards of a tensor that every rank has.


def shard(x: Any, mesh: Any = None, spec: ShardSpec | None = None, *, axis: int = 0, devices: Any = None) -> Any:
    """This rank's part of a tensor that every rank has whole; nothing is sent.

    By default axis `axis` is cut along all axes of the mesh; `spec` says otherwise. With `devices` (a list), outside
    of ranks, the list of all parts for `parallel_map`.

    Raises:
        ShapeError: an axis has no equal parts.
        ArgumentError: the mesh has no such axis, or the caller is not a rank and gives no devices.
    """
    x = as_tensor(x)
    if devices is not None:
        return _split_for_devices(x, axis, len(devices))
    if spec is None:
        return ops.local_part(x, axis=axis, groups=current_axes(mesh, None, "shard").groups)
    where = current_axes(mesh, None, "shard").mesh
    return cut_tensor(x, spec.dims(x.ndim), where)


def cut_tensor(x: Tensor, dims: Dims, mesh: Mesh) -> Tensor:
    """This rank's part of a tensor that every rank has whole."""
    for at, axes in enumerate(dims):
        if axes:
            x = ops.local_part(x, axis=at, groups=mesh.groups(axes))
    return x


def join_tensor(x: Tensor, dims: Dims, partial: Sequence[str], mesh: Mesh, site: str) -> Tensor:
    """The whole tensor, from this rank's part: sums and gathers; errors name the site."""
    if partial:
        x = ops.all_reduce(x, kind="sum", groups=mesh.groups(partial), site=site)
    for at, axes in enumerate(dims):
        if axes:
            x = ops.all_gather(x, axis=at, groups=mesh.groups(axes), site=site)
    return x


def _split_for_devices(x: Tensor, axis: int, count: int) -> list[Tensor]:
    size = x.shape[normalize_axis(axis, x.ndim)]
    if not count or size % count:
        raise ShapeError(
            f"axis {axis} of size {size} has no {count} equal parts", location=user_location(),
            expected=f"a multiple of {count}", received=str(x.type),
        )  # fmt: skip
    return list(split(x, count, axis))


# Asynchronous collectives: a handle whose `wait` gives the result.


class Handle:
    """A collective that was started; `wait()` gives its result. It must be waited for before the rank ends."""

    def __init__(self, finish: Any) -> None:
        self._finish = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, when the collective is complete."""
        if self._result is None:
            self._result = self._finish()
            self._finish = None
        return self._result


def _start(op: Any, x: Any, attrs: dict[str, Any]) -> Handle:
    """Start a collective op; in a trace, and where gradients are recorded, it runs in place."""
    x = as_tensor(x)
    if CURRENT_BUILDER.get() is not None or x.requires_grad:
        done = op(x, **attrs)
        return Handle(lambda: done)
    try:
        if op.canonical is not None:
            attrs = dict(op.canonical(x.type, **attrs))
        (result,) = op.result_types((x.type,), attrs)
    except TesseraError as error:
        raise error.at(user_location()) from None
    site = attrs.pop("site")
    in_place = x.data.__class__ is DeviceArray and takes_device_arrays()
    pending: Pending = start_exchange(op.__name__, x.data if in_place else x.numpy(), attrs, site)
    return Handle(lambda: wrap_array(pending.wait(), result))


def all_reduce_async(x: Any, op: str = "sum", mesh: Where = None, axis: Any = None) -> Handle:
    """`all_reduce` that runs while this rank computes: `handle.wait()` gives the result."""
    where = current_axes(mesh, axis, "all_reduce_async")
    return _start(ops.all_reduce, x, {"kind": op, "groups": where.groups, "site": _site()})


def all_gather_async(x: Any, mesh: Where = None, axis: Any = 0) -> Handle:
    """`all_gather` that runs while this rank computes: `handle.wait()` gives the result."""
    at, where = _split_axis(axis, mesh, "all_gather_async")
    return _start(ops.all_gather, x, {"axis": at, "groups": where.groups, "site": _site()})


def reduce_scatter_async(x: Any, mesh: Where = None, axis: Any = 0, op: str = "sum") -> Handle:
    """`reduce_scatter` of a sum or mean that runs while this rank computes."""
    at, where = _split_axis(axis, mesh, "reduce_scatter_async")
    return _start(ops.reduce_scatter, x, {"axis": at, "kind": op, "groups": where.groups, "site": _site()})


def broadcast_async(x: Any, src: int = 0, mesh: Where = None, axis: Any = None) -> Handle:
    """`broadcast` that runs while this rank computes."""
    where = current_axes(mesh, axis, "broadcast_async")
    return _start(ops.broadcast_from, x, {"root": _check_root(src, where), "groups": where.groups, "site": _site()})


def all_to_all_async(x: Any, mesh: Where = None, split_axis: int = 0, concat_axis: int = 0, axis: Any = None) -> Handle:
    """`all_to_all` that runs while this rank computes."""
    where = current_axes(mesh, axis, "all_to_all_async")
    attrs = {"split": split_axis, "join": concat_axis, "groups": where.groups, "site": _site()}
    return _start(ops.all_to_all, x, attrs)


# Gathers into a tensor that is given.


class _InFlight(Donated):
    """What a tensor holds while an asynchronous collective writes it: to read the tensor is an error."""

    __slots__ = ()
    state = "being gathered"

    def error(self) -> AsyncCopyError:  # type: ignore[override]
        """The error of a read."""
        return AsyncCopyError(
            f"{self.call} reads a tensor that a collective is writing", location=user_location(),
            expected="handle.wait() before the read", received=f"an all_gather into it, started at {self.place}",
        )  # fmt: skip


def _check_gathered(out: Tensor, x: Tensor, where: MeshAxis) -> TensorType:
    count = where.size
    shapes = ((count * x.shape[0], *x.shape[1:]) if x.shape else None, (count, *x.shape))  # type: ignore[operator]
    if tuple(out.shape) not in shapes or out.dtype != x.dtype:
        raise ShapeError(
            "the gathered tensor does not fit", location=user_location(), received=str(out.type),
            expected=f"{TensorType((count, *x.shape), x.dtype)}: one of {x.type} for each of {count} ranks",
        )  # fmt: skip
    return out.type


def all_gather_into(out: Tensor, x: Any, mesh: Where = None, axis: Any = None) -> Tensor:
    """Write the tensors of all ranks into `out` [ranks, *x.shape], or [ranks * n, ...] for x [n, ...]; returns it.

    Raises:
        ShapeError: `out` has another shape or element type.
        ArgumentError: as `all_reduce`.
    """
    x, where = as_tensor(x), current_axes(mesh, axis, "all_gather_into")
    type = _check_gathered(out, x, where)
    row = reshape(x, shape=(1, *x.shape))
    found = reshape(ops.all_gather(row, axis=0, groups=where.groups, site=_site()), shape=type.shape)
    out.data, out.type = found.data, found.type
    return out


def all_gather_into_async(out: Tensor, x: Any, mesh: Where = None, axis: Any = None) -> Handle:
    """`all_gather_into` that runs while this rank computes: to read `out` before `handle.wait()` is an error.

    Raises:
        ShapeError, ArgumentError: as `all_gather_into`.
        AsyncCopyError: when `out` is read too early.
    """
    x, where = as_tensor(x), current_axes(mesh, axis, "all_gather_into_async")
    type = _check_gathered(out, x, where)
    row = reshape(x, shape=(1, *x.shape))
    started = _start(ops.all_gather, row, {"axis": 0, "groups": where.groups, "site": _site()})
    if CURRENT_BUILDER.get() is None:
        out.data = _InFlight(f"rank {require_rank('all_gather_into_async').rank}", user_location())

    def finish() -> Tensor:
        found = reshape(started.wait(), shape=type.shape)
        out.data, out.type = found.data, found.type
        return out

    return Handle(finish)


def barrier() -> None:
    """Wait until every rank is here.

    Raises:
        ArgumentError: the caller is not a rank.
    """
    mesh = require_rank("barrier").mesh
    ops.all_reduce(zeros((1,)), kind="max", groups=mesh.groups(), site=_site())
