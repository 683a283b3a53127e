"""Dynamic shapes: one compiled program for every size, with the results of a program for each."""

import functools
import logging

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera.core.errors import OutOfBoundsError, ShapeError
from tessera.core.symbolic_dim import UnknownSizeError
from tessera.runtime.program import prepare

SIZES = st.sampled_from([1, 2, 3, 7, 15, 16, 17, 31, 63, 64, 65, 127, 129, 200])


def rows(count, columns=24, dtype=np.float32):
    return np.random.default_rng(count * 1000 + columns).standard_normal((count, columns)).astype(dtype)


def compilations(caplog):
    return [r.message for r in caplog.records if r.message.startswith("compiled")]


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, "tessera.compile")


def layer(x, w):
    hidden = ts.gelu(ts.matmul(x, w))
    return ts.softmax(hidden - ts.mean(hidden, axis=-1, keepdims=True), axis=-1)


DYNAMIC = ts.jit(layer, target="llvm")
STATIC = ts.jit(layer, target="llvm", dynamic=False)


@given(batch=SIZES, width=SIZES)
def test_one_program_agrees_with_one_for_each_size(batch, width):
    x, w = rows(batch), rows(24, width)
    np.testing.assert_allclose(DYNAMIC(x, w).numpy(), layer(ts.Tensor(x), ts.Tensor(w)).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_sums_of_slices_that_may_be_empty(target):
    """The merged axes of a sum are divided by a size that may be 0."""

    def program(x: ts.Tensor["B", 6, "W"]):
        return ts.sum(x[:, :, 1:], axis=(1, 2)), ts.sum(x.permute(2, 0, 1)[1:, :, ::2], axis=(0, 2))

    f = ts.jit(program, target=target, dynamic=True)
    for batch, width in ((7, 5), (1, 1), (3, 40)):
        x = np.random.default_rng(width).integers(-9, 9, (batch, 6, width)).astype(np.float32)
        for ours, wanted in zip(f(x), program(ts.Tensor(x)), strict=True):
            np.testing.assert_array_equal(ours.numpy(), wanted.numpy())


def test_twenty_batch_sizes_are_two_compilations(caplog):
    f = ts.jit(layer, target="llvm")
    w = rows(24, 8)
    for batch in range(1, 21):
        assert f(rows(batch), w).shape == (batch, 8)
    assert len(compilations(caplog)) == 2 and "s0x24xf32" in compilations(caplog)[1]


def test_dynamic_true_is_one_compilation_and_false_one_for_each(caplog):
    annotated = lambda x: x * 2.0  # noqa: E731
    annotated.__annotations__ = {"x": ts.Tensor["B", 24]}
    f = ts.jit(annotated, target="llvm", dynamic=True)
    for batch in (4, 5, 6):
        np.testing.assert_array_equal(f(rows(batch)).numpy(), rows(batch) * 2)
    assert len(compilations(caplog)) == 1
    g = ts.jit(lambda x: x * 2.0, target="llvm", dynamic=False)
    for batch in (4, 5, 6):
        g(rows(batch))
    assert len(compilations(caplog)) == 4


def test_axes_with_the_same_sizes_share_a_symbol_until_they_differ():
    f = ts.jit(lambda x, y: ts.sum(x) + ts.sum(y), target="llvm")
    for sizes in ((2, 2), (3, 3), (4, 4), (5, 6), (7, 2)):
        x, y = (np.ones((n, 2), np.float32) for n in sizes)
        assert f(x, y).item() == 2 * sum(sizes)


TABLE = {3: True, 5: True}


@pytest.mark.parametrize(
    "test",
    [
        lambda n: n == 1, lambda n: n > 4, lambda n: n <= 2, lambda n: n in (3, 5), lambda n: n in {3, 5},
        lambda n: TABLE.get(n, False), lambda n: (n, 2) in {(3, 2)}, lambda n: min(n, 4) == 4, lambda n: n % 2 == 0,
        lambda n: functools.lru_cache(lambda m: m == 3)(n), lambda n: max(n, 3) != 3, lambda n: bool(n - 1 > 2),
    ],
)  # fmt: skip
def test_what_python_decides_by_a_size_stays_true(test):
    f = ts.jit(lambda x: x * 10.0 if test(x.shape[0]) else x + 1.0, target="llvm")
    for size in (2, 3, 4, 1, 5, 6, 3, 9):
        want = 10.0 if test(size) else 2.0
        assert f(np.ones((size, 2), np.float32)).numpy()[0, 0] == want, size


def test_squeeze_of_all_axes_is_right_for_one_row():
    f = ts.jit(lambda x: ts.squeeze(x), target="llvm")
    assert [f(np.ones((n, 2), np.float32)).shape for n in (3, 4, 1, 5)] == [(3, 2), (4, 2), (2,), (5, 2)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(np.sqrt(x.shape[0])),
        lambda x: ts.grad(lambda y: ts.sum(ts.prod(y, axis=0)))(x),
        lambda x: sum((row for row in x), start=ts.Tensor(np.float32(0))),
    ],
)
def test_what_needs_a_number_is_compiled_for_each_size(function):
    f = ts.jit(function, target="llvm")
    for size in (2, 3, 5):
        x = rows(size, 4)
        np.testing.assert_allclose(f(x).numpy(), function(ts.Tensor(x)).numpy(), rtol=1e-5, atol=1e-6)


