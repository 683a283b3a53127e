"""No kernel of a drawn program is refused for its shared memory or registers, on any architecture (compile only)."""

import random
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from ptxcheck import ARCHITECTURES

import tessera as ts
from tessera.codegen.contract import emit_artifact
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.emission import SHARED_LIMIT
from tessera.codegen.ptx.generator import PLAN
from tessera.core.errors import Location, ResourceError
from tessera.core.types import RefType
from tessera.interp.tile import interpreter
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Value
from tessera.lower.pipeline import lower
from tessera.ops.dialects import host
from tessera.ops.dialects import tile as tile_ops
from tessera.ops.tensor import basic
from tessera.runtime.artifacts import emit_program
from tessera.runtime.program import CallArguments, prepare

TYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def memory(dtype, *shape):
    """An array that takes no memory: compilation reads only its type."""
    return np.broadcast_to(np.zeros((), TYPES[dtype]), shape)


def wide_sum(x):
    return ts.sum(x if x.dtype == ts.f64 else ts.cast(x, dtype=ts.f32))


def mlp(x, a, b):
    return wide_sum(ts.relu(x @ a) @ b)


def attend(q, k, v):
    return wide_sum(ts.scaled_dot_product_attention(q, k, v, is_causal=True))


def draw_convolution(draw, dtype):
    channels, size, kernel = draw.choice((16, 37, 256, 2048)), draw.choice((7, 28, 56)), draw.choice((1, 3))
    groups = draw.choice((1, channels))
    images, weights = (
        memory(dtype, 8, channels, size, size),
        memory(dtype, channels, channels // groups, kernel, kernel),
    )
    return lambda x, w: ts.conv2d(x, w, padding=kernel // 2, groups=groups), (images, weights)


def draw_product(draw, dtype):
    m, n, k = (draw.choice((1, 17, 64, 100, 1000, 4096)) for _ in range(3))
    epilogue = draw.choice((lambda a, b: a @ b, lambda a, b: ts.gelu(a @ b), lambda a, b: ts.silu(a @ b) * (a @ b)))
    lead = draw.choice(((), (3,)))
    flipped = draw.random() < 0.5
    shape = (*lead, n, k) if flipped else (*lead, k, n)
    return (
        lambda a, b: epilogue(a, ts.swapaxes(b, -1, -2) if flipped else b),
        (memory(dtype, *lead, m, k), memory(dtype, *shape)),
    )


def draw_gradient(draw, dtype):
    rows, width = draw.choice((1, 128, 4096)), draw.choice((64, 1000, 8192, 16384))
    square = memory(dtype, width, width)
    return ts.grad(mlp, argnums=(0, 1, 2)), (memory(dtype, rows, width), square, square)


def draw_attention(draw, dtype):
    size = draw.choice((32, 80, 128, 256))
    return draw.choice((attend, ts.grad(attend, argnums=(0, 1, 2)))), (memory(dtype, 2, 3, 512, size),) * 3


def draw_rows(draw, dtype):
    rows, columns = draw.choice((1, 8, 1000)), draw.choice((1, 100, 4097, 32768, 1_000_000))
    function = draw.choice((ts.softmax, ts.logsumexp, ts.argmax, ts.var))
    return lambda x: function(x, axis=axis), (memory(dtype, rows, columns),) if (axis := draw.choice((0, 1))) else (
        memory(dtype, columns, rows),
    )


DRAWS = (draw_convolution, draw_product, draw_gradient, draw_attention, draw_rows)


def compile_tile(function, args):
    return list(lower(Module("graph", (ts.jit(function).trace(*args).function,)), PLAN))[-1][1]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drawn", DRAWS)
def test_drawn_programs_fit(drawn, seed):
    draw = random.Random(seed)
    function, args = drawn(draw, draw.choice(tuple(TYPES)))
    module = compile_tile(function, args)
    for arch in ARCHITECTURES:
        BACKEND.emit(module, {"arch": arch})


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, w: ts.conv2d(x, w, padding=1), (memory("bf16", 32, 256, 56, 56), memory("bf16", 256, 256, 3, 3))),
        (ts.grad(mlp, argnums=(0, 1, 2)), (memory("bf16", 4096, 8192),) + (memory("bf16", 8192, 8192),) * 2),
        (lambda a, b: ts.silu(a @ b) * (a @ b), (memory("f64", 1024, 1024),) * 2),
        (lambda a, b: a @ b, (memory("f64", 4096, 4096),) * 2),
        (lambda x: sum([p.sum() for p in ts.chunk(x, 32, axis=1)]), (memory("f32", 5525, 64),)),  # 32 small blocks
    ],
)
def test_programs_that_were_refused(function, args):
    module = compile_tile(function, args)
    for arch, limit in SHARED_LIMIT.items():
        plan = BACKEND.emit(module, {"arch": arch}).manifest["plan"]
        assert all(entry["shared"] <= limit for entry in plan["entries"].values())


