"""The numbered constraints of `docs/semantics/reductions.md` and `conversions.md`, on levels and in text of targets."""

import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from conformance.run import find_guarded_engine, list_engines
from tessera.core.errors import DTypeError, ShapeError, UnsupportedOpError
from tessera.core.types import as_dtype
from tessera.frontend.jit.tracing import Jit
from tessera.ir.tensor import Tensor
from tessera.runtime.program import prepare

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import semantics_chapters as chapters  # noqa: E402
from semantics_pages import show  # noqa: E402

PAGE = (ROOT / "docs" / "semantics" / "reductions.md").read_text()
CONVERSIONS = (ROOT / "docs" / "semantics" / "conversions.md").read_text()
NUMBERS = re.findall(r"^- \*\*(\w+)\.([TRSAEVI])\*\*(.*)$", PAGE, re.M)
CONVERTED = re.findall(r"^\| \*\*(\w+)\.(\w+)\*\* \|(.*)\|$", CONVERSIONS, re.M)
ENGINES = [*list_engines(["ptx"], ["graph", "schedule", "tile", "target"]), find_guarded_engine("llvm")]
ELEMENTS = list_engines(["csl"], ["target"])


def said_by(letter):
    return [(name, said.strip().rstrip(".")) for name, found, said in NUMBERS if found == letter]


def read_results(name, letter):
    rows = re.search(rf"\*\*{name}\.{letter}\*\*\n\n.*\n.*\n((?:  \|.*\n?)+)", PAGE)[1].strip().splitlines()
    return [cell.strip() for row in rows for cell in row.split("|")[3].split(",")]


def agrees(got, want, radius=0.0):
    """Whether a result is what the page says, but for the last digits of a function or of a sum in another order."""
    shown = show(got)
    if shown == want:
        return True
    if {shown, want} & {"NaN", "+inf", "-inf", "true", "false"} or np.asarray(got).dtype.kind in "iub":
        return False
    if float(shown) == float(want) == 0:
        return False  # the sign differs
    return abs(float(shown) - float(want)) <= 1e-5 * abs(float(want)) + 2 * radius


def test_the_pages_are_what_the_definitions_give():
    assert chapters.make_reductions() == PAGE and chapters.make_conversions() == CONVERSIONS


def test_each_op_and_conversion_has_its_numbers():
    found = {(name, letter) for name, letter, _ in NUMBERS}
    assert len(found) == len(NUMBERS) and {name for name, _ in found} == set(chapters.REDUCTIONS)
    assert all({(name, letter) for letter in "TSAEVI"} <= found for name in ("sum", "max", "argmin", "cumsum", "sort"))
    pairs = {(source, target) for source, target, _ in CONVERTED}
    assert pairs == {(s, t) for s in chapters.SOURCES for t in chapters.DTYPES}


@pytest.mark.parametrize(("name", "said"), said_by("T"))
def test_types(name, said):
    for part in said.split("; "):
        listed, _, out = part.partition(": ")
        for dtype in listed.split(", "):
            operand = Tensor(np.ones((2, 3), as_dtype(dtype).numpy), as_dtype(dtype))
            found = Jit(lambda x: chapters.REDUCTIONS[name](x, axis=-1))(operand).dtype.name
            assert found == (dtype if out == "the same" else out), dtype


@pytest.mark.parametrize(("name", "said"), said_by("R"))
def test_refusals(name, said):
    for dtype in said.removesuffix(" are refused").split(", "):
        with pytest.raises(DTypeError):
            operand = Tensor(np.ones((2, 3), as_dtype(dtype).numpy), as_dtype(dtype))
            Jit(lambda x: chapters.REDUCTIONS[name](x, axis=-1))(operand)


@pytest.mark.parametrize(("name", "said"), said_by("S"))
def test_shapes(name, said):
    stated = re.findall(r"(\([\d, ]*\)) over axis (-?\d)( with keepdims)?: (\([\d, ]*\))", said)
    assert len(stated) == len(chapters.SHAPES)
    for shape, axis, keepdims, out in stated:
        named = {"keepdims": True} if keepdims else {}
        operand = np.ones(tuple(map(int, re.findall(r"\d+", shape))), np.float32)
        found = Jit(partial(chapters.REDUCTIONS[name], axis=int(axis), **named))(operand).shape
        assert found == tuple(map(int, re.findall(r"\d+", out)))


