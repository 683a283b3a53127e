"""Families of pointwise functions, casts and layouts."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import tessera as ts
from benchmarks.breadth_families import Case, Draw, family
from tessera.torch.tensors import find_dtype

UNARY = (
    ("exp", ts.exp, torch.exp),
    ("tanh", ts.tanh, torch.tanh),
    ("sigmoid", ts.sigmoid, torch.sigmoid),
    ("sin", ts.sin, torch.sin),
    ("abs", ts.abs, torch.abs),
    ("sqrt of abs", lambda x: ts.sqrt(ts.abs(x)), lambda x: torch.sqrt(torch.abs(x))),
    ("log1p of abs", lambda x: ts.log1p(ts.abs(x)), lambda x: torch.log1p(torch.abs(x))),
    ("erf", ts.erf, torch.erf),
)


@family("pointwise unary")
def _(d: Draw) -> Case:
    name, own, theirs = d.pick(*UNARY)
    dtype = d.floats()
    (n,) = d.shape((1 << 12, 1 << 30), item=dtype.itemsize)
    return Case(f"{name} {n} {dtype}", own, theirs, (d.normal(n, dtype=dtype),))


@family("gelu")
def _(d: Draw) -> Case:
    dtype = d.floats()
    m, n = d.shape((1, 8192), (128, 28672), item=dtype.itemsize)
    how = d.pick("none", "tanh")
    x = d.normal(m, n, dtype=dtype)
    return Case(
        f"gelu {how} {m}x{n} {dtype}", lambda x: ts.gelu(x, approximate=how), lambda x: F.gelu(x, approximate=how), (x,)
    )


@family("silu gate")
def _(d: Draw) -> Case:
    dtype = d.floats()
    m, n = d.shape((1, 8192), (128, 28672), item=dtype.itemsize)
    x, y = d.normal(m, n, dtype=dtype), d.normal(m, n, dtype=dtype)
    return Case(f"swiglu {m}x{n} {dtype}", lambda x, y: ts.silu(x) * y, lambda x, y: F.silu(x) * y, (x, y))


@family("pointwise binary")
def _(d: Draw) -> Case:
    dtype = d.floats()
    m, n = d.shape((1, 65536), (16, 65536), item=dtype.itemsize)
    x, y = d.normal(m, n, dtype=dtype), d.normal(m, n, dtype=dtype)
    how = d.pick("add", "mul", "maximum")
    own, theirs = getattr(ts, how), getattr(torch, how)
    return Case(f"{how} {m}x{n} {dtype}", own, theirs, (x, y))


@family("pointwise ternary")
def _(d: Draw) -> Case:
    m, n = d.shape((1, 65536), (16, 65536))
    x, y, z = (d.normal(m, n) for _ in range(3))
    how = d.pick("where", "lerp", "fma")
    own = {"where": lambda x, y, z: ts.where(x > 0, y, z), "lerp": ts.lerp, "fma": lambda x, y, z: x * y + z}[how]
    theirs = {
        "where": lambda x, y, z: torch.where(x > 0, y, z), "lerp": torch.lerp, "fma": lambda x, y, z: x * y + z,
    }[how]  # fmt: skip
    return Case(f"{how} {m}x{n}", own, theirs, (x, y, z))


@family("broadcast of rows and columns")
def _(d: Draw) -> Case:
    dtype = d.floats()
    m, n = d.shape((4, 65536), (4, 65536), item=dtype.itemsize)
    x, row, column = d.normal(m, n, dtype=dtype), d.normal(n, dtype=dtype), d.normal(m, 1, dtype=dtype)

    def apply(x, row, column):  # type: ignore[no-untyped-def]
        return (x + row) * column

    return Case(f"(x + row) * column {m}x{n} {dtype}", apply, apply, (x, row, column))


@family("outer sum")
def _(d: Draw) -> Case:
    m, n = d.shape((4, 65536), (4, 65536))
    x, y = d.normal(m), d.normal(n)
    return Case(f"outer {m}x{n}", lambda x, y: x[:, None] + y, lambda x, y: x[:, None] + y, (x, y))


@family("mixed types")
def _(d: Draw) -> Case:
    narrow = d.pick(torch.bfloat16, torch.float16, torch.int8)
    m, n = d.shape((1, 16384), (16, 65536))
    x = d.ints(100, m, n, low=-100, dtype=narrow) if narrow is torch.int8 else d.normal(m, n, dtype=narrow)
    y = d.normal(m, n)
    return Case(f"{narrow} * f32 {m}x{n}", lambda x, y: ts.cast(x, ts.f32) * y, lambda x, y: x.float() * y, (x, y))


@family("strided inputs")
def _(d: Draw) -> Case:
    m, n = d.shape((16, 16384), (16, 16384))
    step = d.pick(2, 3, 4)
    x, y = d.normal(m, n), d.normal(m, -(-n // step))
    return Case(f"x[:, ::{step}] + y {m}x{n}", lambda x, y: x[:, ::step] + y, lambda x, y: x[:, ::step] + y, (x, y))


@family("transposed input")
def _(d: Draw) -> Case:
    m, n = d.shape((16, 16384), (16, 16384))
    x, y = d.normal(n, m), d.normal(m, n)
    return Case(f"x.T + y {m}x{n}", lambda x, y: ts.transpose(x) + y, lambda x, y: x.T + y, (x, y))


@family("chain of pointwise ops")
def _(d: Draw) -> Case:
    (n,) = d.shape((1 << 10, 1 << 30))
    return Case(
        f"relu(x * 1.5 + .25) * .75 {n}", lambda x: ts.relu(x * 1.5 + 0.25) * 0.75,
        lambda x: torch.relu(x * 1.5 + 0.25) * 0.75, (d.normal(n),),
    )  # fmt: skip


@family("small pointwise")
def _(d: Draw) -> Case:
    m, n = d.size(1, 64), d.size(1, 256)
    x, y = d.normal(m, n), d.normal(m, n)
    return Case(f"x * y + 1 {m}x{n}", lambda x, y: x * y + 1, lambda x, y: x * y + 1, (x, y))


@family("casts")
def _(d: Draw) -> Case:
    source, target = d.pick(
        (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16),
        (torch.float16, torch.float32), (torch.int8, torch.float32), (torch.float32, torch.float64),
        (torch.int64, torch.float32),
    )  # fmt: skip
    (n,) = d.shape((1 << 12, 1 << 30), item=max(source.itemsize, target.itemsize))
    x = d.normal(n, dtype=source) if source.is_floating_point else d.ints(100, n, low=-100, dtype=source)
    own = find_dtype(target)
    return Case(f"{source} to {target} {n}", lambda x: ts.cast(x, own), lambda x: x.to(target), (x,))


@family("casts fp8")
def _(d: Draw) -> Case:
    pair = d.pick(torch.float8_e4m3fn, torch.float8_e5m2), d.pick(torch.float32, torch.bfloat16)
    (n,) = d.shape((1 << 12, 1 << 30), floor=1 / 256)
    source, target = pair if d.pick(True, False) else pair[::-1]
    own = find_dtype(target)
    return Case(
        f"{source} to {target} {n}", lambda x: ts.cast(x, own), lambda x: x.to(target), (d.normal(n).to(source),)
    )


@family("rotary embedding")
def _(d: Draw) -> Case:
    heads, width = d.pick(8, 12, 32), d.pick(64, 80, 128)
    batch, length = d.shape((1, 8), (128, 8192), item=4 * heads * width)
    x, c, s = d.normal(batch, heads, length, width), d.normal(length, width // 2), d.normal(length, width // 2)

    def own(x, c, s):  # type: ignore[no-untyped-def]
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return ts.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    def theirs(x, c, s):  # type: ignore[no-untyped-def]
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    return Case(f"rotary {batch}x{heads}x{length}x{width}", own, theirs, (x, c, s))


@family("transpose")
def _(d: Draw) -> Case:
    dtype = d.pick(torch.float32, torch.bfloat16, torch.int8, torch.float64)
    m, n = d.shape((16, 65536), (16, 65536), item=dtype.itemsize)
    x = d.ints(100, m, n, dtype=dtype)
    return Case(f"transpose {m}x{n} {dtype}", ts.transpose, lambda x: x.T.contiguous(), (x,), exact=True)


@family("permute")
def _(d: Draw) -> Case:
    dtype = d.pick(torch.float32, torch.bfloat16)
    a, b, c, e = d.shape((1, 64), (3, 512), (7, 256), (7, 256), item=dtype.itemsize)
    axes = d.pick((0, 2, 3, 1), (0, 3, 1, 2), (0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2))
    x = d.normal(a, b, c, e, dtype=dtype)
    label = f"permute {axes} {a}x{b}x{c}x{e} {dtype}"
    return Case(label, lambda x: ts.permute(x, axes), lambda x: x.permute(axes).contiguous(), (x,), exact=True)


@family("concatenate")
def _(d: Draw) -> Case:
    axis = d.pick(0, 1)
    m, n, other = d.shape((8, 16384), (8, 16384), (8, 4096), floor=0)
    x, y = d.normal(m, n), d.normal(*((other, n) if axis == 0 else (m, other)))
    label = f"concatenate axis {axis} {tuple(x.shape)} {tuple(y.shape)}"
    return Case(
        label, lambda x, y: ts.concatenate([x, y], axis=axis), lambda x, y: torch.cat((x, y), axis), (x, y), exact=True
    )


@family("stack")
def _(d: Draw) -> Case:
    axis = d.pick(0, 1, 2)
    m, n = d.shape((8, 8192), (8, 8192), item=12)
    xs = tuple(d.normal(m, n) for _ in range(3))
    return Case(
        f"stack axis {axis} 3 of {m}x{n}", lambda *xs: ts.stack(xs, axis=axis), lambda *xs: torch.stack(xs, axis), xs,
        exact=True,
    )  # fmt: skip


@family("split and swap")
def _(d: Draw) -> Case:
    m, n = d.shape((8, 16384), (8, 8192), item=8)
    x = d.normal(m, 2 * n)
    return Case(
        f"split halves {m}x{2 * n}", lambda x: ts.split(x, 2, axis=1)[::-1],
        lambda x: tuple(v.contiguous() for v in x.chunk(2, 1)[::-1]), (x,), exact=True,
    )  # fmt: skip


@family("pad")
def _(d: Draw) -> Case:
    b, c, h, w = d.shape((1, 64), (1, 256), (7, 512), (7, 512))
    p = d.pick(1, 2, 3)
    x = d.normal(b, c, h, w)
    return Case(
        f"pad {p} of {b}x{c}x{h}x{w}", lambda x: ts.pad(x, ((0, 0), (0, 0), (p, p), (p, p))),
        lambda x: F.pad(x, (p, p, p, p)), (x,), exact=True,
    )  # fmt: skip


@family("flip")
def _(d: Draw) -> Case:
    m, n = d.shape((8, 16384), (8, 16384))
    axis = d.pick(0, 1)
    x = d.normal(m, n)
    return Case(
        f"flip axis {axis} {m}x{n}", lambda x: ts.flip(x, axis), lambda x: torch.flip(x, (axis,)), (x,), exact=True
    )


@family("roll")
def _(d: Draw) -> Case:
    m, n = d.shape((8, 16384), (8, 16384))
    axis = d.pick(0, 1)
    by = int(d.rng.integers(1, (m, n)[axis]))
    x = d.normal(m, n)
    return Case(
        f"roll {by} axis {axis} {m}x{n}",
        lambda x: ts.roll(x, by, axis),
        lambda x: torch.roll(x, by, axis),
        (x,),
        exact=True,
    )


@family("repeat heads")
def _(d: Draw) -> Case:
    heads, width, times = d.pick(2, 4, 8), d.pick(64, 128), d.pick(2, 4, 8)
    batch, length = d.shape((1, 8), (64, 4096), item=4 * heads * width * times)
    x = d.normal(batch, heads, length, width)
    return Case(
        f"repeat {times} of {batch}x{heads}x{length}x{width}", lambda x: ts.repeat(x, times, axis=1),
        lambda x: x.repeat_interleave(times, 1), (x,), exact=True,
    )  # fmt: skip


@family("slices with steps")
def _(d: Draw) -> Case:
    m, n = d.shape((16, 16384), (16, 16384))
    a, b = d.pick(1, 2, 3), d.pick(1, 2, 3)
    x = d.normal(m, n)
    return Case(f"x[::{a}, 1::{b}] {m}x{n}", lambda x: x[::a, 1::b], lambda x: x[::a, 1::b].clone(), (x,), exact=True)


@family("triangles")
def _(d: Draw) -> Case:
    b, n = d.shape((1, 64), (16, 8192), item=4)
    n = min(n, int((d.limit / 4 / b) ** 0.5))
    how, k = d.pick("tril", "triu"), d.pick(0, 1, -3)
    x = d.normal(b, n, n)
    own, theirs = getattr(ts, how), getattr(torch, how)
    return Case(f"{how} {k} of {b}x{n}x{n}", lambda x: own(x, k), lambda x: theirs(x, k), (x,), exact=True)


@family("masked fill")
def _(d: Draw) -> Case:
    m, n = d.shape((8, 16384), (8, 16384))
    x, mask = d.normal(m, n), d.uniform(m, n) > 0.5
    return Case(
        f"masked fill {m}x{n}", lambda x, mask: ts.masked_fill(x, mask, -1e9),
        lambda x, mask: x.masked_fill(mask, -1e9), (x, mask), exact=True,
    )  # fmt: skip


# Random results: their share of zeros and their mean are compared, to five standard deviations and more.


def _summarise(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack([(x == 0).double().mean(), x.double().mean(), x.double().square().mean()]) for x in results]


@family("dropout")
def _(d: Draw) -> Case:
    dtype, p = d.floats(), d.pick(0.1, 0.2, 0.5)
    m, n = d.shape((64, 16384), (256, 8192), item=dtype.itemsize)
    x = torch.ones(m, n, dtype=dtype)
    return Case(
        f"dropout {p} {m}x{n} {dtype}", lambda x: ts.dropout(x, p), lambda x: F.dropout(x, p), (x,),
        tolerance=0.1, summary=_summarise,
    )  # fmt: skip


@family("residual with dropout")
def _(d: Draw) -> Case:
    dtype = d.floats()
    m, n = d.shape((64, 16384), (256, 8192), item=dtype.itemsize)
    x, y = torch.ones(m, n, dtype=dtype), torch.ones(m, n, dtype=dtype)
    return Case(
        f"x + dropout(y) {m}x{n} {dtype}", lambda x, y: x + ts.dropout(y, 0.1), lambda x, y: x + F.dropout(y, 0.1),
        (x, y), tolerance=0.1, summary=_summarise,
    )  # fmt: skip


@family("random numbers")
def _(d: Draw) -> Case:
    (n,) = d.shape((1 << 14, 1 << 30))
    x = torch.ones(n)
    how = d.pick("rand", "randn")
    own, theirs = getattr(ts, how), getattr(torch, f"{how}_like")
    return Case(
        f"{how} of {n}", lambda x: x + own((n,)), lambda x: x + theirs(x), (x,), tolerance=0.1, summary=_summarise
    )
