"""Kernel fusion: programs that must fuse do, and the IR verifies."""

import numpy as np
import pytest

import tessera.lower.pipeline as pipeline
from tessera.core.errors import OutOfBoundsError, UnsupportedOpError
from tessera.core.types import bf16, f32, fp4
from tessera.frontend.jit.tracing import jit
from tessera.interp import schedule
from tessera.interp.tile import interpreter
from tessera.ir.core import Module
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.rewrite import eliminate_common_subexpressions
from tessera.lower.graph_to_schedule.lowering import to_schedule
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.schedule_to_tile.lowering import format_summary, summarise_kernels
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import attention, basic, contractions, losses, nn, reduce, shape
from tessera.ops.tensor import elementwise as e
from tessera.transforms.autodiff.gradients import grad
from tests.lower.levels import agree, modules, traced

B, S, D, H, F = 2, 16, 24, 3, 40


def encoder(x, wq, bq, wk, bk, wv, bv, wo, bo, w1, b1, w2, b2, g1, c1, g2, c2):
    def heads(w, b):
        return contractions.linear(x, w, b).reshape(B, S, H, D // H).permute(0, 2, 1, 3)

    o = attention.scaled_dot_product_attention(heads(wq, bq), heads(wk, bk), heads(wv, bv))
    merged = o.permute(0, 2, 1, 3).reshape(B, S, D)
    h = nn.layer_norm(x + contractions.linear(merged, wo, bo), D, g1, c1)
    return nn.layer_norm(h + contractions.linear(nn.gelu(contractions.linear(h, w1, b1)), w2, b2), D, g2, c2)


def parameters(rng):
    shapes = [(B, S, D), *[(D, D), (D,)] * 4, (D, F), (F,), (F, D), (D,), *[(D,)] * 4]
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def names(function, *arrays, plan=None):
    return [name.partition("_")[2] or name for name, _, _ in summarise_kernels(scheduled(function, *arrays, plan=plan))]


def scheduled(function, *arrays, plan=None):
    return modules(traced(function, *arrays)[0], plan or LoweringPlan())["schedule"]


def zeros(*shapes):
    return [np.zeros(s, np.float32) for s in shapes]


def test_encoder_kernels(rng):
    found = names(encoder, *parameters(rng))
    assert found == ["matmul"] * 3 + ["attend", "matmul", "normalize", "matmul_gelu", "matmul", "normalize"]


def test_encoder_agrees(rng):
    agree(encoder, *parameters(rng), rtol=1e-4)


def test_encoder_text(rng):
    function, _ = traced(encoder, *parameters(rng))
    for level in ("schedule", "tile"):
        module = modules(function, LoweringPlan())[level]
        assert parse_module(print_module(module)) == module


def test_same_bytes_again(rng):
    arrays = parameters(rng)
    texts = {print_module(modules(traced(encoder, *arrays)[0], LoweringPlan())["tile"]) for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    "function, shapes, want",
    [
        (lambda x: e.tanh(x * 2 + 1), [(4, 5)], ["tanh"]),
        (nn.softmax, [(4, 5)], ["softmax"]),
        (lambda x: nn.softmax(x * 0.5 + 1) * 2, [(4, 5)], ["softmax"]),
        (lambda x: nn.layer_norm(x), [(4, 8)], ["normalize"]),
        (lambda x: x.sum(axis=1) * 2, [(4, 5)], ["sum"]),
        (lambda x, w: nn.relu(x @ w), [(4, 5), (5, 6)], ["matmul"]),
        (lambda x, w: nn.softmax(x @ w), [(4, 5), (5, 6)], ["matmul", "softmax"]),
        (lambda x, a, b: x @ a @ b, [(4, 5), (5, 6), (6, 7)], ["matmul", "matmul"]),
        (lambda x, w: nn.layer_norm(nn.gelu(x @ w)), [(4, 5), (5, 6)], ["matmul_gelu", "normalize"]),
        (lambda x, y: x + e.exp(y), [(4, 5), (5,)], ["exp", "add"]),
        (lambda x: x + x.max(axis=0), [(4, 5)], ["max"]),
        (lambda x, y: x + y.max(axis=1, keepdims=True), [(4, 5), (4, 9)], ["max", "add"]),
    ],
)
def test_kernels(function, shapes, want):
    assert names(function, *zeros(*shapes)) == want


def test_heads_load_as_blocks():
    """Head split and merge are part of a block load or store, never element by element."""
    function, _ = traced(encoder, *parameters(np.random.default_rng(0)))
    module = modules(function, LoweringPlan())["tile"]
    ops = [n.op.name for f in module.functions[1:] for n in f.body.walk()]
    assert "tile.gather" not in ops and "tile.scatter" not in ops


def test_equal_kernels_are_one():
    def program(x):
        for _ in range(3):
            x = x @ x
        return x

    module = modules(traced(program, *zeros((4, 4)))[0], LoweringPlan())["tile"]
    assert [f.name for f in module.functions[1:]] == ["k0_matmul"]
    assert len(module.main.body.nodes) == 5  # two buffers, three launches


def test_attention_twice_with_other_sizes(rng):
    q, k = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 5, 4), (2, 3, 7, 4)))

    def program(q, k):
        return attention.scaled_dot_product_attention(q, k, k) + attention.scaled_dot_product_attention(q, q, q)

    agree(program, q, k)
    module = scheduled(program, q, k)
    assert [f.name for f in module.functions[1:]] == ["attend", "attend_1"]


