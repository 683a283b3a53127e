"""The whole suite passes on everything installed; the runner can tell a wrong engine from a right one."""

import io
import re
from contextlib import redirect_stdout
from fnmatch import fnmatch

import numpy as np
import pytest
from declared_reasons import NO_CASE

import tessera as ts
from conformance.case import AREAS, Case, all_cases, read_area
from conformance.inputs import tensor
from conformance.run import (
    Engine,
    find_checked_engines,
    find_guarded_engine,
    judge,
    list_engines,
    run_case,
    select_cases,
)
from tessera.codegen.contract import get_backend
from tessera.core.errors import ArgumentError, ShapeError, UnsupportedOpError
from tessera.frontend.jit.tracing import Jit
from tessera.interp import bound
from tessera.interp.bound import compare_with_bound
from tessera.interp.tile import interpreter
from tessera.ir.numerics.interval_arithmetic import IntervalArray

CASES = list(all_cases())
COLUMNS = list_engines(["llvm"], ["graph", "schedule", "tile", "target"])
MESH = list_engines(["csl:2x3"], ["target"])
# Kernels under a transform: the kernels alone (`jit`) run on the mesh above.
SMALL_MESH = list_engines(["csl:1x2"], ["target"])
TRANSFORMED = tuple(f"graph/launches/{name}/" for name in ("grad", "vmap", "scan", "checkpoint"))
# No case of these fits on a mesh of elements, which is one rank.
WITHOUT_MESH = ("graph.host", "graph.flow", "graph.collectives")
GUARDED = {"graph.found", "tile.found", "tile.memory"}  # also run with guard bytes around every buffer


class Watched(Engine):
    """The Tile interpreter, for the ops of a case: none may be declared to have no case. Debug mode keeps every bit."""

    def run(self, program):
        names = {n.op.name for m in program.levels.values() for f in m.functions for n in f.body.walk()}
        assert not names & set(NO_CASE), f"NO_CASE has {names & set(NO_CASE)}, which this case has"
        given = [a.tobytes() for a in program.arrays]
        found, arrays = super().run(program), [a.copy() for a in program.arrays]
        with redirect_stdout(io.StringIO()):  # a kernel that prints has printed
            watched = interpreter.run(program.levels["tile"], arrays, debug=True)
        watched += [arrays[i] for i in program.written]
        assert [a.tobytes() for a in watched] == [a.tobytes() for a in found], "debug mode changes a result"
        kept = [a.tobytes() for i, a in enumerate(arrays) if i not in program.written]
        assert kept == [a for i, a in enumerate(given) if i not in program.written], "debug mode changes an operand"
        return found


# What the emulators leave out, where most of the time went; LLVM's machine code runs all of it. Large products differ
# from smaller ones in how ptx tiles them, and launches in one format of 16 bits from those in the other.
LARGE = ("16x64x256", "104x200x64", "136x136x136", "264x64x136", "continued-bf16", "sums-bf16")
ANOTHER_FORMAT = (
    "graph/launches/jit/*/attention-*-bf16", "graph/launches/jit/*/product-*-f16", "graph/launches/jit/*/matmul-f16",
    "graph/launches/vmap/tutorials/matmul-f32",
)  # fmt: skip


def is_emulated(case):
    if case.name.startswith("tile/products/") and case.name.endswith(LARGE):
        return "/fp8_e4m3-turned" in case.name or "/fp8_e5m2-turned" in case.name
    return not any(fnmatch(case.name, pattern) for pattern in ANOTHER_FORMAT)


def number_turns():
    """0 or 1 for each kernel under a transform: both with each kernel, and both with each transform."""
    kernels = {}
    for case in CASES:
        if case.name.startswith(TRANSFORMED):
            kernels.setdefault(case.name.split("/", 3)[3], []).append(case.name)
    return {name: (i + k) % 2 for k, names in enumerate(kernels.values()) for i, name in enumerate(names)}


# A transform and a kernel meet in the text of llvm or on the mesh, in turn; LLVM's machine code has all of them, and
# the text and the larger mesh each kernel alone.
TURNS = number_turns()


