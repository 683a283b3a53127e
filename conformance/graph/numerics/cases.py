"""Narrow types and numeric policies: conversions, arithmetic, sums and products under each clause."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import edge_values, tensor
from tessera.core.types import as_dtype
from tessera.frontend.jit.tracing import Jit

NARROW = ("f16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp6", "fp6_e2m3", "fp4", "int4")
POLICIES = {
    "mixed": {"compute": ts.f16, "accumulate": ts.f32},
    "bf16": {"compute": ts.bf16, "accumulate": ts.f32, "store": ts.bf16},
    "fp8": {"accumulate": ts.f32, "store": ts.fp8_e4m3},
    "toward-zero": {"rounding": "toward_zero", "store": ts.bf16},
    "saturate": {"saturate": True, "store": ts.fp8_e5m2},
    "flush": {"denormals": "flush"},
    "stochastic": {"rounding": "stochastic", "store": ts.bf16},
    "compensated": {"compensated": True},
}


# Policies on values at the edges: what a format does not hold, or holds as infinity, in each place of a computation.
EDGE_POLICIES: dict[str, dict[str, Any]] = {
    "tf32": {"compute": ts.tf32},
    "tf32-saturate": {"compute": ts.tf32, "saturate": True},
    "f16": {"compute": ts.f16},
    "f16-saturate": {"compute": ts.f16, "saturate": True},
    "saturate": {"saturate": True},
    "saturate-f16": {"saturate": True, "store": ts.f16},
    "saturate-bf16": {"saturate": True, "store": ts.bf16},
    "toward-zero": {"rounding": "toward_zero"},
    "toward-zero-f16": {"rounding": "toward_zero", "store": ts.f16},
    "flush": {"denormals": "flush"},
    "flush-f16": {"denormals": "flush", "store": ts.f16},
    "compensated": {"compensated": True},
}
# Of one operand alone: each operand is converted to its own compute type.
MIXED_POLICIES = {
    **{n: EDGE_POLICIES[n] for n in EDGE_POLICIES if not n.endswith(("-f16", "-bf16"))},
    "bf16": {"compute": ts.bf16},
    "f64": {"compute": ts.f64},
}


def cases() -> Iterator[Case]:
    """Each narrow type through an op, a sum and a product; each policy over a small network, and on edge values."""
    for dtype in NARROW:
        x, y = (tensor(f"{dtype}-{i}", (9, 33), dtype) for i in range(2))
        total = ts.int32 if dtype == "int4" else ts.f32
        yield _make_case(f"arithmetic-{dtype}", lambda x, y: x * y + x, x, y)
        yield _make_case(f"widened-{dtype}", lambda x, y: ts.cast(x, dtype=ts.f32) - ts.cast(y, dtype=ts.f32), x, y)
        yield _make_case(f"narrowed-{dtype}", lambda x, d=dtype: ts.cast(x * 3.0, dtype=d), tensor(dtype, (7, 40)))
        yield _make_case(f"sum-{dtype}", lambda x: ts.sum(x, axis=1), x)
        yield _make_case(f"product-{dtype}", lambda x, y, t=total: ts.matmul(x, y.T, dtype=t), x, y)
        if dtype != "int4":
            yield _make_by_chance(dtype)
    for given, stored in itertools.product(("f32", "f16", "bf16", "fp8_e5m2"), ("f32", "f16", "bf16", "fp8_e5m2")):
        x = edge_values("special", 3, (3, 11), given)
        yield _make_case(f"saturated-{given}-{stored}", _saturate(stored), x, 2.0 * x)
    whole = np.arange(150, 190, dtype="f4")
    for clauses in ({"compute": ts.bf16}, {"compute": ts.f16}):
        name = f"computed-in-{clauses['compute']}"  # products that f32 holds, and the type of the computation does not
        yield _make_case(name, _multiply(clauses), whole, whole[::-1].copy())
    for name, clauses in POLICIES.items():
        most = 0.1 if name == "fp8" else 0.5  # larger ones have bounds that say nothing
        x, w = (tensor(n, s, "f32", -most, most) for n, s in (("x", (6, 20)), ("w", (20, 8))))
        yield _make_case(f"policy-{name}", _saturated if name == "saturate" else _under(clauses), x, w)
    for name, clauses in EDGE_POLICIES.items():
        for kind in ("special", "extreme", "subnormal"):
            x, w = edge_values(kind, 1, (5, 16), "f32"), edge_values(kind, 2, (16, 3), "f32")
            program = Jit(_use_edges(clauses))
            yield Case(f"graph/numerics/edges-{name}-{kind}", lambda p=program, a=(x, w): (p, a), unknown=True)  # type: ignore[misc]
    for name, clauses in MIXED_POLICIES.items():
        x, y = (edge_values("extreme", i, (5, 16), "f32") for i in (1, 2))
        program = Jit(_mix(clauses))
        yield Case(f"graph/numerics/mixed-{name}", lambda p=program, a=(x, y): (p, a), unknown=True)  # type: ignore[misc]


def _make_case(name: str, program: Callable[..., Any], *operands: Any) -> Case:
    return Case(f"graph/numerics/{name}", lambda: (Jit(program), operands))


def _make_by_chance(dtype: str) -> Case:
    """Stochastic rounding, whose bits depend on the seed and each element's index: equal on every engine."""
    policy = ts.Policy(dtype, rounding="stochastic", seed=len(dtype))
    program = Jit(lambda x: ts.cast(x, dtype=policy).T * 1.7)
    return Case(f"graph/numerics/stochastic-{dtype}", lambda: (program, (tensor(dtype, (3, 40)),)), alike=True)


