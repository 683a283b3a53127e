"""Random numbers in kernels: the published vectors, the streams of `ts.rand`, and what they look like."""

import numpy as np
import pytest

import tessera as ts
from conformance.tile.random.cases import dropped, normals, numbers, words
from tessera import tile
from tessera.core.errors import ArgumentError, DTypeError, ExecutionError
from tessera.ir.numerics.conversion import philox_4x32
from tessera.ops.tensor.random import Generator

# Random123 1.14, tests/kat_vectors: philox4x32 with 10 rounds: counter, key, result.
ONES = 0xFFFFFFFF
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), VECTORS)
def test_the_published_vectors(counter, key, want):
    assert tuple(int(w[0]) for w in philox_4x32([np.array([c]) for c in counter], [np.array([k]) for k in key])) == want


@pytest.mark.parametrize("seed", [0, 7, -1, 2**40 + 3])
def test_words_are_those_of_the_generator(seed):
    out = np.zeros(40, "i8")
    words[(2,)](seed, out, N=20)
    assert out.tolist() == Generator(seed).words(40).numpy().tolist()


def test_neither_grid_nor_group_changes_the_numbers():
    found = []
    for grid, group in (((8,), 1), ((2,), 4), ((1,), 8)):
        out, whole = np.zeros((8, 9), "f4"), np.zeros((8, 9), "i8")
        numbers[grid, group](5, out, whole, N=9)
        found.append((out, whole))
    assert all(np.array_equal(o, found[0][0]) and np.array_equal(w, found[0][1]) for o, w in found)
    np.testing.assert_array_equal(found[0][0].ravel(), ts.rand(72, generator=Generator(5)).numpy())
    assert found[0][1].min() >= -5 and found[0][1].max() < 20


def test_normals():
    out = np.zeros(20000, "f4")
    normals[(1,)](out, N=20000)
    assert abs(out.mean()) < 0.03 and abs(out.std() - 1) < 0.03


def test_dropout_drops_what_the_stream_says(rng):
    x, out = rng.uniform(1, 2, (3, 33)).astype(ts.bf16.numpy), np.zeros((3, 33), ts.bf16.numpy)
    dropped[(3,)](x, 3, out, N=33)
    kept = ts.rand((3, 33), generator=Generator(3)).numpy() >= 0.25
    assert np.array_equal(out != 0, kept)
    np.testing.assert_allclose(out.astype("f4")[kept], x.astype("f4")[kept] / 0.75, rtol=2**-7)


@ts.kernel
def dropped_at_run_time(x, p: float, seed: int, out):
    tile.store(out, tile.dropout(tile.load(x), p, seed))


@ts.kernel(target="llvm")
def dropped_on_llvm(x, p: float, seed: int, out):
    tile.store(out, tile.dropout(tile.load(x), p, seed))


@pytest.mark.parametrize("entry", [dropped_at_run_time, dropped_on_llvm])
@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.999])
def test_the_probability_may_be_an_argument(entry, p, rng):
    x, out = rng.uniform(1, 2, (3, 32)).astype("f4"), np.zeros((3, 32), "f4")
    entry[(1,)](x, p, 7, out)
    kept = ts.rand((3, 32), generator=Generator(7)).numpy() >= np.float32(p)
    np.testing.assert_allclose(out, np.where(kept, x / (1 - np.float32(p)), 0), rtol=1e-6)
    assert len(entry._cache) == 1  # another probability compiles nothing


@pytest.mark.parametrize("entry", [dropped_at_run_time, dropped_on_llvm])
@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0, np.nan])
def test_a_probability_outside_its_range_is_an_error_of_the_launch(entry, p):
    with pytest.raises(ExecutionError, match="dropout takes a probability from 0 to before 1"):
        entry[(1,)](np.ones((3, 32), "f4"), p, 7, np.zeros((3, 32), "f4"))


@ts.kernel
def whole_probability(x, p: int, out):
    tile.store(out, tile.dropout(tile.load(x), p, 3))


def test_a_probability_is_a_float():
    with pytest.raises(DTypeError, match="the probability of dropout is no float scalar"):
        whole_probability[(1,)](np.ones(4, "f4"), 0, np.zeros(4, "f4"))


@ts.kernel
def float_seed(out):
    out[0] = tile.random(out[0], 3)


@ts.kernel
def too_wide(out):
    out[0] = tile.cast(tile.randint(0, 3, 5, 5), ts.f32)


@ts.kernel
def always(out):
    out[0] = tile.dropout(out[0], 1.0, 3)


@pytest.mark.parametrize(
    ("entry", "error"), [(float_seed, DTypeError), (too_wide, ArgumentError), (always, ArgumentError)]
)
def test_refusals(entry, error):
    with pytest.raises(error):
        entry[(1,)](np.zeros(1, "f4"))
