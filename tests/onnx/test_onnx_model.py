"""Models as functions: calls, gradients, compilation for shapes and values, functions, control flow, artifacts."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tessera as ts
from tessera.errors import ArgumentError, DTypeError, ShapeError, TraceError

HEAD = '<ir_version: 10, opset_import: ["": 22, "own": 1]>'
PERCEPTRON = (
    HEAD
    + """
perceptron (float[n, 3] x) => (float[n, 2] y)
<float[3, 2] w = {0.5, -1.0, 2.0, 0.25, 1.5, -0.75}, float[2] b = {0.1, -0.2}>
{ h = MatMul(x, w)
  s = Add(h, b)
  y = Tanh(s) }
"""
)


def parse(text):
    return onnx.parser.parse_model(text)


@pytest.fixture
def x(rng):
    return rng.standard_normal((4, 3)).astype(np.float32)


@pytest.mark.parametrize("target", [None, "llvm"])
def test_run_equals_the_reference(x, target):
    proto = parse(PERCEPTRON)
    want = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(ts.onnx.load(proto).run({"x": x}, target)[0], want[0], rtol=1e-6)


def test_a_model_is_a_function_under_transforms(x):
    model = ts.onnx.load(parse(PERCEPTRON))
    slope = ts.grad(lambda p: ts.sum(model.apply(p, x)))(model.parameters)
    want = 1 - np.tanh(x @ model.parameters["w"].numpy() + model.parameters["b"].numpy()) ** 2
    np.testing.assert_allclose(slope["b"].numpy(), want.sum(0), rtol=1e-5)
    traced = model.jit().trace(x)
    assert [n.op.name for n in traced.function.body.nodes] == ["ts.dot", "ts.broadcast", "ts.add", "ts.tanh"]


def test_nodes_are_source_lines(x):
    model = ts.onnx.load(parse(PERCEPTRON))
    traced = model.jit().trace(x)
    last = traced.function.body.nodes[-1].loc
    assert last.file == "<perceptron>" and "y = Tanh(s)" in last.excerpt()


RESHAPE = (
    HEAD
    + """
flat (float[a, b] x, int64[r] shape) => (float[c] y)
{ n = Shape(x)
  k = Size(n)
  two = Constant<value_int = 2>()
  same = Equal(k, two)
  y = If(same) <
    then_branch = then () => (float[c] t) { t = Reshape(x, shape) },
    else_branch = other () => (float[a, b] u) { u = Identity(x) } > }
"""
)


def test_inputs_that_decide_shapes_are_taken_by_value(x):
    model = ts.onnx.load(parse(RESHAPE))
    assert model.shape_inputs == ("shape",)
    for shape in ([12], [2, 6], [-1]):
        found = model.run([x, np.array(shape)], "llvm")[0]
        np.testing.assert_array_equal(found, x.reshape(shape))


FUNCTION = (
    HEAD
    + """
calls (float[n] x) => (float[n] y) { y = own.scaled<by = 3.0>(x) }
<domain: "own", opset_import: ["": 22]>
scaled <by> (v) => (w) { c = Constant<value_float: float = @by>()
  w = Mul(v, c) }
