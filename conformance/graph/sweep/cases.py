"""The sweep: ops from the columns of their definitions, with all element types, on shapes and values at the edges.

Shapes: none, 0, 1, primes, one around a vector and a tile, several axes. Values (`conformance.inputs.KINDS`): NaN and
infinities at the first, the last and other places, signed zeros, the limits of the type, subnormals, ties.
"""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import tessera as ts
from conformance.case import Case
from conformance.graph.elementwise.cases import make_zeros
from conformance.graph.numerics.cases import EDGE_POLICIES
from conformance.inputs import edge_values
from tessera.core.types import as_dtype
from tessera.frontend.jit.tracing import Jit
from tessera.ir.rules import REGISTRY, Op, lower
from tessera.ops.tensor import reduce

FLOATS = ("f32", "bf16", "f16", "f64", "fp8_e5m2", "fp8_e4m3")
INTEGERS = ("int32", "uint8", "int64", "int8", "uint32")
SHAPES = ((), (0,), (1,), (17,), (3, 37), (2, 0, 3), (5, 1, 33), (129,), (8193,))
KINDS = ("special", "extreme", "ties", "uniform")
REDUCED = ((3, 5, 36), (1, 1, 1), (2, 17, 65), (7, 1, 9))
AXES: tuple[Any, ...] = (-1, 0, 1, None, (0, 2))
PRODUCTS = (
    (1, 1, 1),
    (1, 7, 1),
    (16, 16, 16),
    (17, 15, 33),
    (64, 1, 5),
    (3, 65, 127),
    (129, 40, 2),
    (5, 0, 3),
    (33, 513, 17),
)
TYPES = (*FLOATS, *INTEGERS, "int16", "uint16", "uint64", "bool", "fp6", "fp4", "int4")


def cases() -> Iterator[Case]:
    """All cases of the sweep."""
    yield from _make_pointwise()
    yield from _make_zeros()
    yield from _make_reductions()
    yield from _make_scans()
    yield from _make_moves()
    yield from _make_products()
    yield from _make_casts()
    yield from _make_gradients()
    yield from _make_policies()


def _case(area: str, name: str, program: Callable[..., Any], inputs: list[tuple[str, tuple[int, ...], str]]) -> Case:
    """A case with inputs of (kind, shape, element type); its arrays are made when it runs."""
    full = f"graph/sweep/{area}/{name}"
    seed = zlib.crc32(full.encode())

    def entry() -> tuple[Any, Any]:
        return Jit(program), tuple(
            edge_values(kind, seed + i, shape, dtype) for i, (kind, shape, dtype) in enumerate(inputs)
        )

    return Case(full, entry, unknown=True)


