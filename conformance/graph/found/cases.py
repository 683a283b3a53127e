"""Functions that fuzzing found to be wrong on some engine, and relatives of them at other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import edge_values, tensor
from tessera import tile
from tessera.core.types import as_dtype
from tessera.frontend.jit.tracing import Jit


def sort_empty(x: Any) -> Any:
    """The indices of an empty axis are constants that no element has: they are not outside it."""
    return ts.sort(x, axis=0), ts.topk(x, 0, axis=0)[0], ts.argsort(x, axis=-1)


def narrow_and_join(x: Any) -> Any:
    """A last vector with one element that was computed in a wider type: its store must not reach beyond the row."""
    return ts.concatenate([x, ts.cast(ts.cast(x, dtype=ts.f32) + 1.0, dtype=x.dtype)], axis=0)


def outer_products(x: Any) -> Any:
    """Products over one element: a vector of the packed operand holds several rows."""
    return ts.sum(ts.matmul(x, ts.permute(x, (1, 0))), axis=0)


def sliced_to_nothing(x: Any) -> Any:
    """A slice without elements beside a reversed axis."""
    return x[0:0:2, ::-1, :]


def constant_dividend(x: Any) -> Any:
    """A division of a constant by floats of 8 bits, whose storage is an integer."""
    return ts.remainder(0.5, x), ts.floor_divide(x, 0.5)


def extremes(x: Any) -> Any:
    """Extremes of types with and without infinities: what is past the end of an axis must not win."""
    ends = [f(x, axis=-1) for f in (ts.max, ts.min, ts.argmax, ts.argmin)]
    return *ends, ts.max(x, axis=0), ts.argmax(-x, axis=0), ts.argmin(-x, axis=0)


def extremes_below_zero(x: Any) -> Any:
    """Extremes of numbers that are all on one side of 0: the padding of pieces on a mesh must not win."""
    return ts.max(x), ts.min(-x), ts.max(x, axis=0), ts.argmax(x, axis=1), ts.argmin(-x, axis=0)


def places_of_extremes(x: Any) -> Any:
    """Places of extremes along a line of several tiles: the first NaN wins, then the first of equal numbers."""
    return ts.argmax(x, axis=0), ts.argmin(x, axis=0)


def scattered_lanes(x: Any, places: Any, updates: Any) -> Any:
    """Scatters of each lane: to equal places, the first and the last one."""
    modes = ("set", "min", "max", "multiply")
    found = [ts.vmap(lambda a, i, u, m=m: ts.scatter(a, i, u, axis=0, mode=m))(x, places, updates) for m in modes]
    found.append(ts.vmap(ts.scatter_add)(x, places, updates))
    return found, ts.vmap(lambda a, i: ts.scatter(a, i, a[:4] * 2, axis=0), in_axes=(0, None))(x, places[0])


def whole_to_float(x: Any) -> Any:
    """Integers that f32 does not hold: a conversion to a narrower float rounds once."""
    return ts.cast(x, dtype=ts.bf16), ts.cast(x, dtype=ts.f32)


def whole_toward_zero(x: Any) -> Any:
    """Integers that f64 or f32 does not hold, toward zero: no result is larger than the number."""
    return [ts.cast(x, dtype=d @ ts.toward_zero) for d in (ts.f32, ts.bf16)]


def list_halves(dtype: str) -> np.ndarray:
    """Integers halfway between neighbours of 4, 8, 11, 24 and 53 digits, and those beside them."""
    info = np.iinfo(dtype)
    found = {info.min, info.max, 0}
    for power, digits, odd in itertools.product(range(5, info.bits), (4, 8, 11, 24, 53), (0, 1)):
        if power >= digits:
            half = (1 << power) + (odd << (power - digits + 1)) + (1 << (power - digits))
            found |= {sign * (half + d) for d in (-1, 0, 1) for sign in (1, -1)}
    return np.array(sorted(n for n in found if info.min <= n <= info.max), dtype)


def folded(x: Any) -> Any:
    """What algebra simplifies and arithmetic does not: with NaN, infinities and zeros of both signs."""
    negated = -x
    parts = [x * 0.0, 0.0 * x, x + 0.0, x - 0.0, x - (-0.0), 0.0 - x, x * 1.0, x / 1.0, -negated, x - x, x / x, x**1.0]
    signs = [ts.copysign(1.0, v) for v in (x + 0.0, x - (-0.0), x * -1.0, negated)]
    return ts.stack([*parts, *signs, ts.maximum(x, x), ts.where(x == x, x, negated)])


def _extreme_cases() -> Iterator[Case]:
    """Extremes of values that bite, and of numbers on one side of 0."""
    for dtype in ("f32", "int32"):
        x = tensor("negative", (7, 35), dtype, -90, -1)
        yield Case(f"graph/found/extremes-below-zero-{dtype}", lambda x=x: (Jit(extremes_below_zero), (x,)), exact=True)  # type: ignore[misc]
    for dtype, columns in itertools.product(("fp8_e4m3", "fp8_e5m2", "fp6", "fp4", "bf16", "int8", "f32"), (3, 33)):
        for kind in ("extreme", "ties"):
            x = edge_values(kind, 1, (5, columns), dtype)
            yield Case(f"graph/found/extremes-{dtype}-{columns}-{kind}", lambda x=x: (Jit(extremes), (x,)), exact=True)  # type: ignore[misc]


def _long_lines() -> Iterator[Case]:
    """Lines longer than a tile, with what wins in the first tile, in the last, in both, or nowhere."""
    for shape, marked in itertools.product(((9001,), (5000, 3)), (np.nan, 3.0, -3.0)):
        for name, places in (("last", [-1]), ("both", [7, -1]), ("first", [0]), ("late", [-2, -1])):
            x = tensor("line", shape, "f32")
            x[places] = marked
            title = f"graph/found/places-{'x'.join(map(str, shape))}-{marked:g}-{name}"
            yield Case(title, lambda x=x: (Jit(places_of_extremes), (x,)), exact=True)  # type: ignore[misc]


def _whole_numbers() -> Iterator[Case]:
    """Conversions of integers that lie between two floats."""
    for dtype, cut in itertools.product(("int64", "uint64", "int32", "uint32", "int16"), (False, True)):
        function = whole_toward_zero if cut else whole_to_float
        x = list_halves(dtype)
        title = f"graph/found/{function.__name__.replace('_', '-')}-{dtype}"
        yield Case(title, lambda f=function, x=x: (Jit(f), (x,)), alike=True)  # type: ignore[misc]


def extremes_of_turned_rows(x: Any) -> Any:
    """Extremes along short rows whose other axes lie in memory in another order."""
    turned = ts.permute(x, (1, 0, 2))
    return ts.max(turned, axis=-1), ts.min(turned, axis=-1, keepdims=True)


def product_by_policy(policy: Any) -> Any:
    """A product whose result, not only its operands, is rounded by a policy."""

    def multiply(x: Any) -> Any:
        rounded = ts.cast(x, dtype=policy)
        return ts.matmul(rounded, ts.permute(rounded, (1, 0)))

    return multiply


def compared_without_memory(x: Any) -> Any:
    """Values of 16 bits that no array holds: they are computed where they are compared."""
    narrow = ts.cast(x, dtype=ts.bf16)
    return ts.less_equal(narrow, narrow)


def parts_of_two_policies(x: Any) -> Any:
    """Infinities without a policy beside saturated elements: the whole saturates, whichever comes first."""
    plain, saturated = ts.floor_divide(3.0, x), ts.cast(x, dtype=ts.fp8_e5m2 @ ts.saturate)
    joined = ts.concatenate([plain, saturated]), ts.stack([saturated, plain]), ts.where(x > 0.0, plain, saturated)
    return tuple(ts.abs(each).to(ts.f32) <= 57344.0 for each in joined)


def _policies() -> Iterator[Case]:
    x = edge_values("extreme", 4, (5, 4), "fp8_e5m2")
    for name, policy in (("toward-zero", ts.bf16 @ ts.toward_zero), ("saturated", ts.fp8_e5m2 @ ts.saturate)):
        yield Case(f"graph/found/product-{name}", lambda p=policy: (Jit(product_by_policy(p)), (x,)))  # type: ignore[misc]
    small_quotients = np.array([-1.95, -0.5, 1.2, -0.0], np.float32)
    yield Case("graph/found/sign-of-a-floor-toward-zero", lambda: (Jit(sign_of_a_floor), (small_quotients,)))
    for wide in ("f32", "f64"):
        x = tensor("computed-narrow", (4, 5), wide)
        yield Case(f"graph/found/computed-narrow-{wide}", lambda x=x: (Jit(computed_narrow), (x,)))  # type: ignore[misc]
    divisors = np.array([[1.5e-5, 1.0], [-1.5e-5, 2.0]]).astype(ts.fp8_e5m2.numpy)
    yield Case("graph/found/parts-of-two-policies", lambda: (Jit(parts_of_two_policies), (divisors,)), exact=True)
    small = edge_values("ramp", 4, (4, 8), "fp8_e4m3")
    yield Case("graph/found/compared-without-memory", lambda: (Jit(compared_without_memory), (small,)), exact=True)


def sign_of_a_floor(x: Any) -> Any:
    """A quotient that is rounded down to 0: rounding an interval around it toward zero keeps its sign."""
    whole = ts.floor_divide(ts.cast(x, dtype=ts.bf16 @ ts.toward_zero), -2.0)
    return whole, ts.atan2(whole, whole)


def computed_narrow(x: Any) -> Any:
    """A composite in a compute type that is narrower than its storage: the operand is rounded to that type."""
    y = ts.cast(x, dtype=ts.Policy(as_dtype(x.dtype), compute=ts.f16))
    return ts.relu(y), ts.clip(y, -1, 1), y * 1.0


def padded_by_infinity(x: Any) -> Any:
    """One element of padding on each side: csl assigns it as a literal, which for narrow floats had the type f32."""
    sides = ts.pad(x, ((1, 1),), value=float("-inf"))
    return sides, ts.max_pool1d(x[None, None], 3, stride=2, padding=1), ts.where(x > 0, x, float("inf"))


def added_to_one_row(x: Any) -> Any:
    """Whole updates of one row: their sum has no rounding error, but a row to which they are added one by one has."""
    return ts.scatter_add(x, ts.Tensor([0, 0, 0, 0]), ts.ones_like(x[:4]), axis=0), x.at[[1, 1, -1, 1]].add(3)


def whole_numbers(x: Any) -> Any:
    """Whole numbers of every code of a format: fp6_e2m3 ends at 7.5, whose nearest whole number it does not have."""
    return ts.round(x), ts.floor(x), ts.ceil(x), ts.trunc(x)


def _narrow_formats() -> Iterator[Case]:
    for dtype in ("f64", "f32", "f16", "bf16"):
        x = edge_values("positive", 0, (5, 64), dtype)
        yield Case(f"graph/found/added-to-one-row-{dtype}", lambda x=x: (Jit(added_to_one_row), (x,)))  # type: ignore[misc]
    for dtype, codes in (("fp6_e2m3", 64), ("fp6", 64), ("fp4", 16)):
        every = np.arange(codes, dtype=np.uint8).view(as_dtype(dtype).numpy)
        yield Case(f"graph/found/whole-numbers-{dtype}", lambda x=every: (Jit(whole_numbers), (x,)), exact=True)  # type: ignore[misc]
    for dtype in ("f16", "bf16", "fp8_e5m2"):
        x = edge_values("ramp", 4, (1,), dtype)
        yield Case(f"graph/found/padded-by-infinity-{dtype}", lambda x=x: (Jit(padded_by_infinity), (x,)), exact=True)  # type: ignore[misc]


@ts.kernel
def row_totals(x: Any, out: Any, *, COUNT: int, BN: int = 1) -> None:
    """Totals of rows, in a loop over blocks of columns."""
    i = tile.program_id(0)
    total = tile.load(x[i : i + 1, 0:BN], other=0.0)
    for j in tile.range(1, COUNT):
        total = total * 0.5 + tile.load(x[i : i + 1, j * BN : j * BN + BN], other=0.0)
    tile.store(out[i : i + 1], tile.sum(total, axis=1))


def totals_of_equal_rows(x: Any) -> Any:
    """A launch on a broadcast value, whose elements lie in another order in the interpreter's memory."""
    rows = ts.broadcast_to(x, (3, x.shape[0]))
    return ts.launch(row_totals, (3,), rows, ts.like(shape=(3,), dtype=x.dtype), COUNT=x.shape[0])