"""
)


def test_functions_of_the_model_take_attributes():
    np.testing.assert_array_equal(ts.onnx.load(parse(FUNCTION)).run([np.float32([1, 2])])[0], [3, 6])


def loop_model(scan_outputs):
    """x is doubled until its sum passes 100, at most `most` times."""
    body = [
        helper.make_node("Add", ["v", "v"], ["w"]),
        helper.make_node("ReduceSum", ["w"], ["total"], keepdims=0),
        helper.make_node("Less", ["total", "hundred"], ["go"]),
    ]
    results = [("go", TensorProto.BOOL, []), ("w", TensorProto.FLOAT, [2])]
    if scan_outputs:
        body.append(helper.make_node("Identity", ["total"], ["row"]))
        results.append(("row", TensorProto.FLOAT, []))
    infos = [("i", TensorProto.INT64, []), ("c", TensorProto.BOOL, []), ("v", TensorProto.FLOAT, [2])]
    graph = helper.make_graph(
        body, "body", [helper.make_tensor_value_info(*i) for i in infos],
        [helper.make_tensor_value_info(*r) for r in results],
    )  # fmt: skip
    names = ["y", "rows"][: 1 + scan_outputs]
    outer = helper.make_graph(
        [helper.make_node("Loop", ["most", "", "x"], names, body=graph)], "doubling",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names],
        [numpy_helper.from_array(np.array(50), "most"), numpy_helper.from_array(np.float32(100), "hundred")],
    )  # fmt: skip
    return helper.make_model(outer, opset_imports=[helper.make_opsetid("", 21)])


@pytest.mark.parametrize("target", [None, "llvm"])
def test_loops_end_by_a_condition(target):
    model = ts.onnx.load(loop_model(scan_outputs=False))
    np.testing.assert_array_equal(model.run([np.float32([1, 2])], target)[0], [64, 128])


def test_a_loop_with_results_of_an_unknown_number_of_steps():
    model = ts.onnx.load(loop_model(scan_outputs=True))
    np.testing.assert_array_equal(model.run([np.float32([1, 2])])[1], [6, 12, 24, 48, 96, 192])
    with pytest.raises((ts.TesseraError,), match="each iteration"):
        model.run([np.float32([1, 2])], "llvm")


def test_wrong_inputs(x):
    model = ts.onnx.load(parse(PERCEPTRON))
    with pytest.raises(DTypeError, match="input x"):
        model.run([x.astype(np.float64)])
    with pytest.raises(ShapeError, match="input x"):
        model.run([x[:, :2]])
    with pytest.raises(ArgumentError, match="lacks its input x"):
        model.run({})
    with pytest.raises(ArgumentError, match="no input z"):
        model.run({"z": x})
    with pytest.raises(ArgumentError, match="no parameter v"):
        model.apply({"v": x}, x)


def test_a_shape_from_values_is_refused_when_compiled():
    text = HEAD + "chosen (float[n] x) => (int64[r, m] y) { y = NonZero(x) }"
    model = ts.onnx.load(parse(text))
    np.testing.assert_array_equal(model.run([np.float32([0, 3, 4])])[0], [[1, 2]])
    with pytest.raises(TraceError, match="NonZero"):
        model.run([np.float32([0, 3, 4])], "llvm")


FLAGGED = (
    HEAD
    + """
flagged (float[n] x, int64 rate) => (float[m] y)
{ fast = Constant<value_int = 16>()
  same = Equal(rate, fast)
  y = If(same) <
    then_branch = then () => (float[m] t) {
      four = Constant<value_ints = [4, -1]>()
      r = Reshape(x, four)
      t = ReduceSum<keepdims = 0>(r) },
    else_branch = other () => (float[m] u) {
      seven = Constant<value_ints = [7, -1]>()
      r = Reshape(x, seven)
      u = ReduceSum<keepdims = 0>(r) } > }
"""
)


def test_a_branch_that_is_not_taken_need_not_fit():
    model = ts.onnx.load(parse(FLAGGED))
    assert model.shape_inputs == ("rate",)
    assert model.run([np.ones(8, np.float32), np.array(16)], "llvm")[0] == 8
    assert model.run([np.ones(7, np.float32), np.array(8)], "llvm")[0] == 7
    with pytest.raises(ts.TesseraError, match="Reshape"):
        model.run([np.ones(8, np.float32), np.array(8)], "llvm")


def test_artifacts(x, tmp_path):
    model = ts.onnx.load(parse(PERCEPTRON))
    folder = ts.build(model.jit(), x, target="llvm", out=str(tmp_path / "artifact"))
    np.testing.assert_allclose(ts.load(folder)(x).numpy(), model.run([x])[0], rtol=1e-6)
