"""Kernels in programs of symbolic sizes: compiled once, right for every size, with derivatives and batches."""

import logging

import numpy as np
import pytest

import tessera as ts
import tessera.stdlib as routines
from tessera import tile
from tessera.core.errors import ShapeError
from tessera.ops.dialects import host
from tessera.runtime.program import prepare


@ts.kernel
def scale_rows(x, out, *, BM: int = 8):
    i = tile.program_id(0) * BM
    rows = tile.load(x[i : i + BM, :16], edge="clip")
    tile.store(out[i : i + BM], tile.sum(rows, axis=1) * 2.0 + x.shape[0], edge="clip")


@ts.kernel
def cumulate(x: ts.Tensor["N"], out: ts.Tensor["N"]):
    """out[i] = x[i] + x[N - 1 - i] + the sum of all elements."""
    i = tile.program_id(0)
    N = x.shape[0]
    total = 0.0
    for j in tile.range(0, N):
        total += x[j]
    out[i] = x[i] + x[N - 1 - i] + total


def scaled(x, y):
    return ts.launch(scale_rows, lambda c: (tile.cdiv(x.shape[0], c["BM"]),), x, ts.like(y)) * y


def program(x, y):
    return ts.launch(cumulate, (y.shape[0],), scaled(x, y), ts.like(y)) * 0.5


def expected(x, y):
    z = (x.sum(1) * 2 + len(x)) * y
    return (z + z[::-1] + z.sum()) * 0.5


def make(n, seed=0):
    rng = np.random.default_rng(seed + n)
    return rng.standard_normal((n, 16)).astype("f4"), rng.standard_normal(n).astype("f4")


SIZES = (5, 9, 65, 1)


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_one_program_serves_every_size(target, tmp_path):
    def f(x: ts.Tensor["N", 16], y: ts.Tensor["N"]):
        return program(x, y)

    ts.build(ts.jit(f), *make(7), target=target, out=str(tmp_path / "a"), dynamic=True)
    built = ts.load(str(tmp_path / "a"))
    for n in SIZES:
        x, y = make(n)
        np.testing.assert_allclose(built(x, y).numpy(), expected(x, y), rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize(
    "transform",
    [
        lambda x, y: ts.grad(lambda x, y: ts.sum(scaled(x, y) ** 2), argnums=(0, 1))(x, y),
        lambda x, y: ts.jvp(program, (x, y), (x, y))[1],
        lambda x, y: ts.vmap(lambda y: program(x, y))(ts.stack([y, y * 2.0])),
        lambda x, y: ts.cond(ts.sum(y) > 0.0, lambda y: program(x, y), lambda y: y, y),
    ],
    ids=["grad", "jvp", "vmap", "cond"],
)
def test_transformations_keep_sizes_symbolic(transform, caplog):
    """Two compilations: for the first size, then for all. Results are those outside of jit, where sizes are numbers."""
    caplog.set_level(logging.INFO, "tessera.compile")
    compiled = ts.jit(transform, target="llvm")
    for n in SIZES:
        x, y = make(n)
        found, wanted = compiled(x, y), transform(ts.tensor(x), ts.tensor(y))
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        for a, b in pairs:
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-4 * (1 + abs(b.numpy()).max()))
    assert sum("compiled" in r.getMessage() for r in caplog.records) == 2


def attend(q: ts.Tensor["B", 4, "S", 16], k: ts.Tensor["B", 2, "T", 16], v: ts.Tensor["B", 2, "T", 16]):
    return routines.flash_attention(q, k, v)


def multiply(a: ts.Tensor["B", "M", "K"], b: ts.Tensor["B", "K", "N"]):
    return routines.batched_matmul(a, b)


def normalise(x: ts.Tensor["M", "N"], w: ts.Tensor["N"]):
    return routines.rms_norm(routines.stable_softmax(x), w)


def add_up(x: ts.Tensor["N"]):
    return routines.tree_sum(x)


def add_up_gradient(x: ts.Tensor["N"]):
    return ts.grad(lambda x: routines.tree_sum(x * x))(x)


def entropy(x: ts.Tensor["N", "V"], labels: ts.Tensor["N", ts.int64]):
    return routines.cross_entropy(x, labels)


def entropy_gradient(x: ts.Tensor["N", "V"], labels: ts.Tensor["N", ts.int64]):
    return ts.grad(routines.cross_entropy)(x, labels)


def turn(x: ts.Tensor["B", "S", 8]):
    return routines.rotary_embedding(x, offset=2)


def turn_by_tables(x: ts.Tensor["B", "S", 8], cos: ts.Tensor["P", 4], sin: ts.Tensor["P", 4]):
    return routines.rotary_embedding(x, cos, sin)


