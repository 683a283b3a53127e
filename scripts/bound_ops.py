"""Error bounds of every op against random legal evaluations, with every element type that it takes.

    python scripts/bound_ops.py --evaluations 100000 [--seed 0] [--report benchmarks/results/bound_ops.json]
    python scripts/bound_ops.py --op exp --op sum --dtype f32
    python scripts/bound_ops.py --table benchmarks/results/bound_ops.json

The uses of ops are those of the conformance cases: types, attributes, and indices. A primitive is evaluated alone, on
exact operands and on uncertain ones, at points of their intervals; a composite as its expansion. How an evaluation may
differ is stated in `legal_evaluations.py`. Prints for each op and type how many evaluations lay outside of their bound,
the largest and the median share of the bound that an element reached, and the bits of a result that the bound makes
certain (median, of exact operands). A report is continued.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from bound_orders import count_bits  # noqa: E402
from legal_evaluations import OpUse, evaluate_in_some_way, evaluate_use  # noqa: E402

from conformance.case import Case, read_area  # noqa: E402
from conformance.inputs import edge_values  # noqa: E402
from tessera.core.errors import TesseraError  # noqa: E402
from tessera.core.types import DType, TensorType, as_dtype, tf32  # noqa: E402
from tessera.interp import bound  # noqa: E402
from tessera.interp.bound import compare_with_bound  # noqa: E402
from tessera.interp.graph import control_flow_rules  # noqa: E402
from tessera.ir.builder import evaluate_block  # noqa: E402
from tessera.ir.core import Attrs, Block, Function, Node, Value  # noqa: E402
from tessera.ir.numerics.conversion import convert  # noqa: E402
from tessera.ir.numerics.error_model import OUTWARD_FACTOR  # noqa: E402
from tessera.ir.numerics.interval_arithmetic import IntervalArray, absolute_distance  # noqa: E402
from tessera.ir.rewrite import expand_composites  # noqa: E402
from tessera.ir.rules import ACCUMULATE, STORAGE, Op, error, lower  # noqa: E402
from tessera.runtime.program import prepare  # noqa: E402

AREAS = (
    "graph.elementwise", "graph.functions", "graph.reduce", "graph.shape", "graph.scatter", "graph.linalg",
    "graph.composites", "graph.networks", "graph.gradients", "graph.numerics", "graph.sizes", "graph.found",
)  # fmt: skip
DTYPES = (
    "f64", "f32", "tf32", "f16", "bf16", "fp8_e5m2", "fp8_e4m3", "fp6", "fp6_e2m3", "fp4", "int64", "int32", "int16",
    "int8", "int4", "uint64", "uint32", "uint16", "uint8", "bool",
)  # fmt: skip
INDEXED = ("ts.check_index",)  # ops of indices alone
MOST_USES, MOST_ELEMENTS = 4, 6000
POINTS = 4096  # elements of a pointwise op
ROUNDS = 20  # evaluations of the same operands


@dataclass(frozen=True)
class Use:
    """An op as a case uses it: the types of its operands, attributes and arrays; `varied` operands have its type."""

    op: Op
    types: tuple[TensorType, ...]
    attrs: Any
    arrays: tuple[np.ndarray, ...]
    varied: tuple[bool, ...]


def harvest(cases: Iterable[Case]) -> dict[Op, list[Use]]:
    """A few uses of each op in the programs of cases: of primitives after expansion, of composites before."""
    found: dict[Op, dict[Any, Use]] = {}
    for case in cases:
        if case.rejects is not None or case.mesh is not None or case.dynamic is not None:
            continue
        entry, arguments = case.entry()
        try:
            prepared = prepare(entry, arguments, "interp", lower=False)
        except TesseraError:
            continue
        graph = prepared.levels["graph"].main
        for function in (graph, expand_composites(graph, keep=lambda op: op in error)):
            _walk_uses(function, prepared.arrays, found)
    return {op: list(uses.values()) for op, uses in found.items()}


def _walk_uses(function: Function, arrays: Sequence[Any], found: dict[Op, dict[Any, Use]]) -> None:
    def meaning(node: Node, args: list[Any], run: Any) -> Any:
        if node.op in control_flow_rules:
            return control_flow_rules.of(node.op)(node, args, run)
        if node.op in error or node.op in lower:
            _keep(node, args, found.setdefault(node.op, {}))
        return node.op.execute(node.types, node.result_types, node.attrs, args)

    with np.errstate(all="ignore"):
        evaluate_block(function.body, list(arrays), meaning)


def _keep(node: Node, args: list[Any], uses: dict[Any, Use]) -> None:
    key = (repr(dict(node.attrs)), tuple((t.rank, t.policy) for t in node.types))
    size = sum(np.size(a) for a in args)
    if key in uses or len(uses) >= MOST_USES or not 0 < size <= MOST_ELEMENTS or node.op.effects:
        return
    floats = [t.dtype.is_float for t in node.types]
    numbers = node.op.name not in INDEXED
    varied = tuple(floats) if any(floats) or not numbers else (True,) * len(floats)
    uses[key] = Use(node.op, node.types, node.attrs, tuple(np.asarray(a) for a in args), varied)


@dataclass(frozen=True)
class TypedUse:
    """A use with an element type: a primitive, or the function that a composite is expanded to."""

    use: Use
    typed: OpUse
    function: Function | None


def retype(use: Use, dtype: DType) -> TypedUse | None:
    """The same use with another element type, on many elements if it is pointwise; None if the op does not take it."""
    if use.op.pointwise and dtype.is_integer and not {"int", "uint"} & set(use.op.kinds):
        return None
    try:
        found = _type_operands(use, dtype, POINTS if use.op.pointwise else 0)
        if found.op in error:
            return TypedUse(use, found, None)
        function = make_function(found)
        if not found.attrs and all(n.op.pointwise or n.op.name in SPREADING for n in function.body.nodes):
            found = _type_operands(use, dtype, POINTS)
            function = make_function(found)
        return TypedUse(use, found, function)
    except (TesseraError, ValueError):
        return None


def _type_operands(use: Use, dtype: DType, points: int) -> OpUse:
    types = []
    for type, varied in zip(use.types, use.varied, strict=True):
        policy = replace(type.policy, storage=dtype) if type.policy is not None and dtype.is_float else None
        shape = (points,) if points and type.shape else type.shape
        types.append(TensorType(shape, dtype, policy) if varied else replace(type, shape=shape))
    attrs = use.attrs
    if use.op.name == "ts.dot" and attrs["dtype"] == use.types[0].dtype:
        attrs = Attrs({**attrs, "dtype": dtype})
    if use.op.name == "ts.pad" and not dtype.is_float:
        attrs = Attrs({**attrs, "value": int(np.asarray(attrs["value"]).astype(dtype.numpy))})
    return OpUse(use.op, tuple(types), use.op.result_types(tuple(types), attrs), attrs)


SPREADING = ("ts.full", "ts.broadcast")  # in a pointwise expansion, of scalars
KINDS = ("uniform", "domain", "domain", "domain", "wide", "ties", "special")


def draw_operands(rng: np.random.Generator, use: Use, types: Sequence[TensorType], kind: str) -> list[Any]:
    """Exact operands: those of the case, numbers of the op's domain, or values that expose errors."""
    drawn = []
    for type, varied, given in zip(types, use.varied, use.arrays, strict=True):
        if not varied:  # indices and conditions
            drawn.append(np.resize(given, type.shape))
        elif kind == "domain" and type.dtype.kind != "bool":
            drawn.append(convert(np.asarray(rng.uniform(*use.op.domain, type.shape)), type.dtype))
        else:
            named = "positive" if kind == "domain" or _divides(use.op, type) else kind
            values = edge_values(named, int(rng.integers(1 << 30)), type.shape, type.dtype)
            drawn.append(convert(values, type.dtype) if type.dtype is tf32 else values)
    return drawn


