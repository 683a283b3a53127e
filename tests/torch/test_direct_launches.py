"""Direct launches: compiled functions on the memory of PyTorch's tensors, and what they leave to the general way."""

import gc
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from interrupts import interrupted  # noqa: E402

import tessera as ts  # noqa: E402
from tessera import tile  # noqa: E402
from tessera.codegen.llvm.runtime import tensor_calls  # noqa: E402
from tessera.errors import OutOfBoundsError  # noqa: E402
from tessera.torch.interop import OTHER, ProgramOptions, compile_for_tensors  # noqa: E402

X, Y = torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)


@pytest.fixture(autouse=True, params=("1", "2"))
def threads(request, monkeypatch):
    monkeypatch.setenv("TESSERA_THREADS", request.param)


@pytest.fixture
def direct(monkeypatch):
    """What came of each direct launch: whether it ran."""
    made, found = tensor_calls._make_function, []

    def noted(kind, words):
        run = made(kind, words)

        def call(*args):
            given = run(*args)
            found.append(given is not OTHER)
            return given

        return call if kind == "addresses" else run

    monkeypatch.setattr(tensor_calls, "_make_function", noted)
    return found


def compile_function(function, *tensors):
    traced = ts.jit(function).trace(*(ts.from_dlpack(t) for t in tensors))
    return compile_for_tensors(traced, ProgramOptions())


def test_results_lie_in_memory_of_their_own(direct):
    run = compile_function(lambda x, y: (x + y, ts.sum(x, axis=0)), X, Y)
    first, second = run([X, Y]), run([Y, Y])
    assert direct == [True, True]
    torch.testing.assert_close(first, [X + Y, X.sum(0)])
    torch.testing.assert_close(second, [Y + Y, Y.sum(0)])


def test_tensors_of_other_layouts_are_copied(direct):
    run = compile_function(lambda x, y: x + y, X, Y)
    wide = torch.arange(24.0).reshape(3, 8)
    torch.testing.assert_close(run([wide[:, ::2], Y]), [wide[:, ::2] + Y])
    assert direct == [True]


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (), (2, 0, 3)])
def test_sizes_of_0_and_1(shape):
    x = torch.ones(shape)
    (found,) = compile_function(lambda x: x * 2.0, x)([x])
    assert found.shape == x.shape and found.stride() == x.stride()
    torch.testing.assert_close(found, x * 2)


def test_another_thread_takes_the_general_way(direct):
    run, found = compile_function(lambda x, y: x + y, X, Y), []
    thread = threading.Thread(target=lambda: found.extend(run([X, Y])))
    thread.start()
    thread.join()
    torch.testing.assert_close(found, [X + Y])
    assert direct == [False]


def test_errors_pass_and_leave_the_program_free(direct):
    x, places = torch.arange(5.0), torch.tensor([0, 9])
    run = compile_function(lambda x, i: ts.take(x, i, axis=0), x, torch.tensor([0, 1]))
    for _ in range(2):
        with pytest.raises(OutOfBoundsError):
            run([x, places])
    torch.testing.assert_close(run([x, torch.tensor([3, 1])]), [x[[3, 1]]])
    assert direct == [True]  # the others raised


def test_what_is_no_number_is_an_error():
    run = compile_function(lambda x: x + 1.0, X)
    run([X])
    bound = next(cell.cell_contents for cell in run.__closure__ if isinstance(cell.cell_contents, dict))
    (_, launch, _) = next(iter(bound.values()))
    with pytest.raises(TypeError):
        launch("x", 0)
    assert launch(X.data_ptr()) is OTHER  # too few
    torch.testing.assert_close(run([X]), [X + 1])


def test_calls_keep_nothing():
    run = compile_function(lambda x, y: x + y, X, Y)
    run([X, Y])
    held = (None, False, True, OTHER)
    gc.collect()  # what earlier tests left
    before = [sys.getrefcount(each) for each in held]
    for _ in range(5000):
        run([X, Y])
    gc.collect()
    assert max(abs(sys.getrefcount(e) - n) for e, n in zip(held, before, strict=True)) < 1000


@ts.kernel
def add_often(x: ts.Tensor["N"], n: ts.Tensor["M", ts.int64]):
    i = tile.program_id(0)
    for _ in range(n[0]):
        x[i] += 1.0


def add_to_copy(x, n):
    out = x + 0.0
    add_often[(2,)](out, n)
    return out


def test_ctrl_c_stops_a_launch(direct):
    x = torch.zeros(2)
    run = compile_function(add_to_copy, x, torch.tensor([3]))
    assert run([x, torch.tensor([3])])[0].tolist() == [3.0, 3.0]
    with interrupted():
        run([x, torch.tensor([10**11])])
    assert run([x, torch.tensor([4])])[0].tolist() == [4.0, 4.0]
    assert direct == [True, True]  # that of the second raised
