"""Kernels whose numbers have a policy: each clause in casts, arithmetic, sums and products of blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile
from tessera.core.types import Policy

POLICIES = {
    "toward-zero": Policy(ts.bf16, rounding="toward_zero"),
    "saturate": Policy(ts.f16, saturate=True),
    "flush": Policy(ts.f32, denormals="flush"),
    "flush-f16": Policy(ts.f16, denormals="flush"),
    "all": Policy(ts.fp8_e5m2, rounding="toward_zero", saturate=True, denormals="flush"),
}
CHANCE = {
    "chance": Policy(ts.bf16, rounding="stochastic", seed=5),
    "chance-saturating": Policy(ts.f16, rounding="stochastic", saturate=True, denormals="flush"),
}


@ts.kernel
def styled(x, y, exact, narrow, totals, product, policy: ts.constexpr):
    i = tile.program_id(0) * 16
    a, b = tile.cast(tile.load(x[i : i + 16, :]), policy), tile.cast(tile.load(y), policy)
    tile.store(exact[i : i + 16, :], tile.cast(a, ts.f32))
    tile.store(narrow[i : i + 16, :], tile.cast(a * 1.7 - a, ts.f32))
    tile.store(totals[i : i + 16], tile.cast(tile.sum(a, axis=1), ts.f32))
    tile.store(product[i : i + 16, :], tile.cast(tile.dot(a, b), ts.f32))


@ts.kernel
def by_chance(x, whole, scaled, policy: ts.constexpr):
    i, me = tile.program_id(0), tile.local_id()
    a = tile.cast(tile.load(x[i, me, :]), policy)
    tile.store(whole[i, me, :], tile.cast(a, ts.f32))
    for _ in tile.range(0, 3):
        a = a * 1.25
    tile.store(scaled[i, me, :], tile.cast(a, ts.f32))


def cases() -> Iterator[Case]:
    """Deterministic policies, within their bounds; and stochastic ones, whose bits are the same on every engine."""
    for name, policy in POLICIES.items():
        x, y = tensor(f"styled-{name}", (32, 32), low=-3, high=3), tensor(f"side-{name}", (32, 24), low=-3, high=3)
        scale = np.float32(2.0 ** (-126 if policy.storage is ts.f32 else -14 if "flush" in name else 0))
        out = [np.zeros(s, "f4") for s in ((32, 32), (32, 32), (32,), (32, 24))]
        arguments = (x * scale, y, *out, policy)
        yield Case(f"tile/language/policy-{name}", lambda a=arguments: (styled, a), (2,))
    for name, policy in CHANCE.items():
        x = tensor(f"by-{name}", (3, 8, 20), low=-3, high=3)
        arguments = (x, np.zeros_like(x), np.zeros_like(x), policy)
        yield Case(f"tile/language/policy-{name}", lambda a=arguments: (by_chance, a), (3,), 8, alike=True)
