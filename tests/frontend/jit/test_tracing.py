"""@jit: what is traced, what is static, what is cached, and what is refused."""

import functools
import json

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, ShapeError, TraceError
from tessera.core.shapes import as_size, require
from tessera.core.types import TensorType, accum, bf16, f32
from tessera.frontend.jit.tracing import jit
from tessera.interp import graph
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise, nn


class Calls:
    """What a traced function was called with; a closure over it is the same closure however much it holds."""

    def __init__(self):
        self.seen = []


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_runs_as_written():
    assert np.array_equal(jit(lambda x: x * 2.0 + 1.0)(X).numpy(), X * 2 + 1)


def test_pytrees_go_in_and_out():
    @jit
    def step(params, x):
        return {"y": x @ params["w"], "parts": [params["b"], 3]}

    out = step({"w": np.eye(3, dtype=np.float32), "b": X[0]}, X)
    assert np.array_equal(out["y"].numpy(), X) and out["parts"][1].item() == 3


def test_static_arguments_make_one_trace_each():
    calls = Calls()

    @jit(static_argnames=("power",))
    def f(x, power):
        calls.seen.append(power)
        return x**power

    for power in (2, 3, 2):
        assert np.allclose(f(X, power).numpy(), X**power)
    assert calls.seen == [2, 3]


def test_a_trace_serves_equal_shapes_only():
    calls = Calls()

    @jit
    def f(x):
        calls.seen.append(x.shape)
        return -x

    for array in (X, X + 1, X[:1], X.astype(np.float64)):
        f(array)
    assert calls.seen == [(2, 3), (1, 3), (2, 3)]


def test_closures_are_part_of_the_key():
    def scaled(factor):
        return jit(lambda x: x * factor)

    assert scaled(2.0)(X)[1, 2].item() == 10 and scaled(3.0)(X)[1, 2].item() == 15
    bias = np.ones(3, np.float32)
    traced = jit(lambda x: x + bias).trace(X)
    assert traced.captures == (bias,) or traced.captures[0] is bias


def test_numbers_are_traced_scalars():
    assert np.array_equal(jit(lambda x, s: x * s)(X, 2.0).numpy(), X * 2)


def test_annotations_bind_sizes_and_policies():
    @jit
    def f(x: Tensor["B", "D", bf16 @ accum(f32)], w: Tensor["D", 4, bf16]):
        return x @ w

    x, w = X.astype(bf16.numpy), np.ones((3, 4), bf16.numpy)
    assert f.trace(x, w).function.params[0].type.policy == bf16 @ accum(f32)
    with pytest.raises(ShapeError, match=r"argument w: axis 0: D is 3 elsewhere and 2 here"):
        f(x, np.ones((2, 4), bf16.numpy))
    with pytest.raises(DTypeError, match="argument x has another element type"):
        f(X, w)


def test_symbolic_shapes_trace_without_running():
    traced = jit(lambda x: nn.softmax(x)[:, :1]).trace(TensorType((as_size("B"), 8), f32))
    (result,) = traced.function.results
    assert str(result.type) == "Bx1xf32"
    (out,) = graph.run(traced.function, [np.ones((5, 8), np.float32)])
    assert out.shape == (5, 1)


def test_control_flow_on_values_is_refused_with_the_line():
    @jit
    def f(x):
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(TraceError) as caught:
        f(X)
    text = str(caught.value)
    assert "test_tracing.py:" in text and "ts.where" in text and "if x.sum() > 0:" in text


def test_wrong_calls_say_so():
    with pytest.raises(ArgumentError, match="missing a required argument: 'y'"):
        jit(lambda x, y: x)(X)
    with pytest.raises(ArgumentError, match="returned a str"):
        jit(lambda x: "no")(X)


def test_a_jit_inside_a_jit_is_inlined():
    inner = jit(lambda x: elementwise.exp(x))
    names = [n.op.name for n in jit(lambda x: inner(x) + 1.0).trace(X).function.body.nodes]
    assert "ts.exp" in names


def test_nodes_know_their_line():
    traced = jit(lambda x: x * 2.0).trace(X)
    assert all(n.loc.file.endswith("test_tracing.py") for n in traced.function.body.nodes)