def _divides(op: Op, type: TensorType) -> bool:
    """Whether operands are small and positive: integers by 0, to a negative power and by long shifts are undefined."""
    undefined = ("ts.floor_divide", "ts.remainder", "ts.fmod", "ts.integer_power", "ts.shift_left", "ts.shift_right")
    return type.dtype.is_integer and op.name in undefined


@dataclass(frozen=True)
class Operand:
    """An operand: exact numbers, or intervals that hold them; `reach` is how far a computed value may be off.

    A value between ops may be rounded to its type at any time, so the radius covers more.
    """

    exact: np.ndarray
    interval: IntervalArray
    reach: np.ndarray
    type: TensorType

    def draw_points(self, rng: np.random.Generator, op: Op) -> np.ndarray:
        """A point of each interval that the operand may be: an end, or between; of the type that the op reads."""
        wide = self.type.accumulate if op.numerics == ACCUMULATE else self.type.compute
        if op.numerics == STORAGE and self.type.dtype.bits > wide.bits:
            wide = self.type.dtype
        if self.interval.exact:
            return self.exact
        shape, value = self.exact.shape, self.interval.value
        place = rng.choice([-1.0, 1.0], shape) if rng.random() < 0.4 else rng.uniform(-1, 1, shape)
        with np.errstate(all="ignore"):
            point = convert(value + place * self.reach, wide)
            inside = np.abs(point.astype(np.float64) - value) <= self.reach
        return np.where(inside & (self.reach > 0), point, self.exact.astype(wide.numpy))