def test_locations_survive():
    function, _ = traced(lambda x: nn.softmax(x), *zeros((4, 5)))
    known = {n.loc for n in function.body.nodes}
    for level in ("schedule", "tile"):
        module = modules(function, LoweringPlan())[level]
        found = {n.loc for f in module.functions for n in f.body.walk()}
        assert {(o.file, o.line) for o in found} == {(o.file, o.line) for o in known}


def test_steps_have_names():
    function, _ = traced(nn.softmax, *zeros((4, 5)))
    found = [(name, m.level) for name, m in pipeline.lower(Module("graph", (function,)))]
    assert found[0] == ("uniform operands", "graph") and found[-2:] == [("tile", "tile"), ("table staging", "tile")]


def test_summary_text():
    assert format_summary(scheduled(nn.softmax, *zeros((4, 5)))).startswith("k0_softmax")


@pytest.mark.parametrize(("level", "run"), [("schedule", schedule.run), ("tile", interpreter.run)])
def test_index_out_of_bounds(level, run):
    function, arrays = traced(
        lambda x, i: shape.gather(x, i, axis=0), np.zeros((3, 4), np.float32), np.array([0, 3], np.int32)
    )
    with pytest.raises(OutOfBoundsError, match="index 3 is outside axis 0 of size 3"):
        run(modules(function, LoweringPlan())[level], arrays)


def test_control_flow_is_refused():
    function, _ = traced(lambda x: x + 1, *zeros((3,)))
    node = function.body.nodes[0]
    body = type(function.body)(function.params, (type(node)(control_flow.if_, (), node.attrs, (), (), node.loc),), ())
    with pytest.raises(UnsupportedOpError, match="ts.if cannot be scheduled"):
        to_schedule(Module("graph", (type(function)("f", body),)))


def written(function, *arrays):
    """The memory that each kernel of a program fills."""
    return [n.args[-1].type for n in scheduled(function, *arrays).main.body.nodes if n.op.name == "schedule.kernel"]


def narrow(*shapes):
    return [np.zeros(s, bf16.numpy) for s in shapes]


def test_rows_of_one_axis_are_finished_before_another_is_reduced():
    found = written(
        lambda x, w: reduce.sum(nn.layer_norm(x, None, w).to(f32), axis=1), *narrow((4, 8, 16), (16,))
    )  # fmt: skip
    assert [t.dtype for t in found] == [bf16, f32]


def test_what_is_kept_is_narrow():
    # The product is kept as it is rounded, not as the norm after it reads it.
    found = written(lambda x, w: nn.layer_norm(x @ w), *narrow((64, 32), (32, 48)))
    assert [t.dtype for t in found] == [bf16] * 2


