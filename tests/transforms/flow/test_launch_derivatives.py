"""Reverse mode of kernels: against central differences in f64, and against the same maths in ts operations."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import tile
from tessera.core.errors import UnsupportedOpError
from tessera.ops.dialects import tile as dialect
from tessera.stdlib.attention import attend
from tessera.stdlib.normalisation import normalize_rows, softmax_rows
from tessera.transforms.flow.launch_derivatives import AdjointKernel

TARGETS = ("interp", "llvm", "ptx")
RANDOM = np.random.default_rng(0)


@ts.kernel
def smooth(x, w, out, *, BM: int = 4):
    """Pointwise ops and a row that all programs share."""
    i = tile.program_id(0) * BM
    v = tile.load(x[i : i + BM], edge="clip")
    tile.store(out[i : i + BM], tile.exp(v) * tile.tanh(v + w[0]) + v / (w[1] + 2.0), edge="clip")


@ts.kernel
def recurrent(x, w, out, *, BM: int = 4, STEPS: int = 5):
    """A loop whose carried block is used nonlinearly, and a branch on the program's number."""
    i = tile.program_id(0) * BM
    v = x[i : i + BM]
    state = tile.zeros((BM,), x.dtype)
    for _ in tile.range(0, STEPS):
        state = tile.tanh(state * w[0:BM] + v)
    if i > BM:
        state = state * state
    out[i : i + BM] = state


@ts.kernel
def nested(x, out):
    """A loop in a loop, with bounds that differ between programs."""
    p = tile.program_id(0)
    total = tile.zeros((), x.dtype)
    for i in tile.range(0, p + 1):
        part = tile.full((), 1.0, x.dtype)
        for j in tile.range(0, 3):
            part = part * tile.sin(x[i, j])
        total = total * 0.5 + part
    out[p] = total


@ts.kernel
def overwritten(x, y, out, *, BM: int = 4):
    """Stores to the same elements: the last one counts."""
    i = tile.program_id(0) * BM
    for k in tile.range(0, 3):
        out[i : i + BM] = x[k, i : i + BM] ** 2
    out[i : i + 2] = y[i : i + 2] * 3.0


@ts.kernel
def picked(x, rows, out, *, BM: int = 4):
    """A gather whose rows repeat, and a scatter."""
    i = tile.program_id(0) * BM + tile.arange(0, BM)
    tile.store(out, (BM * 2 - 1) - i, tile.load(x, rows[i]) ** 2)


@ts.kernel
def cleared(x, out):
    """A store of constants over stored blocks."""
    out[0:4] = x[0:4] * 2.0
    out[0:2] = tile.zeros((2,), x.dtype)


@ts.kernel
def cleared_privately(x, out):
    """The same in memory of the kernel's own, and a store of constants before any other."""
    held = tile.alloc_shared((4,), x.dtype)
    held[2:4] = tile.full((2,), 3.0, x.dtype)
    first = tile.load(held[2:4])
    held[0:4] = x[0:4] * 2.0
    held[0:2] = tile.zeros((2,), x.dtype)
    out[0:4] = tile.load(held[0:4]) * 5.0 + tile.sum(first) * x[0:4]


@ts.kernel
def sliding(x, out):
    """Windows of successive trips that overlap."""
    for k in tile.range(0, 3):
        out[k : k + 4] = x[k, 0:4] ** 2


@ts.kernel
def diagonals(x, out):
    """An index that is the sum of two loops' indices."""
    for i in tile.range(0, 3):
        for j in tile.range(0, 4):
            out[i + j] = x[i, j] ** 2


@ts.kernel
def filled(x, other, out):
    """Loads whose elements outside and under a mask are active blocks."""
    i = tile.program_id(0) * 4
    v = tile.load(x[i : i + 4], edge="clip", other=other[0:4])
    w = tile.load(x, i % 4 + tile.arange(0, 4), mask=tile.arange(0, 4) < 2, other=other[1] ** 2)
    out[i : i + 4] = v * v + w


@ts.kernel
def mixed(x, out, *, BM: int = 4):
    """A block and a gather of one memory."""
    i = tile.program_id(0) * BM
    out[i : i + BM] = x[i : i + BM] * tile.load(x, (i + tile.arange(0, BM) * 3) % x.shape[0])