def make_operand(rng: np.random.Generator, x: np.ndarray, type: TensorType, uncertain: bool) -> Operand:
    """An operand that holds the numbers of an array, of which some are uncertain if any is."""
    if not (uncertain and type.dtype.is_float):
        return Operand(x, IntervalArray(x), np.zeros(x.shape), type)
    wide = x.astype(np.float64)
    size = np.where(np.abs(wide) < HUGE, np.abs(wide), 0.0)
    reach = size * rng.choice([0.0, 0.0, 1e-6, 1e-3, 0.3, 2.0], x.shape)
    value = np.where(reach > 0, wide + reach * rng.uniform(-0.99, 0.99, x.shape), wide)
    with np.errstate(all="ignore"):
        ends = (convert(value + side * reach, type.dtype).astype(np.float64) for side in (-1, 1))
        apart = np.maximum(*(absolute_distance(end, value) for end in ends))
    radius = np.where(reach > 0, np.maximum(reach, apart) * OUTWARD_FACTOR, 0.0)
    return Operand(x, IntervalArray(value, radius), reach, type)


HUGE = 1e300  # an interval of larger numbers has no ends


@dataclass
class Tally:
    """What the evaluations of one op with one type came to."""

    evaluations: int = 0
    outside: int = 0
    largest: float = 0.0
    example: str = ""

    def __post_init__(self) -> None:
        self.shares: list[np.ndarray] = []
        self.relative: list[np.ndarray] = []

    def add(self, found: Sequence[Any], bounds: Sequence[IntervalArray], worst: list[np.ndarray], said: str) -> None:
        """Compare the results of an evaluation with their bounds."""
        for at, (result, each) in enumerate(zip(found, bounds, strict=True)):
            agreement = compare_with_bound(result, each)
            self.evaluations += np.size(result)
            self.largest = max(self.largest, agreement.worst_share)
            if not agreement.ok:
                self.outside += 1
                self.example = self.example or f"{said}: {agreement}"
            with np.errstate(all="ignore"):
                apart = np.abs(np.asarray(result).astype(np.float64) - each.value.astype(np.float64))
                worst[at] = np.fmax(worst[at], np.where(apart == 0, 0.0, apart / each.radius))


def examine_use(rng: np.random.Generator, each: TypedUse, tally: Tally, least: float) -> None:
    """Evaluate a use `ROUNDS` times on operands that are drawn, and tally the results."""
    kind = str(rng.choice(KINDS)) if tally.relative else "domain"  # first what says how many bits are certain
    arrays = draw_operands(rng, each.use, each.typed.types, kind)
    uncertain = each.function is None and bool(tally.relative) and rng.random() < 0.5
    operands = [make_operand(rng, x, t, uncertain) for x, t in zip(arrays, each.typed.types, strict=True)]
    typed = replace(each.typed, final=bool(rng.random() < 0.5))
    if each.function is None:
        bounds: Any = bound.apply_with_bounds(*_list_parts(typed), [o.interval for o in operands], typed.final)
    else:
        bounds = bound.run(each.function, arrays)
    worst = [np.zeros(b.shape) for b in bounds]
    for _ in range(ROUNDS):
        with np.errstate(all="ignore"):
            if each.function is None:
                found = evaluate_use(rng, typed, [o.draw_points(rng, typed.op) for o in operands])
            else:
                found = evaluate_in_some_way(each.function, arrays, rng)
        tally.add(found, bounds, worst, f"{kind}{' uncertain' * uncertain}")
    tally.shares += [w[np.isfinite(b.radius) & (b.radius > 0)] for w, b in zip(worst, bounds, strict=True)]
    if not uncertain and kind == "domain":
        tally.relative += [(b.radius / np.maximum(np.abs(b.value.astype(np.float64)), least)).ravel() for b in bounds]


def _list_parts(use: OpUse) -> tuple[Any, ...]:
    return use.op, use.types, use.results, use.attrs


