"""Loops: unrolled or recorded, with variables that find their type."""

import numpy as np

from tessera import tile
from tessera.core.types import f32, int64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.kernel_function import KernelLaunch
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow


def nodes(entry, op, *args, **constants):
    """How many nodes of an op the kernel has."""
    body = KernelLaunch(entry).module(*args, **constants).functions[1].body
    return sum(n.op is op for n in body.walk())


@kernel
def total(x: Tensor["N"]) -> f32:
    acc = 0
    for i in range(len(x)):
        acc += x[i]
    return acc


def test_a_number_takes_the_type_it_becomes(rng):
    x = rng.random(100, dtype="f4")
    np.testing.assert_allclose(total(x), x.sum(), rtol=1e-5)
    assert nodes(total, control_flow.for_, x) == 1


@kernel
def nested(x: Tensor["M", "N"]):
    best, where = -1.0, 0
    for i in tile.range(M):
        row = 0.0
        for j in tile.range(0, N, 2):
            v = x[i, j]
            if v > 0.0:
                row = row + v
            else:
                row -= v / 2.0
        if row > best:
            best = row
            where = i
    return best, where


def test_nested_loops_and_branches(rng):
    x = rng.standard_normal((5, 8)).astype("f4")
    even = x[:, ::2]
    rows = np.where(even > 0, even, -even / 2).sum(1)
    best, where = nested(x)
    np.testing.assert_allclose(best, rows.max(), rtol=1e-5)
    assert where == rows.argmax()


@kernel
def blocked(x: Tensor["M", "N"], *, B):
    acc = 0.0
    for k in tile.range(0, N, B):
        acc = acc + x[:, k : k + B]
    return acc


def test_a_number_becomes_a_block(rng):
    x = rng.random((3, 12), dtype="f4")
    np.testing.assert_allclose(blocked(x, B=4), x.reshape(3, 3, 4).sum(1), rtol=1e-6)


@kernel
def swapping(n: int):
    a, b, calls = 0, 1, 0
    for _ in range(n):
        a, b = b, a + b
        unchanged = 7
        calls = calls + unchanged - 6
    return a, calls


def test_swapped_integers_and_scalar_bounds():
    assert [int(v) for v in swapping(10)] == [55, 10]
    assert [int(v) for v in swapping(0)] == [0, 0]


@kernel
def collatz(n: int):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def test_while_with_a_condition_of_run_time():
    assert collatz(6) == 8
    assert nodes(collatz, control_flow.while_, 6) == 1


@kernel
def unrolled(x: Tensor["N"]):
    acc, width = 0.0, N
    while width > 1:
        width //= 2
        if width == 4:
            continue
        for step in (1, 2):
            if step > width:
                break
            acc += x[width] * step
    for j in tile.static_range(2):
        acc += x[j]
    return acc


def test_loops_known_while_compiling_are_unrolled(rng):
    x = rng.random(16, dtype="f4")
    want = sum(x[w] * (3 if w >= 2 else 1) for w in (8, 2, 1)) + x[0] + x[1]
    np.testing.assert_allclose(unrolled(x), want, rtol=1e-6)
    assert nodes(unrolled, control_flow.for_, x) == 0


@kernel
def reused(x: Tensor["N"]):
    acc = 0.0
    for i in tile.range(N):
        part = x[i]
        acc += part
    for i in tile.range(N):
        part = i
        acc += float(part)
    return acc


def test_a_name_that_no_one_reads_again_may_change_its_type(rng):
    x = rng.random(6, dtype="f4")
    np.testing.assert_allclose(reused(x), x.sum() + 15, rtol=1e-6)


@kernel
def backward(x: Tensor["N", int64]):
    acc = 0
    for i in tile.range(N - 1, -1, -2):
        acc = acc * 10 + x[i]
    return acc


def test_a_negative_step():
    assert backward(np.arange(6)) == 531


@kernel
def peeled(x: Tensor["N"]):
    error, i = 1.0, 0
    while error > 0.1 and i < N:
        error = x[i]
        i += 1
    return i


def test_a_while_that_becomes_unknown_on_the_way():
    assert peeled(np.float32([0.5, 0.3, 0.05, 0.7])) == 3
    assert peeled(np.float32([0.5, 0.5])) == 2


@kernel
def blocks_by_number(x: Tensor["M", "N"]):
    acc = tile.zeros((4, N))
    for block in tile.range_n(x.shape, 4):
        acc += tile.load(x, block, cols=N) * float(block.start)
    return acc


def test_range_n_walks_blocks_of_rows(rng):
    x = rng.random((12, 3), dtype="f4")
    want = sum(x[i : i + 4] * i for i in (0, 4, 8))
    np.testing.assert_allclose(blocks_by_number(x), want, rtol=1e-6)


@kernel
def index_of_several_results(x, out):
    i, s = 3, 0.0
    for k in tile.range(0, tile.program_id(0) + 2):
        s, i = s + x[i], (i + k) % 4
    out[0:4] = tile.load(x, i + tile.arange(0, 4), other=0.0) + s


def test_an_index_that_a_loop_carries_beside_another_value():
    x, out = np.arange(8, dtype="f4"), np.zeros(4, "f4")
    index_of_several_results[1,](x, out)
    assert out.tolist() == [6, 7, 8, 9]


@kernel
def shifted_sums(x: Tensor["N"], out: Tensor["T"], *, blocks, size):
    totals = [tile.zeros((size,), f32) for _ in tile.static_range(out.shape[0])]
    last = (0, tile.zeros((), f32))
    for i in tile.range(blocks):
        for t in tile.static_range(out.shape[0]):
            first = i * size + t
            last = (t, tile.sum(tile.load(x[first : first + size], edge="clip")))
        parts = [tile.load(x[i * size + t : i * size + t + size], edge="clip") for t in range(out.shape[0])]
        totals = [totals[t] + parts[t] for t in tile.static_range(out.shape[0])]
    for t in tile.static_range(out.shape[0]):
        out[t] = tile.sum(totals[t])


def test_a_loop_carries_the_items_of_a_list(rng):
    x, out = rng.random(32, dtype="f4"), np.zeros(3, "f4")
    shifted_sums[(1,)](x, out, blocks=4, size=8)
    np.testing.assert_allclose(out, [x[t:].sum() for t in range(3)], rtol=1e-5)


@kernel
def swapped(x: Tensor["N"]) -> f32:
    pair = (tile.load(x[0]), tile.load(x[1]))
    for _ in tile.range(3):
        pair = (pair[1], pair[0] + pair[1])
    return pair[1]


def test_a_loop_carries_the_items_of_a_tuple():
    assert swapped(np.array([1, 2], "f4")) == 8
