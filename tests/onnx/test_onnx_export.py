"""Export: models that onnx.checker accepts, and that the reference evaluator, onnxruntime and Tessera run alike."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import tessera as ts
from tessera.errors import ArgumentError, UnsupportedOpError

W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def attention(x):
    heads = x[None, None]
    return ts.scaled_dot_product_attention(heads, heads, heads, causal=True)


def network(x):
    h = ts.gelu(ts.layer_norm(ts.linear(x, W, np.float32([1, 2, 3, 4]))))
    return ts.softmax(h, axis=-1), ts.argmax(h, axis=-1), ts.mean(h, axis=0)


def indices(x):
    order = ts.argsort(x, axis=-1, descending=True)
    return ts.take_along_axis(x, order), x[:, ::-1], ts.pad(x, 1, value=2.0), ts.concatenate([x, x[:1]], axis=0)


def rounding(x):
    return x // 0.3, x % 0.3, ts.floor(x), ts.exp2(x), ts.log1p(ts.abs(x)), ts.expm1(x * 1e-3), ts.rsqrt(ts.abs(x) + 1)


def integers(x):
    n = ts.cast(x * 10, dtype=ts.int64)
    return n // 3, n % 3, n & 3, n << 2, n >> 1, ts.sum(n), n != 2


def convolution(x):
    image = x.reshape(1, 1, 5, 3)
    return ts.max_pool2d(ts.conv2d(image, np.ones((2, 1, 2, 2), np.float32), padding=1), 2)


def loops(x):
    total, rows = ts.scan(lambda s, r: (s * 0.5 + r, s), ts.zeros(3), x)
    i, y = ts.while_loop(lambda i, y: ts.sum(y) < 50.0, lambda i, y: (i + 1, y * 1.5), (0, ts.abs(x) + 1))
    return total, rows, i, y, ts.cond(ts.sum(x) > 0, lambda v: v * 2, lambda v: -v, x)


def gradient(x):
    return ts.grad(lambda v: ts.sum(ts.tanh(v @ W) ** 2))(x)


@pytest.mark.parametrize(
    "function",
    [network, attention, indices, rounding, integers, convolution, loops, gradient],
    ids=lambda f: f.__name__,
)
def test_exported_functions_run_alike_elsewhere(function, rng, tmp_path):
    x = rng.standard_normal((5, 3)).astype(np.float32)
    file = tmp_path / "model.onnx"
    ts.onnx.export(function, file, x)
    proto = onnx.load(file)
    onnx.checker.check_model(proto, full_check=True)
    want = function(ts.Tensor(x))
    want = [t.numpy() for t in (want if isinstance(want, tuple) else (want,))]
    name = proto.graph.input[0].name
    answers = [ReferenceEvaluator(proto).run(None, {name: x}), ts.onnx.load(file).run([x])]
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    answers.append(session.run(None, {name: x}))
    for found in answers:
        for a, b in zip(found, want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_the_same_function_gives_the_same_bytes(rng, tmp_path):
    x = rng.standard_normal((5, 3)).astype(np.float32)
    one, other = (ts.onnx.export(network, tmp_path / f"{i}.onnx", x) for i in range(2))
    assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()
    assert "test_onnx_export.py:" in one.graph.node[0].doc_string and len(one.graph.initializer) <= 12


def test_what_onnx_cannot_say():
    x = np.eye(3, dtype=np.float32)
    with pytest.raises(UnsupportedOpError, match="ts.cholesky") as raised:
        ts.onnx.export(lambda a: ts.cholesky(a), None, x)
    assert raised.value.location.file == __file__
    with pytest.raises(UnsupportedOpError, match="random numbers"):
        ts.onnx.export(lambda a: a + ts.rand(3), None, x)
    with pytest.raises(UnsupportedOpError, match="known by name alone"):
        ts.onnx.export(lambda a: ts.sum(a), None, ts.Tensor["N", 3])
    with pytest.raises(ArgumentError, match="opset 7"):
        ts.onnx.export(lambda a: a, None, x, opset=7)
    with pytest.raises(ArgumentError, match="the second argument of export is the file to write") as raised:
        ts.onnx.export(lambda a: a, x)
    assert raised.value.location.file == __file__
