"""Rewriting: use-def chains, patterns and the driver, dead code and common subexpressions.

Programs are random straight-line Graph functions, so that each property holds for what nobody thought of.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import tile
from tessera.core.errors import Location, VerifyError
from tessera.core.symbolic_dim import Dim
from tessera.core.types import TensorType, f16, f32, f64, int32, scalar
from tessera.frontend.jit.tracing import jit
from tessera.interp import graph
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Module, Value, structural_key
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.rewrite import (
    VERIFY_VARIABLE,
    RewritePatterns,
    UseDef,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    infer_by_lowering,
    rewrite_function,
    rewrite_to_fixed_point,
)
from tessera.ir.verify import verify, verify_function
from tessera.lower.passes.canonicalisation import canonicalisation, canonicalise
from tessera.ops.dialects import tile as tile_ops
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e
from tessera.runtime.program import prepare

X = np.linspace(-2, 3, 12, dtype=np.float32).reshape(3, 4)
TYPE = TensorType((3, 4), f32)
UNARY = (e.neg, e.abs, e.tanh)
BINARY = (e.add, e.sub, e.mul, e.maximum)


@st.composite
def programs(draw):
    """A random Graph function of one tensor; not all of its nodes are used."""
    builder, x = Builder(), Value(TYPE, "x")
    values = [x]
    for line in range(draw(st.integers(1, 12))):
        with builder.at(Location("random.py", line + 1, 1)):
            values.append(_add_node(draw, builder, values))
    results = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    return Function("random", builder.block([x], results))


def _add_node(draw, builder, values):
    pick = st.sampled_from(values)
    kind = draw(st.sampled_from(("unary", "binary", "number", "view")))
    if kind == "unary":
        return builder.add(draw(st.sampled_from(UNARY)), [draw(pick)]).out
    if kind == "binary":
        return builder.add(draw(st.sampled_from(BINARY)), [draw(pick), draw(pick)]).out
    if kind == "number":
        return builder.add(basic.full, [], {"shape": (3, 4), "value": draw(st.sampled_from((0.0, 1.0, 2.0)))}).out
    turned = builder.add(shape.permute, [draw(pick)], {"axes": (1, 0)}).out
    return builder.add(shape.permute, [turned], {"axes": (1, 0)}).out


def run(function):
    return graph.run(function, [X])


def same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


double_negation = RewritePatterns("double negation", same_types=True)


@double_negation(e.neg)
def _(rewriter, node, args):
    inner = rewriter.find_producer(args[0], e.neg)
    return inner.args[0] if inner else None


REWRITES = {
    "double negation": lambda f: rewrite_function(f, double_negation),
    "canonicalise": canonicalise,
    "canonicalise to a fixed point": lambda f: rewrite_to_fixed_point(f, canonicalisation),
    "common subexpressions": eliminate_common_subexpressions,
    "dead code": eliminate_dead_code,
}


@pytest.mark.parametrize("name", REWRITES)
@settings(max_examples=40, deadline=None)
@given(function=programs())
def test_rewriting_preserves_meaning_and_round_trips(name, function):
    made = REWRITES[name](function)
    same(run(made), run(function))
    module = verify(Module("graph", (made,)))
    assert parse_module(print_module(module)) == module
    assert [v.type for v in made.results] == [v.type for v in function.results]


@pytest.mark.parametrize("name", ["canonicalise to a fixed point", "common subexpressions", "dead code"])
@settings(max_examples=40, deadline=None)
@given(function=programs())
def test_a_second_time_changes_nothing(name, function):
    once = REWRITES[name](function)
    assert REWRITES[name](once) == once


@settings(max_examples=40, deadline=None)
@given(function=programs())
def test_without_patterns_the_function_is_copied_with_its_locations(function):
    made = rewrite_function(function, RewritePatterns("none"))
    assert structural_key(made) == structural_key(function)


@settings(max_examples=40, deadline=None)
@given(function=programs())
def test_use_def_agrees_with_a_search(function):
    uses, nodes = UseDef(function), list(function.body.walk())
    for node in nodes:
        assert uses.block_of(node) is function.body
        for value in node.results:
            assert uses[value] is node
            assert uses.users(value) == tuple(n for n in nodes if value in n.args)
            count = sum(n.args.count(value) for n in nodes) + function.results.count(value)
            assert uses.count_uses(value) == count
    assert uses.get(function.params[0]) is None
    assert len(uses) == sum(len(n.results) for n in nodes)
    kept = {n for n in eliminate_dead_code(function).body.nodes}
    assert set(uses.backward_slice(function.results)) == kept


def test_use_def_of_inner_regions():
    loop = trace(lambda x: ts.fori_loop(0, 3, lambda i, y: y * 2.0, x))
    (node,) = [n for n in loop.body.nodes if n.regions]
    inner = node.regions[0].nodes[-1]
    assert UseDef(loop).block_of(inner) is node.regions[0]
    assert inner.out not in UseDef(loop, nested=False)


def trace(program):
    return jit(program).trace(X).function


def names(function):
    return [n.op.__name__ for n in function.body.nodes]


def test_patterns_of_an_op_are_tried_in_order_and_those_of_any_op_last():
    tried = []
    patterns = RewritePatterns("order")
    patterns.any_op(lambda rewriter, node, args: tried.append("any"))
    patterns(e.neg)(lambda rewriter, node, args: tried.append("first"))
    patterns(e.neg)(lambda rewriter, node, args: tried.append("second"))
    rewrite_function(trace(lambda x: -x), patterns)
    assert tried == ["first", "second", "any"]


def test_a_pattern_for_no_ops_matches_nothing():
    patterns = RewritePatterns("empty")
    patterns()(lambda rewriter, node, args: args[0])
    function = trace(lambda x: -x)
    assert rewrite_function(function, patterns) is function


def test_a_failed_match_leaves_no_nodes():
    patterns = RewritePatterns("failing")
    patterns(e.neg)(lambda rewriter, node, args: rewriter.add(e.abs, args[0]) and None)
    function = trace(lambda x: -x)
    assert rewrite_function(function, patterns) == function


def test_a_replacement_of_another_type_is_no_match_where_types_must_stay():
    for same_types, want in ((True, ["neg"]), (False, ["cast"])):
        patterns = RewritePatterns("types", same_types)
        patterns(e.neg)(lambda rewriter, node, args: rewriter.add(basic.cast, args[0], dtype=f64))
        assert names(rewrite_function(trace(lambda x: -x), patterns)) == want


def test_new_nodes_have_the_location_of_the_node_they_replace():
    patterns = RewritePatterns("location")
    patterns(e.neg)(lambda rewriter, node, args: rewriter.add(e.sub, rewriter.add(e.abs, args[0]), args[0]))
    function = trace(lambda x: -x)
    made = rewrite_function(function, patterns)
    assert {n.loc for n in made.body.nodes} == {function.body.nodes[0].loc}


def test_revisiting_matches_what_a_pattern_adds():
    patterns = RewritePatterns("unfold")
    patterns(e.tanh)(lambda rewriter, node, args: rewriter.add(e.abs, rewriter.add(e.neg, args[0])))
    patterns(e.abs)(lambda rewriter, node, args: rewriter.add(e.maximum, args[0], args[0]))
    function = trace(lambda x: x.tanh())
    assert names(rewrite_function(function, patterns)) == ["neg", "abs"]
    assert names(rewrite_function(function, patterns, revisit=True)) == ["neg", "maximum"]


def test_a_pattern_sees_old_uses_and_new_values():
    seen = []
    patterns = RewritePatterns("context")

    @patterns(e.add)
    def _(rewriter, node, args):
        old = rewriter.uses[node.args[0]]
        seen.append((old.op, rewriter.uses.count_uses(old.out), rewriter.new(old.out) is args[0]))

    rewrite_function(trace(lambda x: -x + x), patterns)
    assert seen == [(e.neg, 1, True)]


def test_nodes_that_a_rewrite_leaves_alone_are_the_same_nodes():
    """What comes before a match stays, inner regions included; what depends on one is made again."""
    patterns = RewritePatterns("one match")
    patterns(e.tanh)(lambda rewriter, node, args: rewriter.add(e.abs, args[0]))
    function = trace(lambda x: (ts.fori_loop(0, 3, lambda i, y: y * 2.0, -x).tanh() * 3.0, -x))
    made = rewrite_function(function, patterns)
    assert made.params == function.params
    number = next(i for i, n in enumerate(function.body.nodes) if n.op is e.tanh)
    before, after = function.body.nodes[:number], made.body.nodes[:number]
    assert any(n.regions for n in before) and all(a is b for a, b in zip(after, before, strict=True))
    assert names(made) == [{"tanh": "abs"}.get(n, n) for n in names(function)]
    product = next(n for n in made.body.nodes if n.args[:1] == made.body.nodes[number].results)
    assert product.op is e.mul and product not in function.body.nodes


def test_a_match_in_a_region_leaves_the_nodes_before_it():
    patterns = RewritePatterns("one match")
    patterns(e.tanh)(lambda rewriter, node, args: rewriter.add(e.abs, args[0]))
    function = trace(lambda x: ts.fori_loop(0, 3, lambda i, y: (-y).tanh() + y, x))
    (old,), (new,) = ([n for n in f.body.nodes if n.regions] for f in (function, rewrite_function(function, patterns)))
    (region,), (made,) = old.regions, new.regions
    assert made.params == region.params and made.nodes[0] is region.nodes[0]
    assert [n.op for n in made.nodes] == [e.abs if n.op is e.tanh else n.op for n in region.nodes]
    assert not {v for n in made.nodes[1:] for v in n.results} & {v for n in region.nodes for v in n.results}


def test_a_region_that_is_used_twice_has_values_of_its_own_each_time():
    """A pattern that evaluates a region and keeps its loop, too: no value is defined twice."""
    patterns = RewritePatterns("peeling")
    function = trace(lambda x: ts.fori_loop(0, 3, lambda i, y: y + ts.ones((3, 4)), x))
    (loop,) = [n for n in function.body.nodes if n.regions]

    @patterns(loop.op)
    def _(rewriter, node, args):
        copies = [rewriter.copy(node, args) for _ in range(2)]
        return [rewriter.add(e.add, a, b) if a.type == TYPE else a for a, b in zip(*copies, strict=True)]

    made = rewrite_function(function, patterns)
    assert [n.op for n in made.body.nodes].count(loop.op) == 2
    defined = [v for n in made.body.walk() for v in (*n.results, *(p for r in n.regions for p in r.params))]
    assert len(set(defined)) == len(defined)
    verify_function(made)
    same(run(made), [2 * value for value in run(function)])


def test_uses_of_a_value_that_a_region_gives_and_a_later_node_takes():
    function = trace(lambda x: ts.cond(x.sum() > 0, lambda y: y, lambda y: -y, x) + x)
    uses, (x,) = UseDef(function), function.params
    blocks = [function.body, *(r for n in function.body.walk() for r in n.regions)]
    count = sum(n.args.count(x) for n in function.body.walk()) + sum(b.results.count(x) for b in blocks)
    assert uses.count_uses(x) == count and uses.users(x) == tuple(n for n in function.body.walk() if x in n.args)


def test_a_table_without_a_fixed_point_is_reported():
    patterns = RewritePatterns("swap")
    patterns(e.add)(lambda rewriter, node, args: rewriter.add(e.sub, *args))
    patterns(e.sub)(lambda rewriter, node, args: rewriter.add(e.add, *args))
    with pytest.raises(AssertionError, match="swap patterns reach no fixed point"):
        rewrite_to_fixed_point(trace(lambda x: x + x), patterns)


def test_debug_builds_verify_after_each_rewrite(monkeypatch):
    patterns = RewritePatterns("broken")
    patterns(e.neg)(lambda rewriter, node, args: [Value(node.out.type)])
    function = trace(lambda x: (-x).tanh())
    rewrite_function(function, patterns)
    monkeypatch.setenv(VERIFY_VARIABLE, "1")
    with pytest.raises(VerifyError, match="V1: ts.tanh: a value is used that is not defined before"):
        rewrite_function(function, patterns)


@settings(max_examples=20, deadline=None)
@given(function=programs())
def test_functions_verify_alone(function):
    assert verify_function(function) is function


@ts.kernel
def updated(x, out):
    before = tile.load(x[0:4])
    tile.store(x[0:4], before + 1.0)
    tile.store(out[0:4], before + tile.load(x[0:4]))


def test_equal_reads_around_a_write_stay_two():
    given = {"x": np.zeros(4, "f4"), "out": np.zeros(4, "f4")}
    function = prepare(updated, given, "llvm", (1,)).levels["tile"].functions[1]
    made = eliminate_common_subexpressions(function)
    assert [n.op for n in made.body.nodes].count(tile_ops.load) == 2


def test_zeros_of_both_signs_are_two_expressions():
    builder = Builder()
    zeros = [builder.add(basic.full, [], {"shape": (), "value": v, "dtype": f32}).out for v in (0.0, -0.0)]
    made = eliminate_common_subexpressions(Function("zeros", builder.block([], zeros)))
    assert np.signbit(graph.run(made, [])).tolist() == [False, True]


def test_a_slice_is_in_program_order():
    builder, x = Builder(), Value(scalar(f32), "x")
    made = [builder.add(e.neg, [x]).out]
    for _ in range(20):
        made.append(builder.add(e.add, [made[-1], made[0]]).out)
    function = Function("chain", builder.block([x], made[-1:]))
    assert UseDef(function).backward_slice(function.results) == function.body.nodes


def test_the_types_of_a_composite_are_inferred_once():
    """For equal types and attributes; of symbolic sizes each time, since a lowering may require something of them."""
    traced = []

    def lowering(x, *, p):
        traced.append(p)
        return x * p

    op = SimpleNamespace(name="test.scaled")
    rule = infer_by_lowering(op, SimpleNamespace(of=lambda op: lowering))
    narrow, wide = TensorType((3,), f16), TensorType((3,), f32)
    for type in (narrow, wide, narrow, wide):
        assert rule(type, p=2) == type
    assert rule(TensorType((3,), int32), p=2) == TensorType((3,), int32)
    assert rule(TensorType((3,), int32), p=2.0) == TensorType((3,), f32)
    assert traced == [2, 2, 2, 2.0]
    symbolic = TensorType((Dim.of("N"),), f32)
    assert rule(symbolic, p=2) == rule(symbolic, p=2) == symbolic and len(traced) == 6