def test_dynamic_true_says_what_needs_a_number():
    with pytest.raises(UnknownSizeError, match="is not known"):
        ts.jit(lambda x: x * float(np.sqrt(x.shape[0])), target="llvm", dynamic=True)(rows(3))


ALONG = {
    "cumsum": (lambda x: ts.cumsum(x, axis=0), lambda x: np.cumsum(x, 0)),
    "cumprod": (lambda x: ts.cumprod(x, axis=1), lambda x: np.cumprod(x, 1)),
    "prod": (lambda x: ts.prod(x, axis=0), lambda x: np.prod(x, 0)),
    "prod of all": (lambda x: ts.prod(x), np.prod),
    "sort": (lambda x: ts.sort(x, axis=0), lambda x: np.sort(x, 0)),
    "flip": (lambda x: ts.flip(x, axis=0), lambda x: x[::-1]),
    "repeat": (lambda x: ts.repeat(x, 2, axis=0), lambda x: np.repeat(x, 2, 0)),
    "arange": (lambda x: x + ts.arange(x.shape[0])[:, None], lambda x: x + np.arange(len(x))[:, None]),
    "down": (lambda x: ts.arange(x.shape[0] - 1, -1, -2), lambda x: np.arange(len(x) - 1, -1, -2)),
    "lanes": (
        lambda x: ts.vmap(lambda r: ts.cumsum(r) + ts.prod(r))(x),
        lambda x: np.cumsum(x, 1) + x.prod(1)[:, None],
    ),
    "gradient": (
        lambda x: ts.grad(lambda y: ts.sum(ts.cumsum(y, axis=0) ** 2))(x),
        lambda x: 2 * np.cumsum(np.cumsum(x, 0)[::-1], 0)[::-1],
    ),
}


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("name", ALONG)
def test_one_program_for_all_sizes_of_the_axis(name, target, caplog):
    caplog.set_level(logging.INFO, "tessera.compile")
    function, reference = ALONG[name]
    f = ts.jit(function, target=target, dynamic=True)
    for shape in ((5, 6), (1, 33), (70, 2)):
        x = 1 + np.random.default_rng(7).standard_normal(shape).astype(np.float32) / 4
        np.testing.assert_allclose(f(x).numpy(), reference(x.astype(np.float64)), rtol=1e-4, atol=1e-5)
    assert len(compilations(caplog)) == 1


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "prod", "sort", "flip"])
def test_rows_may_be_empty(name, target):
    function, reference = ALONG[name]
    f = ts.jit(function, target=target, dynamic=True)
    for shape in ((3, 0), (0, 3), (0, 0), (2, 3)):
        found, want = f(np.ones(shape, np.float32)).numpy(), reference(np.ones(shape))
        assert found.shape == want.shape and (found == want).all()


