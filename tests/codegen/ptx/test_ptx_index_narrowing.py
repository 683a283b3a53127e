"""Index narrowing: indices that are proven to fit are computed in 32 bits, others in 64; the results are NumPy's."""

import re

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.contract import get_backend
from tessera.runtime import driver
from tessera.runtime.program import prepare

X = np.arange(97, dtype=np.float32)


def build(module, arrays):
    backend = get_backend("ptx")
    artifact = backend.emit(module, {})
    (text,) = (data for name, data in artifact.files.items() if name.endswith(".ptx"))
    return text, backend.sanitized(artifact)(arrays)


def gather(index, *arrays):
    """The text of `X[index(...)]`, and the result."""
    traced = ts.jit(lambda x, *rest: x[index(*rest)]).trace(X, *arrays).function
    text, results = build(driver.lower(traced, "ptx")["tile"], [X, *arrays])
    return text, results[0]


def count_wide(text):
    """The 64-bit operations on what differs between the threads of a block, addresses apart."""
    return len(re.findall(r"\b(?:abs|sub|min|max|mul\.lo|rem|div)\.s64", text.split(".entry")[-1]))


def reflect(n):
    return 60 - ts.abs(60 - ts.abs(ts.iota((n,)) - 5))


def test_indices_within_32_bits():
    text, out = gather(lambda: reflect(120) % 97)
    np.testing.assert_array_equal(out, X[(60 - abs(60 - abs(np.arange(120) - 5))) % 97])
    assert "abs.s32" in text and "abs.s64" not in text and "mad.wide.s32" in text


@pytest.mark.parametrize("factor", [1 << 24, 1 << 25, -(1 << 24), -(1 << 25), 1 << 40])
def test_indices_beyond_32_bits(factor):
    """127 times 2^24 fits, and times 2^25 does not."""
    text, out = gather(lambda: ts.abs(ts.iota((128,)) * factor) % 97)
    np.testing.assert_array_equal(out, X[abs(np.arange(128) * factor) % 97])
    assert ("abs.s32" in text) == (abs(factor) == 1 << 24)


