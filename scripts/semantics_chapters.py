"""Write `docs/semantics/reductions.md`, `conversions.md` and the element types of `graph.md` from the definitions.

python scripts/semantics_chapters.py            # write the pages
python scripts/semantics_chapters.py --check    # status 1 if they are not what the definitions give
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import semantics_examples as examples  # noqa: E402
from semantics_pages import DTYPES, show  # noqa: E402

import tessera as ts  # noqa: E402
from tessera.core.errors import DTypeError, TesseraError  # noqa: E402
from tessera.core.types import as_dtype  # noqa: E402
from tessera.frontend.jit.tracing import Jit  # noqa: E402
from tessera.ir.rules import REGISTRY  # noqa: E402
from tessera.ir.tensor import Tensor  # noqa: E402

FOLDER = ROOT / "docs" / "semantics"
REDUCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(ts, name)
    for name in ("sum", "prod", "max", "min", "mean", "var", "std", "logsumexp", "any", "all", "argmax", "argmin",
                 "cumsum", "cumprod", "cummax", "cummin", "sort", "argsort")
}  # fmt: skip
SCANS = ("cumsum", "cumprod", "cummax", "cummin", "sort", "argsort")
MAX = 3.4028235e38
# Rows of three values that meet in one reduction.
ROWS: dict[str, tuple[float, ...]] = {
    "NaN first": (np.nan, 1.0, 2.0), "NaN last": (2.0, 1.0, np.nan), "two NaNs": (1.0, np.nan, np.nan),
    "+inf": (1.0, np.inf, 2.0), "both infinities": (np.inf, 1.0, -np.inf), "-inf alone": (-np.inf, -np.inf, -np.inf),
    "+0 and -0": (0.0, -0.0, 0.0), "-0 alone": (-0.0, -0.0, -0.0), "inf times 0": (np.inf, 0.0, 1.0),
    "ties": (2.0, 1.0, 2.0), "max twice": (MAX, MAX, 1.0), "subnormals": (2.0**-140, 2.0**-141, -(2.0**-141)),
}  # fmt: skip
INTEGER_ROWS: dict[str, tuple[int, ...]] = {
    "negative": (-5, -3, -4), "ties": (2, 1, 2), "min and max": (-(2**31), 2**31 - 1, 1), "zeros": (0, 0, 0),
}  # fmt: skip
SHAPES = (((3, 4), -1, False), ((3, 4), 0, True), ((2, 1, 5), 1, False), ((1,), 0, False))
HEAD = """# The values of reductions and scans

`scripts/semantics_chapters.py` writes this page from the definitions of the ops, and
`tests/ops/test_semantics_chapters.py` checks every number of it on several levels and targets. A number names an op and
one of these constraints:

| constraint | states |
|---|---|
| `T` | the element type of the result for each type of the operand |
| `R` | the element types that are refused, with a `DTypeError` |
| `S` | the shape of the result for shapes and axes |
| `A` | an axis that the operand does not have is a `ShapeError` |
| `E` | the result over an axis without elements, or the error |
| `V` | the f32 results of rows of three values at the edges; a scan gives three |
| `I` | the int32 results of rows of three values |

A sum or product may be formed in any order, in the accumulate type (rules 2 and 15 of `docs/semantics.md`). "max twice"
is the largest f32 number twice, and 1.
"""
CONVERSIONS = """# The values of conversions

