"""Translation validation in the suite: a sample passes, and a fault that is put into a pass is found and named."""

import pytest

from conformance.case import Case, all_cases
from conformance.inputs import tensor
from conformance.passes import ROUNDING_PASSES, list_pass_engines
from conformance.run import Engine, run_case
from tessera.codegen.csl import generator as csl_generator
from tessera.codegen.llvm import generator as llvm_generator
from tessera.codegen.ptx import pipeline as ptx_pipeline
from tessera.frontend.jit.tracing import Jit
from tessera.ir.builder import make_copier, rebuild_function
from tessera.lower import pipeline
from tessera.ops.dialects import tile
from tessera.ops.tensor import elementwise
from tessera.runtime.program import prepare
from tessera.tools.bisect import judge_passes
from tessera.tools.cli.main import main

CASES = {case.name: case for case in all_cases()}
SAMPLE = [case for case in CASES.values() if case.rejects is None][7::55]
ENGINES = {engine.name: engine for engine in list_pass_engines()}


def test_each_target_has_a_column():
    assert list(ENGINES) == ["llvm passes", "ptx sm_80 passes", "ptx sm_90a passes", "csl:2x2 passes"]
    assert [e.name for e in list_pass_engines(["ptx"])] == ["ptx sm_80 passes", "ptx sm_90a passes"]


@pytest.mark.parametrize("case", SAMPLE, ids=lambda c: c.name)
def test_every_pass_keeps_what_a_case_means(case):
    outcomes = list(run_case(case, list(ENGINES.values())))
    assert len(outcomes) == len(ENGINES)
    assert not [f"{o.engine}: {o.detail}" for o in outcomes if o.status == "fail"]
    assert any(o.status == "pass" for o in outcomes)


def with_other(old, new):
    """A rewrite that puts another op in the place of one."""

    def meaning_of(builder):
        copy = make_copier(builder)

        def meaning(node, args, run):
            return builder.add(new, args, node.attrs, loc=node.loc).results if node.op is old else copy(node, args, run)

        return meaning

    return lambda function: rebuild_function(function, meaning_of)


def without(op):
    """A rewrite that drops every use of an op without results."""

    def meaning_of(builder):
        copy = make_copier(builder)
        return lambda node, args, run: () if node.op is op else copy(node, args, run)

    return lambda function: rebuild_function(function, meaning_of)


def without_added_zeros(function):
    """x + 0 as x: wrong for -0, and within every bound."""

    def meaning_of(builder):
        copy = make_copier(builder)
        return lambda node, args, run: (args[0],) if node.op is elementwise.add else copy(node, args, run)

    return rebuild_function(function, meaning_of)


def on_tile_functions(rewrite):
    return lambda module: module.replace(module.main, *map(rewrite, module.functions[1:]))


def break_graph_pass(patch, name, rewrite):
    wrong = pipeline.rewrite_main(rewrite)
    table = [(n, (lambda m, p, run=run: wrong(run(m, p), p)) if n == name else run) for n, run in pipeline.PIPELINE]
    patch.setattr(pipeline, "PIPELINE", tuple(table))


def break_ptx_pass(patch, name, rewrite):
    table = [(n, (lambda f, run=run: rewrite(run(f))) if n == name else run) for n, run in ptx_pipeline.FUNCTION_PASSES]
    patch.setattr(ptx_pipeline, "FUNCTION_PASSES", tuple(table))


def break_function(patch, module, name, rewrite):
    found = getattr(module, name)
    patch.setattr(module, name, lambda given: on_tile_functions(rewrite)(found(given)))


def zeros():
    return Case("zeros", lambda: (Jit(lambda x: x * 0.0 + 0.0), (tensor("z", (5,), low=-2, high=-1),)))


SUB_TO_ADD, EXP_TO_EXP2 = with_other(elementwise.sub, elementwise.add), with_other(elementwise.exp, elementwise.exp2)
FAULTS = {
    "an op of the graph": (
        lambda patch: break_graph_pass(patch, "simplify", EXP_TO_EXP2), "graph/composites/softmax-f32",
        "llvm passes", "simplify", "shown by 1 of",
    ),
    "the sign of a zero": (
        lambda patch: break_graph_pass(patch, "dead code", without_added_zeros), zeros, "llvm passes", "dead code",
        "the pass must keep every bit",
    ),
    "a tile function of llvm": (
        lambda patch: break_function(patch, llvm_generator, "vectorise_groups", SUB_TO_ADD), "tile/groups/mirrored",
        "llvm passes", "group vectorisation", "-tile.load (cases.py:5",
    ),
    "a tile function of ptx": (
        lambda patch: break_ptx_pass(patch, "layout assignment", EXP_TO_EXP2), "graph/composites/softmax-f32",
        "ptx sm_90a passes", "layout assignment", "times its bound",
    ),
    "a wait for a copy": (
        lambda patch: break_ptx_pass(patch, "multistage pipelining", without(tile.async_wait)), "product",
        "ptx sm_80 passes", "multistage pipelining", "async",
    ),
    "a kernel on a mesh": (
        lambda patch: break_function(patch, csl_generator, "ungroup_kernels", SUB_TO_ADD), "tile/groups/mirrored",
        "csl:2x2 passes", "group vectorisation", "-tile.load (cases.py:5",
    ),
}  # fmt: skip


def find_case(name):
    if callable(name):
        return name()
    if name == "product":
        inputs = tuple(tensor(n, (256, 256), "bf16") for n in "xw")
        return Case("product", lambda: (Jit(lambda x, w: x @ w), inputs))
    return CASES[name]


@pytest.mark.parametrize(("fault", "case", "engine", "step", "says"), FAULTS.values(), ids=list(FAULTS))
def test_a_planted_fault_is_found_at_its_pass(fault, case, engine, step, says, monkeypatch):
    (sound,) = run_case(find_case(case), [ENGINES[engine]])
    assert sound.status == "pass", sound.detail
    fault(monkeypatch)
    (outcome,) = run_case(find_case(case), [ENGINES[engine]])
    assert outcome.status == "fail" and outcome.case == find_case(case).name
    assert outcome.detail.startswith(f"{step} is the first pass that changes a value: ") and says in outcome.detail


def test_a_fault_does_not_show_elsewhere(monkeypatch):
    break_ptx_pass(monkeypatch, "layout assignment", EXP_TO_EXP2)
    outcomes = run_case(
        CASES["graph/composites/softmax-f32"], [ENGINES["llvm passes"], Engine("tile", "tile", "interp")]
    )
    assert [o.status for o in outcomes] == ["pass", "pass"]


def test_the_passes_that_may_round_are_passes():
    names = set()
    for case in ("graph/linalg/scaled-operand", "tile/blocks/column-sums"):
        program = prepare(*CASES[case].entry(), "interp", CASES[case].grid, CASES[case].group)
        bounds = program.bounds()
        names |= {v.step for e in ENGINES.values() for v in judge_passes(program, e.target, e.options, bounds)}
    assert ROUNDING_PASSES <= names


def test_a_type_that_a_target_lacks_is_unsupported():
    (outcome,) = run_case(CASES["tile/blocks/elementwise-f64"], [ENGINES["csl:2x2 passes"]])
    assert outcome.status == "unsupported" and "f64" in outcome.detail


def test_the_command(capsys):
    assert main(["conformance", "--pass-by-pass", "--target", "llvm", "-k", "composites/softmax-f32"]) == 0
    out = capsys.readouterr().out
    assert "llvm passes" in out and "0 fail" in out
    assert main(["conformance", "--pass-by-pass", "-k", "nothing-of-this-name"]) != 0
