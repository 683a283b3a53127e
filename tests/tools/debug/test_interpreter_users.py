"""What users of other interpreters complain of, asked of ours: docs/interpreter-users.md names these by number."""

import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import BarrierError, ExecutionError, OutOfBoundsError


@ts.kernel
def product(a, b, out):
    tile.store(out[0:16, 0:16], tile.dot(tile.load(a[0:16, 0:16]), tile.load(b[0:16, 0:16])))


def test_01_bf16_products(rng):
    a, b = (rng.standard_normal((16, 16)).astype(ml_dtypes.bfloat16) for _ in range(2))
    out = np.zeros((16, 16), np.float32)
    product[(1,)](a, b, out)
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(out - want).max() <= 16 * 2.0**-23 * (abs(a).astype("f8") @ abs(b).astype("f8")).max()
    ones = np.ones((16, 16), ml_dtypes.bfloat16)
    product[(1,)](ones, ones, out)
    assert (out == 16).all()


@ts.kernel
def narrow_arithmetic(x, y, total, less, negative, N: ts.constexpr):
    a, b = tile.load(x[0:N]), tile.load(y[0:N])
    tile.store(total[0:N], a + b)
    tile.store(less[0:N], a < b)
    tile.store(negative[0:N], -a)


def test_02_bf16_arithmetic(rng):
    x, y = (rng.standard_normal(64).astype(ml_dtypes.bfloat16) for _ in range(2))
    total, less, negative = np.zeros_like(x), np.zeros(64, bool), np.zeros_like(x)
    narrow_arithmetic[(1,)](x, y, total, less, negative, N=64)
    assert (total == (x.astype("f4") + y.astype("f4")).astype(ml_dtypes.bfloat16)).all()
    assert (less == (x.astype("f4") < y.astype("f4"))).all() and (negative == -x.astype("f4")).all()


@ts.kernel
def narrowed(x, out, N: ts.constexpr, T: ts.constexpr):
    tile.store(out[0:N], tile.cast(tile.load(x[0:N]), T))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8_e5m2", ml_dtypes.float8_e5m2), ("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("bf16", ml_dtypes.bfloat16)],
)
def test_05_every_f16_is_cast_to_the_nearest(name, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    out = np.zeros(x.shape, dtype)
    narrowed[(1,)](x, out, N=x.size, T=getattr(ts, name))
    with np.errstate(all="ignore"):
        want = x.astype(np.float32).astype(dtype)
    assert np.array_equal(out.astype("f4"), want.astype("f4"), equal_nan=True)


@ts.kernel
def sum_of_bools(x, out):
    out[0] = x[0] + x[1]


def test_07_bool_plus_bool_is_numpys():
    for x in np.array([[0, 0], [0, 1], [1, 1]], bool):
        out = np.zeros(1, bool)
        sum_of_bools[(1,)](x, out)
        assert out[0] == x[0] + x[1]


@ts.kernel
def masked_square(x, out, N: ts.constexpr):
    places = tile.arange(0, 16)
    value = tile.load(x, places, mask=places < N, other=0.0)
    tile.store(out, places, value * value)


def test_08_masked_lanes_read_as_other(rng):
    x, out = rng.random(10, np.float32) + 1, np.full(16, 9, np.float32)
    masked_square[(1,)](x, out, N=10)
    assert np.array_equal(out, [*(x * x), *[0] * 6])


@ts.kernel(autotune=True, autotune_configs=[{"B": 8}, {"B": 16}])
def tuned(x, *, B: int = 4):
    i = tile.program_id(0) * B
    x[i : i + B] += B


def test_12_autotuned_kernels_run_without_a_device():
    x = np.zeros(16, np.float32)
    tuned[(2,)](x)
    assert (x == 8).all()


@ts.kernel
def scattered(index, out):
    out[index[tile.program_id(0)]] = 1.0


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("wrong", [-1, -(1 << 40), 8, 1 << 40, np.iinfo(np.int64).min, np.iinfo(np.int64).max])
def test_13_nothing_outside_is_touched(wrong, debug):
    whole = np.zeros(24, np.float32)
    index = np.array([0, 7, wrong, 3])
    with pytest.raises(OutOfBoundsError, match=r"program \(2,\)"):
        if debug:
            with ts.debug.checked():
                scattered[(4,)](index, whole[8:16])
        else:
            scattered[(4,)](index, whole[8:16])
    assert not whole[:8].any() and not whole[16:].any()


@ts.kernel
def fails_before_the_barrier(x, out):
    me = tile.local_id()
    tile.assert_(x[me] < 3.0, "too large")
    tile.barrier()
    out[me] = x[me]


@ts.kernel
def vote_in_a_branch(x, out):
    me = tile.local_id()
    if x[me] > 2.0:
        tile.barrier()
    out[me] = x[me]


def test_25_a_barrier_on_data_is_reported():
    x = np.arange(4, dtype=np.float32)
    with pytest.raises(BarrierError, match=r"tiles 3 of program \(0,\), 1 of 4"), ts.debug.checked():
        vote_in_a_branch[(1,), 4](x, np.zeros(4, np.float32))


def test_27_an_error_before_a_barrier_ends_the_run():
    with pytest.raises(ExecutionError, match="too large"):
        fails_before_the_barrier[(2,), 4](np.arange(4, dtype=np.float32), np.zeros(4, np.float32))


def test_27_many_threads_may_interpret_at_once():
    results = {}

    def work(seed):
        x, out = np.full(4, seed % 3, np.float32), np.zeros(4, np.float32)
        fails_before_the_barrier[(1,), 4](x, out)
        results[seed] = np.array_equal(x, out)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16 and all(results.values())


def test_27_debug_mode_is_chosen_by_call_after_import():
    code = (
        "import numpy as np, tessera as ts, sys\n"
        "assert not {'pycuda', 'cuda', 'torch'} & set(sys.modules)\n"
        "with ts.debug.checked(collect=True) as report: pass\n"
        "print(len(report))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={}, check=True)
    assert done.stdout == "0\n"