def test_composites_of_narrow_floats_keep_narrow_values():
    """What is computed in f32 from narrow values is computed again in each kernel, and not kept."""
    rows = narrow((64, 32), (32,), (32,))
    programs = {
        "batch_norm": (lambda x, w, b: nn.batch_norm(x, w, w, w, b), rows),
        "layer_norm": (lambda x, w, b: nn.layer_norm(x, 32, w, b), rows),
        "huber_loss": (grad(lambda x, y: losses.huber_loss(x, y), (0, 1)), narrow((64, 32), (64, 32))),
        "loss of a product": (lambda x, w, y: losses.mse_loss(x @ w, y), narrow((64, 32), (32, 64), (64, 64))),
    }
    for name, (function, given) in programs.items():
        made = modules(jit(function).trace(*given).function, LoweringPlan())["schedule"]
        kept = [n.out.type for n in made.main.body.nodes if n.op.name == "host.alloc"]
        assert all(t.dtype is bf16 or np.prod(t.shape) <= 64 for t in kept), (name, kept)


def test_the_negative_of_a_rounded_value_is_not_rounded_again():
    for dtype, casts in ((bf16, 1), (fp4, 2)):  # a NaN gives +0 in fp4, whatever its sign
        graph = jit(lambda x, d=dtype: (x.to(d), (-x).to(d))).trace(np.zeros(4, np.float32)).function
        made = dict(pipeline.lower(Module("graph", (graph,))))["simplify"].main
        merged = eliminate_common_subexpressions(made)
        assert [n.op for n in merged.body.nodes].count(basic.cast) == casts


def test_a_launch_reads_through_a_reshape():
    def program(x, w):
        q = (x @ w).reshape(2, 8, 3, 16).permute(0, 2, 1, 3)
        return attention.scaled_dot_product_attention(q, q, q)

    # The product fills memory of its own shape, which attention sees as heads.
    assert tuple(written(program, *zeros((2, 8, 32), (32, 48)))[0].shape) == (16, 48)


def test_attention_takes_heads_after_positions_as_they_are():
    def program(q, k, v):
        found = attention.scaled_dot_product_attention(*(x.permute(0, 2, 1, 3) for x in (q, k, v)))
        return found.permute(0, 2, 1, 3) * 2.0

    x = zeros(*[(2, 8, 3, 16)] * 3)
    assert names(program, *x) == ["attend", "mul"]


@pytest.mark.parametrize("parallel, kernels", [(None, 2), (264, 1)], ids=["blocks", "a thread for each element"])
def test_stacks_of_computed_arrays(parallel, kernels):
    """The elements of each part lie apart in the result: threads gather them, blocks read them from memory."""
    found = names(
        lambda x: shape.stack([x, x + 1], axis=-1).reshape(8, 24), *zeros((8, 12)), plan=LoweringPlan(parallel=parallel)
    )
    assert len(found) == kernels


def test_long_chains_are_kernels_of_bounded_size():
    def program(x):
        for _ in range(600):
            x = x * 0.75 + 0.5
        return x

    x = np.linspace(0, 3, 7, dtype=np.float32)
    want = x
    for _ in range(600):
        want = want * np.float32(0.75) + np.float32(0.5)
    assert len(names(program, x)) == 2  # 1,200 ops
    for target in ("llvm", "ptx"):
        np.testing.assert_array_equal(jit(program, target=target)(x).numpy(), want)


@pytest.mark.parametrize(
    ("width", "found"), [(320, ["normalize", "sum_tanh", "sum"]), (96, ["sum", "sum", "normalize", "sum_tanh"])]
)
def test_a_product_of_a_vector_reads_rows_that_are_computed_once(width, found):
    """A normalised row and an activation are in memory where hundreds of results of a product read them, not fewer."""

    def program(x, g, c, up, down):
        hidden = nn.gelu(contractions.linear(nn.layer_norm(x, width, g, c), up), approximate="tanh")
        return contractions.linear(hidden, down)

    given = zeros((1, width), (width,), (width,), (width, width), (width, width))
    made = names(program, *given, plan=LoweringPlan(vector_products=1))
    assert made == found