def test_an_expression_may_precede_its_name():
    @jit
    def f(x: Tensor["2*B"], y: Tensor["B"]):
        return x.sum() + y.sum()

    assert f(np.ones(4, np.float32), np.ones(2, np.float32)).item() == 6
    with pytest.raises(ShapeError, match=r"argument x: axis 0: expected 2\*B = 6, received 4"):
        f(np.ones(4, np.float32), np.ones(3, np.float32))
    traced = f.trace(TensorType((as_size("2*B"),), f32), TensorType((as_size("B"),), f32))
    with pytest.raises(ShapeError, match=r"argument x: axis 0: expected 2\*B = 6, received 4"):
        graph.run(traced.function, [np.ones(4, np.float32), np.ones(3, np.float32)])


def test_symbolic_types_are_held_against_annotations():
    f = jit(lambda x, y: x @ y)
    f.annotations = {"x": Tensor["B", "D"], "y": Tensor["D", "..."]}
    b, k = as_size("B"), as_size("K")
    with pytest.raises(ShapeError, match="argument y: axis 0: D is K elsewhere and B here"):
        f.trace(TensorType((b, k), f32), TensorType((b, 4), f32))


def test_any_leading_axes():
    @jit
    def f(x: Tensor["...", "D"], w: Tensor["D"]):
        return (x * w).sum()

    for shape in ((3,), (2, 3), (2, 1, 3)):
        assert f(np.ones(shape, np.float32), X[0]).item() == X[0].sum() * np.prod(shape[:-1])


def test_requirements_of_sizes():
    @jit
    @require("D % 2 == 0")
    def f(x: Tensor["B", "D"]):
        require("B < D")
        return -x

    assert f(np.ones((2, 4), np.float32)).shape == (2, 4)
    with pytest.raises(ShapeError, match="D % 2 == 0 does not hold"):
        f(X)
    with pytest.raises(ShapeError, match="B < D does not hold") as caught:
        f(np.ones((4, 4), np.float32))
    assert "test_tracing.py:" in str(caught.value)


def test_values_that_closed_over_functions_hold_are_part_of_the_key():
    factor = 2.0

    def scaled(x):
        return x * factor if x.ndim else scaled(x[None])  # closes over itself too

    outer = jit(lambda x: scaled(x) + 1.0)
    assert outer(X)[0, 1].item() == 3
    factor = 5.0
    assert outer(X)[0, 1].item() == 6


def test_defaults_that_a_call_leaves_are_no_operands():
    """A number that only the function's own line gives may decide an axis, and takes the type beside it."""
    f = ts.jit(lambda x, axis=-1, scale=0.5: ts.sum(x * scale, axis=axis))
    assert f(np.ones((2, 3), np.float32)).tolist() == [1.5, 1.5]
    assert [p.hint for p in f.trace(np.ones((2, 3), np.float32)).function.params] == ["x"]
    assert f(ts.ones((2, 3), ts.f16)).dtype == ts.f16
    assert [p.hint for p in f.trace(np.ones((2, 3), np.float32), scale=2.0).function.params] == ["x", "scale"]


def declared(annotation, body, *args):
    def function(x):
        return body(x)

    function.__annotations__ = {"x": Tensor["N", "D"], "return": annotation}
    return jit(function)(*args or (X,))


def test_a_result_as_declared():
    assert declared(Tensor["D", "N"], lambda x: x.T).shape == (3, 2)
    assert declared(tuple[Tensor["N"], Tensor["D"]], lambda x: (x.sum(1), x.sum(0)))[1].shape == (3,)
    assert declared(Tensor["K", "D"], lambda x: ts.concatenate([x, x])).shape == (4, 3)  # K is the result's own name


@pytest.mark.parametrize(
    ("annotation", "body", "error", "problem"),
    [
        (Tensor["N", "D"], lambda x: x.sum(-1), ShapeError, "rank 2 expected, rank 1 received"),
        (Tensor["N", 10], lambda x: x * 2.0, ShapeError, "axis 1: expected 10, received 3"),
        (Tensor["D", "N"], lambda x: x * 2.0, ShapeError, "axis 0: D is 3 elsewhere and 2 here"),
        (Tensor["N", "D", bf16], lambda x: x * 2.0, DTypeError, "another element type"),
        (tuple[Tensor["N"], Tensor["D"]], lambda x: (x.sum(1), x.sum(1)), ShapeError, "D is 3 elsewhere and 2 here"),
    ],
)
def test_a_result_other_than_declared(annotation, body, error, problem):
    with pytest.raises(error, match="does not return what it says") as found:
        declared(annotation, body)
    assert problem in found.value.message and found.value.location.file == __file__