def make_function(use: OpUse) -> Function:
    """A Graph function of one op, expanded."""
    params = tuple(Value(t) for t in use.types)
    made = Node(use.op, params, Attrs(use.attrs), tuple(Value(t) for t in use.results))
    return expand_composites(Function("program", Block(params, (made,), made.results)), keep=lambda op: op in error)


def examine(op: Op, typed: Sequence[TypedUse], dtype: str, evaluations: int, seed: int) -> dict[str, Any] | None:
    """The row of an op and a type; None if its results have no elements."""
    rng = np.random.default_rng([seed, *op.name.encode(), *dtype.encode()])
    tally, floats = Tally(), as_dtype(dtype).is_float
    least = float(ml_dtypes.finfo(as_dtype(dtype).numpy).smallest_normal) if floats else 1.0
    while tally.evaluations < evaluations:
        before = tally.evaluations
        for each in typed:
            examine_use(rng, each, tally, least)
        if tally.evaluations == before:
            return None
    shares, relative = (np.concatenate([*parts, np.zeros(0)]) for parts in (tally.shares, tally.relative))
    relative = relative[~np.isnan(relative)]  # outside of the domain of the op results are NaN
    return {
        "op": op.name.removeprefix("ts."), "dtype": dtype, "evaluations": tally.evaluations, "outside": tally.outside,
        "largest": round(tally.largest, 4), "median": round(float(np.nanmedian(shares)), 4) if shares.size else 0.0,
        "bits": round(count_bits(float(np.median(relative)), dtype), 1) if floats and relative.size else None,
        "wide": round(float(np.mean(relative > 0.5)), 4) if relative.size else 0.0, "example": tally.example,
    }  # fmt: skip


def list_rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all ops and types that are asked for."""
    uses = harvest(c for area in AREAS for c in read_area(area))
    for op in sorted(uses, key=lambda op: op.name):
        if given.op and op.name.removeprefix("ts.") not in given.op:
            continue
        typed = {d: [t for u in uses[op] if (t := retype(u, as_dtype(d))) is not None] for d in given.dtype or DTYPES}
        taken = {d: found for d, found in typed.items() if found}
        for dtype, found in taken.items():
            try:
                row = examine(op, found, dtype, given.evaluations // len(taken), given.seed)
            except TesseraError as refusal:  # an op of the expansion does not take the type
                print(f"{op.name} {dtype}: {refusal.message}")
                continue
            if row is not None:
                yield row


def describe(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table with a line for each op: the types, evaluations, those outside, and the shares and bits by type."""
    shown = ("f64", "f32", "f16", "bf16", "fp8_e4m3")
    lines = [
        f"| op | types | evaluations | outside | largest share | {' | '.join(shown)} |",
        "|---" * (5 + len(shown)) + "|",
    ]
    for op in dict.fromkeys(r["op"] for r in rows):
        mine = {r["dtype"]: r for r in rows if r["op"] == op}
        cells = (f"{mine[d]['median']:.2f} ({mine[d]['bits'] or '–'})" if d in mine else "" for d in shown)
        counts = (sum(r[name] for r in mine.values()) for name in ("evaluations", "outside"))
        facts = (len(mine), *counts, f"{max(r['largest'] for r in mine.values()):.2f}")
        lines.append(f"| {op} | {' | '.join(map(str, facts))} | {' | '.join(cells)} |")
    return lines


LINE = (
    "{op:24} {dtype:9} {evaluations:8} outside {outside}, largest {largest}, median {median}, bits {bits}, "
    "wide {wide} {example}"
)


def main() -> int:
    """Print a line for each op and type; status 1 if an evaluation lay outside."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--evaluations", type=int, default=100_000, help="for each op, of all types")
    options.add_argument("--op", action="append", default=[])
    options.add_argument("--dtype", action="append", default=[], choices=DTYPES)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--report", type=Path)
    options.add_argument("--table", type=Path, help="only print the table of a report")
    given = options.parse_args()
    if given.table:
        print("\n".join(describe(json.loads(given.table.read_text()))))
        return 0
    known = json.loads(given.report.read_text()) if given.report and given.report.exists() else []
    rows = {(r["op"], r["dtype"]): r for r in known}  # the report is continued
    for row in list_rows(given):
        rows[row["op"], row["dtype"]] = row
        print(LINE.format(**row), flush=True)
        if given.report:
            lines = (json.dumps(rows[key]) for key in sorted(rows))
            given.report.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return 1 if any(r["outside"] for r in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
