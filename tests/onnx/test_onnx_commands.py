"""The commands on ONNX files: run, build, inspect, bisect; open sizes and inputs that decide shapes."""

import numpy as np
import onnx
import pytest

from tessera.errors import ArgumentError
from tessera.tools.cli.entry_points import find_entry_point, make_inputs
from tessera.tools.cli.main import main

HEAD = '<ir_version: 10, opset_import: ["": 22]>'
PERCEPTRON = (
    HEAD
    + """
perceptron (float[batch, 3] x) => (float[batch, 2] y) <float[3, 2] w = {0.5, -1.0, 2.0, 0.25, 1.5, -0.75}>
{ h = MatMul(x, w)
  y = Tanh(h) }
"""
)
RESHAPED = HEAD + "flat (float[n] x, int64[2] shape) => (float[a, b] y) { y = Reshape(x, shape) }"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("perceptron", PERCEPTRON), ("flat", RESHAPED)):
        onnx.save(onnx.parser.parse_model(text), f"{name}.onnx")
    return tmp_path


def test_run_and_build(folder, capsys):
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    np.save("x.npy", x)
    assert main(["run", "perceptron.onnx", "--input", "x.npy", "--output", "y.npy"]) == 0
    assert "within the bound" in capsys.readouterr().out
    w = np.float32([[0.5, -1.0], [2.0, 0.25], [1.5, -0.75]])
    np.testing.assert_allclose(np.load("y.npy"), np.tanh(x @ w), rtol=1e-5)
    assert main(["build", "perceptron.onnx", "--target", "llvm", "--size", "batch=4", "-o", "artifact"]) == 0
    assert main(["run", "artifact", "--input", "x.npy", "--output", "z.npy"]) == 0
    np.testing.assert_allclose(np.load("z.npy"), np.load("y.npy"), rtol=1e-5)


def test_inspect_shows_nodes(folder, capsys):
    assert main(["inspect", "perceptron.onnx", "--size", "batch=4", "--level", "graph"]) == 0
    assert "y = Tanh(h)" in capsys.readouterr().out


def test_inputs_that_decide_shapes(folder):
    np.save("x.npy", np.arange(6, dtype=np.float32))
    np.save("shape.npy", np.array([2, 3]))
    assert main(["run", "flat.onnx", "--input", "x.npy", "--input", "shape.npy", "--output", "y.npy"]) == 0
    np.testing.assert_array_equal(np.load("y.npy"), np.arange(6).reshape(2, 3))
    with pytest.raises(ArgumentError, match="decides shapes"):
        make_inputs(find_entry_point("flat.onnx", ["n=6"]), 0)


def test_sizes(folder, capsys):
    assert main(["run", "perceptron.onnx"]) == 2
    assert "leaves the size batch of the input x open" in capsys.readouterr().err
    assert main(["run", "perceptron.onnx", "--size", "rows=4"]) == 2
    assert "has no size rows" in capsys.readouterr().err
    assert main(["run", "perceptron.onnx", "--size", "batch"]) == 2
    assert "NAME=NUMBER" in capsys.readouterr().err
    assert main(["run", "program.py", "--size", "batch=4"]) == 2
    assert "--size is for the open axes of a model" in capsys.readouterr().err
