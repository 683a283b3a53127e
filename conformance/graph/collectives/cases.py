"""Collectives of the ranks of a mesh, alone and in programs: each rank's program against one of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tessera as ts
from conformance.case import Case
from conformance.inputs import edge_values
from tessera.dist.mesh import Mesh, MeshAxis
from tessera.frontend.jit.tracing import Jit

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": ts.sum, "mean": ts.mean, "max": ts.max, "min": ts.min, "prod": ts.prod,
}  # fmt: skip
SHAPE = (12, 12)  # of a rank's tensor: each axis can be cut for 2, 3 and 4 ranks
# The axes of a mesh and those along which ranks communicate.
MESHES = {
    "3": ((3,), ("x",), ("x",)), "2x2-rows": ((2, 2), ("x", "y"), ("x",)),
    "2x2-all": ((2, 2), ("x", "y"), ("y", "x")), "1": ((1,), ("x",), ("x",)),
}  # fmt: skip
DTYPES = {"3": ("f32", "bf16", "int32"), "2x2-rows": ("f32", "fp8_e4m3"), "2x2-all": ("f64",), "1": ("f32",)}

Ranked = Callable[[Any, MeshAxis], Any]  # what a rank computes from its tensor
Joined = Callable[[Sequence[Any]], Sequence[Any]]  # what the ranks of a group have, from all their tensors


def _repeat(value: Any, xs: Sequence[Any]) -> list[Any]:
    return [value] * len(xs)


def _cut(x: Any, parts: int, axis: int) -> list[Any]:
    width = x.shape[axis] // parts
    return [ts.narrow(x, axis, i * width, (i + 1) * width) for i in range(parts)]


def _reduced(name: str) -> tuple[Ranked, Joined]:
    return (
        lambda x, where: ts.all_reduce(x, name, where),
        lambda xs: _repeat(REDUCTIONS[name](ts.stack(list(xs)), axis=0), xs),
    )


COLLECTIVES: dict[str, tuple[Ranked, Joined]] = {
    **{f"all_reduce-{name}": _reduced(name) for name in REDUCTIONS},
    "all_gather": (
        lambda x, where: ts.all_gather(x, where, axis=1), lambda xs: _repeat(ts.concatenate(list(xs), axis=1), xs)),
    "reduce_scatter": (
        lambda x, where: ts.reduce_scatter(x, where, axis=1),
        lambda xs: _cut(ts.sum(ts.stack(list(xs)), axis=0), len(xs), 1)),
    "reduce_scatter-max": (
        lambda x, where: ts.reduce_scatter(x, where, axis=0, op="max"),
        lambda xs: _cut(ts.max(ts.stack(list(xs)), axis=0), len(xs), 0)),
    "broadcast": (lambda x, where: ts.broadcast(x, where.size - 1, where), lambda xs: _repeat(xs[-1], xs)),
    "scatter": (
        lambda x, where: ts.dist.scatter(x, where, axis=1, src=where.size - 1), lambda xs: _cut(xs[-1], len(xs), 1)),
    "gather": (
        lambda x, where: ts.dist.gather(x, where, axis=0, dst=0),
        lambda xs: [ts.concatenate(list(xs)), *[ts.zeros_like(ts.concatenate(list(xs)))] * (len(xs) - 1)]),
    "all_to_all": (
        lambda x, where: ts.all_to_all(x, where, split_axis=1, concat_axis=0),
        lambda xs: [ts.concatenate([_cut(x, len(xs), 1)[i] for x in xs]) for i in range(len(xs))]),
    "permute": (
        lambda x, where: ts.dist.collective_permute(x, [(0, where.size - 1)], where),
        lambda xs: [ts.zeros_like(xs[0])] * (len(xs) - 1) + [xs[0]]),
    "ring": (
        lambda x, where: ts.dist.collective_permute(x, [(i, (i + 1) % where.size) for i in range(where.size)], where),
        lambda xs: [xs[-1], *xs[:-1]]),
}  # fmt: skip


def _average(x: Any, where: MeshAxis) -> Any:
    """A step of data parallelism: what ranks compute, averaged; the sum of all in a loop and a branch after it."""
    mean = ts.all_reduce(ts.tanh(x) * 0.5, "mean", where)
    total = ts.scan(lambda s, row: (s + ts.all_reduce(row, "max", where), s), mean[0] * 0.0, x)[0]
    return ts.cond(ts.sum(total) > 1e6, lambda t: t, lambda t: t - ts.all_reduce(mean[1], "sum", where), total)


def _average_whole(xs: Sequence[Any]) -> Sequence[Any]:
    stacked = ts.stack(list(xs))
    mean = ts.mean(ts.tanh(stacked) * 0.5, axis=0)
    total = ts.sum(ts.max(stacked, axis=0), axis=0)
    return _repeat(total - mean[1] * len(xs), xs)


def _multiply(x: Any, where: MeshAxis) -> Any:
    """A product whose contraction is cut over the ranks."""
    return ts.reduce_scatter(ts.matmul(x, x.T), where, axis=0)


def _multiply_whole(xs: Sequence[Any]) -> Sequence[Any]:
    joined = ts.concatenate(list(xs), axis=1)
    return _cut(ts.matmul(joined, joined.T), len(xs), 0)


def _derive(x: Any, where: MeshAxis) -> Any:
    """The gradient of the sum over ranks."""
    return ts.grad(lambda z: ts.sum(ts.square(ts.all_reduce(ts.sin(z), "sum", where))))(x)


def _derive_whole(xs: Sequence[Any]) -> Sequence[Any]:
    total = ts.sum(ts.sin(ts.stack(list(xs))), axis=0) * (2.0 * len(xs))
    return [total * ts.cos(x) for x in xs]


PROGRAMS: dict[str, tuple[Ranked, Joined]] = {
    "average": (_average, _average_whole), "multiply": (_multiply, _multiply_whole),
    "derive": (_derive, _derive_whole),
    "batch": (
        lambda x, where: ts.vmap(lambda row: ts.all_gather(row * 2.0, where))(x),
        lambda xs: _repeat(ts.concatenate([x * 2.0 for x in xs], axis=1), xs)),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Each collective on each mesh with its types, with special values, without elements, and in programs."""
    for name, (ranked, joined) in COLLECTIVES.items():
        for mesh, dtypes in DTYPES.items():
            for dtype in dtypes:
                if not (name.endswith("mean") and dtype.startswith("int")):  # which is refused
                    yield _make_case(f"{name}-{mesh}-{dtype}", mesh, ranked, joined, ("uniform", SHAPE, dtype))
    for name in ("all_reduce-sum", "all_reduce-max", "all_reduce-min", "reduce_scatter", "all_gather", "permute"):
        ranked, joined = COLLECTIVES[name]
        yield _make_case(f"{name}-special", "3", ranked, joined, ("special", SHAPE, "f32"))
        yield _make_case(f"{name}-empty", "2x2-all", ranked, joined, ("uniform", (0, 4), "f32"))
    for name, (ranked, joined) in PROGRAMS.items():
        for mesh in ("3", "2x2-rows"):
            yield _make_case(f"{name}-{mesh}", mesh, ranked, joined, ("uniform", SHAPE, "f32"))


def _make_case(name: str, mesh: str, ranked: Ranked, joined: Joined, values: tuple[str, Any, str]) -> Case:
    shape, names, axes = MESHES[mesh]
    made = Mesh(shape, names, engine="simulated")
    kind, own, dtype = values
    stacked = edge_values(kind, 5, (made.size, *own), dtype)

    def whole(xs: Any) -> Any:
        found: dict[int, Any] = {}
        for group in made.groups(axes):
            found.update(zip(group, joined([xs[rank] for rank in group]), strict=True))
        return ts.stack([found[rank] for rank in range(made.size)])

    entry = Jit(lambda x: ranked(x, made.axis(*axes)))
    unknown = kind == "special"
    return Case(f"graph/collectives/{name}", lambda: (entry, (stacked,)), mesh=made, whole=Jit(whole), unknown=unknown)
