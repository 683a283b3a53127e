"""Every public function of tensors with wrong ranks, shapes, types and axes: the error is ours; nothing upcasts."""

import inspect
import itertools
import math
from types import FunctionType

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, TesseraError
from tessera.ir.rules import Op

FUNCTIONS = {
    name: function
    for name in sorted(set(ts.__all__))
    if isinstance(function := getattr(ts, name), Op)
    or (isinstance(function, FunctionType) and function.__module__.startswith("tessera.ops"))
}
MATRIX, ROW, WHOLE = ts.Tensor([[1.0, 2.0], [3.0, 4.0]]), ts.Tensor([1.0, 2.0, 3.0]), ts.Tensor([[1, 2], [3, 4]])
VALUES = (
    MATRIX, ROW, WHOLE, ts.Tensor([[1.0, 2.0], [3.0, 4.0]], ts.f16), ts.Tensor([[True, False], [True, True]]),
    ts.Tensor(1.0), ts.zeros((0, 2)), "text", None, object(), 1.5, -3, [[1.0], [2.0, 3.0]],
)  # fmt: skip
AXES = (7, -9, "x", 1.5, (0, 0), (5,), True, None)


def parameters(function):
    """The names of a function's parameters, and how many are required."""
    if isinstance(function, Op):
        return [*function.operands, *function.attrs], len(function.operands)
    listed = inspect.signature(function).parameters.values()
    return [p.name for p in listed], len([p for p in listed if p.default is p.empty and p.kind is not p.VAR_POSITIONAL])


def tried(function, args, named):
    """Call; what is raised must be an error of ours."""
    try:
        function(*args, **named)
    except TesseraError as error:
        assert str(error)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_operands(name):
    _, required = parameters(FUNCTIONS[name])
    fill = (MATRIX,) * max(0, required - 2)
    for args in itertools.product(VALUES, repeat=min(required, 2)):
        tried(FUNCTIONS[name], (*args, *fill), {})


@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if "axis" in parameters(f)[0]])
def test_wrong_axes(name):
    names, required = parameters(FUNCTIONS[name])
    first = [n for n in names[:required] if n != "axis"]
    for axis in AXES:
        for x in (MATRIX, ts.Tensor(1.0)):
            tried(FUNCTIONS[name], (), {**dict.fromkeys(first, x), "axis": axis}) if name != "concatenate" else tried(
                FUNCTIONS[name], (x, x), {"axis": axis}
            )


@pytest.mark.parametrize("axis", [7, -3, "x", 1.5, (0, 0)])
def test_an_axis_that_is_none_says_so(axis):
    with pytest.raises(TesseraError, match="axis") as found:
        ts.sum(MATRIX, axis=axis)
    assert found.value.location.file == __file__


BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "atan2", "hypot", "logaddexp", "copysign", "matmul")
BINARY += ("floor_divide", "remainder", "less", "equal", "vecdot", "outer", "kron", "mse_loss", "l1_loss", "isclose")


@pytest.mark.parametrize("name", BINARY)
def test_float_types_never_mix(name):
    x = ROW if name == "outer" else MATRIX
    for narrow in (ts.f16, ts.bf16, ts.f64):
        with pytest.raises(DTypeError, match="mix"):
            getattr(ts, name)(x, x.to(narrow))


UNARY = [n for n, f in FUNCTIONS.items() if isinstance(f, Op) and len(f.operands) == 1 and f.infer is not None]
SAME = (*UNARY, "relu", "gelu", "silu", "sigmoid", "softmax", "log_softmax", "var", "std", "softplus", "mish", "flip")
HOST = ("cholesky", "svd", "qr", "eigh", "eig", "slogdet")