def test_a_product_declared_in_the_type_of_its_accumulator_is_not_rounded_before():
    narrow = ts.fp8_e4m3 @ accum(f32)

    @jit
    def product(a: Tensor["M", "K", narrow], b: Tensor["K", "N", narrow]) -> Tensor["M", "N", f32]:
        return ts.gemm(a, b)

    a = np.linspace(-2, 2, 12, dtype="f4").reshape(3, 4).astype(ts.fp8_e4m3.numpy)
    assert product(a, a.T).dtype == f32 and ts.check(product).ok
    np.testing.assert_allclose(product(a, a.T).numpy(), a.astype("f4") @ a.T.astype("f4"), rtol=1e-6)


def test_broadcast_errors_have_the_names_of_sizes():
    @jit
    def add(x: Tensor["B", "S"], y: Tensor["B", "K"]):
        return x + y

    with pytest.raises(ShapeError, match=r"cannot broadcast S = 3 with K = 5 in dimension 1"):
        add(X, np.ones((2, 5), "f4"))
    assert "Cannot broadcast S with K in dimension 1" in str(ts.check(add))


def test_a_list_is_no_annotated_tensor():
    @jit
    def double(x: Tensor["N"]):
        return x * 2.0

    with pytest.raises(DTypeError, match="argument x is not a tensor") as error:
        double([float(i) for i in range(10_000)])
    assert len(str(error.value)) < 500 and error.value.suggestion == "ts.tensor(x)"


def test_a_comparison_of_sizes_is_no_annotation():
    size, _ = ts.dims("size other")

    def function(x: Tensor["N", size], constraint: size % 8 == 0):
        return x

    with pytest.raises(ArgumentError, match="the annotation of constraint is False") as error:
        jit(function)
    assert '@ts.require("D % 8 == 0")' in error.value.suggestion


class Scaled:
    def __call__(self, x):
        return x * 3.0


def scale(factor, x):
    return x * factor


@pytest.mark.parametrize(
    "function, name",
    [(lambda x: x * 3.0, "lambda_"), (functools.partial(scale, 3.0), "scale"), (Scaled(), "Scaled"), (scale, "scale")],
    ids=["lambda", "partial", "object", "function"],
)
def test_programs_have_the_name_of_what_was_traced(function, name, tmp_path):
    x = np.ones(3, np.float32)
    arguments = (3.0, x) if function is scale else (x,)
    np.testing.assert_array_equal(ts.jit(function)(*arguments), x * 3)
    folder = ts.build(ts.jit(function), *arguments, out=tmp_path / "built")
    assert json.loads((folder / "manifest.json").read_text())["interface"]["entry"] == name


def test_one_static_argument_needs_no_list():
    x = np.ones((2, 3), "f4")
    assert ts.jit(lambda x, n: x * n, static_argnums=1)(x, 2).tolist() == [[2, 2, 2]] * 2
    assert ts.jit(lambda x, axis: x.sum(axis), static_argnames="axis")(x, 0).tolist() == [2, 2, 2]


def test_what_a_mask_chooses_has_no_size_in_a_trace():
    for function in (lambda x: x[x > 0], lambda x: ts.nonzero(x), lambda x: x.at[x > 0].get()):
        with pytest.raises(TraceError) as error:
            ts.jit(function)(np.ones((2, 3), "f4"))
        assert "ts.where" in error.value.suggestion and "x.at[mask]" in error.value.suggestion


def test_a_tensor_that_left_its_trace_says_so():
    kept = []
    ts.jit(lambda x: kept.append(x) or x * 2)(np.ones(2, "f4"))
    for use in (lambda x: x + 1, lambda x: x.numpy(), float):
        with pytest.raises(TraceError, match="after its trace has ended"):
            use(kept[0])
