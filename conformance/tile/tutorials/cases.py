"""The kernels of Triton's public tutorials in this kernel language, on sizes that blocks do not divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.inputs import tensor
from conformance.tile.tutorials import attention, layer_norm, products, vectors


def cases() -> Iterator[Case]:
    """Vector add, softmax, matmul, dropout, layer norm, attention, grouped and block-scaled products."""
    yield from _make_vectors()
    yield from _make_products()
    yield from _make_layer_norm()
    yield from _make_attention()


def _make_vectors() -> Iterator[Case]:
    x, y = tensor("tutx", (100,)), tensor("tuty", (100,))
    out = np.zeros(100, "f4")
    yield _make("vector-add", vectors.add, {"x": x, "y": y, "out": out, "BLOCK": 16}, (7,))
    rows = tensor("tutrows", (9, 21))
    yield _make("softmax", vectors.softmax, {"x": rows, "out": np.zeros_like(rows), "BLOCK": 32}, (4,))
    yield _make("dropout", vectors.dropout, {"x": x, "out": out, "seed": 123, "p": 0.3, "BLOCK": 16}, (7,))


def _make_products() -> Iterator[Case]:
    for dtype in ("f16", "bf16", "f32"):
        a, b = tensor(f"tuta{dtype}", (37, 20), dtype), tensor(f"tutb{dtype}", (20, 29), dtype)
        given = {"a": a, "b": b, "c": np.zeros((37, 29), "f4"), "BM": 16, "BN": 16, "BK": 8, "GROUP": 2}
        yield _make(f"matmul-{dtype}", products.matmul, {**given, "activate": dtype == "f32"}, (6,))
    sizes = np.array([(17, 9, 8), (4, 20, 25), (25, 5, 12)])
    m, n, k = sizes.T
    flat = {"a": tensor("tutga", (int((m * k).sum()),), "bf16"), "b": tensor("tutgb", (int((k * n).sum()),), "bf16")}
    given = {**flat, "c": np.zeros(int((m * n).sum()), "f4"), "sizes": sizes, "BM": 8, "BN": 8, "BK": 8}
    yield _make("grouped-gemm", products.grouped_gemm, given, (3,))
    for dtype, high in (("fp8_e4m3", 100), ("fp8_e5m2", 100), ("fp4", 6)):
        a, b = (tensor(f"tuts{s}{dtype}", (n, 32), dtype, -high, high) for s, n in (("a", 16), ("b", 24)))
        scales = (tensor(f"tutss{s}", (n, 2), "uint8", 120, 132) for s, n in (("a", 16), ("b", 24)))
        sa, sb = scales
        given = {"a": a, "a_scale": sa, "b": b, "b_scale": sb, "c": np.zeros((16, 24), "f4")}
        yield _make(f"block-scaled-{dtype}", products.block_scaled, {**given, "BM": 8, "BN": 8, "VEC": 16}, (2, 3))


def _make_layer_norm() -> Iterator[Case]:
    for dtype in ("f32", "f16"):
        x, g = tensor(f"tutnx{dtype}", (5, 23), dtype), tensor(f"tutng{dtype}", (5, 23), dtype)
        w, b = tensor("tutnw", (23,), dtype), tensor("tutnb", (23,), dtype)
        mean, rstd = np.zeros(5, "f4"), np.zeros(5, "f4")
        given = {"x": x, "weight": w, "bias": b, "y": np.zeros_like(x), "mean": mean, "rstd": rstd, "eps": 1e-5}
        yield _make(f"layer-norm-{dtype}", layer_norm.forward, {**given, "BLOCK": 8}, (5,))
        mean, rstd = x.astype("f8").mean(1).astype("f4"), (1 / x.astype("f8").std(1)).astype("f4")
        sums = {"dw": np.zeros((2, 23), "f4"), "db": np.zeros((2, 23), "f4")}
        given = {"dy": g, "x": x, "weight": w, "mean": mean, "rstd": rstd, "dx": np.zeros_like(x), **sums, "BLOCK": 32}
        yield _make(f"layer-norm-backward-{dtype}", layer_norm.backward_rows, given, (5,))
    dw, db = tensor("tutdw", (5, 23)), tensor("tutdb", (5, 23))
    out = {"weight_grad": np.zeros(23, "f4"), "bias_grad": np.zeros(23, "f4"), "BM": 2, "BN": 8}
    yield _make("layer-norm-sums", layer_norm.backward_sums, {"dw": dw, "db": db, **out}, (3,))


def _make_attention() -> Iterator[Case]:
    for dtype, causal in (("f32", False), ("f32", True), ("bf16", True)):
        q, k, v, g = (tensor(f"tutatt{n}{dtype}", (2, 16, 8), dtype) for n in "qkvg")
        options: dict[str, Any] = {"causal": causal, "scale": 0.3, "BM": 8, "BN": 4}
        empty, rows = np.zeros_like(q), np.zeros((2, 16), "f4")
        name = f"attention{'-causal' if causal else ''}-{dtype}"
        given = {"q": q, "k": k, "v": v, **options}
        yield _make(name, attention.forward, {**given, "out": empty, "lse": rows}, (2, 2))
        saved = {"grad": g, "lse": tensor("tutlse", (2, 16), low=2, high=3), "delta": tensor("tutdelta", (2, 16))}
        grads = {"dk": empty, "dv": empty.copy()}
        yield _make(f"{name}-keys", attention.keys_backward, {**given, **saved, **grads}, (2, 4))
        yield _make(f"{name}-queries", attention.queries_backward, {**given, **saved, "dq": empty}, (2, 2))
        yield _make(f"{name}-sums", attention.row_sums, {"out": v, "grad": g, "delta": rows, "BM": 8}, (2, 2))


def _make(name: str, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> Case:
    return Case(f"tile/tutorials/{name}", lambda: (kernel, arguments), grid=grid)
