"""Models from strangers: truncated, cyclic, with data outside their folder, or of the future, are typed errors."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tessera as ts
from tessera.errors import ArgumentError, FileError, ParseError, TesseraError, UnsupportedOpError


def make_model(nodes, opset=21, **more):
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])], **more,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def external(location, **entries):
    """A model whose parameter w lies in another file."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return make_model([helper.make_node("Add", ["x", "w"], ["y"], "sum")], initializer=[tensor])


def test_external_data_beside_the_model(tmp_path):
    np.float32([9, 9, 10, 20]).tofile(tmp_path / "w.bin")
    onnx.save(external("w.bin", offset=8, length=8), tmp_path / "m.onnx")
    np.testing.assert_array_equal(ts.onnx.load(tmp_path / "m.onnx").run([np.float32([1, 2])])[0], [11, 22])


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "link", "folder/secret", "a/../../secret"])
def test_external_data_outside_the_folder_is_not_read(tmp_path, location):
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "secret").write_bytes(bytes(8))
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "folder").symlink_to(tmp_path)
    onnx.save(external(location), inside / "m.onnx")
    with pytest.raises(FileError, match="w: its data is not in the model's folder"):
        ts.onnx.load(inside / "m.onnx")


def test_truncated_external_data(tmp_path):
    (tmp_path / "w.bin").write_bytes(bytes(4))
    onnx.save(external("w.bin"), tmp_path / "m.onnx")
    with pytest.raises(FileError, match="does not hold its data"):
        ts.onnx.load(tmp_path / "m.onnx")
    onnx.save(external("missing.bin"), tmp_path / "m.onnx")
    with pytest.raises(FileError, match="cannot be read"):
        ts.onnx.load(tmp_path / "m.onnx")
    with pytest.raises(FileError, match="no folder"):
        ts.onnx.load(external("w.bin"))


def test_negative_places_of_external_data(tmp_path):
    np.zeros(4, np.float32).tofile(tmp_path / "w.bin")
    for entries in ({"offset": -8, "length": 8}, {"offset": 0, "length": -1}):
        onnx.save(external("w.bin", **entries), tmp_path / "m.onnx")
        with pytest.raises(TesseraError, match="negative"):
            ts.onnx.load(tmp_path / "m.onnx")


@pytest.mark.parametrize("source", [None, 3, ["m.onnx"]])
def test_what_is_no_model_is_refused(source):
    with pytest.raises(ArgumentError, match="no ONNX model"):
        ts.onnx.load(source)


def test_cycles_and_undefined_values():
    nodes = [helper.make_node("Add", ["x", "b"], ["a"], "first"), helper.make_node("Neg", ["a"], ["b"], "second")]
    last = helper.make_node("Identity", ["b"], ["y"])
    with pytest.raises(ParseError, match="node first .Add. reads a value that depends on its own results"):
        ts.onnx.load(make_model([*nodes, last]))
    with pytest.raises(ParseError, match="node first .Add. reads z, which nothing computes"):
        ts.onnx.load(make_model([helper.make_node("Add", ["x", "z"], ["y"], "first")]))
    with pytest.raises(ParseError, match="nothing computes the result y"):
        ts.onnx.load(make_model([helper.make_node("Neg", ["x"], ["q"])]))


def test_unsorted_nodes_are_sorted():
    nodes = [helper.make_node("Neg", ["a"], ["y"]), helper.make_node("Abs", ["x"], ["a"])]
    np.testing.assert_array_equal(ts.onnx.load(make_model(nodes)).run([np.float32([1, -2])])[0], [-1, -2])


def test_operators_of_the_future_and_of_nobody():
    node = helper.make_node("Neg", ["x"], ["y"], "only")
    with pytest.raises(UnsupportedOpError, match="newer version"):
        ts.onnx.load(make_model([node], opset=999))
    unknown = ts.onnx.load(make_model([helper.make_node("Frobnicate", ["x"], ["y"], "only")]))
    with pytest.raises(UnsupportedOpError, match="node only .Frobnicate.: there is no such operator") as raised:
        unknown.run([np.float32([1, 2])])
    assert raised.value.location.excerpt().count("^") > 5
    foreign = helper.make_node("Op", ["x"], ["y"], "only", domain="com.example")
    with pytest.raises(UnsupportedOpError, match="com.example"):
        ts.onnx.load(make_model([foreign])).run([np.float32([1, 2])])


def test_wrong_operands_and_attributes():
    for node, words in (
        (helper.make_node("Add", ["x"], ["y"], "only"), "a wrong number of operands"),
        (helper.make_node("Neg", ["x"], ["y"], "only", colour=1), "no attribute colour"),
        (helper.make_node("Concat", ["x", "x"], ["y"], "only"), "lacks its attribute axis"),
        (helper.make_node("Transpose", ["x"], ["y"], "only", perm=[0, 0, 7]), "node only"),
    ):
        with pytest.raises(TesseraError, match=words):
            ts.onnx.load(make_model([node])).run([np.float32([1, 2])])


def test_functions_that_call_themselves():
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
    g (float[2] x) => (float[2] y) { y = own.again(x) }
    <domain: "own", opset_import: ["": 21, "own": 1]> again (v) => (w) { w = own.again(v) }"""
    model = onnx.parser.parse_model(text)
    with pytest.raises(ParseError, match="call themselves"):
        ts.onnx.load(model)


def test_functions_that_expand_without_limit():
    calls = [f'<domain: "own", opset_import: ["": 21, "own": 1]> f{i} (v) => (w) {{ a = own.f{i - 1}(v)\n'
             f" w = own.f{i - 1}(a) }}" for i in range(1, 40)]  # fmt: skip
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
    g (float[2] x) => (float[2] y) { y = own.f39(x) }
    <domain: "own", opset_import: ["": 21]> f0 (v) => (w) { w = Neg(v) } """
    with pytest.raises(ParseError, match="expand into more than"):
        ts.onnx.load(onnx.parser.parse_model(text + " ".join(calls)))


def test_truncated_files(tmp_path):
    weights = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    data = make_model([helper.make_node("Add", ["x", "w"], ["y"])], initializer=[weights]).SerializeToString()
    for length in range(0, len(data), 3):
        with pytest.raises(TesseraError):
            ts.onnx.load(data[:length]).run([np.float32([1, 2])])
    short = TensorProto(name="w")
    short.data_type, short.raw_data = TensorProto.FLOAT, bytes(4)
    short.dims.append(2)
    model = make_model([helper.make_node("Add", ["x", "w"], ["y"])], initializer=[short])
    with pytest.raises(FileError, match="truncated or malformed"):
        ts.onnx.load(model).run([np.float32([1, 2])])
    with pytest.raises(FileError, match="no file"):
        ts.onnx.load(tmp_path / "none.onnx")


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_are_typed_errors(seed):
    """Each byte may change: the model then loads and runs, or the error is typed."""
    random = np.random.default_rng(seed)
    weights = helper.make_tensor("w", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], "p"), helper.make_node("Softmax", ["a"], ["y"], axis=-1)]
    data = bytearray(make_model(nodes, initializer=[weights]).SerializeToString())
    for _ in range(150):
        damaged = bytearray(data)
        damaged[random.integers(len(data))] = random.integers(256)
        try:
            ts.onnx.load(bytes(damaged)).run([np.float32([1, 2])])
        except TesseraError:
            pass