@pytest.mark.parametrize("divisor", [7, -7])
def test_divisions_round_down(divisor):
    index = np.arange(130) - 65
    text, out = gather(lambda: ts.abs((ts.iota((130,)) - 65) // divisor) + (ts.iota((130,)) - 65) % divisor + 7)
    np.testing.assert_array_equal(out, X[abs(index // divisor) + index % divisor + 7])


@pytest.mark.parametrize("dtype", ["i8", "i4", "i2", "u1", "u4"])
def test_indices_from_memory_are_checked_in_their_own_type(dtype):
    given = np.array([0, 96, 5, *range(40)], dtype)
    text, out = gather(lambda i: i, given)
    np.testing.assert_array_equal(out, X[given])
    far = given.astype("i8") + (1 << 32)  # whose low halves are inside
    with pytest.raises(ts.errors.OutOfBoundsError, match=f"index {1 << 32} is outside axis 0 of size 97"):
        gather(lambda i: i, far)


DRAWN = {"+": np.add, "-": np.subtract, "*": np.multiply, "min": np.minimum, "max": np.maximum}
OURS = {"+": ts.add, "-": ts.sub, "*": ts.mul, "min": ts.minimum, "max": ts.maximum}


@pytest.mark.parametrize("seed", range(12))
def test_drawn_indices(seed):
    """Sums and products of an index and numbers, some of which leave 32 bits, and comparisons of them."""
    rng, count = np.random.default_rng(seed), 200

    def compute(index, ops, where):
        rng = np.random.default_rng(seed)
        known = [index]
        for _ in range(6):
            name = list(ops)[rng.integers(len(ops))]
            other = int(rng.integers(-9, 9) * 10 ** rng.integers(0, 5)) if rng.random() < 0.7 else known[-1]
            known.append(ops[name](known[rng.integers(len(known))], other))
        total = where(known[-1] < known[-2], known[-1], known[-2])
        return (total - known[0]) % 97

    text, out = gather(lambda: compute(ts.iota((count,)), OURS, ts.where))
    np.testing.assert_array_equal(out, X[compute(np.arange(count), DRAWN, np.where)])
    assert rng is not None and ".entry" in text


@ts.kernel
def add_rows(x: ts.Tensor["N", ts.f32], out: ts.Tensor["M", ts.f32], BLOCK: ts.constexpr, rounds: ts.constexpr):
    """Sums of elements at places that a loop and a program number move."""
    p = tile.program_id(0)
    total = tile.zeros((BLOCK,), ts.f32)
    for i in range(0, rounds):
        total = total + tile.load(x[(tile.arange(0, BLOCK) * 3 + i + p) % 97])
    tile.store(out[p * BLOCK : p * BLOCK + BLOCK], total)


def test_places_that_a_loop_moves():
    out = np.zeros(96, np.float32)
    module = prepare(add_rows[3], (X, out, 32, 5), "ptx").levels["tile"]
    text, _ = build(module, [X, out])
    places = np.arange(32)[:, None] * 3 + np.arange(5)
    want = np.concatenate([X[(places + p) % 97].sum(1) for p in range(3)])
    np.testing.assert_array_equal(out, want)
    assert count_wide(text) <= 1  # the number of the block


def test_a_constant_of_an_index_is_the_displacement_of_its_access():
    text, out = gather(lambda i: ts.minimum(ts.maximum(i, 0), 50) + 9, np.arange(-20, 80))
    np.testing.assert_array_equal(out, X[np.clip(np.arange(-20, 80), 0, 50) + 9])
    assert re.search(r"ld\.global\.f32 %f\d+, \[%x\d+\+36\]", text)


def test_indices_that_are_in_bounds_in_a_partial_tile_have_no_mask():
    """5000 indices are no whole tiles: past the end they are 0, in bounds; in a flip they would be negative."""
    index = np.arange(5000) % 97
    text, out = gather(lambda i: ts.minimum(ts.maximum(i, 0), 96), index)
    np.testing.assert_array_equal(out, X[index])
    assert re.search(r"\n\tld\.global\.f32", text) and not re.search(r"@%p\d+ ld\.global\.f32", text)
    wide = np.arange(5000, dtype=np.float32)
    traced = ts.jit(lambda x: ts.flip(x, 0)).trace(wide).function
    text, (out,) = build(driver.lower(traced, "ptx")["tile"], [wide])
    np.testing.assert_array_equal(out, wide[::-1])
    assert re.search(r"@%p\d+ ld\.global\.f32", text)


def test_elements_past_the_end_are_in_no_sum():
    """They are read without a mask, and are not 0."""
    index = np.arange(5000) % 97
    traced = ts.jit(lambda x, i: ts.sum(x[ts.minimum(ts.maximum(i, 0), 96)])).trace(X + 1, index).function
    _, (out,) = build(driver.lower(traced, "ptx")["tile"], [X + 1, index])
    np.testing.assert_allclose(out, (X[index] + 1).sum(), rtol=1e-6)


@pytest.mark.parametrize("twice", [False, True])
def test_indices_of_hundreds_of_steps(twice):
    """Their intervals are found without as many calls in one another, and each once."""

    def compute(i):
        for n in range(200):
            i = ts.minimum(i + 1, ts.maximum(i - 1, 90 + n % 5)) if twice else ts.minimum(i + 1, 90 + n % 5)
        return ts.maximum(i, 0)

    index, want = np.arange(5000) % 97, np.arange(5000) % 97
    for n in range(200):
        want = np.minimum(want + 1, np.maximum(want - 1, 90 + n % 5) if twice else 90 + n % 5)
    text, out = gather(compute, index)
    np.testing.assert_array_equal(out, X[np.clip(want, 0, 96)])
