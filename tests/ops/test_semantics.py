"""The numbered constraints of `docs/semantics/pointwise.md`: each is checked, at the Tile level and on llvm too."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from conformance.run import find_guarded_engine, list_engines
from tessera.core.errors import DTypeError
from tessera.core.types import as_dtype
from tessera.frontend.jit.tracing import Jit
from tessera.ir.tensor import Tensor
from tessera.runtime.program import prepare

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import semantics_pages as pages  # noqa: E402

PAGE = (ROOT / "docs" / "semantics" / "pointwise.md").read_text()
OPS = {op.__name__: op for op, _ in pages.list_pointwise()}
NUMBERS = re.findall(r"^- \*\*(\w+)\.([TRSVI])\*\*(.*)$", PAGE, re.M)
# The reason why a level may differ from the page in the sign of a zero, or in subnormal numbers.
LOOSE_ZERO = ()


def read_table(name, letter):
    rows = re.search(rf"\*\*{name}\.{letter}\*\*\n\n.*\n.*\n((?:  \|.*\n?)+)", PAGE)[1].strip().splitlines()
    return [cell.strip() for row in rows for cell in row.split("|")[2:-1]]


def make_tensors(op, dtype, shapes):
    element = as_dtype(dtype)
    return [Tensor(np.ones(shape, element.numpy), element) for shape in shapes[: len(op.operands)]]


def test_the_page_is_what_the_definitions_give():
    assert pages.make_page() == PAGE


def test_each_op_has_its_numbers():
    found = {(name, letter) for name, letter, _ in NUMBERS}
    assert len(found) == len(NUMBERS) and {name for name, _ in found} == set(OPS)
    for name in OPS:
        assert {(name, "T"), (name, "S")} <= found and ((name, "V") in found or (name, "I") in found)


@pytest.mark.parametrize(("name", "said"), [(n, said) for n, letter, said in NUMBERS if letter == "T"])
def test_types(name, said):
    for part in said.strip(" .").split("; "):
        listed, _, out = part.partition(": ")
        for dtype in listed.split(", "):
            program = Jit(_call(OPS[name]))
            found = program(*make_tensors(OPS[name], dtype, ((2,), (2,)))).dtype.name
            assert found == (dtype if out == "the same" else out), dtype


@pytest.mark.parametrize(("name", "said"), [(n, said) for n, letter, said in NUMBERS if letter == "R"])
def test_refusals(name, said):
    for dtype in said.strip(" .").removesuffix(" are refused").split(", "):
        with pytest.raises(DTypeError):
            Jit(_call(OPS[name]))(*make_tensors(OPS[name], dtype, ((2,), (2,))))


@pytest.mark.parametrize("name", [n for n, letter, _ in NUMBERS if letter == "S"])
def test_shapes(name):
    op, dtype = OPS[name], "f32" if any(n == name and letter == "V" for n, letter, _ in NUMBERS) else "int32"
    for shape in ((), (1,), (0, 3)):
        assert Jit(_call(op))(*make_tensors(op, dtype, (shape, shape))).shape == shape
    if len(op.operands) == 2:
        assert Jit(_call(op))(*make_tensors(op, dtype, ((3, 1), (4,)))).shape == (3, 4)


def _call(op):
    return (lambda x: op(x)) if len(op.operands) == 1 else (lambda x, y: op(x, y))


def list_groups(letter):
    """The ops with a table, in groups of one number of operands, for one program each."""
    names = [n for n, found, _ in NUMBERS if found == letter]
    for count in (1, 2):
        own = [n for n in names if len(OPS[n].operands) == count]
        yield from (own[i : i + 14] for i in range(0, len(own), 14))


@pytest.mark.parametrize(
    ("letter", "names"), [(x, g) for x in "VI" for g in list_groups(x)], ids=lambda v: v if isinstance(v, str) else v[0]
)
def test_values(letter, names):
    values, dtype = (pages.FLOATS, "f32") if letter == "V" else (pages.INTEGERS, "int32")
    ops = [OPS[n] for n in names]
    one = (
        (lambda x: tuple(op(x) for op in ops))
        if len(ops[0].operands) == 1
        else (lambda x, y: tuple(op(x, y) for op in ops))
    )
    program = prepare(Jit(one), pages.make_arrays(ops[0], values, dtype))
    texts = [engine.run(program) for engine in list_engines(["ptx", "csl"], ["target"])]
    for results in (program.run("graph"), program.run("tile"), find_guarded_engine("llvm").run(program), *texts):
        for name, result in zip(names, results, strict=True):
            for place, (got, want) in enumerate(zip(result, read_table(name, letter), strict=True)):
                assert agrees(got, want, name), (name, pages.list_operands(OPS[name], values)[place], got, want)


def agrees(got, want, name):
    """Whether a result is what the page says, but for the last digits of a function."""
    shown = pages.show(got)
    if shown == want or (name in LOOSE_ZERO and shown.strip("+-") == want.strip("+-") == "0"):
        return True
    if {shown, want} & {"NaN", "+inf", "-inf", "+0", "-0", "true", "false"} or np.asarray(got).dtype.kind in "iub":
        return False
    return abs(float(shown) - float(want)) <= 1e-5 * abs(float(want))