def _saturate(stored: str) -> Callable[..., Any]:
    """Infinities and numbers beyond the range of a type, which may be wider than that of the operand."""
    dtype = as_dtype(stored) @ ts.saturate
    return lambda x, y: (ts.cast(x, dtype=dtype), ts.cast(y, dtype=dtype))


def _saturated(x: Any, w: Any) -> Any:
    """A constant beyond the largest number of the type, 57344, and products beyond it, of either sign."""
    with ts.numerics(**POLICIES["saturate"]):
        return x * 2.0**18, (w * 49152.0) * 4.0


def _use_edges(clauses: dict[str, Any]) -> Callable[..., Any]:
    def program(x: Any, w: Any) -> Any:
        with ts.numerics(**clauses):
            pointwise = (x * 1.5, x + x, x - x[:, ::-1], ts.exp(x), ts.maximum(x, 0.0), -x)
            return *pointwise, ts.sum(x, axis=1), ts.cumsum(x, axis=0), ts.mean(x * 2.0), ts.max(x, axis=0), x @ w

    return program


def _mix(clauses: dict[str, Any]) -> Callable[..., Any]:
    """Ops of an operand that has a policy and of one without."""

    def program(x: Any, y: Any) -> Any:
        narrow = ts.cast(x, dtype=ts.Policy(ts.f32, **clauses))  # not rounded to the compute type before an op
        pointwise = narrow * y, y + narrow, y - narrow, narrow - y, ts.maximum(y, narrow)
        return *pointwise, ts.where(y > x, y, narrow), ts.where(narrow > y, narrow, y), narrow / y, narrow @ y.T

    return program


def _multiply(clauses: dict[str, Any]) -> Callable[..., Any]:
    def product(x: Any, y: Any) -> Any:
        with ts.numerics(**clauses):
            return x * y

    return product


def _under(clauses: dict[str, Any]) -> Callable[..., Any]:
    def network(x: Any, w: Any) -> Any:
        with ts.numerics(**clauses):
            return ts.softmax(ts.relu(ts.matmul(x, w)) + 0.5, axis=-1).sum(axis=0)

    return network
