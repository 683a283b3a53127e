"""Checked indices: a function of tensors reads and writes no memory but its own, on every target, and says where."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import tile
from tessera.codegen.contract import emit_artifact, get_backend, load_interpreter, load_runtime
from tessera.errors import OutOfBoundsError
from tessera.interp.tile import interpreter
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ops.tensor.shape import normalise_indices
from tessera.runtime.program import prepare

X, W = np.arange(5, dtype=np.float32), np.arange(20, dtype=np.float32).reshape(5, 4)
# Functions of an array and indices of its first axis, with NumPy's answer.
FUNCTIONS = {
    "subscript": (lambda x, i: x[i], lambda x, i: x[i]),
    "joint": (lambda x, i: x[i, i], lambda x, i: x[i, i]),
    "gather": (lambda x, i: ts.gather(x, i, axis=0), lambda x, i: x[i]),
    "embedding": (ts.embedding, lambda x, i: x[i]),
    "take": (ts.take, lambda x, i: x[i]),
    "take_along_axis": (
        lambda x, i: ts.take_along_axis(x[:, :1], i.reshape(2, 1), axis=0),
        lambda x, i: x[i, :1],
    ),
    "at-set": (lambda x, i: x.at[i].set(7.0), lambda x, i: change(x, i, 7.0)),
    "at-add": (lambda x, i: x.at[i].add(1.0), lambda x, i: change(x, i, x[i] + 1)),
    "scatter": (lambda x, i: ts.scatter(x, i, x[2:4]), lambda x, i: change(x, i, x[2:4])),
    "scatter-max": (lambda x, i: ts.scatter(x, i, x[2:4] + 9, mode="max"), lambda x, i: change(x, i, x[2:4] + 9)),
    "scatter_add": (lambda x, i: ts.scatter_add(x, i, x[2:4]), lambda x, i: change(x, i, x[i] + x[2:4])),
    "index_add": (lambda x, i: ts.index_add(x, 0, i, x[2:4]), lambda x, i: change(x, i, x[i] + x[2:4])),
}
TARGETS = ["interp", "llvm", "ptx", "csl"]


def change(x, i, values):
    out = x.copy()
    out[i] = values
    return out


def call(function, target, *args):
    if target == "eager":
        return function(*map(ts.Tensor, args)).numpy()
    return np.asarray(ts.jit(function, target=target)(*args))


def indices(*numbers):
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("target", ["eager", *TARGETS])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_negative_indices_count_from_the_end(name, target):
    function, reference = FUNCTIONS[name]
    x = W if name != "joint" else W[:, :4]
    i = indices(-4, -1) if name != "joint" else indices(-4, 3)
    np.testing.assert_array_equal(call(function, target, x, i), reference(x, i))


@pytest.mark.in_turn("wrong")
@pytest.mark.parametrize("target", ["eager", *TARGETS])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("wrong", [5, -6, 2**40])
def test_an_index_outside_is_an_error(name, target, wrong):
    with pytest.raises(OutOfBoundsError, match="is outside axis 0 of size 5") as caught:
        call(FUNCTIONS[name][0], target, W, indices(1, wrong))
    assert caught.value.location.line and "test_checked_indices.py" in caught.value.location.file
    assert target == "csl" or f"index {wrong} is outside" in str(caught.value)


@pytest.mark.parametrize("engine", ["llvm", "llvm text", "ptx text", "csl text"])
def test_what_a_failed_run_leaves_changes_no_later_one(engine):
    """One loaded program, with indices inside and outside in turn."""
    target, _, text = engine.partition(" ")
    backend, name = get_backend(target), "scatter_add"
    module = prepare(ts.jit(FUNCTIONS[name][0]), (W, indices(1, 3)), target).levels["tile"]
    artifact = emit_artifact(backend, module, {})
    run = load_interpreter(backend, artifact) if text else load_runtime(backend, artifact).run
    for pair, inside in (((1, 3), True), ((1, 5), False), ((2, -1), True), ((-9, 0), False), ((0, 4), True)):
        if inside:
            np.testing.assert_array_equal(run([W, indices(*pair)])[0], FUNCTIONS[name][1](W, indices(*pair)))
        else:
            with pytest.raises(OutOfBoundsError):
                run([W, indices(*pair)])


@pytest.mark.parametrize("target", ["eager", "interp", "llvm", "ptx"])
@pytest.mark.parametrize("wrong", [40, -41, 2**40])
def test_library_kernels_check_too(target, wrong):
    """Of many updates, which a kernel of the library adds in order."""
    rng = np.random.default_rng(0)
    x, updates, i = np.zeros((40, 70), np.float32), rng.random((30, 70), np.float32), rng.integers(-40, 40, 30)
    expected = x.copy()
    np.add.at(expected, i, updates)
    function = lambda x, i, updates: ts.scatter_add(x, i, updates)  # noqa: E731
    np.testing.assert_allclose(call(function, target, x, i, updates), expected, rtol=1e-6)
    with pytest.raises(OutOfBoundsError, match=f"index {wrong} is outside axis 0 of size 40"):
        call(function, target, x, np.where(np.arange(30) == 17, wrong, i), updates)


@pytest.mark.parametrize("target", ["eager", *TARGETS])
@pytest.mark.parametrize("loss", [ts.cross_entropy, ts.nll_loss])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_class_outside_is_an_error(loss, target, wrong):
    with pytest.raises(OutOfBoundsError, match="class .*is outside axis 1 of size 4"):
        call(loss, target, W[:2], indices(0, wrong))


@pytest.mark.parametrize("target", TARGETS)
def test_an_ignored_class_is_no_index(target):
    expected = ts.cross_entropy(W[:1], ts.Tensor([2])).numpy()
    found = call(lambda x, i: ts.cross_entropy(x, i, ignore_index=-100), target, W[:2], indices(2, -100))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


gathered = {t: ts.jit(lambda x, i: x[i] + 1.0, target=t) for t in ("interp", "llvm")}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(gathered)), st.sampled_from([1, 3, 77, 1000]))
def test_as_numpy(data, target, count):
    x = np.arange(77, dtype=np.float32)
    i = np.random.default_rng(count).integers(-77, 77, count)
    i[data.draw(st.integers(0, count - 1))] = data.draw(st.sampled_from([-(2**63), -78, -77, 0, 76, 77, 78, 2**63 - 1]))
    try:
        expected = x[i] + 1
    except IndexError:
        expected = None
    if expected is None:
        with pytest.raises(IndexError, match="is outside axis 0 of size 77"):
            gathered[target](x, i)
    else:
        np.testing.assert_array_equal(np.asarray(gathered[target](x, i)), expected)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.uint64])
@pytest.mark.parametrize("target", ["eager", "interp", "llvm", "ptx"])
def test_indices_of_every_type(dtype, target):
    i = np.array([1, 3], dtype)
    np.testing.assert_array_equal(call(lambda x, i: x[i], target, X, i), X[[1, 3]])
    with pytest.raises(OutOfBoundsError, match=f"index {np.iinfo(dtype).max if dtype != np.uint64 else ''}"):
        call(lambda x, i: x[i], target, X, np.array([1, np.iinfo(dtype).max], dtype))
    with pytest.raises(OutOfBoundsError, match="is outside axis 0 of size 5"):
        call(ts.take_along_axis, target, X, np.array([1, np.iinfo(dtype).max], dtype))


@pytest.mark.parametrize("target", TARGETS)
def test_places_that_a_guard_leaves_out_are_not_checked(target):
    def function(x, i):
        return ts.concatenate([x[i + 4], ts.pad(x[i], (2, 3)), ts.pad(x[i + 7], (2, 3))])

    i = indices(-3, -4, -5)  # where nothing is read, i may be 0, and i + 7 is no index
    found = call(function, target, X, i)
    np.testing.assert_array_equal(found, np.concatenate([X[i + 4], np.pad(X[i], (2, 3)), np.pad(X[i + 7], (2, 3))]))
    np.testing.assert_array_equal(call(lambda x, i: x[i + 7] * 2.0, target, X, i), X[i + 7] * 2)


@pytest.mark.parametrize(
    "target, count", [*((t, n) for t in TARGETS for n in (3, 77)), *((t, 5003) for t in TARGETS[:3])]
)
def test_what_fills_up_a_tile_is_no_index(count, target):
    """There i is 0, and i + 7 and i + 9 are outside, beside places that need a negative index moved."""
    i = np.arange(count) % 5
    found = call(lambda x, i: x[i + 7] * 2.0 + x[i + 9], target, X, i - 12)
    np.testing.assert_array_equal(found, X[i - 5] * 2 + X[i - 3])


@pytest.mark.parametrize("target", TARGETS)
def test_ranges_that_end_at_the_axis(target):
    """What is known of an index leaves the check out where it proves it, and not one element further."""
    i = indices(0, 5, 11, 4)
    for function, expected in (
        (lambda x, i: x[i % 5], X[i % 5]),
        (lambda x, i: x[i % 5 - 1], X[i % 5 - 1]),
        (lambda x, i: x[i % 10 - 5], X[i % 10 - 5]),
    ):
        np.testing.assert_array_equal(call(function, target, X, i), expected)
    with pytest.raises(OutOfBoundsError, match="is outside axis 0 of size 5"):
        call(lambda x, i: x[i % 6], target, X, i)
    with pytest.raises(OutOfBoundsError, match="is outside axis 0 of size 5"):
        call(lambda x, i: x[i % 5 - 6], target, X, i)


def test_only_counted_indices_are_checked():
    found = normalise_indices(np.array([9, -1, -9, 4]), 5, 0, counted=np.array([False, True, False, True]))
    assert found[[1, 3]].tolist() == [4, 4]
    with pytest.raises(OutOfBoundsError, match="index -9 is outside axis 1 of size 5"):
        normalise_indices(np.array([9, -1, -9, 4]), 5, 1, counted=np.array([False, True, True, True]))
    with pytest.raises(OutOfBoundsError, match="class -1 is outside axis 0 of size 5"):
        normalise_indices(np.array([4, -1]), 5, 0, what="class", wrap=False)


@ts.kernel
def pick_odd(x: ts.Tensor[5, ts.f32], i: ts.Tensor[4, ts.int64], out: ts.Tensor[4, ts.f32]):
    p = tile.program_id(0)
    if p % 2 == 1:
        tile.store(out[p], tile.load(x[tile.load(i[p])]))


def insert_check(text):
    """A module of text in which the one integer that is loaded is checked as an index of an axis of size 5."""
    (loaded,) = re.findall(r'(%\d+) = "ts.reshape".* -> tensor<i64>.*\n', text)
    head, line, tail = re.split(rf"( *{loaded} = .*\n)", text)
    known = '{along = 0 : i64, size = 5 : i64, what = "index", wrap = true} : (tensor<i64>) -> tensor<i64>'
    return head + line + f'%9999 = "ts.check_index"({loaded}) {known}\n' + re.sub(rf"{loaded}\b", "%9999", tail)


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_a_branch_that_is_not_taken_checks_nothing(target):
    """Programs 0 and 2 have indices outside, and do not use them."""
    out, i = np.zeros(4, np.float32), indices(9, -1, -7, 3)
    module = prepare(pick_odd[4], (X, i, out), target).levels["tile"]
    module = parse_module(insert_check(print_module(module)))
    backend = get_backend(target) if target != "interp" else None
    run = backend.interpreter(backend.emit(module, {})) if backend else lambda arrays: interpreter.run(module, arrays)
    run([X, i, out])
    np.testing.assert_array_equal(out, [0, X[-1], 0, X[3]])
    with pytest.raises(OutOfBoundsError, match="index 5 is outside axis 0 of size 5"):
        run([X, indices(9, 1, 9, 5), out])


@pytest.mark.parametrize("target", ["eager", "interp", "llvm"])
def test_errors_name_the_axis_of_the_update(target):
    updates, i = np.ones((40, 30), np.float32), np.arange(30)
    function = lambda x, i, updates: ts.scatter_add(x, i, updates, axis=1)  # noqa: E731
    with pytest.raises(OutOfBoundsError, match="index 70 is outside axis 1 of size 70"):
        call(function, target, np.zeros((40, 70), np.float32), np.where(i == 17, 70, i), updates)


def test_the_first_failure_is_reported_whatever_the_threads():
    """Every index is wrong, in many programs and two launches; the error is that of the first one."""
    function = ts.jit(lambda x, i: x[i].sum() + x[i + 1], target="llvm")
    i = np.arange(5, 300_005)
    for _ in range(10):
        with pytest.raises(OutOfBoundsError, match=r"index [56] is outside axis 0 of size 5"):
            function(X, i)
    np.testing.assert_array_equal(function(X, i * 0), np.ones(300_000, np.float32))


def test_a_loop_ends_at_a_failure():
    """The condition depends on memory that the failed launch did not write."""

    @ts.jit(target="llvm")
    def count(x, i):
        return ts.while_loop(lambda s, k: s < 3.0, lambda s, k: (s + x[i + k].sum(), k + 1), (0.0, 0))[0]

    assert float(count(X + 1, indices(0))) == 3.0
    with pytest.raises(OutOfBoundsError, match="index 5 is outside axis 0 of size 5"):
        count(X * 0, indices(2))


def test_the_check_is_visible_and_dropped_where_proven():
    """Below Graph the check is an op; an index that is proven to be in bounds has none."""
    for function, expected in (
        (lambda x, i: x[i], 1),
        (lambda x, i: x[ts.iota((5,)) % 3], 0),
        (lambda x, i: x[::-1], 0),
        (lambda x, i: x[ts.iota((6,)) % 6], 1),
    ):
        levels = prepare(ts.jit(function), (X, indices(0)), "interp").levels
        for level in ("schedule", "tile"):
            assert print_module(levels[level]).count("ts.check_index") == expected


@pytest.mark.parametrize("last", [6, 7])
@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_places_that_floats_give_are_checked_where_they_may_be_outside(target, last):
    """An image is resampled by one kernel, whatever the order of its axes; places are computed in f32."""
    step = np.float32(last / 11 + 1e-3)

    def resample(image):
        rows = (ts.iota((12,)).astype(ts.f32) * float(step)).astype(ts.int64)
        columns = ts.maximum(ts.iota((9,)).astype(ts.f32) * 0.5 - 1.0, 0.0).astype(ts.int64)
        return ts.permute(image, axes=(2, 0, 1))[:, rows.reshape((12, 1)), columns] * 2.0

    image = np.arange(7 * 4 * 3, dtype=np.float32).reshape(7, 4, 3)
    module = prepare(ts.jit(resample), (image,), target).levels["tile"]
    assert print_module(module).count("ts.check_index") == (last == 7)
    assert print_module(module).count('"host.launch"') == 1
    if last == 7:
        with pytest.raises(OutOfBoundsError, match="index 7 is outside axis 1 of size 7"):
            call(resample, target, image)
        return
    rows, columns = (
        (np.arange(12, dtype=np.float32) * step).astype(int),
        np.maximum(np.arange(9) * 0.5 - 1, 0).astype(int),
    )
    want = image.transpose(2, 0, 1)[:, rows[:, None], columns] * 2
    np.testing.assert_array_equal(call(resample, target, image), want)


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_emulators_of_texts_check_as_machines_do(target):
    """The text itself checks: an emulator that knows nothing of the compiler finds the same failure, each time."""
    i = np.array([4, -1, 0, 7, 9, *[3] * 60])
    backend = get_backend(target)
    levels = prepare(ts.jit(lambda x, i: x[i] * 2.0), (X, i), target).levels
    run = backend.interpreter(backend.emit(levels["tile"], {}))
    for _ in range(2):
        with pytest.raises(OutOfBoundsError, match="index 7 is outside axis 0 of size 5"):
            run([X, i])
    np.testing.assert_array_equal(run([X, np.minimum(i, 4)])[0], X[np.minimum(i, 4)] * 2)


@pytest.mark.parametrize("target", ["eager", "interp", "llvm"])
@pytest.mark.parametrize("name", ["gather", "scatter_add"])
def test_in_a_batch_the_error_names_the_axis_of_an_example(name, target):
    program = ts.vmap(FUNCTIONS[name][0])
    with pytest.raises(OutOfBoundsError, match="index 5 is outside axis 0 of size 5"):
        call(program, target, np.stack([W, W]), np.array([[0, 1], [2, 5]]))


@pytest.mark.parametrize("target", ["eager", *TARGETS])
@pytest.mark.parametrize("bounded", [lambda i: ts.minimum(i, 4), lambda i: i % 7], ids=["above", "below"])
def test_an_index_with_a_bound_on_one_side_is_checked_on_the_other(bounded, target):
    def function(x, i):
        return ts.take(x, bounded(i), axis=0)

    right, wrong = np.array([3, 0, 9, -1] if bounded(9) == 4 else [3, 0, 7, 11]), np.array([-6, 1, 5, 2])
    np.testing.assert_array_equal(call(function, target, W, right), W[np.asarray(bounded(right))])
    with pytest.raises(OutOfBoundsError, match="is outside axis 0 of size 5"):
        call(function, target, W, wrong)