@ts.kernel
def masked(x, w, out, *, BM: int = 4):
    """Loads under a mask and clipped ones, from memory that programs share."""
    i = tile.program_id(0)
    v = tile.load(x[i : i + BM], edge="clip", mask=tile.arange(0, BM) < 3, other=2.0)
    tile.store(out[i, 0:BM], v * v * tile.load(w[0:BM], mask=tile.arange(0, BM) != 1, other=0.5))


@ts.kernel
def stepped(x, out, *, FIRST: int, END: int, STEP: int):
    """A loop whose index starts anywhere and takes long steps; no trips are allowed."""
    state = tile.full((4,), 1.0, x.dtype)
    for i in tile.range(FIRST, END, STEP):
        state = tile.sin(state * x[i, 0:4]) + 1.0
    out[0:4] = state


@ts.kernel
def branched(x, out, *, BM: int = 4):
    """A block that a branch uses, and what follows it."""
    i = tile.program_id(0) * BM
    v = tile.load(x[i : i + BM])
    u = v * 3.0
    if i > 0:
        u = tile.tanh(u) * v
    out[i : i + BM] = u * tile.sin(v)


@ts.kernel
def grouped(x, w, out):
    """Tiles of a group that load one element, and each carry a value of their own."""
    i = tile.local_id()
    state = x[tile.program_id(0), i]
    for _ in tile.range(0, 3):
        state = tile.sin(state * w[0])
    out[tile.program_id(0), i] = state


@ts.kernel
def scattered(x, out):
    """Elements that each trip of a loop stores again."""
    for k in tile.range(0, 3):
        tile.store(out, 3 - tile.arange(0, 4), x[k, 0:4] ** 2)


@ts.kernel
def spread(x, out):
    """One element for a block, and a column for several."""
    tile.store(out, tile.arange(0, 4)[:, None] + 8, tile.arange(0, 2)[None, :], tile.reshape(x[0, 0:2], (1, 2)) ** 4)
    out[0:4, 0:2] = tile.load(x[0:1, 0:1]) ** 2
    out[4:8, 0:2] = tile.load(x[0:1, 0:2]) ** 3


@ts.kernel
def running(x, out, *, BM: int = 4):
    """Memory of a trip: scans of blocks move their elements through it, and the carry depends on what it held."""
    i = tile.program_id(0)
    carry = tile.full((1,), 0.5, x.dtype)
    for j in tile.range(0, x.shape[1], BM):
        v = tile.cumsum(tile.load(x[i, j : j + BM], edge="clip"), axis=0) * carry
        tile.store(out[i, j : j + BM], v, edge="clip")
        carry += tile.sum(tile.flip(v) * tile.arange(0, BM), axis=0)


@ts.kernel
def running_twice(x, out):
    """Memory of a trip in a trip, and of a branch."""
    i = tile.program_id(0)
    total = tile.full((4,), 1.0, x.dtype)
    for j in tile.range(0, 2):
        for _ in tile.range(0, 2):
            total = tile.cumprod(tile.sin(total + x[i, 0:4]), axis=0) + j
        if j > 0:
            total = tile.flip(total * x[i, 0:4])
    out[i, 0:4] = total


def random(*shape, dtype="f8"):
    return RANDOM.standard_normal(shape).astype(dtype)