@pytest.mark.parametrize("dtype", [ts.f16, ts.bf16, ts.f64], ids=str)
@pytest.mark.parametrize("name", SAME)
def test_results_keep_the_type(name, dtype):
    """A float gives its own type, a bool (of a question) or an int64 (a place); never a wider float."""
    function = FUNCTIONS[name]
    needs = {"shape": (2, 2), "axes": (1, 0), "start": (0, 0), "stop": (1, 1)}
    named = {k: needs[k] for k in parameters(function)[0] if k in needs and k in ("shape", "axes", "start", "stop")}
    named |= {"width": 1} if name == "pad" else {}
    if name in ("cast", "bitwise_not"):  # it is told the type; it takes no floats
        return
    x = ts.Tensor(np.float64([[2.0, 0.5], [0.5, 1.0]]), dtype)
    out = function(x, **named)
    for each in out if isinstance(out, tuple) else (out,):
        assert each.dtype in (dtype, ts.bool, ts.int64)


def test_numbers_take_the_tensor_s_type():
    assert (ts.Tensor([1.0], ts.bf16) * 2.5).dtype is ts.bf16 and (ts.Tensor([1], ts.int8) + 1).dtype is ts.int8
    assert ts.where(ts.Tensor([True]), ts.Tensor([1.0], ts.f16), 0.0).dtype is ts.f16
    assert ts.clip(ts.Tensor([1.0], ts.f16), 0, math.inf).dtype is ts.f16
    assert (ts.Tensor([1], ts.int8) * 1.5).dtype is ts.f32


def test_a_refused_call_leaves_the_default_generator_as_it_was():
    ts.manual_seed(3)
    with pytest.raises(TesseraError, match="a permutation of 1.5 numbers"):
        ts.permutation(1.5)
    assert ts.rand(3).tolist() == ts.rand(3, generator=ts.manual_seed(3)).tolist()


CALLS = {
    "a shape that is a bool": (lambda: ts.zeros(True), "not a shape"),
    "a shape that is a tensor": (lambda: ts.layer_norm(MATRIX, MATRIX[0]), "not a shape"),
    "no arguments": (lambda: ts.zeros(), "missing 1 required positional argument: 'shape'"),
    "an unknown argument": (lambda: ts.exp(MATRIX, foo=1), "exp does not take these arguments"),
    "a result where a function is due": (lambda: ts.grad(ts.sum(MATRIX)), r"write grad\(f\)\(x\), not grad\(f\(x\)\)"),
    "a number for jit": (lambda: ts.jit(3), "jit takes a function"),
    "a number for vmap": (lambda: ts.vmap(3), "vmap takes a function"),
    "a static parameter that is none": (lambda: ts.jit(lambda x: x, static_argnames=("z",)), "no parameter z"),
    "an axis of vmap": (lambda: ts.vmap(lambda x: x, in_dims=5)(MATRIX), "axis 5 is out of range"),
    "a device": (lambda: MATRIX.to("float99"), "the device float99 is not available"),
    "a default device": (lambda: ts.set_default_device("none"), "the device none is not available"),
    "a target": (lambda: ts.jit(lambda x: x, target="none")(MATRIX), '"none" is not a code generator'),
    "a program": (lambda: ts.build(lambda x: x, MATRIX, out="nowhere"), "is not a program"),
    "an artifact": (lambda: ts.load("nowhere"), "there is no folder nowhere"),
    "an element type": (lambda: ts.accum("foo"), "'foo' is not an element type"),
    "no element type": (lambda: ts.finfo(None), "None is not an element type"),
    "unequal vectors": (lambda: ts.vecdot(ROW, ROW[:2]), "the vectors differ in length"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_tells_the_line(name):
    """File and line of the user's call, whatever was wrong with it."""
    call, says = CALLS[name]
    with pytest.raises(TesseraError, match=says) as caught:
        call()
    assert caught.value.location.file == __file__ and "|" in str(caught.value)


def test_a_selection_has_three_operands():
    with pytest.raises(ArgumentError, match="where takes 3 operands, not 1"):
        ts.where(ts.tensor([True]))
