"""Families of products, attention and factorisations."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import tessera as ts
from benchmarks.breadth_families import Case, Draw, family

Range = tuple[int, int]


def _matmul(name: str, m: Range, n: Range, k: Range, *dtypes: torch.dtype) -> None:
    """A family of products of drawn sizes, types and transpositions."""

    @family(name)
    def _(d: Draw) -> Case:
        dtype = d.pick(*(dtypes or (torch.float32, torch.bfloat16)))
        r, s, t = d.product(m, n, k, item=dtype.itemsize)
        left, right = d.pick(False, True), d.pick(False, True)
        a = d.normal(*((t, r) if left else (r, t)), dtype=dtype)
        b = d.normal(*((s, t) if right else (t, s)), dtype=dtype)

        def apply(a, b):  # type: ignore[no-untyped-def]
            return (a.T if left else a) @ (b.T if right else b)

        label = f"{r}x{t} @ {t}x{s} {dtype} {'NT'[left]}{'NT'[right]}"
        return Case(label, apply, apply, (a, b), 2.0 * r * s * t)


_matmul("product f32", (128, 8192), (128, 8192), (128, 8192), torch.float32)
_matmul("product bf16", (128, 16384), (128, 16384), (128, 16384), torch.bfloat16)
_matmul("product f16", (128, 16384), (128, 16384), (128, 16384), torch.float16)
_matmul("product f64", (64, 4096), (64, 4096), (64, 4096), torch.float64)
_matmul("product tall", (16384, 262144), (16, 256), (16, 512))
_matmul("product wide", (16, 256), (16384, 151936), (64, 1024))
_matmul("product of few rows", (2, 64), (512, 28672), (512, 16384))
_matmul("product deep and thin", (16, 256), (16, 256), (8192, 262144))
_matmul("product small", (2, 96), (2, 96), (2, 96))


@family("vector times matrix")
def _(d: Draw) -> Case:
    dtype = d.pick(torch.float32, torch.bfloat16)
    k, n = d.shape((512, 28672), (512, 28672), item=dtype.itemsize)
    x, w = d.normal(k, dtype=dtype), d.normal(k, n, dtype=dtype)
    return Case(f"{k} @ {k}x{n} {dtype}", lambda x, w: x @ w, lambda x, w: x @ w, (x, w), 2.0 * k * n)


@family("matrix times vector")
def _(d: Draw) -> Case:
    dtype = d.pick(torch.float32, torch.bfloat16)
    m, k = d.shape((512, 28672), (512, 28672), item=dtype.itemsize)
    w, x = d.normal(m, k, dtype=dtype), d.normal(k, dtype=dtype)
    return Case(f"{m}x{k} @ {k} {dtype}", lambda w, x: w @ x, lambda w, x: w @ x, (w, x), 2.0 * m * k)


@family("product int8")
def _(d: Draw) -> Case:
    m, n, k = d.product((64, 8192), (64, 8192), (64, 8192))
    m, n, k = max(m, 17), -(-n // 8) * 8, -(-k // 8) * 8
    a, b = d.ints(100, m, k, low=-100, dtype=torch.int8), d.ints(100, k, n, low=-100, dtype=torch.int8)
    return Case(
        f"int8 {m}x{k} @ {k}x{n}", lambda a, b: ts.matmul(a, b, dtype=ts.int32), torch._int_mm, (a, b), 2.0 * m * n * k,
        exact=True,
    )  # fmt: skip


@family("batched products")
def _(d: Draw) -> Case:
    dtype = d.pick(torch.float32, torch.bfloat16)
    batch = d.size(2, 256)
    m, n, k = d.product((16, 2048), (16, 2048), (16, 512), item=dtype.itemsize, batch=batch)
    a, b = d.normal(batch, m, k, dtype=dtype), d.normal(batch, k, n, dtype=dtype)
    return Case(
        f"{batch} x {m}x{k} @ {k}x{n} {dtype}", lambda a, b: a @ b, lambda a, b: a @ b, (a, b), 2.0 * batch * m * n * k
    )


@family("batched small products")
def _(d: Draw) -> Case:
    m, n, k = (d.size(2, 32) for _ in range(3))
    (batch,) = d.shape((64, 65536), item=4 * max(m * n, m * k, n * k))
    a, b = d.normal(batch, m, k), d.normal(batch, k, n)
    return Case(f"{batch} x {m}x{k} @ {k}x{n}", lambda a, b: a @ b, lambda a, b: a @ b, (a, b), 2.0 * batch * m * n * k)


@family("linear with activation")
def _(d: Draw) -> Case:
    dtype = d.pick(torch.float32, torch.bfloat16)
    m, n, k = d.product((16, 8192), (128, 8192), (128, 8192), item=dtype.itemsize)
    x, w, b = d.normal(m, k, dtype=dtype), d.normal(n, k, dtype=dtype), d.normal(n, dtype=dtype)
    how = d.pick("relu", "gelu", "silu")
    return Case(
        f"{how}(linear) {m}x{k} @ {k}x{n} {dtype}", lambda x, w, b: getattr(ts, how)(ts.linear(x, w.T, b)),
        lambda x, w, b: getattr(F, how)(F.linear(x, w, b)), (x, w, b), 2.0 * m * n * k,
    )  # fmt: skip


@family("linear with residual")
def _(d: Draw) -> Case:
    m, n, k = d.product((16, 8192), (128, 4096), (128, 8192))
    x, w, b, r = d.normal(m, k), d.normal(n, k), d.normal(n), d.normal(m, n)
    return Case(
        f"linear + residual {m}x{k} @ {k}x{n}", lambda x, w, b, r: ts.linear(x, w.T, b) + r,
        lambda x, w, b, r: F.linear(x, w, b) + r, (x, w, b, r), 2.0 * m * n * k,
    )  # fmt: skip


@family("gated products")
def _(d: Draw) -> Case:
    m, n, k = d.product((1, 2048), (128, 14336), (128, 4096))
    x, w, v = d.normal(m, k), d.normal(n, k), d.normal(n, k)
    return Case(
        f"silu(x w) * (x v) {m}x{k} @ {k}x{n}", lambda x, w, v: ts.silu(ts.linear(x, w.T)) * ts.linear(x, v.T),
        lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v), (x, w, v), 4.0 * m * n * k,
    )  # fmt: skip


@family("quantised weights")
def _(d: Draw) -> Case:
    m, n, k = d.product((1, 64), (512, 14336), (512, 8192))
    groups = 64
    k = -(-k // groups) * groups
    x, w = d.normal(m, k), d.ints(127, k, n, low=-127, dtype=torch.int8)
    scale = d.uniform(k // groups, n)

    def own(x, w, scale):  # type: ignore[no-untyped-def]
        wide = ts.cast(w, ts.f32).reshape(k // groups, groups, n) * scale[:, None, :]
        return x @ wide.reshape(k, n)

    def theirs(x, w, scale):  # type: ignore[no-untyped-def]
        return x @ (w.float().view(k // groups, groups, n) * scale[:, None, :]).view(k, n)

    return Case(f"int8 weights, groups of 64: {m}x{k} @ {k}x{n}", own, theirs, (x, w, scale), 2.0 * m * n * k)


@family("grouped products")
def _(d: Draw) -> Case:
    experts = d.pick(4, 8, 16)
    m, n, k = d.product((16, 512), (128, 4096), (128, 4096), batch=experts)
    x, w = d.normal(experts, m, k), d.normal(experts, n, k)
    return Case(
        f"{experts} experts {m}x{k} @ {k}x{n}", lambda x, w: ts.einsum("emk,enk->emn", x, w),
        lambda x, w: torch.einsum("emk,enk->emn", x, w), (x, w), 2.0 * experts * m * n * k,
    )  # fmt: skip


@family("einsum")
def _(d: Draw) -> Case:
    heads, width = d.pick(4, 8, 12), d.pick(32, 64, 80)
    b, s, t = d.size(1, 4), d.size(32, 1024), d.size(32, 512)
    equation = d.pick("bshd,bthd->bhst", "bsd,dhe->bshe")
    if equation == "bshd,bthd->bhst":
        x, y, flops = d.normal(b, s, heads, width), d.normal(b, t, heads, width), 2.0 * b * s * t * heads * width
    else:
        x, y, flops = d.normal(b, s, t), d.normal(t, heads, width), 2.0 * b * s * t * heads * width
    return Case(
        f"{equation} {tuple(x.shape)} {tuple(y.shape)}", lambda x, y: ts.einsum(equation, x, y),
        lambda x, y: torch.einsum(equation, x, y), (x, y), flops,
    )  # fmt: skip


@family("tensordot")
def _(d: Draw) -> Case:
    a, b, c, e = d.size(8, 256), d.size(4, 64), d.size(4, 64), d.size(8, 256)
    x, y = d.normal(a, b, c), d.normal(b, c, e)
    return Case(
        f"tensordot {a}x{b}x{c} {b}x{c}x{e}", lambda x, y: ts.tensordot(x, y, 2),
        lambda x, y: torch.tensordot(x, y, 2), (x, y), 2.0 * a * b * c * e,
    )  # fmt: skip


@family("product gradient")
def _(d: Draw) -> Case:
    m, n, k = d.product((64, 4096), (64, 4096), (64, 4096))
    x, w, g = d.normal(m, k), d.normal(k, n), d.normal(m, n)
    return Case(
        f"gradient of tanh(x @ w) {m}x{k} @ {k}x{n}", lambda x, w: ts.tanh(x @ w), lambda x, w: torch.tanh(x @ w),
        (x, w, g), 6.0 * m * n * k, wrt=(0, 1),
    )  # fmt: skip


def _attention(name: str, *, wrt: bool = False, decode: bool = False, **how: bool) -> None:
    @family(name)
    def _(d: Draw) -> Case:
        width, heads, batch = d.pick(32, 64, 80, 128, 256), d.pick(4, 8, 16), d.size(1, 8)
        shared = d.pick(2, 4) if how.get("grouped") else 1
        keys = d.size(512, 32768) if decode else d.size(64, 4096)
        rows = 1 if decode else keys
        while batch > 1 and 4.0 * batch * heads * rows * keys * width > d.work:
            batch -= 1
        while 4.0 * batch * heads * rows * keys * width > d.work or batch * heads * keys * width * 4 > d.limit:
            keys = keys // 2
            rows = 1 if decode else keys
        dtype = torch.float32 if wrt else d.floats()
        q = d.normal(batch, heads, rows, width, dtype=dtype)
        k, v = (d.normal(batch, heads // shared, keys, width, dtype=dtype) for _ in range(2))
        inputs: tuple[torch.Tensor, ...] = (q, k, v, *((d.normal(*q.shape),) if wrt else ()))
        causal = bool(how.get("causal"))
        label = f"{name} {batch}x{heads}/{shared}x{rows}x{keys}x{width} {dtype}"
        flops = 4.0 * batch * heads * rows * keys * width * (3.5 if wrt else 1) / (2 if causal else 1)

        def theirs(q, k, v):  # type: ignore[no-untyped-def]
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared > 1)

        return Case(
            label, lambda q, k, v: ts.scaled_dot_product_attention(q, k, v, causal=causal), theirs, inputs, flops,
            wrt=(0, 1, 2) if wrt else (),
        )  # fmt: skip


_attention("attention")
_attention("attention causal", causal=True)
_attention("attention grouped queries", causal=True, grouped=True)
_attention("attention decode", decode=True)
_attention("attention decode grouped queries", decode=True, grouped=True)
_attention("attention gradient", wrt=True, causal=True)


@family("attention with a bias")
def _(d: Draw) -> Case:
    heads, width, n = d.pick(4, 8, 12), d.pick(32, 64), d.size(64, 1024)
    q, k, v = (d.normal(2, heads, n, width) for _ in range(3))
    bias = d.normal(heads, n, n)
    return Case(
        f"attention with bias 2x{heads}x{n}x{width}", lambda q, k, v, b: ts.scaled_dot_product_attention(q, k, v, b),
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b[None]), (q, k, v, bias),
        8.0 * heads * n * n * width,
    )  # fmt: skip


def _batch_of_matrices(d: Draw) -> torch.Tensor:
    n = d.size(2, 64)
    (batch,) = d.shape((4, 4096), item=64 * n * n)
    x = d.normal(batch, n, n)
    return x @ x.mT + n * torch.eye(n)


@family("cholesky batched")
def _(d: Draw) -> Case:
    x = _batch_of_matrices(d)
    return Case(f"cholesky {tuple(x.shape)}", ts.cholesky, torch.linalg.cholesky, (x,), tolerance=1e-4)


@family("solve batched")
def _(d: Draw) -> Case:
    x = _batch_of_matrices(d)
    b = d.normal(*x.shape[:2], 4)
    return Case(f"solve {tuple(x.shape)}", ts.solve, torch.linalg.solve, (x, b), tolerance=1e-4)


@family("qr batched")
def _(d: Draw) -> Case:
    x = _batch_of_matrices(d)

    def own(x):  # type: ignore[no-untyped-def]
        return ts.abs(ts.qr(x)[1])

    return Case(f"qr {tuple(x.shape)}", own, lambda x: torch.linalg.qr(x).R.abs(), (x,), tolerance=1e-4)