PROGRAMS = {
    "pointwise": (lambda x, w: ts.launch(smooth, (3,), x, w, ts.like(x)), random(10), random(2)),
    "recurrent": (lambda x, w: ts.launch(recurrent, (3,), x, w, ts.like(x)), random(12), random(4)),
    "nested": (lambda x: ts.launch(nested, (3,), x, ts.like(x, shape=(3,))), random(3, 3)),
    "overwritten": (lambda x, y: ts.launch(overwritten, (2,), x, y, ts.like(y)), random(3, 8), random(8)),
    "cleared": (lambda x: ts.launch(cleared, (1,), x, ts.like(x)), random(4)),
    "cleared privately": (lambda x: ts.launch(cleared_privately, (1,), x, ts.like(x)), random(4)),
    "sliding": (lambda x: ts.launch(sliding, (1,), x, ts.like(x, shape=(6,))), random(3, 4)),
    "diagonals": (lambda x: ts.launch(diagonals, (1,), x, ts.like(x, shape=(6,))), random(3, 4)),
    "filled": (lambda x, o: ts.launch(filled, (2,), x, o, ts.like(x, shape=(8,))), random(6), random(4)),
    "gathered": (
        lambda x: ts.launch(picked, (2,), x, ts.Tensor([0, 2, 2, 1, 4, 0, 0, 2]), ts.like(x, shape=(8,))),
        random(5),
    ),
    "mixed": (lambda x: ts.launch(mixed, (2,), x, ts.like(x)), random(8)),
    "branched": (lambda x: ts.launch(branched, (2,), x, ts.like(x)), random(8)),
    "masked": (lambda x, w: ts.launch(masked, (3,), x, w, ts.like(x, shape=(3, 4))), random(5), random(4)),
    "grouped": (lambda x, w: ts.launch(grouped, ((2,), 4), x, w, ts.like(x)), random(2, 4), random(1)),
    "grouped once": (lambda x, w: ts.launch(grouped, ((1,), 4), x, w, ts.like(x)), random(1, 4), random(1)),
    "scattered": (lambda x: ts.launch(scattered, (1,), x, ts.like(x, shape=(4,))), random(3, 4)),
    "running": (lambda x: ts.launch(running, (2,), x, ts.like(x)), random(2, 10)),
    "running twice": (lambda x: ts.launch(running_twice, (2,), x, ts.like(x)), random(2, 4)),
    "spread": (lambda x: ts.launch(spread, (1,), x, ts.like(x, shape=(12, 2))), random(1, 2)),
}
for first, end, step in ((0, 6, 1), (1, 6, 2), (4, 6, 1), (3, 3, 1), (4, 2, 2)):
    constants = {"FIRST": first, "END": end, "STEP": step}
    PROGRAMS[f"range({first}, {end}, {step})"] = (
        lambda x, c=constants: ts.launch(stepped, (1,), x, ts.like(x, shape=(4,)), **c),
        random(6, 4),
    )


def weigh(program):
    def loss(*args):
        y = program(*args)
        return (y * ts.Tensor(np.cos(np.arange(y.size, dtype="f8")).reshape(y.shape))).sum()

    return loss


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_central_differences(name, target):
    program, *args = PROGRAMS[name]
    loss, step = weigh(program), 1e-6
    found = ts.jit(ts.grad(loss, tuple(range(len(args)))), target=target)(*args)
    for place, (x, g) in enumerate(zip(args, found, strict=True)):
        for index in np.ndindex(x.shape):
            moved = [[a.copy() for a in args] for _ in range(2)]
            moved[0][place][index] += step
            moved[1][place][index] -= step
            high, low = (float(loss(*each)) for each in moved)
            assert abs((high - low) / (2 * step) - g.numpy()[index]) < 1e-6 * (1 + abs(g.numpy()[index]))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 9), st.integers(1, 21), st.sampled_from([4, 8, 16]))
