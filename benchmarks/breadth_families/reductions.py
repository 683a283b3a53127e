"""Families of reductions, norms, scans, sorts and losses."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import tessera as ts
from benchmarks.breadth_families import Case, Draw, family


def _matrix(d: Draw) -> tuple[torch.Tensor, str]:
    dtype = d.floats()
    m, n = d.shape((1, 65536), (17, 262144), item=dtype.itemsize)
    return d.normal(m, n, dtype=dtype), f"{m}x{n} {dtype}"


def _reduced(name: str, own: str, theirs: str, axis: object) -> None:
    @family(name)
    def _(d: Draw) -> Case:
        x, label = _matrix(d)
        return Case(
            f"{own} axis {axis} {label}", lambda x: getattr(ts, own)(x, axis=axis),
            lambda x: getattr(torch, theirs)(x, dim=axis), (x,),
        )  # fmt: skip


_reduced("sum of all", "sum", "sum", None)
_reduced("sum of rows", "sum", "sum", 1)
_reduced("sum over axis 0", "sum", "sum", 0)
_reduced("mean of rows", "mean", "mean", 1)
_reduced("max of rows", "max", "amax", 1)
_reduced("max over axis 0", "max", "amax", 0)
_reduced("logsumexp", "logsumexp", "logsumexp", 1)


@family("sum over a middle axis")
def _(d: Draw) -> Case:
    a, b, c = d.shape((1, 512), (7, 8192), (7, 4096))
    x = d.normal(a, b, c)
    return Case(f"sum axis 1 {a}x{b}x{c}", lambda x: ts.sum(x, axis=1), lambda x: x.sum(1), (x,))


@family("sum over two axes")
def _(d: Draw) -> Case:
    a, b, c = d.shape((2, 1024), (7, 1024), (7, 4096))
    axes = d.pick((0, 2), (0, 1), (1, 2))
    x = d.normal(a, b, c)
    return Case(f"sum axes {axes} {a}x{b}x{c}", lambda x: ts.sum(x, axis=axes), lambda x: x.sum(axes), (x,))


@family("argmax")
def _(d: Draw) -> Case:
    m, n = d.shape((1, 65536), (17, 262144))
    axis = d.pick(0, 1)
    x = d.normal(m, n)
    return Case(
        f"argmax axis {axis} {m}x{n}", lambda x: ts.argmax(x, axis=axis), lambda x: x.argmax(axis), (x,), exact=True
    )


@family("any and all")
def _(d: Draw) -> Case:
    m, n = d.shape((1, 65536), (17, 262144), item=1)
    how, axis = d.pick("any", "all"), d.pick(0, 1)
    x = d.uniform(m, n) > (0.999 if how == "any" else 0.001)
    own, theirs = getattr(ts, how), getattr(torch, how)
    return Case(f"{how} axis {axis} {m}x{n}", lambda x: own(x, axis=axis), lambda x: theirs(x, axis), (x,), exact=True)


@family("variance")
def _(d: Draw) -> Case:
    x, label = _matrix(d)
    axis = d.pick(0, 1)
    return Case(
        f"var axis {axis} {label}", lambda x: ts.var(x, axis=axis), lambda x: torch.var(x, axis, correction=0), (x,)
    )


@family("vector norm")
def _(d: Draw) -> Case:
    m, n = d.shape((1, 65536), (17, 262144))
    axis = d.pick(1, None)
    x = d.normal(m, n)
    return Case(
        f"norm axis {axis} {m}x{n}", lambda x: ts.sqrt(ts.sum(x * x, axis=axis)),
        lambda x: torch.linalg.vector_norm(x, dim=axis), (x,),
    )  # fmt: skip


@family("softmax")
def _(d: Draw) -> Case:
    x, label = _matrix(d)
    return Case(f"softmax {label}", lambda x: ts.softmax(x, axis=-1), lambda x: torch.softmax(x, -1), (x,))


@family("softmax over another axis")
def _(d: Draw) -> Case:
    a, b, c = d.shape((1, 64), (7, 4096), (7, 4096))
    x = d.normal(a, b, c)
    return Case(f"softmax axis 1 {a}x{b}x{c}", lambda x: ts.softmax(x, axis=1), lambda x: torch.softmax(x, 1), (x,))


@family("log softmax")
def _(d: Draw) -> Case:
    x, label = _matrix(d)
    return Case(f"log_softmax {label}", lambda x: ts.log_softmax(x, axis=-1), lambda x: torch.log_softmax(x, -1), (x,))


@family("layer norm")
def _(d: Draw) -> Case:
    dtype = d.floats()
    m, n = d.shape((1, 65536), (64, 16384), item=dtype.itemsize)
    x, w, b = d.normal(m, n, dtype=dtype), d.normal(n, dtype=dtype), d.normal(n, dtype=dtype)
    return Case(
        f"layer_norm {m}x{n} {dtype}", lambda x, w, b: ts.layer_norm(x, (n,), w, b),
        lambda x, w, b: F.layer_norm(x, (n,), w, b), (x, w, b),
    )  # fmt: skip


@family("rms norm")
def _(d: Draw) -> Case:
    dtype = d.floats()
    m, n = d.shape((1, 65536), (64, 16384), item=dtype.itemsize)
    x, w = d.normal(m, n, dtype=dtype), d.normal(n, dtype=dtype)
    return Case(
        f"rms_norm {m}x{n} {dtype}", lambda x, w: ts.rms_norm(x, w), lambda x, w: F.rms_norm(x, (n,), w, 1e-5), (x, w)
    )


@family("layer norm gradient")
def _(d: Draw) -> Case:
    m, n = d.shape((1, 65536), (64, 16384), item=8)
    x, w, b, g = d.normal(m, n), d.normal(n), d.normal(n), d.normal(m, n)
    return Case(
        f"layer_norm gradient {m}x{n}", lambda x, w, b: ts.layer_norm(x, (n,), w, b),
        lambda x, w, b: F.layer_norm(x, (n,), w, b), (x, w, b, g), wrt=(0, 1, 2),
    )  # fmt: skip


@family("group norm")
def _(d: Draw) -> Case:
    groups = d.pick(8, 16, 32)
    b, c, h, w = d.shape((1, 16), (1, 20), (7, 128), (7, 128), item=4 * groups)
    c *= groups
    x, weight, bias = d.normal(b, c, h, w), d.normal(c), d.normal(c)
    return Case(
        f"group_norm {groups} {b}x{c}x{h}x{w}", lambda x, w, b: ts.group_norm(x, groups, w, b),
        lambda x, w, b: F.group_norm(x, groups, w, b), (x, weight, bias),
    )  # fmt: skip


@family("batch norm")
def _(d: Draw) -> Case:
    b, c, h, w = d.shape((1, 64), (16, 1024), (7, 128), (7, 128))
    x, weight, bias = d.normal(b, c, h, w), d.normal(c), d.normal(c)
    return Case(
        f"batch_norm {b}x{c}x{h}x{w}", lambda x, w, b: ts.batch_norm(x, None, None, w, b, training=True),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (x, weight, bias),
    )  # fmt: skip


def _scanned(name: str, axis: int, reverse: bool = False) -> None:
    @family(name)
    def _(d: Draw) -> Case:
        m, n = d.shape((1, 16384), (17, 262144))
        x = d.normal(m, n)

        def own(x):  # type: ignore[no-untyped-def]
            return ts.flip(ts.cumsum(ts.flip(x, axis), axis=axis), axis) if reverse else ts.cumsum(x, axis=axis)

        def theirs(x):  # type: ignore[no-untyped-def]
            return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)

        return Case(f"cumsum axis {axis} {m}x{n}" + " reverse" * reverse, own, theirs, (x,))


_scanned("running sums of rows", 1)
_scanned("running sums over axis 0", 0)
_scanned("reverse running sums", 1, reverse=True)


@family("running products")
def _(d: Draw) -> Case:
    m, n = d.shape((1, 16384), (17, 262144))
    x = 1 + d.normal(m, n) / 1000
    return Case(f"cumprod {m}x{n}", lambda x: ts.cumprod(x, axis=1), lambda x: x.cumprod(1), (x,), tolerance=1e-4)


@family("sort")
def _(d: Draw) -> Case:
    m, n = d.shape((1, 16384), (17, 1000000), item=16)
    x = d.normal(m, n)
    return Case(f"sort {m}x{n}", lambda x: ts.sort(x, axis=-1), lambda x: x.sort(-1).values, (x,), exact=True)


@family("argsort")
def _(d: Draw) -> Case:
    m, n = d.shape((1, 16384), (17, 1000000), item=16)
    x = torch.stack([torch.randperm(n, generator=d.random) for _ in range(m)]).float()
    return Case(f"argsort {m}x{n}", lambda x: ts.argsort(x, axis=-1), lambda x: x.argsort(-1), (x,), exact=True)


@family("top-k")
def _(d: Draw) -> Case:
    m, n = d.shape((1, 4096), (64, 151936), item=8)
    k = min(d.pick(1, 2, 8, 40, 64), n)
    x = d.normal(m, n)
    return Case(f"top-{k} {m}x{n}", lambda x: ts.topk(x, k)[0], lambda x: x.topk(k).values, (x,), exact=True)


@family("searchsorted")
def _(d: Draw) -> Case:
    n = d.size(64, 1 << 18)
    (m,) = d.shape((1024, 1 << 24), item=8)
    x, v = d.normal(n).sort().values, d.normal(m)
    return Case(f"searchsorted {m} in {n}", ts.searchsorted, torch.searchsorted, (x, v), exact=True)


@family("histogram")
def _(d: Draw) -> Case:
    bins = d.size(8, 65536)
    (m,) = d.shape((1024, 1 << 24), item=16)
    x = d.ints(bins, m)
    return Case(
        f"bincount {m} in {bins}", lambda x: ts.scatter_add(ts.zeros((bins,), ts.int64), x, ts.ones((m,), ts.int64)),
        lambda x: torch.zeros(bins, dtype=torch.int64, device=x.device).scatter_add_(0, x, torch.ones_like(x)), (x,),
        exact=True,
    )  # fmt: skip


@family("cross entropy")
def _(d: Draw) -> Case:
    m, n = d.shape((8, 8192), (10, 151936))
    x, y = d.normal(m, n), d.ints(n, m)
    return Case(f"cross_entropy {m}x{n}", ts.cross_entropy, F.cross_entropy, (x, y))


@family("cross entropy gradient")
def _(d: Draw) -> Case:
    m, n = d.shape((8, 8192), (10, 151936), item=8)
    x, y, g = d.normal(m, n), d.ints(n, m), torch.ones(())
    return Case(f"cross_entropy gradient {m}x{n}", ts.cross_entropy, F.cross_entropy, (x, y, g), wrt=(0,))


@family("mean squared error")
def _(d: Draw) -> Case:
    m, n = d.shape((8, 16384), (8, 16384))
    x, y = d.normal(m, n), d.normal(m, n)
    return Case(f"mse {m}x{n}", lambda x, y: ts.mean((x - y) ** 2), F.mse_loss, (x, y))


@family("optimizer step")
def _(d: Draw) -> Case:
    sizes = [d.shape((64, 4096), (64, 4096), item=16)[0:2] for _ in range(4)]
    params, grads = [d.normal(*s) for s in sizes], [d.normal(*s) for s in sizes]
    first, second = [torch.zeros(s) for s in sizes], [torch.zeros(s) for s in sizes]

    def step(sqrt):  # type: ignore[no-untyped-def]
        def apply(*lists):  # type: ignore[no-untyped-def]
            out = []
            for p, g, m, v in zip(lists[:4], lists[4:8], lists[8:12], lists[12:], strict=True):
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                out += [p - 1e-3 * (m * 10) / (sqrt(v * 1000) + 1e-8), m, v]
            return tuple(out)

        return apply

    return Case(f"adam of {sizes}", step(ts.sqrt), step(torch.sqrt), (*params, *grads, *first, *second))
