"""The kernels of the standard library: ragged sizes, several element types, each compiled option."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.inputs import tensor
from tessera.stdlib import attention, deterministic_reductions, gemm, losses, normalisation, optimisers

FLOATS = ("f32", "bf16", "f16")


def cases() -> Iterator[Case]:
    """Every kernel, its options and edges."""
    for dtype in FLOATS:
        yield from _make_norms(dtype)
        yield from _make_products(dtype)
        yield from _make_attention(dtype)
        yield _make_rotary(dtype, interleaved=dtype == "f16")
        yield _make_adam(dtype, decoupled=dtype != "f16")
        yield _make_entropy(dtype, gradient=True)
        yield _make_sums(dtype)
    yield _make_entropy("f64", gradient=False)
    yield _make_sums("int32")
    yield _make_quantized("int8")
    yield _make_quantized("fp8_e4m3")


def _make_norms(dtype: str) -> Iterator[Case]:
    x, w, b = tensor(f"norm{dtype}", (5, 23), dtype), tensor("weight", (23,), dtype), tensor("bias", (23,), dtype)
    blocks, out = {"BM": 4, "BN": 8}, np.zeros_like(x)
    layer = {"x": x, "weight": w, "bias": b, "out": out, "eps": 1e-5, "center": True, **blocks}
    yield _make(f"layernorm-{dtype}", normalisation.normalize_rows, layer, (2,))
    rms = {**layer, "bias": None, "center": False}
    yield _make(f"rms-norm-{dtype}", normalisation.normalize_rows, rms, (2,))
    yield _make(f"softmax-{dtype}", normalisation.softmax_rows, {"x": x, "out": out, **blocks}, (2,))


def _make_products(dtype: str) -> Iterator[Case]:
    a, b = tensor(f"pa{dtype}", (2, 9, 21), dtype), tensor(f"pb{dtype}", (2, 21, 13), dtype)
    blocks = {"BM": 8, "BN": 8, "BK": 16}
    for name, activation in ((None, None), *gemm.ACTIVATIONS.items()):
        bias = None if name is None else tensor("pbias", (13,), dtype)
        arguments = {"a": a, "b": b[:1], "bias": bias, "out": np.zeros((2, 9, 13), a.dtype), "activation": activation}
        yield _make(f"product-{name}-{dtype}", gemm.product, {**arguments, **blocks}, (2, 2, 2))
    grouped = {
        "a": a.reshape(18, 21),
        "b": b,
        "bias": None,
        "ends": np.array([0, 5, 18]),
        "out": np.zeros((18, 13), a.dtype),
    }
    yield _make(f"grouped-{dtype}", gemm.group_product, {**grouped, **blocks}, (2, 2, 2))


def _make_attention(dtype: str) -> Iterator[Case]:
    q, k, v = (tensor(f"{n}{dtype}", (2, h, s, 8), dtype) for n, h, s in (("q", 4, 9), ("k", 2, 21), ("v", 2, 21)))
    mask = tensor("mask", (2, 1, 1, 21), dtype)
    options: dict[str, Any] = {"out": np.zeros_like(q), "scale": 0.35, "BM": 8, "BN": 8}
    for name, causal, lengths, m in (
        ("grouped", False, None, None), ("causal", True, None, None), ("mask", False, None, mask),
        ("cache", True, np.array([9, 20]), None),
    ):  # fmt: skip
        given = {"q": q, "k": k, "v": v, "mask": m, "lengths": lengths, "causal": causal, **options}
        yield _make(f"attention-{name}-{dtype}", attention.attend, given, (2, 4, 2))
    given = {"q": q, "k": k, "v": v, "mask": None, "lengths": None, "causal": False, "window": 5, "softcap": 1.5}
    yield _make(f"attention-window-{dtype}", attention.attend, {**given, **options}, (2, 4, 2))


def _make_rotary(dtype: str, interleaved: bool) -> Case:
    x, angles = tensor(f"rotary{dtype}", (2, 11, 6), dtype), np.arange(33, dtype="f8").reshape(11, 3)
    tables = {"cos": np.cos(angles).astype("f4"), "sin": np.sin(angles).astype("f4")}
    arguments = {"x": x, **tables, "out": np.zeros_like(x), "interleaved": interleaved, "BM": 8}
    return _make(f"rotary-{dtype}", attention.rotate, arguments, (2, 2))


def _make_adam(dtype: str, decoupled: bool) -> Case:
    p, g = (tensor(f"{n}adam{dtype}", (37,), dtype) for n in "pg")
    m, v = tensor("m", (37,)), tensor("v", (37,), low=0.1)
    rates = np.array([1e-2, 0.9, 0.999, 0.1, 0.19, 0.002], "f4")
    arguments = {
        "param": p,
        "grad": g,
        "m": m,
        "v": v,
        "rates": rates,
        "eps": 1e-8,
        "decoupled": decoupled,
        "BLOCK": 16,
    }
    return _make(f"adam-{dtype}", optimisers.adam_step, arguments, (3,))


def _make_entropy(dtype: str, gradient: bool) -> Case:
    x, wide = tensor(f"logits{dtype}", (7, 19), dtype), "f8" if dtype == "f64" else "f4"
    arguments = {"logits": x, "targets": np.array([0, 18, 3, -100, 7, 8, 9]), "scale": np.array([0.25], wide)}
    outputs = {"losses": np.zeros(7, wide), "grad": np.zeros_like(x) if gradient else None}
    return _make(
        f"cross-entropy-{dtype}", losses.entropy_rows, {**arguments, **outputs, "ignore": -100, "BM": 4, "BN": 8}, (2,)
    )


def _make_sums(dtype: str) -> Case:
    x = tensor(f"sums{dtype}", (100,), dtype, -50, 50)
    out = np.zeros(3, "i8" if dtype == "int32" else "f4")
    return _make(
        f"tree-sum-{dtype}", deterministic_reductions.sum_blocks, {"x": x, "out": out, "per": 3, "BLOCK": 16}, (3,)
    )


def _make_quantized(dtype: str) -> Case:
    a, b = tensor(f"qa{dtype}", (9, 21), dtype, -100, 100), tensor(f"qb{dtype}", (21, 13), dtype, -100, 100)
    scales = {
        "row_scale": tensor("rs", (9,), low=0.1),
        "col_scale": tensor("cs", (13,), low=0.1),
        "bias": tensor("qc", (13,)),
    }
    arguments = {"a": a, "b": b, **scales, "out": np.zeros((9, 13), "f4"), "BM": 8, "BN": 8, "BK": 16}
    return _make(f"quantized-{dtype}", gemm.scaled_product, arguments, (2, 2))


def _make(name: str, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> Case:
    return Case(f"tile/stdlib/{name}", lambda: (kernel, arguments), grid=grid)