LIBRARY = {
    add_up: (((5000,),), ((7,),), ((1,),)),
    add_up_gradient: (((5000,),), ((7,),)),
    entropy: (((5, 100), 5), ((1, 3), 1)),
    entropy_gradient: (((5, 100), 5), ((3, 2), 3)),
    turn: (((2, 70, 8),), ((1, 1, 8),)),
    turn_by_tables: (((2, 9, 8), (9, 4), (9, 4)), ((1, 3, 8), (20, 4), (20, 4))),
    attend: (((2, 4, 33, 16), (2, 2, 70, 16), (2, 2, 70, 16)), ((1, 4, 1, 16), (1, 2, 129, 16), (1, 2, 129, 16))),
    multiply: (((2, 65, 7), (2, 7, 33)), ((1, 1, 64), (1, 64, 1))),
    normalise: (((5, 40), (40,)), ((9, 513), (513,)), ((1, 1), (1,))),
}


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("routine", LIBRARY, ids=lambda f: f.__name__)
def test_library_routines_take_symbolic_sizes(routine, target, rng):
    compiled = ts.jit(routine, target=target, dynamic=True)
    for shapes in LIBRARY[routine]:
        args = [rng.standard_normal(s).astype("f4") if isinstance(s, tuple) else rng.integers(0, 2, s) for s in shapes]
        wanted = routine(*map(ts.tensor, args)).numpy()
        np.testing.assert_allclose(compiled(*args).numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_rotary_tables_must_have_a_row_for_each_position(rng):
    compiled = ts.jit(turn_by_tables, target="llvm", dynamic=True)
    make = lambda length, rows: [rng.standard_normal(s).astype("f4") for s in ((2, length, 8), (rows, 4), (rows, 4))]  # noqa: E731
    compiled(*make(9, 9))
    with pytest.raises(ShapeError, match="`cos` does not fit"):
        compiled(*make(9, 8))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_symbolic_rows_is_that_of_pytorch(reduction, rng):
    torch = pytest.importorskip("torch")
    compiled = ts.jit(lambda x, t: routines.cross_entropy(x, t, reduction=reduction), target="llvm", dynamic=True)
    for rows, classes in ((5, 100), (33, 7)):
        x, labels = rng.standard_normal((rows, classes)).astype("f4"), rng.integers(0, classes, rows)
        want = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels), reduction=reduction)
        np.testing.assert_allclose(compiled(x, labels).numpy(), want.numpy(), rtol=1e-4)


@ts.kernel
def chain(x, out, *, BM: int = 4):
    """A recurrence along each row, whose derivative needs a value of each trip."""
    i = tile.program_id(0) * BM
    h = tile.full((BM,), 1.0, "f32")
    for k in tile.range(0, x.shape[1]):
        column = tile.reshape(tile.load(x[i : i + BM, k : k + 1], edge="clip"), (BM,))
        h = h * 0.5 + tile.sin(column) * h
    tile.store(out[i : i + BM], h, edge="clip")


@ts.kernel
def causal(x, out, *, B: int = 4):
    """A recurrence over the blocks up to each program's own."""
    i = tile.program_id(0)
    t = tile.full((1,), 1.0, "f32")
    for k in tile.range(0, tile.minimum((i + 1) * B, x.shape[0]), B):
        t = t * 0.9 + tile.sum(tile.load(x[k : k + B], edge="clip")) * t
    tile.store(out[i : i + 1], t)


def run_chain(x):
    return ts.launch(chain, (tile.cdiv(x.shape[0], 4),), x, ts.like(shape=(x.shape[0],), dtype="f32"))


def run_causal(x):
    x = ts.reshape(x, (-1,))
    blocks = tile.cdiv(x.shape[0], 4)
    return ts.launch(causal, (blocks,), x, ts.like(shape=(blocks,), dtype="f32"))


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("run", [run_chain, run_causal])
def test_gradients_of_loops_over_symbolic_sizes(run, target, rng):
    """Against central differences in f64 outside of the program of symbolic sizes."""

    def loss(x):
        return ts.sum(run(x) ** 2)

    compiled = ts.jit(ts.grad(loss), target=target, dynamic=True)
    for shape in ((3, 5), (9, 1), (6, 11)):
        x = (rng.standard_normal(shape) * 0.3).astype("f4")
        step = rng.standard_normal(shape).astype("f4")
        ends = [float(loss(ts.tensor(x + e * step)).numpy()) for e in (1e-2, -1e-2)]
        slope = float((compiled(x).numpy().astype("f8") * step).sum())
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-2, rtol=2e-2, atol=1e-2)
        np.testing.assert_allclose(compiled(x).numpy(), ts.grad(loss)(ts.tensor(x)).numpy(), rtol=1e-3, atol=1e-5)


