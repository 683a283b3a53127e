"""Each number of the chapters has a case where it holds and one on its other side, which run on several engines."""

import re
import sys
from functools import cache
from pathlib import Path

import pytest

import tessera as ts
from conformance.case import all_cases
from conformance.graph.sweep.cases import list_pointwise
from conformance.run import Engine, find_guarded_engine, run_case
from tessera.core.errors import DTypeError, ExecutionError
from tessera.frontend.jit.tracing import Jit
from tessera.ir.rules import REGISTRY
from tessera.runtime.program import prepare

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import semantics_chapters as chapters  # noqa: E402
import semantics_examples as examples  # noqa: E402

TEXTS = [(ROOT / "docs" / name).read_text() for name in examples.PAGES]
PAGES = [text.partition(examples.MARK)[0] for text in TEXTS]  # below: tests/ops/test_semantics_levels.py
NUMBERS = {n: text for page in PAGES for n, text in examples.read_numbers(page).items()}
EXAMPLES = [e for number, text in NUMBERS.items() for e in examples.read_examples(number, text)]
TYPED = chapters.list_type_cases()
TYPES = re.findall(r"^- \*\*(\w+)\.([TR])\*\* (.*)\.$", TEXTS[1].partition(examples.MARK)[2], re.M)
EXPRESSIONS = [e for e in EXAMPLES if e.is_expression]
ENGINES = [Engine("tile", "tile", "interp"), find_guarded_engine("llvm")]
# Not a program of their own: properties of types, functions of functions, programs of several ranks.
EAGER = (
    "ranks(",
    "grad(",
    "custom_",
    ".type",
    ".dtype",
    ".shape",
    "array_equal(",
    "jit(",
    "checkpoint(",
    "float(",
    "isinstance(",
)


def test_each_number_has_a_case_on_either_side():
    for number in NUMBERS:
        sides = {e.positive for e in EXAMPLES if e.number == number}
        assert sides == {True, False}, f"{number} has cases for {sides or 'neither side'} alone"


def test_the_check_finds_a_number_without_cases():
    assert examples.read_numbers("- **a.1** Text.\n- **a.2.** More\n  text.\n") == {
        "a.1": "Text.",
        "a.2": "More\n  text.\n",
    }
    assert examples.read_examples("a.1", "Nothing is `here`.") == []
    held, refused = examples.read_examples("a.1", "`f(1)` is `2`, but\n  `f(0)` raises `E`.")
    assert (
        held.positive and not refused.positive and (refused.what, refused.verb, refused.want) == ("f(0)", "raises", "E")
    )


def test_each_op_has_a_number():
    tables = {op.__name__ for op, _ in list_pointwise()} | set(chapters.REDUCTIONS) | {"cast"}
    stated = {number.rpartition(".")[0] for text in TEXTS for number in examples.read_numbers(text)}
    for name, op in REGISTRY.items():
        own = op.__name__ if name.startswith(("ts.", "transform.")) else name
        assert own in stated or (name.startswith("ts.") and own in tables), f"{name} has no number in docs/semantics"


def test_the_element_types_are_what_the_definitions_give():
    assert chapters.make_graph() == TEXTS[1] and {name for name, *_ in TYPES} == set(TYPED) and len(TYPED) > 40


@pytest.mark.parametrize(("name", "letter", "said"), TYPES, ids=lambda v: v if len(v) < 30 else "")
def test_element_types(name, letter, said):
    for part in said.removesuffix(" are refused").split("; "):
        listed, _, out = part.partition(": ")
        for dtype in listed.split(", "):
            if letter == "R":
                with pytest.raises(DTypeError):
                    examples.evaluate(TYPED[name], dtype)
                continue
            try:
                found = examples.evaluate(TYPED[name], dtype)
            except ExecutionError:  # the values of the case in this type have no result: a singular matrix of bools
                continue
            found = found[0] if isinstance(found, tuple) else found
            assert found.dtype.name == (dtype if out == "the same" else out), dtype


@pytest.mark.parametrize("example", EXPRESSIONS, ids=lambda e: f"{e.number}-{'held' if e.positive else 'other'}")
def test_expression(example):
    if example.verb == "raises":
        with pytest.raises(Exception) as caught:
            examples.evaluate(example.what)
        assert example.want in {c.__name__ for c in type(caught.value).__mro__}
        return
    got, want = examples.evaluate(example.what), examples.evaluate(example.want)
    assert examples.agrees(got, want), got
    if isinstance(got, (ts.Tensor, tuple)) and not any(word in example.what for word in EAGER):
        program = prepare(Jit(lambda: examples.evaluate(example.what)), ())
        for engine in ENGINES:
            results = engine.run(program)
            found = results[0] if isinstance(got, ts.Tensor) else tuple(results)
            assert examples.agrees(found, want), (engine.name, found)


@cache
def find_cases():
    return {case.name: case for case in all_cases()}


TESTS, CASES = (
    [e for e in EXAMPLES if not e.is_expression and e.what.startswith("tests/") == t] for t in (True, False)
)


@pytest.mark.parametrize("example", TESTS, ids=lambda e: f"{e.number}-{e.what}")
def test_test_is_there(example):
    path, _, name = example.what.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("example", CASES, ids=lambda e: f"{e.number}-{e.what}")
def test_conformance_case(example):
    case = find_cases()[example.what]
    assert (case.rejects is not None) == (example.verb == "is refused")
    (outcome,) = run_case(case, [Engine("tile", "tile", "interp")])
    assert outcome.status == "pass", outcome.detail