def test_softmax_of_any_size(rows, columns, block):
    x, w = random(rows, columns), random(rows, columns)
    grid = (-(-rows // 4),)
    own = lambda x: (ts.launch(softmax_rows, grid, x, ts.like(x), BM=4, BN=block) * w).sum()  # noqa: E731
    other = lambda x: (ts.softmax(x, axis=-1) * w).sum()  # noqa: E731
    np.testing.assert_allclose(ts.grad(own)(x), ts.grad(other)(x), atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
def test_layer_norm(target):
    x, weight, bias, w = random(9, 20), random(20), random(20), random(9, 20)
    constants = {"eps": 1e-5, "center": True, "BM": 4, "BN": 16}
    own = lambda x, a, b: (ts.launch(normalize_rows, (3,), x, a, b, ts.like(x), **constants) * w).sum()  # noqa: E731
    other = lambda x, a, b: (ts.layer_norm(x, (20,), a, b) * w).sum()  # noqa: E731
    found = ts.jit(ts.grad(own, (0, 1, 2)), target=target)(x, weight, bias)
    for g, expected in zip(found, ts.grad(other, (0, 1, 2))(x, weight, bias), strict=True):
        np.testing.assert_allclose(g, expected, atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("causal", (False, True))
def test_flash_attention_with_grouped_queries(causal, target):
    q, k, v = random(2, 4, 20, 8, dtype="f4"), random(2, 2, 20, 8, dtype="f4"), random(2, 2, 20, 8, dtype="f4")
    constants = {"causal": causal, "scale": 8**-0.5, "BM": 8, "BN": 8}

    def own(q, k, v):
        return (ts.launch(attend, (2, 4, 3), q, k, v, None, None, ts.like(q), **constants) ** 2).sum()

    def other(q, k, v):
        k, v = (ts.repeat(t, 2, axis=1) for t in (k, v))
        scores = ts.einsum("bhsd,bhtd->bhst", q, k) * 8**-0.5
        scores = ts.where(ts.tril(ts.ones((20, 20))) > 0, scores, -float("inf")) if causal else scores
        return (ts.einsum("bhst,bhtd->bhsd", ts.softmax(scores, axis=-1), v) ** 2).sum()

    found = ts.jit(ts.grad(own, (0, 1, 2)), target=target)(q, k, v)
    for g, expected in zip(found, ts.grad(other, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(g, expected, atol=2e-5)


def build_adjoint(program, *args):
    function = ts.jit(program).trace(*args).function
    (node,) = [n for n in function.body.nodes if n.op.name == "ts.launch"]
    return AdjointKernel(node, tuple(v.type.dtype.is_float for v in node.args)).build()


def test_programs_that_own_their_elements_add_without_atomics():
    rows = build_adjoint(lambda x: ts.launch(softmax_rows, (3,), x, ts.like(x), BM=4, BN=16), random(9, 20))
    assert not [n for n in rows.body.walk() if n.op is dialect.atomic]
    shared = build_adjoint(PROGRAMS["pointwise"][0], random(10), random(2))
    assert {n.args[0].hint for n in shared.body.walk() if n.op is dialect.atomic} == {"w_gradient"}


def test_carried_values_that_no_derivative_needs_are_not_kept():
    @ts.kernel
    def summed(x, out, *, BM: int = 4):
        total = tile.zeros((BM,), x.dtype)
        for i in tile.range(0, 5):
            total = total + x[i, 0:BM]
        out[0:BM] = total

    linear = build_adjoint(lambda x: ts.launch(summed, (1,), x, ts.like(x, shape=(4,))), random(5, 4))
    assert not [p for p in linear.params if p.hint.startswith("carried")]
    kept = build_adjoint(PROGRAMS["recurrent"][0], random(12), random(4))
    assert [p.hint for p in kept.params if p.hint.startswith("carried")] == ["carried0"]


def test_transforms_compose():
    x, w = random(12), random(4)
    loss = weigh(PROGRAMS["recurrent"][0])
    expected = ts.grad(loss, (0, 1))(x, w)
    for found in (ts.grad(ts.checkpoint(loss), (0, 1))(x, w), ts.value_and_grad(loss, (0, 1))(x, w)[1]):
        for g, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-12)
    many = ts.vmap(ts.grad(loss), in_dims=(0, None))(np.stack([x, x * 2]), w)
    np.testing.assert_allclose(many.numpy()[1], ts.grad(loss)(x * 2, w), rtol=1e-12)
    both = ts.grad(lambda x: ts.vmap(lambda a: loss(a, w))(ts.stack([x, x * 2])).sum())(x)
    np.testing.assert_allclose(both, ts.grad(loss)(x, w) + 2 * ts.grad(loss)(x * 2, w), rtol=1e-10)


def test_a_rule_of_the_user_takes_precedence():
    @ts.custom_vjp
    def clipped(x):
        return ts.launch(softmax_rows, (3,), x, ts.like(x), BM=4, BN=16)

    clipped.defvjp(lambda x: (clipped(x), None), lambda kept, g: (g * 7.0,))
    np.testing.assert_allclose(ts.grad(lambda x: clipped(x).sum())(random(9, 20)), np.full((9, 20), 7.0))


@ts.kernel
def reads_its_result(x, out):
    out[0] = x[0]
    out[1] = out[0] * x[1]


@ts.kernel
def shares(x, out, *, N: int):
    held = tile.alloc_shared((N,), ts.f64)
    held[tile.local_id()] = x[tile.local_id()]
    tile.barrier()
    out[tile.local_id()] = held[N - 1 - tile.local_id()]


@ts.kernel
def shared_sum(x, out):
    """All programs store to the same elements."""
    out[0:2] = x[0:2] * 2.0


@ts.kernel
def neighbours(x, out):
    """Programs whose windows overlap."""
    p = tile.program_id(0)
    out[p : p + 2] = x[p : p + 2] * 2.0


@ts.kernel
def paired(x, out):
    """More elements are stored than the memory has."""
    p = tile.program_id(0)
    out[p // 2] = x[p]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (lambda x: ts.launch(shared_sum, (3,), x, ts.like(x)), "several programs store to the same elements of `out`"),
        (lambda x: ts.launch(neighbours, (3,), x, ts.like(x)), "several programs store to the same elements of `out`"),
        (lambda x: ts.launch(paired, (8,), x, ts.like(x, shape=(4,))), "several programs store"),
        (lambda x: ts.launch(reads_its_result, (1,), x, ts.like(x)), "reads `out`, which it writes"),
    ],
)
def test_no_derivative_is_an_error_at_the_kernel_s_line(program, text):
    with pytest.raises(UnsupportedOpError, match=text) as caught:
        ts.grad(lambda x: program(x).sum())(random(8))
    assert caught.value.location.file == __file__ and "custom_vjp" in str(caught.value)


def test_shared_memory_hands_the_cotangents_back():
    w = random(8)
    found = ts.grad(lambda x: (ts.launch(shares, ((1,), 8), x, ts.like(x), N=8) * w).sum())(random(8))
    np.testing.assert_array_equal(found.numpy(), w[::-1])


@ts.kernel
def windows(x, out, *, A: int, B: int, C: int, SHIFT: int, N: int):
    """Two loads, from windows that move with the program's numbers."""
    p, q = tile.program_id(0), tile.program_id(1)
    first = p * A + q * B
    other = first + tile.program_id(0) * C + SHIFT
    out[p, q, 0:N] = x[first : first + N] * x[other : other + N]


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.sampled_from([1, 2, 3])] * 2), st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 0, 1]),
    st.integers(0, 3), st.sampled_from([1, 2, 4]),
)  # fmt: skip
@example((1, 3), 0, 1, 0, 0, 2)  # neighbours share one element
@example((2, 2), 3, 2, 0, 0, 2)  # rows of windows do
@example((2, 1), 2, 0, 0, 1, 2)  # the second load does
@example((1, 3), 1, 4, 0, 0, 4)
@example((3, 1), 1, 0, 1, 0, 1)  # the loads move by different steps
def test_programs_that_share_elements_add_by_atomics(grid, a, b, c, shift, n):
    constants = {"A": a, "B": b, "C": c, "SHIFT": shift, "N": n}
    found = build_adjoint(lambda x: ts.launch(windows, grid, x, ts.like(x, shape=(*grid, n)), **constants), random(64))
    loads = [
        {s + i for s in (p * a + q * b, p * (a + c) + q * b + shift) for i in range(n)} for p, q in np.ndindex(grid)
    ]
    shared = sum(map(len, loads)) != len(set.union(*loads))
    atomic = any(n.op is dialect.atomic for n in found.body.walk())
    assert atomic or not shared
    if not shared and c == shift == 0 and 1 in grid:
        assert not atomic


@ts.kernel
def scaled(x, w, out, count):
    """A factor that all programs share, and a result of integers."""
    i = tile.program_id(0)
    out[i] = x[i] * w[0]
    count[i] = 1


def test_the_cotangents_of_a_narrow_memory_are_summed_in_f32():
    x, w = np.ones(4096, "f2"), np.ones(1, "f2")
    out = lambda w: ts.launch(scaled, (4096,), x, w, ts.like(x), ts.like(x, dtype="int32"))  # noqa: E731
    found = ts.grad(lambda w: out(w)[0].to(ts.f32).sum())(w)
    assert found.dtype == ts.f16 and found.item() == 4096.0  # in f16 the sum would stay at 2048


@ts.kernel
def updates(x, total):
    total[0] += x[0]


@ts.kernel
def overwrites(x, total):
    total[0] = x[0]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (lambda x: ts.launch(updates, (1,), x, x * 2.0), "reads `total`, which it writes"),
        (lambda x: ts.launch(overwrites, (1,), x, x * 2.0), "updates `total`, which has a derivative"),
    ],
)
def test_kernels_that_need_a_rule_of_the_user(program, text):
    with pytest.raises(UnsupportedOpError, match=text):
        ts.grad(lambda x: program(x).sum())(random(8))