def cases() -> Iterator[Case]:
    """Each function at the sizes around a vector."""
    yield from _policies()
    ramp = edge_values("ramp", 0, (4,), "f32")
    yield Case("graph/found/totals-of-equal-rows", lambda: (Jit(totals_of_equal_rows), (ramp,)))
    yield from _narrow_formats()
    turned = tensor("turned-rows", (6, 9, 5), "f32")
    yield Case("graph/found/extremes-of-turned-rows", lambda: (Jit(extremes_of_turned_rows), (turned,)), exact=True)
    yield from _long_lines()
    places = np.array([[0, 4, 4, 2], [3, 3, 0, 3], [4, 1, 1, -5]])
    for dtype in ("f32", "int32"):
        x, updates = tensor("lanes", (3, 5, 2), dtype, -9, 9), tensor("updates", (3, 4, 2), dtype, -9, 9)
        arguments = (x, places, updates)
        # The bits of the interpreter, which runs the definition: the bound follows from the lowering.
        alike = dtype == "int32"
        yield Case(f"graph/found/scattered-lanes-{dtype}", lambda a=arguments: (Jit(scattered_lanes), a), alike=alike)  # type: ignore[misc]
    yield from _whole_numbers()
    for dtype in ("fp8_e4m3", "fp8_e5m2", "bf16", "f16"):
        x = tensor("divisor", (3, 4), dtype, 0.5, 3.0)
        yield Case(f"graph/found/constant-dividend-{dtype}", lambda x=x: (Jit(constant_dividend), (x,)))  # type: ignore[misc]
    yield from _extreme_cases()
    for dtype, kind in itertools.product(("f64", "f32", "f16", "bf16"), ("special", "zeros", "extreme")):
        x = edge_values(kind, 1, (3, 11), dtype)
        yield Case(f"graph/found/folded-{dtype}-{kind}", lambda x=x: (Jit(folded), (x,)), unknown=True)  # type: ignore[misc]
    for dtype in ("int64", "int32", "int16", "int8"):
        least = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, -3], dtype)
        yield Case(
            f"graph/found/abs-of-the-least-{dtype}", lambda x=least: (Jit(lambda y: ts.abs(y)), (x,)), exact=True
        )  # type: ignore[misc]
    for shape in ((0, 3), (3, 0), (0,)):
        name = "graph/found/sort-empty-" + "x".join(map(str, shape))
        yield Case(name, lambda s=shape: (Jit(sort_empty), (np.zeros(s, np.float32),)), exact=True)  # type: ignore[misc]
    yield Case("graph/found/sliced-to-nothing", lambda: (Jit(sliced_to_nothing), (np.ones((1, 2, 1), np.float32),)))
    for columns in (1, 9, 17, 33):
        for dtype in ("bf16", "f16", "int8"):
            x = tensor(f"join{columns}", (3, columns), dtype)
            yield Case(f"graph/found/narrow-and-join-{columns}-{dtype}", lambda x=x: (Jit(narrow_and_join), (x,)))  # type: ignore[misc]
    for rows in (1, 2, 5, 9, 17):
        x = tensor(f"outer{rows}", (rows, 1))
        yield Case(f"graph/found/outer-products-{rows}", lambda x=x: (Jit(outer_products), (x,)))  # type: ignore[misc]
