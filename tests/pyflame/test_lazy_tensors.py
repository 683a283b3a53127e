"""Lazy tensors: what is evaluated when, what programs are compiled, and wrong calls."""

import gc
import weakref

import numpy as np
import pytest

import tessera as ts
import tessera.pyflame as pf
from tessera.pyflame.lazy_graph import count_programs


def test_nothing_is_computed_before_it_is_needed():
    x = pf.randn([4])
    y = pf.exp(x)
    assert not x.is_evaluated() and pf.is_lazy(y)
    array = y.numpy()
    assert y.is_evaluated()
    np.testing.assert_allclose(array, np.exp(x.numpy()), rtol=1e-6)


def test_eval_returns_its_tensors():
    a, b = pf.ones([2]), pf.zeros([2])
    c = a + b
    assert pf.eval(c) is c and pf.eval(a, b, c) == (a, b, c)
    assert c.eval() is c


def test_arrays_are_copies_in_both_directions():
    array = np.ones(3, np.float32)
    x = pf.from_numpy(array)
    y = x * 2.0
    array[:] = 5
    x.numpy()[:] = 7
    assert y.numpy().tolist() == [2, 2, 2]


def test_random_numbers_are_those_of_the_seed_in_any_order_of_evaluation():
    def draw(backwards):
        pf.manual_seed(3)
        a, b, c = pf.randn([5]), pf.rand([2, 3]), pf.randn([4], dtype=pf.float16)
        for x in [c, b, a] if backwards else [a, b, c]:
            x.eval()
        return [x.numpy() for x in (a, b, c)]

    for one, other in zip(draw(False), draw(True), strict=True):
        np.testing.assert_array_equal(one, other)
    ts.manual_seed(3)
    np.testing.assert_array_equal(draw(True)[0], (ts.manual_seed(3), ts.randn((5,)))[1].numpy())
    pf.manual_seed(0)
    x = pf.rand([100000], dtype=pf.bfloat16).numpy().astype(np.float32)
    assert x.max() < 1 and x.min() >= 0 and abs(x.mean() - 0.5) < 0.01


def test_a_random_tensor_has_one_value():
    x = pf.randn([3])
    y, z, other = x * 1.0, x * 1.0, pf.randn([3])
    assert (other.numpy() != x.numpy()).all() and (pf.rand([3]).numpy() != pf.rand([3]).numpy()).all()
    np.testing.assert_array_equal(y.numpy(), z.numpy())
    np.testing.assert_array_equal(y.numpy(), x.numpy())


def test_a_program_of_the_same_structure_is_compiled_once():
    def step(x, w):
        return pf.tanh(x @ w)

    w, h = pf.randn([3, 3]), pf.randn([2, 3])
    counts = []
    for _ in range(4):
        h = step(h, w).eval()
        counts.append(count_programs())
    assert counts[0] == counts[-1]
    before = count_programs()
    step(pf.randn([5, 3]), w).eval()
    assert count_programs() == before + 1


def test_long_graphs():
    x = pf.zeros([2])
    for _ in range(1500):
        x = x + 1.0
    assert x.numpy().tolist() == [1500, 1500]


def test_without_gradients_history_is_forgotten():
    with pf.no_grad():
        x = pf.ones([2])
        y = x * 2.0
        known = weakref.ref(x._expression)
        y.eval()
        del x
    gc.collect(1)
    assert known() is None


def test_text():
    x = pf.ones([2], layout=pf.MeshLayout.grid(1, 2))
    assert repr(x) == "Tensor(ones, shape=[2], dtype=float32, layout=MeshLayout.grid(1, 2), lazy)"
    assert repr(x.eval()) == "Tensor([1., 1.], shape=[2], dtype=float32, layout=MeshLayout.grid(1, 2))"
    assert (x.shape, x.ndim, x.numel, len(x), [float(v) for v in x]) == ([2], 1, 2, 2, [1, 1])


def test_formats():
    assert f"{pf.tensor(1.5) * 2.0:.2f}" == "3.00"


def test_data_types_of_data():
    assert pf.tensor([1, 2]).dtype is pf.float32
    assert pf.tensor([True]).dtype is pf.bool_
    assert pf.tensor(np.float64([1])).dtype is pf.float32
    assert pf.tensor(np.int64([1])).dtype is pf.int64
    assert pf.tensor(np.float16([1])).dtype is pf.float16
    assert pf.arange(3, dtype=pf.int32).numpy().dtype == np.int32
    assert pf.full([2], 3).dtype is pf.float32