`scripts/semantics_chapters.py` writes this page from the definition of `ts.cast`, and
`tests/ops/test_semantics_chapters.py` checks every number of it on several levels and targets. A number names the
source and the target of a conversion. Rule 6 of `docs/semantics.md` states what the tables show: floats to integers
truncate and saturate, NaN gives 0; to floats every conversion rounds once, to nearest even. Between integers the low
bits stay. A number other than 0 is true, NaN too.
"""
FLOAT_VALUES = {"NaN": np.nan, "+inf": np.inf, "-inf": -np.inf, "+0": 0.0, "-0": -0.0, "0.5": 0.5, "-1.5": -1.5,
                "2.5": 2.5, "300": 300.0, "-1e10": -1e10, "max": MAX, "subnormal": 2.0**-140}  # fmt: skip
INTEGER_VALUES = {"min": -(2**31), "max": 2**31 - 1, "-1": -1, "0": 0, "17": 17, "300": 300, "16777217": 2**24 + 1}
SOURCES = {"f32": FLOAT_VALUES, "int32": INTEGER_VALUES}


def find_types(function: Callable[..., Any]) -> tuple[dict[str, str], list[str]]:
    """The result type for each accepted operand type, and the refused types."""
    taken, refused = {}, []
    for dtype in DTYPES:
        try:
            operand = Tensor(np.ones((2, 3), as_dtype(dtype).numpy), as_dtype(dtype))
            taken[dtype] = function(operand, axis=-1).dtype.name
        except TesseraError:
            refused.append(dtype)
    return taken, refused


def describe_types(taken: dict[str, str]) -> str:
    """The types that stay, and those that become another."""
    same = [d for d, out in taken.items() if d == out]
    others = [(out, [d for d, found in taken.items() if found == out != d]) for out in dict.fromkeys(taken.values())]
    parts = [f"{', '.join(same)}: the same"] if same else []
    return "; ".join([*parts, *(f"{', '.join(of)}: {out}" for out, of in others if of)])


def reduce_shape(name: str, shape: tuple[int, ...], axis: int, keepdims: bool) -> tuple[int, ...]:
    """The shape that a reduction or scan of ones gives."""
    operand = Tensor(np.ones(shape, np.bool_ if name in ("any", "all") else np.float32))
    named = {} if name in SCANS else {"keepdims": keepdims}
    return tuple(REDUCTIONS[name](operand, axis=axis, **named).shape)


def describe_empty(name: str) -> str:
    """What a reduction over no elements gives."""
    try:
        found = REDUCTIONS[name](Tensor(np.zeros((2, 0), np.float32)), axis=-1)
    except TesseraError as error:
        return f"is a `{type(error).__name__}`"
    return "gives no elements" if name in SCANS else f"gives {show(found.numpy()[0])}"


def make_table(name: str, rows: dict[str, tuple[Any, ...]], dtype: str) -> list[str]:
    """Each row and its result."""
    data = np.array(list(rows.values()), as_dtype(dtype).numpy)
    with np.errstate(all="ignore"):
        found = REDUCTIONS[name](Tensor(data, as_dtype(dtype)), axis=-1).numpy().reshape(len(data), -1)
    lines = ["", "  | row | values | result |", "  |---|---|---|"]
    for label, values, result in zip(rows, data, found, strict=True):
        lines.append(f"  | {label} | {', '.join(map(show, values))} | {', '.join(map(show, result))} |")
    return [*lines, ""]


def describe_reduction(name: str) -> list[str]:
    """The section of one op."""
    taken, refused = find_types(REDUCTIONS[name])
    shapes = [
        f"{s} over axis {a}{' with keepdims' if k and name not in SCANS else ''}: {reduce_shape(name, s, a, k)}"
        for s, a, k in SHAPES
    ]
    lines = [f"## {name}", "", f"- **{name}.T** {describe_types(taken)}."]
    lines += [f"- **{name}.R** {', '.join(refused)} are refused."] if refused else []
    lines += [f"- **{name}.S** {'; '.join(shapes)}.", f"- **{name}.A** Axis 2 of (3, 4) is a `ShapeError`."]
    lines.append(f"- **{name}.E** An axis without elements {describe_empty(name)}.")
    for letter, rows, dtype in (("V", ROWS, "f32"), ("I", INTEGER_ROWS, "int32")):
        if dtype in taken:
            lines += [f"- **{name}.{letter}**", *make_table(name, rows, dtype)]
    return lines


def convert_values(source: str, target: str) -> np.ndarray:
    """The edge values of a type in another type."""
    data = np.array(list(SOURCES[source].values()), as_dtype(source).numpy)
    with np.errstate(all="ignore"):
        return ts.cast(Tensor(data, as_dtype(source)), dtype=as_dtype(target)).numpy()


def make_reductions() -> str:
    """The text of the chapter on reductions."""
    lines = [HEAD.rstrip()]
    for name in REDUCTIONS:
        lines += ["", *describe_reduction(name)]
    return "\n".join(lines).rstrip().replace("\n\n\n", "\n\n") + "\n"


def make_conversions() -> str:
    """The text of the chapter on conversions."""
    lines = [CONVERSIONS.rstrip()]
    for source, values in SOURCES.items():
        lines += ["", f"## From {source}", "", f"| | {' | '.join(values)} |", "|---" * (len(values) + 1) + "|"]
        for target in DTYPES:
            found = " | ".join(show(v) for v in convert_values(source, target))
            lines.append(f"| **{source}.{target}** | {found} |")
    return "\n".join(lines) + "\n"


TYPES = """
## Element types

For each op the element type of the (first) result of its first case, with the floats of the case in each type (`T`),
and the types that are refused (`R`).
"""


NOT_TYPED = ("dtype=", "ranks(", "grad(", "jit(", "custom_", "zeros(", "full(", "transforms.", ".shape", "scan(",
             "cond(", "while_", "take(")  # fmt: skip


def list_type_cases() -> dict[str, str]:
    """For each op of the Graph chapter its first case, if its operands may have any element type."""
    texts, found = examples.read_numbers((FOLDER / "graph.md").read_text().partition(examples.MARK)[0]), {}
    for name in (op.__name__ for op in list(REGISTRY.values()) if op.name.startswith("ts.")):
        cases = examples.read_examples(name, texts.get(f"{name}.1", ""))[:1]
        if cases and ".0" in cases[0].what and not any(word in cases[0].what for word in NOT_TYPED):
            found[name] = cases[0].what
    return found


def find_case_types(case: str) -> tuple[dict[str, str], list[str]]:
    """As `find_types`, of an expression."""
    taken, refused = {}, []
    for dtype in DTYPES:
        try:
            traced = Jit(lambda dtype=dtype: examples.evaluate(case, dtype)).trace().function
            taken[dtype] = traced.results[0].type.dtype.name
        except DTypeError:
            refused.append(dtype)
    return taken, refused


def make_types() -> str:
    """The text of the last section of the Graph chapter."""
    lines = [TYPES.strip(), ""]
    for name, case in list_type_cases().items():
        taken, refused = find_case_types(case)
        lines.append(f"- **{name}.T** {describe_types(taken)}.")
        lines += [f"- **{name}.R** {', '.join(refused)} are refused."] if refused else []
    return "\n".join(lines) + "\n"


def make_graph() -> str:
    """The Graph chapter: its written part, then the element types."""
    return (FOLDER / "graph.md").read_text().partition(examples.MARK)[0] + examples.MARK + make_types()


PAGES = {"graph.md": make_graph, "reductions.md": make_reductions, "conversions.md": make_conversions}


def main() -> int:
    """Write the pages, or check them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true")
    check = options.parse_args().check
    for name, make in PAGES.items():
        if not check:
            (FOLDER / name).write_text(make())
        elif (FOLDER / name).read_text() != make():
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
