"""Every op is whole: prose, a type rule, an error rule or a lowering — or a reason why not."""

import inspect

import pytest

import tessera.ops  # noqa: F401
from tessera import batching
from tessera.autodiff import dual
from tessera.flow import implicit, nodes, scan_derivative
from tessera.lower import flow, hosted, to_schedule
from tessera.lower.body import compute
from tessera.op import REGISTRY, batch, error, jvp, lower

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
assert to_schedule and hosted  # fill the tables of the levels below
assert nodes and implicit and scan_derivative  # fill those of transforms, for ops with regions
UNDERIVED = dict.fromkeys(("ts.for", "ts.while", "ts.if"), "of tile functions, which no transform reads")
UNDERIVED["ts.round_by_chance"] = "of lowered functions, as those"


@pytest.mark.parametrize("op", TENSOR_OPS, ids=name)
def test_derivative_and_batching(op):
    if op.name not in UNDERIVED:
        assert op in jvp or op in lower or op in dual.calls
        assert op in batch or op in lower or op.pointwise or not op.operands or op in batching.calls


def test_reasons_are_of_ops_that_lack_something():
    assert set(UNDERIVED) <= {o.name for o in TENSOR_OPS if o not in jvp and o not in lower and o not in dual.calls}


@pytest.mark.parametrize("op", TENSOR_OPS, ids=name)
def test_a_place_below_graph(op):
    """At an index of a kernel, taken by the host, or by what it is lowered to."""
    if op.name not in UNDERIVED or op in compute:
        assert op in lower or op in compute or op in flow.rules
