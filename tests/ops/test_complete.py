"""Completeness: every op has each column, a row or a declared refusal on each target, and a conformance case."""

import inspect
from functools import cache

import pytest
from declared_reasons import NO_CASE, NO_ERROR_RULE

import tessera as ts
import tessera.ops  # noqa: F401
from conformance.case import all_cases
from tessera.codegen.contract import get_backend
from tessera.codegen.coverage import list_required_ops, make_refusal_error
from tessera.dist.engines import run_ranks
from tessera.ir.core import Node
from tessera.ir.rules import REGISTRY, batch, error, jvp, lower
from tessera.lower.graph_to_schedule import host_ops, lowering
from tessera.lower.graph_to_schedule.kernel_body import point_rules
from tessera.runtime.program import prepare
from tessera.transforms import batching
from tessera.transforms.autodiff import linearisation
from tessera.transforms.flow import control_flow_rules, implicit_differentiation, region_ops

TARGETS = ("llvm", "ptx", "csl")
DIALECTS = ("ts", "transform", "tile", "host", "schedule", "mesh")
# Composites whose bound is wider than that of their lowering.
WIDER_THAN_LOWERING = {
    "ts.rough_cast": "targets may flush subnormal numbers to 0",
    **dict.fromkeys(("ts.cumsum", "ts.scatter_add"), "targets may add in any order"),
    **dict.fromkeys(("ts.prod", "ts.cumprod"), "targets may multiply in any order, in which parts may overflow"),
}
# The reason why an op has neither a derivative nor a batching rule, nor a lowering that implies them.
NO_DERIVATIVE = {
    **dict.fromkeys(("ts.for", "ts.while", "ts.if"), "appears in tile functions, which no transform takes"),
    "ts.round_by_chance": "appears in lowered functions, which no transform takes",
    "ts.strided_view": "appears in lowered functions, which no transform takes",
}
assert lowering and host_ops  # fill the tables of the levels below
assert region_ops and implicit_differentiation and control_flow_rules  # fill those of transforms, for ops with regions
REQUIRED = frozenset(list_required_ops())
TENSOR_OPS = [op for op in REGISTRY.values() if op.name.startswith("ts.")]


CASES = [case for case in all_cases() if case.rejects is None]


@cache
def list_ops_of_case(number):
    """The names of the ops that a conformance case has, at any level."""
    case = CASES[number]
    entry, arguments = case.entry()

    def prepare_rank():
        return prepare(entry, [x[ts.get_rank()] for x in arguments])

    if case.mesh is None:
        program = prepare(entry, arguments, "interp", case.grid, case.group, dynamic=case.dynamic)
    else:
        program = run_ranks(case.mesh, prepare_rank)[0]
    levels = program.levels.values()
    return frozenset(n.op.name for m in levels for f in m.functions for n in f.body.walk())


# Cases that have the ops that no case is named after: a look at all cases would prepare a thousand of them.
CASES_OF_OTHER_OPS = """
    collectives/all_reduce-sum-3-f32 collectives/broadcast-3-f32 collectives/gather-3-f32 collectives/permute-3-f32
    collectives/reduce_scatter-max-3-f32 collectives/scatter-3-f32 composites/attention-full-f32
    composites/attention-positional composites/elu-f32 composites/rms_norm-f32 cooperation/warp-16
    debug/M5-turned-at-once-repaired elementwise/floor-f32 flow/branching-f32 flow/counted-f32 functions/tan-f32
    gradients/attention jit/tutorials/grouped-gemm language/mbarrier launches/checkpoint/stdlib/layernorm-f32
    memory/double-buffered numerics/policy-compensated numerics/stochastic-f16 reduce/all--1-bool
    scatter/add-once-axis0-f32-ties sizes/row-sum-1x1 tile/atomics/tickets
""".split()
OTHERS = [i for i, case in enumerate(CASES) if case.name.endswith(tuple(CASES_OF_OTHER_OPS))]


def has_case(op):
    """Whether a case has the op: one that is named after it, or one of the list above."""
    named = [i for i, case in enumerate(CASES) if op.__name__ in case.name]
    return any(op.name in list_ops_of_case(i) for i in (*named[:3], *OTHERS, *named[3:]))


def has_prose(op):
    first = inspect.cleandoc(op.__doc__ or "-").splitlines()[0]
    return len(first) > 8 and first.endswith(".")


def has_error_rule(op):
    """A composite's bound follows from its parts, so it has no rule of its own."""
    rules = (op in error) + (op in lower) + (op.name in NO_ERROR_RULE)
    return not op.name.startswith("ts.") or rules == 1 + (op.name in WIDER_THAN_LOWERING)


def has_derivative(op):
    known = op in jvp or op in lower or op in linearisation.call_jvp_rules
    return not op.name.startswith("ts.") or known or op.name in NO_DERIVATIVE


def has_batching_rule(op):
    known = op in batch or op in lower or op.pointwise or not op.operands or op in batching.call_batching_rules
    return not op.name.startswith("ts.") or known or op.name in NO_DERIVATIVE