def _show(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def list_pointwise() -> list[tuple[Op, tuple[str, ...]]]:
    """Pointwise ops, and composites of one operand without attributes, with their element types."""
    found = []
    for op in REGISTRY.values():
        if not op.name.startswith("ts.") or op.attrs or op.effects or not 1 <= len(op.operands) <= 2:
            continue
        if not op.pointwise and (op not in lower or not _is_elementwise(op)):
            continue
        kinds = op.kinds if op.pointwise else ("float",)
        dtypes = (FLOATS if "float" in kinds else ()) + (INTEGERS if "int" in kinds else ())
        found.append((op, dtypes + (("bool",) if "bool" in kinds else ())))
    return [(op, dtypes) for op, dtypes in found if op.name not in EXCLUDED]


# Undefined for some of the values (semantics, rule 7), or not a function of elements.
EXCLUDED = (
    "ts.shift_left",
    "ts.shift_right",
    "ts.round_by_chance",
    "ts.integer_power",
    "ts.recompute",
    "ts.fusion_barrier",
    "ts.kept",
    "ts.stop_gradient",
)


def _is_elementwise(op: Op) -> bool:
    """Whether a composite gives one element for each: its lowering is made of pointwise ops, as its module says."""
    return len(op.operands) >= 1 and inspect.getmodule(op.ref).__name__.rsplit(".", 1)[1] in (  # type: ignore[union-attr]
        "elementwise", "decompositions", "activations", "scalar_functions",
    )  # fmt: skip


def _make_pointwise() -> Iterator[Case]:
    for op, dtypes in list_pointwise():
        divides = op.name in ("ts.floor_divide", "ts.remainder", "ts.fmod")
        for number, dtype in enumerate(dtypes):
            for (a, shape), (b, kind) in itertools.product(enumerate(SHAPES), enumerate(KINDS)):
                if (a + b + number) % 3:  # a third of the product: each pair of op and type has each shape and kind
                    continue
                # Integers by 0 are undefined, and -0 is rounded down to -1 or to itself.
                unsure = not as_dtype(dtype).is_float or (
                    op.name == "ts.floor_divide" and kind == "special" and not shape
                )
                second = "positive" if divides and unsure else kind
                first = "zeros" if op.name == "ts.acos" and kind == "ties" and not shape else kind  # of -1: pi or -pi
                inputs = [(first, shape, dtype), (second, shape, dtype)][: len(op.operands)]
                yield _case("pointwise", f"{op.__name__}-{dtype}-{_show(shape)}-{kind}", _call(op), inputs)


def _call(op: Op, **attrs: Any) -> Callable[..., Any]:
    """A function of as many parameters as the op has operands."""
    if len(op.operands) == 1:
        return lambda x: op(x, **attrs)
    return lambda x, y: op(x, y, **attrs)


def _make_zeros() -> Iterator[Case]:
    for op, dtypes in list_pointwise():
        yield from (make_zeros(f"graph/sweep/zeros/{op.__name__}-{d}", (op,), d) for d in dtypes if d in FLOATS)


def _make_reductions() -> Iterator[Case]:
    ops = (reduce.sum, reduce.max, reduce.min, reduce.mean, reduce.var, reduce.prod, reduce.std, reduce.logsumexp,
           reduce.argmax, reduce.argmin)  # fmt: skip
    for op, shape, axis, (number, kind) in itertools.product(ops, REDUCED, AXES, enumerate(KINDS)):
        if op in (reduce.argmax, reduce.argmin) and not isinstance(axis, int):
            continue
        dtype = ("f32", "bf16", "f64", "int32")[(number + len(str(axis))) % 4]
        kind = _choose_kind(op.__name__, kind, dtype, shape, axis)
        name = f"{op.__name__}-{dtype}-{_show(shape)}-{axis}-{kind}".replace(" ", "")
        yield _case("reduce", name, _along(op, axis), [(kind, shape, dtype)])


ROUNDED = ("mean", "var", "std", "logsumexp")  # of integers, too


def _choose_kind(op: str, kind: str, dtype: str, shape: tuple[int, ...], axis: Any) -> str:
    """A kind of values of which a bound says something: no order of a sum or product overflows by itself."""
    if op not in (*ROUNDED, "sum", "prod", "cumsum", "cumprod") or (dtype == "int32" and op not in ROUNDED):
        return kind
    if shape == (1, 1, 1) and op in ROUNDED:  # of one element: 0, or the element itself
        return {"var": "zeros", "std": "zeros", "logsumexp": "positive"}.get(op, kind if kind != "extreme" else "wide")
    if kind == "extreme":
        return "near" if "prod" in op else "wide"
    return "infinite" if kind == "special" and not isinstance(axis, int) else kind


def _along(op: Callable[..., Any], axis: Any) -> Callable[[Any], Any]:
    return lambda x: op(x, axis=axis)


def _multiply(dtype: Any) -> Callable[[Any, Any], Any]:
    return lambda a, b: ts.matmul(a, b, dtype=dtype)


def _convert(name: str) -> Callable[[Any], Any]:
    return lambda x: ts.cast(x, dtype=as_dtype(name))


def _make_scans() -> Iterator[Case]:
    for op, shape, axis, kind in itertools.product(("cumsum", "cumprod", "sort", "argsort"), REDUCED, (0, 1, 2), KINDS):
        dtype = ("f32", "int32", "bf16")[axis]
        function, kind = getattr(ts, op), _choose_kind(op, kind, dtype, shape, axis)
        name = f"{op}-{dtype}-{_show(shape)}-{axis}-{kind}"
        yield _case("scan", name, _along(function, axis), [(kind, shape, dtype)])


MOVES: dict[str, Callable[[Any], Any]] = {
    "reverse": lambda x: x[::-1], "every-second": lambda x: x[..., ::2], "inner": lambda x: x[1:, ..., :-1],
    "pad": lambda x: ts.pad(x, ((1, 2),) * 3, value=1), "join": lambda x: ts.concatenate([x, x[:, :1], x], axis=1),
    "stack": lambda x: ts.stack([x, x], axis=-1), "turn": lambda x: ts.permute(x, (2, 0, 1)),
    "flat": lambda x: ts.reshape(ts.permute(x, (1, 0, 2)), (-1,)), "roll": lambda x: ts.roll(x, -2, axis=1),
    "repeat": lambda x: ts.repeat(x, 3, axis=0), "take": lambda x: ts.take(x, ts.Tensor([0, -1, 0]), axis=1),
    "broadcast": lambda x: ts.broadcast_to(x, (2, *x.shape)), "lower": lambda x: ts.tril(x),
    "where": lambda x: ts.where(x == x[:1], x, x[:, ::-1]),
}  # fmt: skip


def _make_moves() -> Iterator[Case]:
    for (name, move), shape, dtype in itertools.product(MOVES.items(), REDUCED, TYPES):
        yield _case("move", f"{name}-{dtype}-{_show(shape)}", move, [("special", shape, dtype)])


def _make_products() -> Iterator[Case]:
    for (m, k, n), dtype, kind in itertools.product(
        PRODUCTS, (*FLOATS, "int8", "int32"), ("uniform", "special", "ties")
    ):
        inputs = [(kind, (m, k), dtype), (kind, (k, n), dtype)]
        wide = as_dtype("f32" if as_dtype(dtype).is_float else "int32") if dtype not in ("f64", "int32") else None
        yield _case("product", f"matmul-{dtype}-{m}x{k}x{n}-{kind}", _multiply(wide), inputs)


def _make_casts() -> Iterator[Case]:
    for source, to, kind in itertools.product(TYPES, TYPES, ("special", "extreme")):
        if source != to:
            yield _case("cast", f"{source}-{to}-{kind}", _convert(to), [(kind, (5, 13), source)])
    narrow = [t for t in (*TYPES, "fp6_e2m3") if t not in ("f32", "f64") and as_dtype(t).is_float]
    for source, to, kind in itertools.product(("f32", "f64"), narrow, ("special", "extreme")):
        yield _case("cast", f"rounded-{source}-{to}-{kind}", _round(source, to), [(kind, (5, 13), source)])
    for chain in itertools.permutations(("f16", "bf16", "fp8_e4m3", "int8"), 3):
        yield _case("cast", "chain-" + "-".join(chain), _chain(chain), [("uniform", (7, 9), "f32")])


def _round(source: str, to: str) -> Callable[[Any], Any]:
    """To a narrow type and back, which a target may do without the code of that type."""
    return lambda x: ts.cast(ts.cast(x, dtype=as_dtype(to)), dtype=as_dtype(source)) * 1.5


def _chain(names: tuple[str, ...]) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        for name in names:
            x = ts.cast(x, dtype=as_dtype(name)) * 3
        return ts.cast(x, dtype=ts.f32)

    return program


def _make_gradients() -> Iterator[Case]:
    for op, dtypes in list_pointwise():
        if "f32" not in dtypes or op.__name__ in ("nextafter", "signbit", "isnan", "isinf", "isfinite", "bitcast"):
            continue
        if op.__name__ in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"):
            continue
        for dtype, kind in itertools.product(("f32", "f64"), ("uniform", "ties", "positive")):
            inputs = [(kind, (3, 17), dtype), ("positive", (3, 17), dtype)][: len(op.operands)]
            yield _case("gradient", f"{op.__name__}-{dtype}-{kind}", _gradient(op), inputs)


def _gradient(op: Op) -> Callable[..., Any]:
    both = tuple(range(len(op.operands)))
    if len(both) == 1:
        return ts.grad(lambda x: ts.sum(op(x)))
    return ts.grad(lambda x, y: ts.sum(op(x, y)), argnums=both)


def _make_policies() -> Iterator[Case]:
    """Each pointwise op of floats under each policy, with one kind of values: the kinds take turns."""
    ops = [op for op, dtypes in list_pointwise() if "f32" in dtypes]
    for (a, op), (b, (name, clauses)) in itertools.product(enumerate(ops), enumerate(EDGE_POLICIES.items())):
        kind = ("special", "extreme", "subnormal", "uniform")[(a + b) % 4]
        inputs = [(kind, (3, 37), "f32"), ("positive" if a % 2 else kind, (3, 37), "f32")][: len(op.operands)]
        yield _case("policy", f"{op.__name__}-{name}-{kind}", _under(clauses, op), inputs)


def _under(clauses: dict[str, Any], op: Op) -> Callable[..., Any]:
    call = _call(op)

    def program(*operands: Any) -> Any:
        with ts.numerics(**clauses):
            return call(*operands)

    return program
