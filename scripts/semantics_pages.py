"""Write `docs/semantics/pointwise.md`: the numbered constraints of pointwise ops, computed from their definitions.

python scripts/semantics_pages.py            # write the page
python scripts/semantics_pages.py --check    # status 1 if it is not what the definitions give
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from conformance.graph.sweep.cases import list_pointwise
from tessera.core.errors import TesseraError
from tessera.core.types import as_dtype
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor

PAGE = Path(__file__).parents[1] / "docs" / "semantics" / "pointwise.md"
DTYPES = ("f64", "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int64", "int32", "int8", "uint32", "uint8", "bool")
FLOATS = {"NaN": np.nan, "+inf": np.inf, "-inf": -np.inf, "+0": 0.0, "-0": -0.0, "subnormal": 2.0**-140,
          "max": 3.4028235e38, "-1": -1.0, "1": 1.0}  # fmt: skip
# Second operands of a binary op: each meets each first one.
SECONDS = ("NaN", "+inf", "+0", "-0", "-1")
INTEGERS = {"min": -(2**31), "max": 2**31 - 1, "0": 0, "-1": -1, "1": 1}
HEAD = """# The values of pointwise ops

`scripts/semantics_pages.py` writes this page from the definitions of the ops, and `tests/ops/test_semantics.py` checks
every number of it on several levels and on `llvm`. A number names an op and one of these constraints:

| constraint | states |
|---|---|
| `T` | the element type of the result for each type of the operands that the op takes |
| `R` | the element types that it refuses, with a `DTypeError` |
| `S` | the shapes: a scalar, an axis of size 1, no elements, and, with two operands, broadcasting |
| `V` | the f32 results of values at the edges: `subnormal` is 2^-140, `max` the largest number |
| `I` | the int32 results of values at the edges; `min` and `max` are the least and the largest number |

Rules for all ops are in `docs/semantics.md`. Functions that are approximated (`exp`, `sin`) may differ from these
values within their error bounds, but not in NaN, infinities and exact results.
"""


def show(number: Any) -> str:
    """A result as text: signs of zeros and infinities, and six digits."""
    value = number.item() if hasattr(number, "item") else number
    if isinstance(value, (bool, int)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if np.isnan(value):
        return "NaN"
    if value == 0:
        return "-0" if np.signbit(value) else "+0"
    return f"{value:+.0f}".replace("+inf", "+inf") if np.isinf(value) else f"{value:.6g}"


def list_operands(op: Op, values: dict[str, Any]) -> list[tuple[str, ...]]:
    """The names of the edge values that each column of a table has."""
    if len(op.operands) == 1:
        return [(name,) for name in values]
    seconds = SECONDS if values is FLOATS else tuple(values)
    return [(a, b) for b in seconds for a in values]


def make_arrays(op: Op, values: dict[str, Any], dtype: str) -> list[np.ndarray]:
    """The operands of all columns of a table."""
    columns = list_operands(op, values)
    return [np.array([values[c[i]] for c in columns], as_dtype(dtype).numpy) for i in range(len(op.operands))]


def find_types(op: Op) -> tuple[dict[str, str], list[str]]:
    """The result type for each accepted operand type, and the refused types."""
    taken, refused = {}, []
    for dtype in DTYPES:
        operands = [Tensor(np.ones(2, as_dtype(dtype).numpy), as_dtype(dtype)) for _ in op.operands]
        try:
            taken[dtype] = op(*operands).dtype.name
        except TesseraError:
            refused.append(dtype)
    return taken, refused


def describe_op(op: Op) -> list[str]:
    """The section of one op."""
    name = op.__name__
    taken, refused = find_types(op)
    same = [d for d, out in taken.items() if d == out]
    others = [(out, [d for d, found in taken.items() if found == out != d]) for out in dict.fromkeys(taken.values())]
    said = "; ".join(
        [*([f"{', '.join(same)}: the same"] if same else []), *(f"{', '.join(of)}: {out}" for out, of in others if of)]
    )
    lines = [f"## {name}", "", op.__doc__.strip().splitlines()[0], "", f"- **{name}.T** {said}."]
    if refused:
        lines.append(f"- **{name}.R** {', '.join(refused)} are refused.")
    shapes = "() and (1,) and (0, 3) give themselves"
    lines.append(f"- **{name}.S** {shapes}{'; (3, 1) and (4,) give (3, 4)' if len(op.operands) == 2 else ''}.")
    for letter, values, dtype in (("V", FLOATS, "f32"), ("I", INTEGERS, "int32")):
        if dtype in taken and not (letter == "I" and (op.kinds == ("float",) or name in UNDEFINED)):
            lines += [f"- **{name}.{letter}**", "", *_make_table(op, values, dtype)]
    return lines[:-1] if not lines[-1] else lines


UNDEFINED = ("floor_divide", "remainder", "fmod")  # of integers by 0 (rule 7)


def _make_table(op: Op, values: dict[str, Any], dtype: str) -> list[str]:
    with np.errstate(all="ignore"):
        results = op(*(Tensor(a, as_dtype(dtype)) for a in make_arrays(op, values, dtype))).numpy()
    names = list(values)
    head = [
        f"  | {'x' if len(op.operands) == 1 else 'y / x'} | {' | '.join(names)} |",
        "  |---" * (len(names) + 1) + "|",
    ]
    head[1] = "  |" + "---|" * (len(names) + 1)
    rows = [results] if len(op.operands) == 1 else np.split(results, len(results) // len(names))
    labels = [op.__name__] if len(op.operands) == 1 else (SECONDS if values is FLOATS else names)
    return [
        *head,
        *(f"  | {label} | {' | '.join(show(v) for v in row)} |" for label, row in zip(labels, rows, strict=True)),
        "",
    ]


def make_page() -> str:
    """The text of the page."""
    lines = [HEAD.rstrip()]
    for op, _ in sorted(list_pointwise(), key=lambda pair: pair[0].__name__):
        lines += ["", *describe_op(op)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or check it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true")
    text = make_page()
    if options.parse_args().check:
        return 0 if PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