def test_smaller_tiles_compute_the_same():
    """Every kernel is refused until its blocks have at most 64 elements; the results stay those of NumPy."""

    def refuse_large(module):
        held = {f.name: [v.type for n in f.body.walk() for v in n.results] for f in module.functions[1:]}
        return {n for n, types in held.items() if any(np.prod([int(s) for s in t.shape]) > 64 for t in types)}

    rng = np.random.default_rng(0)
    a, b, c = rng.random((40, 33)), rng.random((33, 50)), rng.random((3, 700))
    program = ts.jit(lambda a, b, c: (a @ b, ts.softmax(c, axis=-1), ts.sum(c, axis=0), ts.exp(a)))
    graph = Module("graph", (program.trace(a, b, c).function,))
    tile = list(lower(graph, replace(PLAN, find_refused=refuse_large)))[-1][1]
    assert not refuse_large(tile)
    found = interpreter.run(tile, [a, b, c])
    soft = np.exp(c) / np.exp(c).sum(-1, keepdims=True)
    for ours, theirs in zip(found, (a @ b, soft, c.sum(0), np.exp(a)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("columns", [16384, 25888, 25892, 28672])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prefetched_rows_leave_room_for_what_layouts_exchange(arch, columns):
    """Two blocks of a row, a vector that all programs share, and an exchange of a block: 313,232 bytes of 232,448."""
    w, x = memory("f32", 512, columns), memory("f32", columns)
    program = prepare(ts.jit(lambda w, x: w @ x), CallArguments((w, x), {}), "ptx", options={"arch": arch})
    emit_program(program, "ptx", options={"arch": arch})


@pytest.mark.parametrize(("count", "version"), [(500, "8.0"), (520, "8.1"), (4000, "8.1")])
def test_an_entry_of_many_parameters_asks_for_the_isa_that_has_them(count, version):
    """A fused optimizer step of GPT-2 has 8,304 bytes of parameters: ISA 8.0 allows 4,352, later ones 32,764."""
    text = emit_many_parameters(count).text("kernels.ptx")
    assert f".version {version}" in text


def test_more_parameters_than_a_launch_may_have_are_refused():
    with pytest.raises(ResourceError, match="bytes of parameters"):
        emit_many_parameters(4200)


def emit_many_parameters(count):
    """A kernel that adds the first elements of so many arrays."""
    names = [f"x{i}" for i in range(count - 1)]
    types = {name: RefType((1,), ts.f32) for name in (*names, "out")}
    builder, params = Builder(), [Value(t, name) for name, t in types.items()]
    with builder.active(), builder.region() as nodes:
        zero = builder.add(basic.full, [], {"shape": (), "value": 0, "dtype": ts.int64}).out
        attrs = {"shape": (1,), "edge": "error", "vector": 1}
        first = builder.add(tile_ops.load, [params[0], zero], attrs).out
        builder.add(tile_ops.store, [params[-1], first, zero], {"edge": "error", "vector": 1}, types=())
    function = Function("many", Block(tuple(params), tuple(nodes), ()), Attrs({"group": 1}), Location())
    outer = [Value(v.type, v.hint) for v in params]
    with builder.active(), builder.region() as launches:
        builder.add(host.launch, outer, {"kernel": "many", "grid": (1,)}, types=())
    main = Function("main", Block(tuple(outer), tuple(launches), ()), Attrs({"outputs": 1, "workspace": 0}), Location())
    return emit_artifact(BACKEND, Module("tile", (main, function)), {"arch": "sm_90a"})