@pytest.mark.parametrize("text", ["B >= 3", "2 < B", "B % 4 == 0", "B > 2 and B <= 64"])
@pytest.mark.parametrize("inside", [False, True])
def test_constraints_bound_sizes(text, inside):
    """What an op needs of a size may be stated, before the function or in it."""

    def largest(x: ts.Tensor["B", 2]):
        if inside:
            ts.require(text)
        return ts.topk(x, 3, axis=0)[0]

    f = ts.jit(largest if inside else ts.require(text)(largest), target="llvm", dynamic=True)
    for size in (4, 8):
        np.testing.assert_array_equal(f(rows(size, 2)).numpy(), -np.sort(-rows(size, 2), 0)[:3])
    with pytest.raises(ShapeError, match="does not hold"):
        f(rows(2, 2))


def test_a_bound_too_low_is_not_taken():
    @ts.jit(target="llvm", dynamic=True)
    @ts.require("B >= 2")
    def largest(x: ts.Tensor["B", 2]):
        return ts.topk(x, 3, axis=0)[0]

    with pytest.raises(UnknownSizeError, match="whether 3 <= B is not known"):
        largest(rows(4, 2))


def test_empty_axes_are_compiled_for_themselves():
    f = ts.jit(lambda x: ts.sum(x, axis=0), target="llvm")
    for size in (3, 4, 0, 5):
        np.testing.assert_allclose(f(rows(size, 3)).numpy(), rows(size, 3).sum(0), rtol=1e-5, atol=1e-6)


def test_a_checked_index_knows_the_size_of_its_call():
    f = ts.jit(lambda x, i: ts.take(x, i, axis=0), target="llvm")
    for size in (3, 4, 6):
        np.testing.assert_array_equal(f(rows(size, 2), np.array([size - 1, -size])).numpy(), rows(size, 2)[[-1, 0]])
    with pytest.raises(OutOfBoundsError, match="index 6 is outside axis 0"):
        f(rows(6, 2), np.array([0, 6]))


def test_slices_are_guarded():
    f = ts.jit(lambda x: x[:4] * 2.0, target="llvm")
    for size in (6, 7, 5, 3, 4, 2):
        np.testing.assert_array_equal(f(rows(size, 2)).numpy(), rows(size, 2)[:4] * 2)


UPDATES = {
    "every second": lambda x: x.at[::2].set(0),
    "every second with values": lambda x: x.at[::2].set(x[::2] * 2),
    "every third from the second": lambda x: x.at[1::3].multiply(5),
    "but the last": lambda x: x.at[:-1:2].add(2),
    "within the end": lambda x: x.at[-3:-1:2].set(7),
    "rows that may be none": lambda x: x.at[:-3].set(x[3:]),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_updates_of_slices_with_steps(update, target):
    """Found by fuzzing: the step was lost where the size was symbolic, and slices without elements were an error."""
    f = ts.jit(update, target=target)
    for size in (9, 8, 5, 7, 12, 4, 3):
        x = rows(size, 2)
        np.testing.assert_array_equal(f(x).numpy(), update(ts.Tensor(x)).numpy())


@pytest.mark.parametrize("pool", [ts.max_pool1d, ts.avg_pool1d])
def test_a_window_that_is_too_large_is_refused_for_later_sizes(pool):
    f = ts.jit(lambda x: pool(x, 3), target="llvm")
    for size in (9, 8, 4):
        assert f(rows(1, size)[None]).shape == (1, 1, size // 3)
    with pytest.raises(ShapeError, match="larger than the padded input"):
        f(rows(1, 2)[None])


def test_an_update_of_all_but_a_row_of_two_symbolic_sizes():
    """Found by fuzzing: the bounds of a checked index asked whether the axis has elements, which no size says."""
    x = np.arange(24, dtype=np.int8).reshape(4, 6)
    update = ts.jit(lambda x: x.at[1:].add(x[1:] * 2))
    program = prepare(update, (x,), "llvm", dynamic={"x": {0: "N", 1: "M"}})
    np.testing.assert_array_equal(program.run("device", "llvm")[0], np.concatenate([x[:1], x[1:] * 3]))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32])