def test_attention_of_symbolic_sizes_is_one_launch():
    """Not the scores in memory: the flash attention kernel, with and without a mask."""

    def f(q: ts.Tensor["B", 2, "S", 16], m: ts.Tensor["B", 1, 1, "S"]):
        return ts.scaled_dot_product_attention(q, q, q, m)

    shapes = np.zeros((2, 2, 9, 16), "f4"), np.zeros((2, 1, 1, 9), "f4")
    levels = prepare(ts.jit(f), shapes, "llvm", dynamic=True).levels
    assert sum(n.op is host.launch for n in levels["schedule"].main.body.walk()) == 1


@ts.kernel
def load_all(x, out):
    out[0] = tile.sum(tile.load(x[:]))


def test_a_block_of_symbolic_size_is_refused():
    def f(x: ts.Tensor["N"]):
        return ts.launch(load_all, (1,), x, ts.like(shape=(1,), dtype="f32"))

    with pytest.raises(ShapeError, match="the size of this slice of x is not known while compiling"):
        ts.jit(f, target="llvm", dynamic=True)(np.ones(4, "f4"))


@ts.kernel
def load_whole(x, out):
    out[0] = tile.sum(tile.load(x))


def test_a_whole_memory_of_symbolic_size_is_no_block():
    def f(x: ts.Tensor["N"]):
        return ts.launch(load_whole, (1,), x, ts.like(shape=(1,), dtype="f32"))

    with pytest.raises(ShapeError, match="a block of x has the size N, which is known only when the program runs"):
        ts.jit(f, target="llvm", dynamic=True)(np.ones(4, "f4"))


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_a_function_may_have_the_name_of_its_kernel(target):
    kernel = scale_rows

    def scale_rows_of(x, y):
        return ts.launch(kernel, (tile.cdiv(9, 8),), x, ts.like(y))

    scale_rows_of.__name__ = kernel.__name__
    x, y = make(9)
    np.testing.assert_allclose(ts.jit(scale_rows_of, target=target)(x, y).numpy(), x.sum(1) * 2 + 9, rtol=1e-5)


FACTORS = {6: 2.0}


@ts.kernel
def choose(x: ts.Tensor["N"], out: ts.Tensor["N"], offset, *, BM: int = 16):
    i = tile.program_id(0) * BM
    factor = 2.0
    if x.shape[0] == 16 or x.shape[0] in (7, 9):
        factor = 5.0
    elif x.shape[0] > 40:
        factor = 3.0
    tile.store(out[i : i + BM], tile.load(x[i : i + BM], edge="clip") * factor + offset, edge="clip")


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_a_kernel_compares_is_a_guard(target, dynamic):
    """A size that another size is compared with gets a program of its own: none runs with the wrong branch."""

    def f(x):
        return ts.launch(choose, (tile.cdiv(x.shape[0], 16),), x, ts.like(x), x.shape[0])

    compiled = ts.jit(f, target=target, dynamic=dynamic)
    for n in (5, 33, 16, 7, 9, 8, 41, 50):
        factor = 5.0 if n in (16, 7, 9) else 3.0 if n > 40 else 2.0
        np.testing.assert_array_equal(compiled(np.ones(n, "f4")).numpy(), np.full(n, factor + n, "f4"))


@ts.kernel
def look_up(x: ts.Tensor["N"], out: ts.Tensor["N"]):
    i = tile.program_id(0)
    out[i] = x[i] * FACTORS.get(x.shape[0], 1.0)


def test_a_size_that_a_kernel_looks_up_is_no_symbol():
    compiled = ts.jit(lambda x: ts.launch(look_up, (x.shape[0],), x, ts.like(x)), target="llvm")
    assert [float(compiled(np.ones(n, "f4")).numpy()[0]) for n in (4, 5, 6, 7)] == [1.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_attention_in_16_bits_has_a_gradient_at_every_length(target):
    """Its backward kernel's loops are pipelined over symbolic lengths."""

    def f(x: ts.Tensor["S", 8]):
        def loss(q):
            q = q.to("bf16")[None, None]
            return ts.sum(ts.scaled_dot_product_attention(q, q, q, causal=True).to("f32"))

        return ts.grad(loss)(x)

    compiled = ts.jit(f, target=target, dynamic=True)
    for n in (5, 33):
        x = np.random.default_rng(n).standard_normal((n, 8)).astype("f4")
        np.testing.assert_allclose(compiled(x).numpy(), f(ts.tensor(x)).numpy(), atol=0.05)
