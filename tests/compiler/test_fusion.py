"""Fusion as the user says it: the number of kernels changes, and nothing that they compute."""

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError, UnknownNameError
from tessera.ops.dialects.tile import find_written_refs
from tessera.runtime.program import prepare

X, W, B = (np.random.default_rng(0).standard_normal(s).astype("f4") for s in ((4, 8), (8, 8), (8,)))


def block(x, w, b):
    return ts.gelu(ts.layer_norm(ts.relu(x @ w + b), weight=b, bias=b))


def kernels(program, *args):
    module = prepare(program, args, "llvm").levels["schedule"]
    return sum(n.op.name == "schedule.kernel" for n in module.main.body.nodes)


@pytest.mark.parametrize(
    ("decorate", "count"),
    [
        (ts.jit, 2),
        (ts.fusion.auto, 2),
        (ts.fusion.vertical, 2),
        (ts.fusion.none, 5),
        (ts.fusion.manual([["matmul", "add", "relu"]]), 3),
        (ts.fusion.manual([["layernorm", "gelu"]]), 4),
        (ts.fusion.manual([["matmul", "add", "relu"], ["layernorm", "gelu"]]), 2),
        (ts.fusion.manual([["layernorm", "matmul", "add", "gelu"]]), 5),
    ],
)
def test_the_kernels_of_a_block(decorate, count):
    program = decorate(block)
    assert kernels(program, X, W, B) == count
    program.target = "llvm"
    np.testing.assert_allclose(program(X, W, B).numpy(), ts.jit(block)(X, W, B).numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("target", ["llvm", "ptx", "csl:2x2"])
def test_barriers_mean_nothing_on_any_target(target):
    program = ts.fusion.none(ts.jit(block, target=target))
    np.testing.assert_allclose(program(X, W, B).numpy(), ts.jit(block)(X, W, B).numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x, y: (ts.exp(x), ts.sin(y)), 1),
        (lambda x, y: (ts.softmax(x), ts.softmax(y * 2.0)), 1),
        (lambda x, y: (x @ x.T, y @ y.T), 1),
        (lambda x, y: (ts.exp(x), ts.sum(y, axis=-1)), 2),  # other dims
        (lambda x, y: ts.softmax(ts.softmax(x) @ y.T), 3),  # each needs the one before
        (lambda x, y: (x + 1.0, y * 2.0, x - y), 1),
        (lambda x, y: (lambda a: (a, ts.exp(a)))(ts.sin(x)), 2),  # the same dims, but one reads what the other writes
    ],
)
@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_independent_kernels_become_one(function, count, target):
    program = ts.fusion.horizontal(ts.jit(function, target=target))
    assert kernels(program, X, W[:4]) == count <= kernels(ts.fusion.none(ts.jit(function)), X, W[:4])
    found, want = program(X, W[:4]), ts.jit(function)(X, W[:4])
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, want)), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_horizontal_fusion_respects_shared_workspace():
    def function(x, y):
        a, b = ts.softmax(x), ts.softmax(y)
        return ts.exp(a @ b.T) @ x, ts.tanh(b @ a.T) @ y

    program = ts.fusion.horizontal(ts.jit(function, target="llvm"))
    for found, want in zip(program(X, W[:4]), ts.jit(function)(X, W[:4]), strict=True):
        np.testing.assert_allclose(found.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)


def test_a_rule_decides_by_pairs():
    seen = []

    @ts.fusion.pattern
    class Never:
        @staticmethod
        def should_fuse(op1, op2):
            seen.append((op1.name, op2.name))
            assert op1.memory_bound != op1.compute_bound and op1.output_size > 0 and op2.input_size > 0
            if op1.name == "dot":  # [4, 8] by [8, 8], of 4 bytes each
                assert (op1.bytes, op1.flops, op1.output_size) == (4 * (32 + 64 + 32), 2 * 4 * 8 * 8, 32)
            return False

    assert kernels(Never(block), X, W, B) == kernels(ts.fusion.none(block), X, W, B)
    assert ("dot", "add") in seen and ("normalize", "gelu") in seen


def test_a_rule_joins_a_call_to_its_producer():
    @ts.fusion.pattern
    class Product:
        @staticmethod
        def should_fuse(op1, op2):
            return op1.name in ("dot", "add")

    assert kernels(Product(block), X, W, B) == 3
    np.testing.assert_allclose(Product(block)(X, W, B).numpy(), ts.jit(block)(X, W, B).numpy(), rtol=2e-5, atol=2e-6)


def test_the_program_of_a_fused_group_is_verified():
    @ts.fusion.pattern
    class Whole:
        @staticmethod
        def should_fuse(op1, op2):
            return True

        @staticmethod
        def fuse(group):
            body = tessera_sequence(group)
            return ts.kernel.generate(inputs=group[0].inputs, outputs=group[-1].outputs, body=body)

    tessera_sequence = ts.kernel.sequence
    np.testing.assert_allclose(Whole(block)(X, W, B).numpy(), ts.jit(block)(X, W, B).numpy(), rtol=1e-5, atol=1e-6)


def test_a_context_has_a_fusion():
    with ts.fusion.use("none"):
        assert kernels(ts.jit(block), X, W, B) == 5
        assert kernels(ts.fusion.auto(block), X, W, B) == 2
    assert kernels(ts.jit(block), X, W, B) == 2


def test_gradients_of_a_function_without_fusion():
    loss = lambda x: ts.sum(ts.fusion.none(block)(x, W, B) ** 2)  # noqa: E731
    want = ts.grad(lambda x: ts.sum(block(x, W, B) ** 2))(ts.Tensor(X)).numpy()
    np.testing.assert_allclose(ts.grad(loss)(ts.Tensor(X)).numpy(), want, rtol=1e-5)


@pytest.mark.parametrize("groups", ["matmul", [], ["matmul"], [[]], [[1]], 3])
def test_groups_that_are_none(groups):
    with pytest.raises(ArgumentError):
        ts.fusion.manual(groups)
    with pytest.raises(UnknownNameError, match="did you mean"):
        ts.fusion.manual([["matmull"]])
    with pytest.raises(ArgumentError):
        ts.fusion.pattern(object)


def list_stored(program, *args):
    """The types that the kernels of a program for a GPU write, in order."""
    module = prepare(program, args, "ptx").levels["tile"]
    written = [[v for v in find_written_refs(f.body) if v in f.params] for f in module.functions[1:]]
    return [str(v.type.dtype) for each in written for v in each], [f.name for f in module.functions[1:]]


def test_a_product_writes_for_another_one_what_that_reads():
    """The epilogue and the narrow type of a gate are those of its own product's kernel."""
    x, w = (np.zeros(s, "f4") for s in ((256, 128), (128, 256)))
    stored, names = list_stored(ts.jit(lambda x, w, u: ts.relu(x @ w).to(ts.bf16).to(ts.f32) * (x @ u)), x, w, w)
    assert stored == ["bf16", "f32"] and len(names) == 2
    halves = [a.astype(ts.bf16.numpy) for a in (x, w, w)]
    _, names = list_stored(ts.jit(lambda x, w, u: ts.silu(x @ w) * (x @ u)), *halves)
    assert ["exp" in n for n in names] == [True, False]