def test_other_types(dtype):
    function = lambda x: ts.max(x, axis=0) + ts.sum(x, axis=0)  # noqa: E731
    f = ts.jit(function, target="llvm")
    for size in (2, 5, 33):
        x = (rows(size, 6) * 8).astype(dtype)
        np.testing.assert_allclose(
            f(x).numpy().astype(float),
            function(ts.Tensor(x)).numpy().astype(float),
            rtol=1e-2 if dtype != np.int32 else 0,
        )


def test_a_constraint_holds_for_every_call():
    @ts.jit(target="llvm")
    @ts.require("B % 2 == 0")
    def f(x: ts.Tensor["B", 24]):
        return x + 1.0

    for size in (2, 4, 6):
        f(rows(size))
    with pytest.raises(ShapeError, match="B % 2 == 0 does not hold"):
        f(rows(7))


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda n: bool(n % 2), lambda n: bool(n % 2)),
        (lambda n: not n % 4, lambda n: not n % 4),
        (lambda n: n % 3 == 0 or n % 5 == 2, lambda n: n % 3 == 0 or n % 5 == 2),
        (lambda n: bool(n - 5), lambda n: n != 5),
        (lambda n: n == 4.0, lambda n: n == 4),
        (lambda n: n == np.int64(6) or n == 6.5, lambda n: n == 6),
        (lambda n: n // 4 == 1, lambda n: n // 4 == 1),
    ],
)
def test_every_question_about_a_size_is_a_guard(choose, expected):
    """Remainders as conditions, and numbers of other kinds: no call runs with another size's branch."""
    f = ts.jit(lambda x: x * 3.0 if choose(x.shape[0]) else x, target="llvm")
    for size in (3, 5, 4, 6, 7, 8, 9, 12, 15):
        assert float(f(np.ones(size, np.float32)).numpy()[0]) == (3.0 if expected(size) else 1.0), size


def test_a_remainder_has_a_program_for_each_answer(caplog):
    caplog.set_level(logging.INFO, "tessera.compile")
    f = ts.jit(lambda x: x * 3.0 if x.shape[0] % 2 else x, target="llvm")
    for size in range(3, 20):
        f(np.ones(size, np.float32))
    assert sum("compiled" in r.getMessage() for r in caplog.records) == 3  # the first size, the even and the odd ones


def test_a_subscript_is_guarded_in_each_trace():
    """Two functions with the same subscript of the same symbol: each has its own guard."""
    functions = [ts.jit(lambda x, k=k: x[:4] * k, target="llvm") for k in (2.0, 3.0)]
    for f, k in zip(functions, (2.0, 3.0), strict=True):
        for size in (6, 7, 3, 2):
            np.testing.assert_array_equal(f(rows(size, 2)).numpy(), rows(size, 2)[:4] * np.float32(k))


def test_what_a_function_states_holds_for_every_call():
    @ts.jit(target="llvm")
    def f(x: ts.Tensor["B", 4]):
        ts.require("B % 2 == 0")
        return x * 2.0

    for size in (2, 4, 6):
        f(rows(size, 4))
    with pytest.raises(ShapeError, match="B % 2 == 0 does not hold"):
        f(rows(7, 4))
