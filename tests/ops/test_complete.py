"""Every op is whole: prose, a type rule, an error rule or a lowering — or a reason why not."""

import inspect

import pytest

import tessera.ops  # noqa: F401
from tessera.ir.rules import REGISTRY, batch, error, jvp, lower
from tessera.lower.graph_to_schedule import host_ops, lowering
from tessera.lower.graph_to_schedule.kernel_body import point_rules
from tessera.transforms import batching
from tessera.transforms.autodiff import linearisation
from tessera.transforms.flow import derivative_rules, implicit_differentiation, region_ops

TENSOR_OPS = [o for o in REGISTRY.values() if o.name.startswith("ts.")]
# The reason why an op has no error rule: its meaning in bound mode is in the interpreter, which walks it.
WALKED = {
    "ts.for": "a region run again",
    "ts.while": "a region run again",
    "ts.if": "one region or the other",
    "ts.scan": "a region run again",
    "ts.cond": "one region or the other",
    "ts.while_loop": "a region run again",
    "ts.cholesky": "LAPACK on the host at every level: bound mode refuses it by name",
    "ts.svd": "as cholesky",
    "ts.qr": "as cholesky",
    "ts.eigh": "as cholesky",
    "ts.eig": "as cholesky",
    "ts.solve": "as cholesky",
    "ts.slogdet": "as cholesky",
}
# Composites whose targets may do more than their lowering does: their bounds say how much.
FREER = ("ts.rough_cast",)
MEMORY_DIALECTS = ("tile", "host", "schedule", "mesh")  # they move values, whose bounds move along


def name(op):
    return op.name


@pytest.mark.parametrize("op", REGISTRY.values(), ids=name)
def test_prose(op):
    first = inspect.cleandoc(op.__doc__).splitlines()[0]
    assert len(first) > 8 and first[-1] == ".", f"{op.name}: the first line is no sentence: {first}"


@pytest.mark.parametrize("op", REGISTRY.values(), ids=name)
def test_type_rule(op):
    assert op.infer is not None or op in lower


@pytest.mark.parametrize("op", REGISTRY.values(), ids=name)
def test_attributes_are_annotated(op):
    assert all(p.annotation is not p.empty for p in op.attrs.values())


@pytest.mark.parametrize("op", TENSOR_OPS, ids=name)
def test_error_rule_or_lowering(op):
    """A composite's bound follows from its parts, so it has no rule of its own."""
    assert ((op in error) + (op in lower) + (op.name in WALKED)) == 1 + (op.name in FREER)


def test_only_tensor_ops_have_error_rules_and_lowerings():
    assert all(o.name.startswith("ts.") for table in (error, lower) for o in table)
    assert {o.name.partition(".")[0] for o in REGISTRY.values()} <= {"ts", "transform", *MEMORY_DIALECTS}


def test_pointwise_ops_are_what_they_say():
    for op in TENSOR_OPS:
        assert not op.pointwise or all(p.name not in ("axis", "shape") for p in op.attrs.values()), op.name


# The reason why an op has neither a derivative nor a batching rule, nor a lowering that gives them.
assert lowering and host_ops  # fill the tables of the levels below
assert region_ops and implicit_differentiation and derivative_rules  # fill those of transforms, for ops with regions
UNDERIVED = dict.fromkeys(("ts.for", "ts.while", "ts.if"), "of tile functions, which no transform reads")
UNDERIVED["ts.round_by_chance"] = "of lowered functions, as those"


@pytest.mark.parametrize("op", TENSOR_OPS, ids=name)
def test_derivative_and_batching(op):
    if op.name not in UNDERIVED:
        assert op in jvp or op in lower or op in linearisation.call_jvp_rules
        assert op in batch or op in lower or op.pointwise or not op.operands or op in batching.call_batching_rules


def test_reasons_are_of_ops_that_lack_something():
    assert set(UNDERIVED) <= {
        o.name for o in TENSOR_OPS if o not in jvp and o not in lower and o not in linearisation.call_jvp_rules
    }


@pytest.mark.parametrize("op", TENSOR_OPS, ids=name)
def test_a_place_below_graph(op):
    """At an index of a kernel, taken by the host, or by what it is lowered to."""
    if op.name not in UNDERIVED or op in point_rules:
        assert op in lower or op in point_rules or op in host_ops.host_rules
