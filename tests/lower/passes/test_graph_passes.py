"""Graph passes: canonicalisation is exact; memory planning never overlaps two live buffers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.case import all_cases, read_area
from conformance.run import list_engines, run_case
from tessera.core.errors import OutOfBoundsError
from tessera.core.types import Policy, RefType, bf16, f32
from tessera.frontend.jit.tracing import jit
from tessera.interp import graph
from tessera.ir.core import Module, Value
from tessera.ir.rewrite import expand_composites
from tessera.ir.tensor import Tensor
from tessera.ir.verify import verify_function
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes.memory_planning import (
    ALIGNMENT,
    BufferLifetime,
    assign_offsets,
    find_lifetimes,
    plan_memory,
)
from tessera.lower.passes.type_conversion import specialise_shapes
from tessera.lower.pipeline import PIPELINE
from tessera.ops.tensor import attention, basic, contractions, nn, shape
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.scatter import scatter_add
from tessera.runtime.program import prepare
from tests.lower.levels import modules

X = np.arange(12, dtype=np.float32).reshape(3, 4) - 5


def passed(function):
    module = Module("graph", (function,))
    for name in ("simplify", "common subexpressions", "dead code"):
        module = dict(PIPELINE)[name](module, LoweringPlan())
    return module.main


def test_random_rounding_stays_where_its_elements_are():
    narrow = Policy(bf16, rounding="stochastic")
    function = jit(lambda x: shape.permute(x / 7, axes=(1, 0)).to(narrow)).trace(X).function
    found = [n.op.__name__ for n in passed(expand_composites(function)).body.nodes]
    assert found.index("permute") < found.index("cast")


@pytest.mark.parametrize(
    "program, ops",
    [
        (lambda x: x.to("f32"), []),
        (lambda x: x.reshape(3, 4), []),
        (lambda x: x.reshape(12).reshape(4, 3), ["reshape"]),
        (lambda x: x.reshape(12).reshape(3, 4), []),
        (lambda x: x.transpose().transpose(), []),
        (lambda x: shape.permute(x.reshape(3, 1, 4), axes=(1, 0, 2)), ["reshape"]),
        (lambda x: basic.broadcast_to(x, shape=(3, 4)), []),
        (lambda x: basic.broadcast_to(basic.broadcast_to(x, shape=(2, 3, 4)), shape=(5, 2, 3, 4)), ["broadcast"]),
        (lambda x: x[:], []),
        (lambda x: shape.pad(x, low=(0, 0), high=(0, 0)), []),
        (lambda x: shape.concatenate([x]), []),
        (lambda x: x * 1.0 / 1.0 - 0.0, []),
        (
            lambda x: shape.permute(shape.permute(x.reshape(3, 2, 2), axes=(1, 2, 0)), axes=(0, 2, 1)),
            ["reshape", "permute"],
        ),
        (lambda x: (x / 7).to("f16").to("f32"), ["full", "div", "cast", "cast"]),
        (lambda x: (x / 7).to("f64").to("f32"), ["full", "div"]),
        (lambda x: (x / 7).to("f64").to("bf16"), ["full", "div", "cast"]),
        (lambda x: x.to("f64").to("int32"), ["cast", "cast"]),
        (lambda x: (x / 7).to("int64").to("f32"), ["full", "div", "cast", "cast"]),
        (lambda x: (x / 7).to("bf16").to("f16"), ["full", "div", "cast", "cast"]),
        (
            lambda x: basic.fusion_barrier(x.reshape(12)).reshape(4, 3).transpose().to("f16"),
            ["cast", "reshape", "fusion_barrier", "reshape", "permute"],
        ),
        (lambda x: shape.concatenate([x[:0], x[:1], x[1:]]), ["slice", "slice", "concatenate"]),
        (lambda x: x + 0.0, ["full", "add"]),  # -0 + 0 is 0
        (lambda x: x + e.exp(basic.full(shape=(4,), value=1.0)), ["full", "add"]),
        (lambda x: (x * 2) + (x * 2), ["full", "mul", "add"]),
        (lambda x: x.reshape(3, 4, 1).sum(axis=-1), ["full", "add"]),  # the sum of one -0 is 0
        (lambda x: x.reshape(3, 4, 1).max(axis=-1), []),
        (lambda x: x.sum(axis=(0, 1)), ["reshape", "sum"]),
        (lambda x: x.reshape(3, 2, 2).max(axis=(0, 2)), ["reshape", "permute", "reshape", "max"]),
        (lambda x: contractions.dot(x[:, :0], x[:0, :]), ["full"]),
        (lambda x: e.where(basic.full(shape=(3, 4), value=True, dtype="bool"), x, x + 1), []),
        (lambda x: (lambda unused: x + 1)(x.exp()), ["full", "add"]),
    ],
)
def test_rewrites(program, ops):
    function = expand_composites(jit(program).trace(X).function)
    found = passed(function)
    assert [n.op.__name__ for n in found.body.nodes] == ops
    for got, want in zip(graph.run(found, [X]), graph.run(function, [X]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_specialize():
    function = jit(lambda x: nn.layer_norm(x)).trace(Tensor["B", "N"]).function
    found = specialise_shapes(function, {"B": 3, "N": 4})
    assert all(isinstance(n, int) for node in found.body.nodes for v in node.results for n in v.type.shape)
    np.testing.assert_array_equal(graph.run(found, [X])[0], graph.run(function, [X])[0])


lives = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9), st.integers(0, 9)), max_size=12)


@given(lives)
def test_living_buffers_never_meet(given_lives):
    found = []
    for size, a, b in given_lives:
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        found.append(BufferLifetime(Value(RefType((size,), f32)), rounded, min(a, b), max(a, b)))
    offsets = assign_offsets(found)
    for i, one in enumerate(found):
        assert offsets[one.buffer] % ALIGNMENT == 0
        for other in found[:i]:
            low, high = sorted((one, other), key=lambda life: offsets[life.buffer])
            assert not one.overlaps(other) or offsets[low.buffer] + low.size <= offsets[high.buffer]
    placed = sorted(found, key=lambda life: (-life.size, life.first))
    for i, one in enumerate(placed):  # each lies at the lowest place that is free beside the larger ones
        beside = [(offsets[o.buffer], offsets[o.buffer] + o.size) for o in placed[:i] if o.overlaps(one)]
        lower = [at for at in (0, *(end for _, end in beside)) if at < offsets[one.buffer]]
        assert not any(all(at + one.size <= low or high <= at for low, high in beside) for at in lower)


def test_memory_is_shared():
    def program(x):
        for _ in range(6):
            x = x @ x
        return x

    function = jit(program).trace(X[:, :3]).function
    module = modules(function, LoweringPlan())["schedule"]
    assert module.main.attrs["workspace"] == 2 * ALIGNMENT
    assert plan_memory(module) == module


POLICY_CASES = [c for c in all_cases() if c.name.startswith("graph/numerics/policy-")]


@pytest.mark.parametrize("case", POLICY_CASES, ids=lambda case: case.name)
def test_each_pass_keeps_numeric_policies(case, monkeypatch):
    """Constants, buffers and stochastic rounding have the types that the rules of their ops infer."""
    monkeypatch.setenv("TESSERA_VERIFY", "1")
    outcomes = list(run_case(case, list_engines(["llvm"], ["graph", "schedule", "tile", "target"])))
    assert len(outcomes) >= 4 and all(o.status == "pass" for o in outcomes), [o.detail for o in outcomes]


def test_a_folded_constant_keeps_its_policy():
    policy = Policy(f32, denormals="flush")
    program = jit(lambda x: x * (basic.cast(basic.full(shape=(4,), value=1e-40), dtype=policy) + 2.0))
    folded = passed(program.trace(X).function)
    verify_function(folded)
    (constant,) = (n for n in folded.body.nodes if n.op is basic.full)
    (cast,) = (n for n in folded.body.nodes if n.op is basic.cast)
    assert constant.attrs["value"] == 2.0 and constant.out.type.policy is None and cast.out.type.policy == policy


MOVES = {
    "reshape": lambda c: c.reshape(2, 6), "broadcast": lambda c: basic.broadcast_to(c, shape=(5, 3, 4)),
    "permute": lambda c: shape.permute(c, axes=(1, 0)), "slice": lambda c: c[1:, ::2], "negation": lambda c: -c,
    "sum": lambda c: c + c, "cast": lambda c: basic.cast(c, dtype="f64"), "all": lambda c: -(c.reshape(12)[3:] + 1.5),
}  # fmt: skip


@pytest.mark.parametrize("policy", [None, Policy(f32, denormals="flush"), Policy(f32, rounding="toward_zero")])
@pytest.mark.parametrize("move", MOVES)
def test_what_is_computed_from_a_constant_is_one_whatever_its_policy(move, policy):
    def program(x):
        constant = basic.full(shape=(3, 4), value=2.5)
        return MOVES[move](constant if policy is None else basic.cast(constant, dtype=policy))

    function = jit(program).trace(X).function
    found = passed(function)
    kept = policy is not None and move != "cast"
    assert [n.op.__name__ for n in found.body.nodes] == ["full", *(["cast"] if kept else [])]
    np.testing.assert_array_equal(graph.run(found, [X])[0], graph.run(function, [X])[0])


def test_attention_on_permuted_heads_becomes_one_op_with_and_without_a_mask():
    q = np.ones((1, 5, 2, 4), np.float32)
    for mask in ((), (np.zeros((5, 5), np.float32),)):

        def program(q, *mask):
            heads = shape.permute(q, axes=attention.HEADS_SECOND_ORDER)
            found = attention.scaled_dot_product_attention(heads, heads, heads, *mask)
            return shape.permute(found, axes=attention.HEADS_SECOND_ORDER)

        names = [n.op.__name__ for n in passed(jit(program).trace(q, *mask).function).body.nodes]
        assert names == ["positional_attention"], names


def test_the_indices_of_a_scatter_are_checked_before_a_library_kernel_adds():
    def program(x, i, u):
        return scatter_add(x, i, u)

    x, i, u = np.zeros((40, 3), np.float32), np.arange(30) % 7, np.ones((30, 3), np.float32)
    (add,) = [n for n in passed(jit(program).trace(x, i, u).function).body.nodes if n.op is scatter_add]
    (check,) = [n for n in passed(jit(program).trace(x, i, u).function).body.nodes if n.op is shape.check_index]
    assert add.args[1].hint == check.out.hint and check.attrs["size"] == 40
    for index in (40, -41):
        with pytest.raises(OutOfBoundsError):
            jit(program, target="llvm")(x, np.where(i == 3, index, i), u)


def test_buffers_live_within_the_program():
    """A lifetime begins at a node of the program, is not empty, and no buffer that is dead shortens the workspace."""
    count = 0
    for case in (c for c in read_area("graph.flow") if c.rejects is None and c.dynamic is None):
        entry, arguments = case.entry()
        main = prepare(entry, arguments).levels["schedule"].main
        lives = find_lifetimes(main.body)
        nodes = 2 * sum(1 for _ in main.body.walk())  # a node with regions counts before and after them
        assert all(0 <= life.first <= life.last <= nodes for life in lives), case.name
        offsets = assign_offsets(lives)
        for at in {life.first for life in lives}:
            alive = sorted((offsets[one.buffer], one.size) for one in lives if one.first <= at <= one.last)
            assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(alive)), case.name
        count += any(node.regions for node in main.body.nodes) and bool(lives)
    assert count > 5