@pytest.mark.parametrize(("name", "said"), said_by("A"))
def test_axes(name, said):
    assert said == "Axis 2 of (3, 4) is a `ShapeError`"
    for axis in (2, -3):
        with pytest.raises(ShapeError):
            Jit(partial(chapters.REDUCTIONS[name], axis=axis))(np.ones((3, 4), np.float32))


@pytest.mark.parametrize(("name", "said"), said_by("E"))
def test_axes_without_elements(name, said):
    empty = np.zeros((2, 0), np.float32)
    if said.endswith("is a `ShapeError`"):
        with pytest.raises(ShapeError):
            prepare(Jit(lambda x: chapters.REDUCTIONS[name](x, axis=-1)), (empty,))
        return
    program = prepare(Jit(lambda x: chapters.REDUCTIONS[name](x, axis=-1)), (empty,))
    for engine in ENGINES:
        (found,) = engine.run(program)
        shown = [show(v) for v in found.reshape(-1)]
        assert shown == ([] if said.endswith("no elements") else [said.rpartition(" ")[2]] * 2), engine.name


@pytest.mark.parametrize("letter", "VI")
def test_values(letter):
    rows, dtype = (chapters.ROWS, "float32") if letter == "V" else (chapters.INTEGER_ROWS, "int32")
    names, data = [n for n, _ in said_by(letter)], np.array(list(rows.values()), dtype)
    ops = [chapters.REDUCTIONS[n] for n in names]
    program = prepare(Jit(lambda x: tuple(op(x, axis=-1) for op in ops)), (data,))
    radii = [b.radius.reshape(-1) for b in program.bounds()]
    for engine in ENGINES:
        for name, found, radius in zip(names, engine.run(program), radii, strict=True):
            triples = zip(found.reshape(-1), read_results(name, letter), radius, strict=True)
            wrong = [(got, want) for got, want, near in triples if not agrees(got, want, near)]
            assert not wrong, (name, engine.name, wrong)


@pytest.mark.parametrize(("name", "letter"), [(n, x) for x in "VI" for n, _ in said_by(x)])
def test_values_on_elements(name, letter):
    """On csl a reduction may give either of two zeros."""
    rows, dtype = (chapters.ROWS, "float32") if letter == "V" else (chapters.INTEGER_ROWS, "int32")
    data = np.array(list(rows.values()), dtype)
    program = prepare(Jit(lambda x: chapters.REDUCTIONS[name](x, axis=-1)), (data,))
    try:
        (found,) = ELEMENTS[0].run(program)
    except UnsupportedOpError:
        assert name in ("argsort", "sort", "any", "all", "argmax", "argmin")
        return
    loose = [w.strip("+-") if name in ("max", "min") and w in ("+0", "-0") else w for w in read_results(name, letter)]
    radius = program.bounds()[0].radius.reshape(-1)
    triples = zip(found.reshape(-1), loose, radius, strict=True)
    assert not [(g, w) for g, w, near in triples if not (agrees(g, w, near) or (w == "0" and g == 0))]


@pytest.mark.parametrize("source", chapters.SOURCES)
def test_conversions(source):
    targets = [(t, [c.strip() for c in cells.split("|")]) for s, t, cells in CONVERTED if s == source]
    data = np.array(list(chapters.SOURCES[source].values()), as_dtype(source).numpy)
    program = prepare(Jit(lambda x: tuple(ts.cast(x, dtype=as_dtype(t)) for t, _ in targets)), (data,))
    for engine in ENGINES:
        for (target, want), found in zip(targets, engine.run(program), strict=True):
            assert [show(v) for v in found] == want, (target, engine.name)
    for target, want in targets:
        one = prepare(Jit(lambda x, t=target: ts.cast(x, dtype=as_dtype(t))), (data,))
        try:
            (found,) = ELEMENTS[0].run(one)
        except UnsupportedOpError:
            continue
        assert [show(v) for v in found] == want, target
