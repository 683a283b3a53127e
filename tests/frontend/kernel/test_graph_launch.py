"""Kernel launches in traced functions: both forms, on every level and target, and what they refuse."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, ExecutionError, OutOfBoundsError, ShapeError, TraceError, VerifyError
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.verify import verify
from tessera.runtime import driver

TARGETS = ("interp", "llvm", "ptx", "csl:2x2")
X, Y = np.arange(24, dtype="f4"), np.linspace(-1, 1, 24, dtype="f4")


@ts.kernel
def axpy(x, y, out, alpha: float, *, BM: int = 8):
    """out = x + alpha y."""
    i = tile.program_id(0) * BM
    out[i : i + BM] = x[i : i + BM] + y[i : i + BM] * alpha


@ts.kernel
def accumulate(x, total, *, BM: int = 8):
    """total += x."""
    i = tile.program_id(0) * BM
    total[i : i + BM] += x[i : i + BM]


@ts.kernel
def halves(x, low, high, *, BM: int = 8):
    """Two results of different types."""
    i = tile.program_id(0) * BM
    low[i : i + BM] = x[i : i + BM] * 0.5
    high[i : i + BM] = tile.cast(x[i : i + BM] * 2.0, ts.int32)


@ts.kernel
def mean(x, *, N: int):
    """A kernel that returns a value."""
    return tile.sum(x[0:N]) / N


def in_place(x, y):
    out = ts.empty((24,))
    axpy[(3,)](x * 2.0, y, out, 3.0)
    return out + 1.0


def functional(x, y):
    return ts.launch(axpy, (3,), x * 2.0, y, ts.like(x), 3.0) + 1.0


def updated(x, y):
    total = ts.zeros(24) + 1.0
    accumulate[(3,)](x * 2.0, total)
    accumulate[lambda sizes: (3,)](y * 3.0, total)
    return total


def kept(x, y):
    """The initial memory is used again after the launch: the launch writes a copy."""
    start = x * 2.0
    total = ts.launch(accumulate, (3,), y * 3.0, start)
    return total + (start - x * 2.0) + 1.0


def started_twice(x, y):
    """Two launches continue from one memory, and a third from an argument, which stays."""
    start = ts.launch(axpy, (3,), x, y, ts.like(x), 0.0)
    low, high = (ts.launch(accumulate, (3,), y * k, start) for k in (1.0, 2.0))
    return ts.launch(accumulate, (3,), low, x) + high - x + 1.0


def two_forms(x, y):
    """A kernel with two values of its constants."""
    low, high = ts.launch(axpy, (3,), x, y, ts.like(x), 1.0), ts.launch(axpy, (6,), x, y, ts.like(x), 2.0, BM=4)
    return low + high + 1.0


@ts.kernel
def accumulate_rows(x, total):
    i = tile.program_id(0)
    total[i, 0:4] += x[i, 0:4]


def reshaped(x, y):
    """A launch that updates another shape of a memory that is used again."""
    start = ts.launch(axpy, (3,), x, y, ts.like(x), 1.0)
    total = ts.launch(accumulate_rows, (6,), ts.reshape(y * 2.0, shape=(6, 4)), ts.reshape(start, shape=(6, 4)))
    return ts.reshape(total, shape=(24,)) + start - y + 1.0


PROGRAMS = (in_place, functional, updated, kept, started_twice, two_forms, reshaped)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_launch_is_part_of_the_program(program, target):
    expected = X * 2 + Y * 3 + 1
    np.testing.assert_allclose(ts.jit(program, target=target)(X, Y), expected, rtol=1e-6)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_every_level_has_a_meaning_and_a_text(program):
    levels = driver.lower(ts.jit(program).trace(X, Y).function, "interp")
    for level in ("graph", "schedule", "tile"):
        module = verify(parse_module(print_module(levels[level])))
        (found,) = driver.compile_level({**levels, level: module}, level, "interp", {})([X, Y])
        np.testing.assert_allclose(found, X * 2 + Y * 3 + 1, rtol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_memory_that_is_read_after_a_launch_that_continues_from_it(target):
    def program(x, y):
        start = ts.launch(axpy, (3,), x, y, ts.like(x), 1.0)
        return ts.launch(accumulate, (3,), y, start), start * 2.0

    for result, expected in zip(ts.jit(program, target=target)(X, Y), (X + 2 * Y, (X + Y) * 2), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_memory_that_only_the_launch_uses_is_not_copied():
    tile_module = driver.lower(ts.jit(updated).trace(X, Y).function, "llvm")["tile"]
    launches = [n for n in tile_module.main.body.walk() if n.op.name == "host.launch"]
    names = [n.attrs["kernel"] for n in launches]
    assert len(names) == 3  # the fill, and two launches of the kernel, each of which computes its product
    assert sum(name.startswith("accumulate_with_mul") for name in names) == 2


@pytest.mark.parametrize("target", TARGETS[:3])
def test_results_of_several_types_and_returned_values(target):
    def program(x):
        low, high = ts.launch(halves, (3,), x, ts.like(x), ts.like(x, dtype="int32"))
        return low, high, ts.launch(mean, (1,), x, N=24), mean[(1,)](x, N=24)

    low, high, first, second = ts.jit(program, target=target)(X)
    np.testing.assert_array_equal(low, X / 2)
    np.testing.assert_array_equal(high, (X * 2).astype("i4"))
    np.testing.assert_allclose([first, second], X.mean(), rtol=1e-6)


def test_outside_of_a_trace_arguments_do_not_change():
    total = X.copy()
    found = ts.launch(accumulate, (3,), Y, total)
    np.testing.assert_array_equal(total, X)
    np.testing.assert_allclose(found, X + Y)
    np.testing.assert_allclose(ts.launch(axpy, (3,), X, Y, ts.like(X), 2.0), X + 2 * Y, rtol=1e-6)


def test_an_autotuned_kernel_runs_in_a_trace_with_its_first_configuration():
    tuned = ts.autotune({"BM": [4, 8]})(ts.kernel(axpy.kernel_function))
    program = ts.jit(lambda x, y: ts.launch(tuned, lambda c: (24 // c["BM"],), x, y, ts.like(x), 2.0))
    np.testing.assert_allclose(program(X, Y), X + 2 * Y, rtol=1e-6)


def test_artifact_holds_the_kernel(tmp_path):
    ts.build(ts.jit(functional), X, Y, target="llvm", out=tmp_path / "out")
    np.testing.assert_allclose(ts.load(tmp_path / "out")(X, Y), X * 2 + Y * 3 + 1, rtol=1e-6)


def test_errors_of_a_launch_name_the_kernel_s_line():
    program = ts.jit(lambda x, y: ts.launch(axpy, (4,), x, y, ts.like(x), 1.0))
    with pytest.raises(OutOfBoundsError, match=r"program \(3,\)") as caught:
        program(X, Y)
    assert caught.value.location.file == __file__


@ts.kernel
def printing(x):
    tile.print(x[0])


def view_first(x, y):
    out = ts.zeros(24)
    seen = ts.reshape(out, shape=(4, 6))
    axpy[(3,)](x, y, out, 1.0)
    return seen


def view_itself(x, y):
    out = ts.reshape(ts.zeros((4, 6)), shape=(24,))
    axpy[(3,)](x, y, out, 1.0)
    return out


def outer_memory(x, y):
    total = ts.zeros(24)
    step = lambda s, v: (s + 1.0, accumulate[(3,)](v, total))  # noqa: E731
    return ts.scan(step, ts.Tensor(0.0), ts.stack([x, y]))


REFUSED = {
    "one tensor twice": (lambda x, y: ts.launch(axpy, (3,), x, out := x * 1.0, out, 1.0), ArgumentError, "and as `y`"),
    "an input as the output": (lambda x, y: axpy[(3,)](x, y, y, 1.0), ArgumentError, "one tensor is passed"),
    "a parameter of the function": (lambda x, y: accumulate[(3,)](x, y), TraceError, "not made in the function"),
    "a captured array": (lambda x, y: accumulate[(3,)](x, X), TraceError, "not made in the function"),
    "a view taken before": (view_first, TraceError, "shares memory with a view"),
    "a view": (view_itself, TraceError, "shares memory with a view"),
    "memory of an outer trace": (outer_memory, TraceError, "not made in the function"),
    "nothing written": (lambda x, y: ts.launch(printing, (1,), x), TraceError, "writes no memory"),
    "no kernel": (lambda x, y: ts.launch(np.sin, (3,), x), ArgumentError, "launch takes a kernel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    program, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        ts.jit(program)(X, Y)


@ts.kernel
def checked(x, out, *, BM: int = 8):
    """A kernel with an effect beside its result."""
    i = tile.program_id(0) * BM
    tile.assert_(x[i : i + BM] < 20.0, "too large")
    out[i : i + BM] = x[i : i + BM]


def count_launches(program, *args):
    main = driver.lower(ts.jit(program).trace(*args).function, "llvm")["tile"].main
    return [n.attrs["kernel"] for n in main.body.walk() if n.op.name == "host.launch"]


def test_a_launch_whose_results_are_unused_is_removed_unless_it_has_an_effect():
    def unused(x, y):
        ts.launch(axpy, (3,), x, y, ts.like(x), 2.0)
        ts.launch(checked, (3,), x, ts.like(x))
        return x + y

    assert sorted(count_launches(unused, X, Y)) == ["checked", "k0_add"]
    for target in ("interp", "llvm"):
        with pytest.raises(ExecutionError, match="too large"):
            ts.jit(unused, target=target)(X, Y)
    gradient = ts.grad(lambda x: ts.launch(axpy, (3,), x, Y, ts.like(x), 2.0).sum())
    assert "axpy_vjp" in count_launches(gradient, X) and "axpy" not in count_launches(gradient, X)


@pytest.mark.parametrize("target", TARGETS[:3])
def test_memory_without_elements_and_empty_grids(target):
    empty = np.zeros(0, "f4")
    program = ts.jit(lambda x, y: ts.launch(axpy, (0,), x, y, ts.like(x), 1.0) + 1.0, target=target)
    assert program(empty, empty).shape == (0,)
    kept = ts.jit(lambda x: ts.launch(accumulate, (0,), x, x * 2.0), target=target)
    np.testing.assert_array_equal(kept(X), X * 2)


def test_a_traced_number_is_no_constant_of_a_kernel_and_no_grid():
    with pytest.raises(ArgumentError, match=r"`BM` of axpy is a constant[^$]*static_argnames=\(\"BM\",\)"):
        ts.jit(lambda x, n: ts.launch(axpy, (3,), x, x, ts.like(x), 1.0, BM=n))(X, 8)
    with pytest.raises(ArgumentError, match=r"is not a grid size[^$]*x\.shape\[0\]"):
        ts.jit(lambda x, n: ts.launch(axpy, (n,), x, x, ts.like(x), 1.0))(X, 3)
    block = ts.jit(lambda x, n: ts.launch(axpy, (24 // n,), x, x, ts.like(x), 1.0, BM=n), static_argnames=("n",))
    assert np.array_equal(block(X, n=4), 2 * X)


def test_new_memory_of_a_shape_and_type_alone():
    new = ts.like(shape=(24,), dtype=ts.f32)
    assert np.array_equal(ts.jit(lambda x: ts.launch(axpy, (3,), x, x, new, 1.0))(X), 2 * X)
    with pytest.raises(ArgumentError, match="type of new memory is not known"):
        ts.like(shape=(24,))


@pytest.mark.parametrize("target", TARGETS)
def test_a_batched_launch_in_a_scan(target):
    """On a mesh the elements gather the carried rows before the launch, with the index type of a kernel."""
    double = lambda c: ts.launch(axpy, (1,), c, c * 1.0, ts.like(c), 1.0)  # noqa: E731
    steps = lambda v: ts.scan(lambda c, s: (double(c) + s, None), v, ts.ones(3))[0]  # noqa: E731
    x = np.arange(24, dtype="f4").reshape(3, 8)
    np.testing.assert_allclose(ts.jit(ts.vmap(steps), target=target)(x), x * 8 + 7, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "other", "message"),
    [
        ("grid = [3 : i64]", "grid = [-3 : i64]", "a grid is a tuple of sizes"),
        ("grid = [3 : i64]", "grid = [3.0 : f64]", "a grid is a tuple of sizes"),
        ("group = 1 : i64", "group = 0 : i64", "not a group size"),
        ("written = [2 : i64]", "written = [0 : i64]", "the written memories are others"),
    ],
)
def test_the_text_of_a_launch_is_verified(text, other, message):
    whole = print_module(driver.lower(ts.jit(functional).trace(X, Y).function, "interp")["graph"])
    assert text in whole
    with pytest.raises(VerifyError, match=message):
        verify(parse_module(whole.replace(text, other)))


def test_a_clone_keeps_its_elements_when_the_kernel_writes_the_tensor():
    def program(x):
        total = ts.zeros(24)
        before, again = total.clone(), ts.tensor(total)
        accumulate[(3,)](x, total)
        return total, before, again

    for run in (program, ts.jit(program)):
        for found, expected in zip(run(ts.Tensor(X)), (X, X * 0, X * 0), strict=True):
            np.testing.assert_array_equal(found, expected)


@ts.kernel
def split(x, out, total, last, *, BM: int = 8):
    """Writes new memory, memory that it is given, and new memory again."""
    i = tile.program_id(0) * BM
    out[i : i + BM] = x[i : i + BM] * 2.0
    total[i : i + BM] += x[i : i + BM]
    last[i : i + BM] = x[i : i + BM] * 4.0


@pytest.mark.parametrize("wrap", (lambda f: f, ts.jit), ids=("eager", "jit"))
def test_results_are_in_the_order_of_the_parameters(wrap):
    found = wrap(lambda x, y: ts.launch(split, (3,), x, ts.like(x), y * 1.0, ts.like(x)))(ts.Tensor(X), ts.Tensor(Y))
    for result, expected in zip(found, (X * 2, X + Y, X * 4), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_named_arguments_are_differentiated_on_a_tape():
    x = ts.Tensor(X, requires_grad=True)
    ts.launch(axpy, (3,), out=ts.like(X), y=x, x=ts.Tensor(X), alpha=3.0).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full(24, 3.0))


@pytest.mark.parametrize("wrap", (lambda f: f, ts.jit, ts.vmap), ids=("eager", "jit", "vmap"))
def test_results_have_the_policy_of_their_memory(wrap):
    x = ts.Tensor(X.reshape(1, 24) if wrap is ts.vmap else X, ts.bf16 @ ts.accum(ts.f32) @ ts.toward_zero)
    assert ts.like(x).type == x.type and ts.like(x, shape=(2,)).type.policy == x.type.policy
    new, updated, _ = wrap(lambda x: ts.launch(split, (3,), x, ts.like(x), x * 1.0, ts.like(x)))(x)
    assert new.type == updated.type == x.type