ELEMENT_TYPES = re.compile(r"(?<![a-z0-9])(bool|u?int\d+|fp\d+(_e\dm\d)?|b?f\d+|tf32)(?![a-z0-9])")
MESH_TYPES = {t.name for t in get_backend("csl").capabilities.dtypes}


def number_types():
    """0 or 1 for each graph case that differs from others in its element types alone, and that the mesh can hold."""
    families = {}
    for case in CASES:
        types = {found[0] for found in ELEMENT_TYPES.finditer(case.name)}
        if case.name.startswith("graph/") and case.name not in TURNS and types and types <= MESH_TYPES:
            families.setdefault(ELEMENT_TYPES.sub("*", case.name), []).append(case.name)
    several = [names for names in families.values() if len(names) > 1]
    return {name: (i + k) % 2 for k, names in enumerate(several) for i, name in enumerate(names)}


# Cases of one program in several element types: each runs as text of llvm or on the mesh, in turn, so that both
# emulators have each program, and each type in half of them. LLVM's machine code has all.
TYPE_TURNS = number_types()


def choose_engines(case, columns):
    """The columns that run a case, and for a graph the mesh."""
    texts = [c for c in columns + choose_mesh(case) if c.name.endswith(" text")]
    turn = TURNS.get(case.name, TYPE_TURNS.get(case.name))
    texts = texts if turn is None else [texts[turn]]
    return [c for c in columns if not c.name.endswith(" text")] + (texts if is_emulated(case) else [])


def test_kernels_and_transforms_take_turns():
    """Each transform meets both emulators."""
    assert all({TURNS[name] for name in TURNS if name.startswith(start)} == {0, 1} for start in TRANSFORMED)


def test_element_types_take_turns():
    """Both emulators have each program of several types, and each type."""
    programs, types = {}, {}
    for name, turn in TYPE_TURNS.items():
        programs.setdefault(ELEMENT_TYPES.sub("*", name), set()).add(turn)
        for found in ELEMENT_TYPES.finditer(name):
            types.setdefault(found[0], set()).add(turn)
    assert len(programs) > 100 and all(turns == {0, 1} for turns in (*programs.values(), *types.values()))


def choose_mesh(case):
    if not case.name.startswith("graph/"):
        return []
    return SMALL_MESH if case.name.startswith(TRANSFORMED) else MESH


def test_emulators_run_most_of_the_suite():
    left_out = [c.name for c in CASES if not is_emulated(c)]
    assert 0 < len(left_out) < 0.08 * len(CASES)


@pytest.mark.parametrize("area", AREAS)
def test_area(area):
    """Each case on every level, on llvm and, if it is a graph, on a mesh of elements: prepared once for all.

    In debug mode it is clean, and its bits stay the same.
    """
    prefix, graph = area.replace(".", "/") + "/", area.startswith("graph.")
    columns = [Watched(e.name, e.level, e.target) if e.level == "tile" else e for e in COLUMNS]
    columns += [find_guarded_engine("llvm")] if area in GUARDED else []
    outcomes = [o for c in CASES if c.name.startswith(prefix) for o in run_case(c, choose_engines(c, columns))]
    assert outcomes and not [f"{o.case} on {o.engine}: {o.detail}" for o in outcomes if o.status == "fail"]
    on_mesh = any(o.status == "pass" and o.engine == MESH[0].name for o in outcomes)
    assert on_mesh or not graph or area in WITHOUT_MESH


@pytest.mark.parametrize("area", ["tile.found"])
def test_kernels_on_elements(area):
    cases, engine = list(read_area(area)), list_engines(["csl"], ["target"])
    outcomes = [o for c in cases for o in run_case(c, engine)]
    assert not [f"{o.case}: {o.detail}" for o in outcomes if o.status == "fail"]
    assert any(o.status == "pass" for o in outcomes)


@pytest.mark.parametrize("target", ["ptx", "ptx:sm_90a"])
def test_products_synchronise_their_threads(target):
    """In debug mode of the PTX emulator: no missing wait, barrier or fence."""
    (engine,) = find_checked_engines(target)
    cases = [c for c in read_area("tile.products") if target != "ptx" or "turned" not in c.name]
    outcomes = [o for c in cases for o in run_case(c, [engine])]
    assert not [f"{o.case}: {o.detail}" for o in outcomes if o.status != "pass"]