HERE = __file__
WRONG = {
    "shapes": (lambda: pf.ones([2, 3]) + pf.ones([4]), ts.errors.ShapeError),
    "product": (lambda: pf.ones([2, 3]) @ pf.ones([2, 3]), ts.errors.ShapeError),
    "cat": (lambda: pf.cat([pf.ones([2, 3]), pf.ones([2, 4])]), ts.errors.ShapeError),
    "empty cat": (lambda: pf.cat([]), ts.errors.ArgumentError),
    "stack": (lambda: pf.stack([pf.ones([2]), pf.ones([3])]), ts.errors.ShapeError),
    "reshape": (lambda: pf.ones([6]).reshape([4, -1]), ts.errors.ShapeError),
    "axis": (lambda: pf.ones([6]).sum(dim=1), ts.errors.ShapeError),
    "squeeze": (lambda: pf.ones([6]).squeeze(3), ts.errors.ShapeError),
    "transpose": (lambda: pf.ones([6, 2]).transpose(0, 2), ts.errors.ShapeError),
    "index": (lambda: pf.ones([6])[6], ts.errors.TesseraError),
    "types": (lambda: pf.ones([2], pf.float16) + pf.ones([2]), ts.errors.DTypeError),
    "text": (lambda: pf.relu("x"), ts.errors.DTypeError),
    "list": (lambda: pf.relu([1.0]), ts.errors.DTypeError),
    "ragged": (lambda: pf.tensor([[1], [1, 2]]), ts.errors.ShapeError),
    "words": (lambda: pf.tensor(["a"]), ts.errors.DTypeError),
    "none": (lambda: pf.tensor(None), ts.errors.DTypeError),
    "unsigned": (lambda: pf.tensor(np.zeros(2, np.uint32)), ts.errors.DTypeError),
    "range": (lambda: pf.tensor([300], dtype=pf.int8), ts.errors.TesseraError),
    "type": (lambda: pf.zeros([2], dtype="float33"), ts.errors.DTypeError),
    "integers": (lambda: pf.randn([2], dtype=pf.int32), ts.errors.DTypeError),
    "shape": (lambda: pf.zeros([2, -1]), ts.errors.ShapeError),
    "float shape": (lambda: pf.zeros([2.0]), ts.errors.ShapeError),
    "fill": (lambda: pf.full([2], "a"), ts.errors.ArgumentError),
    "fraction": (lambda: pf.full([2], 1.5, dtype=pf.int32), ts.errors.DTypeError),
    "step": (lambda: pf.arange(0, 5, 0), ts.errors.ArgumentError),
    "nan": (lambda: pf.arange(float("nan")), ts.errors.ArgumentError),
    "layout": (lambda: pf.zeros([2], layout="grid"), ts.errors.ArgumentError),
    "array": (lambda: pf.from_numpy([1]), ts.errors.DTypeError),
    "item": (lambda: pf.zeros([2]).item(), ts.errors.ShapeError),
    "lazy": (lambda: pf.is_lazy(3), ts.errors.ArgumentError),
    "eval": (lambda: pf.eval(np.ones(2)), ts.errors.ArgumentError),
    "class": (lambda: pf.Tensor([1.0]), ts.errors.ArgumentError),
    "assignment": (lambda: pf.zeros([2]).__setitem__(0, 1.0), ts.errors.ArgumentError),
    "seed": (lambda: pf.manual_seed(1.5), ts.errors.ArgumentError),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_typed_errors_at_the_line_of_the_user(name):
    call, kind = WRONG[name]
    with pytest.raises(kind) as found:
        call()
    assert found.value.location.file == HERE
    assert found.value.location.line == call.__code__.co_firstlineno


def test_errors_of_evaluation_have_the_recorded_line():
    x, i = pf.tensor([1.0, 2.0]), pf.tensor([5], dtype=pf.int32)
    y = x[i]  # this line
    with pytest.raises(ts.errors.OutOfBoundsError) as found:
        y.eval()
    assert "this line" in str(found.value)


def test_evaluation_inside_a_trace_is_refused():
    x = pf.ones([2]) * 2.0
    with pytest.raises(ts.errors.TraceError, match="lazy tensor"):
        ts.jit(lambda a: a + x.numpy())(np.ones(2, np.float32))