def has_kernel_rule(op):
    """A tensor op is computed at an index of a kernel, by the host, or by what it is lowered to."""
    known = op in lower or op in point_rules or op in host_ops.host_rules
    return not op.name.startswith("ts.") or known or op.name in NO_DERIVATIVE


def has_row(target):
    return lambda op: op not in REQUIRED or get_backend(target).coverage.covers(op)


COLUMNS = {
    "prose": has_prose,
    "type rule": lambda op: op.infer is not None or op in lower,
    "annotated attributes": lambda op: all(p.annotation is not p.empty for p in op.attrs.values()),
    "error rule": has_error_rule,
    "derivative": has_derivative,
    "batching rule": has_batching_rule,
    "kernel rule": has_kernel_rule,
    "conformance case": lambda op: op.name in NO_CASE or has_case(op),
    **{f"row for {target}": has_row(target) for target in TARGETS},
}


def find_gaps(op, columns=tuple(COLUMNS)):
    """Of these columns, those that an op lacks without a declared reason."""
    return [column for column in columns if not COLUMNS[column](op)]


@pytest.mark.parametrize("op", REGISTRY.values(), ids=lambda op: op.name)
def test_every_column(op):
    gaps = find_gaps(op)
    assert not gaps, "\n".join([f"{op.name} lacks:", *gaps, "see docs/adding-an-op.md"])


def test_the_tables_are_of_tensor_ops():
    assert all(op.name.startswith("ts.") for table in (error, lower) for op in table)
    assert {name.partition(".")[0] for name in REGISTRY} <= set(DIALECTS)


def test_reasons_are_current():
    """A reason for a missing column goes when the column comes."""
    underived = {op.name for op in TENSOR_OPS if not any(op in t for t in (jvp, lower, linearisation.call_jvp_rules))}
    assert set(NO_DERIVATIVE) <= underived
    assert set(NO_ERROR_RULE) <= {op.name for op in TENSOR_OPS if op not in error and op not in lower}
    assert set(WIDER_THAN_LOWERING) <= {op.name for op in TENSOR_OPS if op in error and op in lower}
    assert set(NO_CASE) <= set(REGISTRY)  # that no case has them: tests/test_conformance.py


def test_pointwise_ops_have_no_axes():
    assert all(k not in ("axis", "shape") for op in TENSOR_OPS if op.pointwise for k in op.attrs)


@pytest.mark.parametrize("target", TARGETS)
def test_refusals_have_reasons(target):
    coverage = get_backend(target).coverage
    assert coverage.list_contradictions() == [] and all(len(reason) > 20 for reason in coverage.refused.values())
    for op, reason in coverage.refused.items():
        text = str(make_refusal_error(target, Node(op, (), {}, ()), coverage.refused))
        assert reason in text and op.name in text and target in text


@pytest.mark.parametrize("target", TARGETS)
def test_a_missing_row_names_the_guide(target):
    text = str(make_refusal_error(target, Node(REGISTRY["ts.exp"], (), {}, ()), {}))
    assert f"the target {target} cannot emit ts.exp" in text and "add a row: docs/adding-an-op.md" in text


# The check itself is checked: what is deleted is reported.


def without(monkeypatch, table, op):
    monkeypatch.delitem(table._table, op)


@pytest.mark.parametrize("target", TARGETS)
def test_each_deleted_row_is_reported(target, monkeypatch):
    coverage = get_backend(target).coverage
    for op in REQUIRED:
        with monkeypatch.context() as patch:
            for table in (*coverage.tables, *coverage.rewritten):
                if op in table:
                    without(patch, table, op)
            if op in coverage.refused:
                patch.delitem(coverage.refused, op)
            assert find_gaps(op, [f"row for {target}"])


@pytest.mark.parametrize(
    ("column", "table"), (("derivative", jvp), ("error rule", error), ("batching rule", batch), ("error rule", lower))
)
def test_each_deleted_rule_is_reported(column, table, monkeypatch):
    for op in [op for op in table if op.name.startswith("ts.")]:
        with monkeypatch.context() as patch:
            without(patch, table, op)
            implied = {"derivative": op in lower or op in linearisation.call_jvp_rules, "batching rule": op in lower}
            assert find_gaps(op, [column]) or implied.get(column)  # no case can be prepared without some of the rules


def test_a_missing_case_is_reported(monkeypatch):
    monkeypatch.setitem(COLUMNS, "conformance case", lambda op: op.name != "ts.exp" and has_case(op))
    assert find_gaps(REGISTRY["ts.exp"]) == ["conformance case"]


# Ops that the pass over groups replaces; what it only widens needs a row of its own.
REPLACED = {f"tile.{name}" for name in "assert collect exchange meet print".split()}
REPLACED |= {f"tile.mbarrier_{name}" for name in "arrive copies expect init wait".split()}


@pytest.mark.parametrize("target", TARGETS)
def test_new_E2(target):
    coverage = get_backend(target).coverage
    assert {op.name for op in REQUIRED if not coverage.emits(op) and op not in coverage.refused} <= REPLACED