def test_a_rank_with_a_wrong_result_fails():
    """Rank 1 of three has its neighbour's part."""
    (case,) = [c for c in CASES if c.name == "graph/collectives/reduce_scatter-3-f32"]

    class Turned(Engine):
        def run(self, program):
            return [np.roll(r, 1, axis=0) if ts.get_rank() == 1 else r for r in super().run(program)]

    right, wrong = Engine("graph", "graph", "interp"), Turned("turned", "graph", "interp")
    assert [o.status for o in run_case(case, [right, wrong])] == ["pass", "fail"]


def test_there_are_enough_and_each_has_its_own_name():
    assert len(CASES) >= 150 and len({c.name for c in CASES}) == len(CASES)


def doubled():
    return Case("double", lambda: (Jit(lambda x: x * 2.0), (tensor("x", (4,)),)))


class Wrong(Engine):
    """An engine whose results are off by one part in a thousand."""

    def run(self, program):
        return [r * 1.001 for r in super().run(program)]


class Lacking(Engine):
    """An engine without multiplication."""

    def run(self, program):
        raise UnsupportedOpError("ts.mul cannot be emitted for lacking")


@pytest.mark.parametrize(("kind", "status"), [(Engine, "pass"), (Wrong, "fail"), (Lacking, "unsupported")])
def test_verdicts(kind, status):
    (outcome,) = run_case(doubled(), [kind("x", "graph", "interp")])
    assert outcome.status == status


def test_a_failure_says_where_and_by_how_much():
    bounds = [IntervalArray(np.array([1.0, 1.9]), np.array([0.01, 0.01]))]
    outcome = judge(doubled(), "tile", [np.float32([1, 2])], bounds)
    assert outcome.status == "fail" and outcome.detail == "output 0 at [1]: the error is 10 times its bound"


def test_nan_and_infinities_are_counted_and_compared_by_place_and_kind():
    nan, inf = np.nan, np.inf
    bounds = [IntervalArray(np.array([1.0, nan, inf, -inf]), np.zeros(4))]
    good = judge(doubled(), "tile", [np.float32([1, nan, inf, -inf])], bounds)
    assert (good.status, good.nans, good.infinities) == ("pass", 1, 2)
    for wrong in ([1, nan, inf, inf], [nan, 1, inf, -inf], [1, nan, nan, -inf], [1, 7, inf, -inf]):
        assert judge(doubled(), "tile", [np.float32(wrong)], bounds).status == "fail"


def test_an_infinite_bound_is_not_within():
    unknown = IntervalArray(np.array([1.0, 2.0]), np.array([np.inf, 0.0]))
    near = compare_with_bound(np.float32([1, 2]), unknown)
    assert near.ok and not near.within and near.compared and near.unbounded == 1
    lost = judge(doubled(), "tile", [np.float32([np.nan, 2])], [unknown])
    assert lost.status == "fail" and "1 NaN of 2 elements, unlike the reference at [0]" in lost.detail
    assert not compare_with_bound(np.float32([np.nan]), IntervalArray(np.array([np.nan]), np.zeros(1))).compared


def test_an_expected_error_must_come():
    (outcome,) = run_case(Case("e", doubled().entry, rejects=ShapeError), [Engine("graph", "graph", "interp")])
    assert outcome.status == "fail" and "no ShapeError was raised" in outcome.detail


def test_a_wide_bound_is_told():
    x = tensor("x", (8,))
    assert judge(doubled(), "tile", [x], [IntervalArray(x, abs(x) * 9)]).useless
    assert not judge(doubled(), "tile", [x], bound.run(Jit(lambda v: v * 1.0).trace(x).function, [x])).useless


def test_selection_reads_as_pytest_does():
    names = [c.name for c in select_cases("softmax and not (f16 or bf16)", CASES)]
    assert names and all("softmax" in n and "f16" not in n for n in names)
    with pytest.raises(ArgumentError, match="is not an expression"):
        select_cases("and and", CASES)
