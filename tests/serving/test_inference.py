"""Open Inference Protocol v2: what a server answers, and what it refuses."""

import json

import numpy as np
import pytest
import services

from tessera.core.types import as_dtype
from tessera.serving import ServerOptions, create_app

X = np.array([[1, 2, 3, 4], [0.5, 0, 0, -1]], np.float32)


@pytest.fixture(scope="module")
def app(scores):
    return create_app({"scores": scores}, ServerOptions(max_body_bytes=1 << 20, max_json_bytes=1 << 18))


def describe(data, shape=(2, 4), datatype="FP32", **more):
    return {"inputs": [{"name": "x", "shape": list(shape), "datatype": datatype, "data": data}], **more}


def post(app, content, path="/v2/models/scores/infer", **headers):
    named = {"headers": {k.replace("_", "-"): v for k, v in headers.items()}}
    body = json.dumps(content).encode() if isinstance(content, dict) else content
    return services.post(app, path, content=body, **named)


def read_outputs(response):
    assert response.status_code == 200, response.text
    return [np.array(o["data"], np.float32).reshape(o["shape"]) for o in response.json()["outputs"]]


def test_health_and_metadata(app):
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/scores/ready",
        "/v2/models/scores/versions/1/ready",
    ):
        assert services.get(app, path).status_code == 200
    found = services.get(app, "/v2/models/scores").json()
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert [(o["datatype"], o["shape"]) for o in found["outputs"]] == [("FP32", [-1, 3]), ("FP32", [-1])]
    assert "binary_tensor_data" in services.get(app, "/v2").json()["extensions"]
    for path in ("/v2/models/other", "/v2/models/scores/versions/2", "/v2/models/a%2Fb", "/other", "/v1/models/scores"):
        assert services.get(app, path).status_code == 404
    assert services.get(app, "/v2/models/scores/infer").status_code == 405


@pytest.mark.parametrize("data", [X.tolist(), X.reshape(-1).tolist()], ids=["nested", "flat"])
def test_json(app, data):
    response = post(app, describe(data, id="seven"))
    for found, want in zip(read_outputs(response), services.want_scores(X), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5)
    assert response.json()["id"] == "seven" and response.json()["model_name"] == "scores"


def test_binary(app):
    head = {"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}],
            "outputs": [{"name": "out1", "parameters": {"binary_data": True}}, {"name": "out0"}]}  # fmt: skip
    text = json.dumps(head).encode()
    response = post(app, text + X.tobytes(), Inference_Header_Content_Length=str(len(text)))
    size = int(response.headers["inference-header-content-length"])
    first, second = json.loads(response.content[:size])["outputs"]
    assert first["parameters"]["binary_data_size"] == len(response.content) - size == 8 and "data" not in first
    want = services.want_scores(X)
    np.testing.assert_allclose(np.frombuffer(response.content[size:], np.float32), want[1], rtol=1e-6)
    np.testing.assert_allclose(np.reshape(second["data"], (2, 3)), want[0], rtol=1e-5)
    nan = np.full((2, 4), np.nan, np.float32)  # NaN is data in binary, and none of JSON
    refused = post(app, text + nan.tobytes(), Inference_Header_Content_Length=str(len(text)))
    assert refused.status_code == 422 and "binary_data" in refused.json()["error"]


def binary(shape, size, raw, datatype="FP32"):
    tensor = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [tensor]}).encode()
    return text + raw, {"Inference_Header_Content_Length": str(len(text))}


HOSTILE = {
    "empty": b"",
    "no object": b"[]",
    "no utf-8": b"\xff\xfe{}",
    "no inputs": b"{}",
    "text": b"hello",
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 50_000,
    "deep inputs": b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}",
    "unfinished strings": b'{"inputs": "' + b'\\"' * 100_000,
    "twice": b'{"inputs": [], "inputs": []}',
    "large integer": b'{"inputs": [' + b"9" * 5000 + b"]}",
    "NaN": json.dumps(describe([float("nan")] * 8)).encode(),
    "infinity": json.dumps(describe([float("inf")] * 8)).encode(),
    "overflow": describe([1e39] + [0] * 7),
    "too large a float": b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1e999,0,0,0]}]}',
    "large int": describe([10**400] + [0] * 7),
    "shape": describe([0] * 6, (2, 3)),
    "rank": describe([0] * 8, (2, 2, 2)),
    "scalar": describe([0], ()),
    "no rows": describe([], (0, 4)),
    "dims": describe([0], (10**12, 4)),
    "product": describe([0], (2**62, 2**62)),
    "negative": describe([0] * 4, (-1, 4)),
    "float size": describe([0] * 4, (1.0, 4)),
    "bool size": describe([0] * 4, (True, 4)),
    "beyond 64 bits": describe([0], (2**63, 4)),
    "many dims": describe([0], (1,) * 33),
    "count": describe([0] * 7),
    "nested wrong": describe([[1, 2, 3, 4], [1, 2, 3]]),
    "nested flat": describe([[1, 2, 3, 4], 5, 6, 7, 8]),
    "strings": describe(["1"] * 8),
    "bools": describe([True] * 8),
    "nulls": describe([None] * 8),
    "object": describe({}),
    "datatype": describe([0] * 8, datatype="FP64"),
    "BYTES": describe([0] * 8, datatype="BYTES"),
    "no datatype": describe([0] * 8, datatype=None),
    "name": {"inputs": [{"name": "y", "shape": [1], "datatype": "FP32", "data": [1]}]},
    "no name": {"inputs": [{"shape": [1], "datatype": "FP32", "data": [1]}]},
    "inputs no list": {"inputs": {"x": 1}},
    "two": {"inputs": describe([0] * 8)["inputs"] * 2},
    "output": describe([0] * 8, outputs=[{"name": "z"}]),
    "outputs": describe([0] * 8, outputs="all"),
    "id": describe([0] * 8, id=7),
    "parameters": describe([0] * 8, parameters=[]),
    "flag": describe([0] * 8, parameters={"binary_data_output": "yes"}),
    "many": {"inputs": [{}] * 2000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json(app, name):
    response = post(app, HOSTILE[name])
    assert response.status_code == 400 and len(response.content) < 1000, response.text
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize(("body", "headers"), [
    binary([2, 4], 32, b"\0" * 31), binary([2, 4], 32, b"\0" * 33), binary([2, 4], 31, b"\0" * 31),
    binary([2, 4], -1, b""), binary([2, 4], True, b"\0"), binary([2, 4], "32", b"\0" * 32),
    binary([10**9, 4], 16 * 10**9, b"\0" * 32), (b"{}", {"Inference_Header_Content_Length": "3"}),
    (b"{}", {"Inference_Header_Content_Length": "-1"}), (b"{}", {"Inference_Header_Content_Length": "1e1"}),
    (b"{}", {"Inference_Header_Content_Length": "\u0661".encode()}), binary([2, 4], 8, b"\2" * 8, "BOOL"),
])  # fmt: skip
def test_hostile_binaries(app, body, headers):
    response = post(app, body, **headers)
    assert response.status_code == 400 and len(response.content) < 1000, response.text


def test_limits_of_size(app):
    assert post(app, b" " * (1 << 20 | 1)).status_code == 413
    assert post(app, b" " * (1 << 18 | 1)).status_code == 413  # JSON alone has a lower one
    assert post(app, describe(X.tolist()), Content_Encoding="gzip").status_code == 415

    async def chunks():
        for _ in range(1 << 12):
            yield b" " * 1024

    assert services.post(app, "/v2/models/scores/infer", content=chunks()).status_code == 413


def test_headers_that_are_there_twice(app):
    for name in ("Content-Type", "Inference-Header-Content-Length", "Authorization", "X-API-Key"):
        response = services.post(app, "/v2/models/scores/infer", content=b"{}", headers=[(name, "1"), (name, "1")])
        assert response.status_code == 400 and "twice" in response.json()["error"]


def test_integers_and_flags():
    from tessera.serving import ServedModel, TensorDescription

    specs = [
        TensorDescription("n", "int8", (-1,)),
        TensorDescription("b", "bool", (-1,)),
        TensorDescription("h", "f16", (-1,)),
    ]
    app = create_app({"echo": ServedModel("echo", lambda n, b, h: (n, b, h), inputs=specs, outputs=specs)})

    def send(n, b, h):
        tensors = [{"name": name, "datatype": t, "shape": [len(v)], "data": v}
                   for name, t, v in (("n", "INT8", n), ("b", "BOOL", b), ("h", "FP16", h))]  # fmt: skip
        return services.post(app, "/v2/models/echo/infer", json={"inputs": tensors})

    assert [o["data"] for o in send([-128, 127], [True, False], [0.5, 2]).json()["outputs"]] == [
        [-128, 127], [True, False], [0.5, 2.0]
    ]  # fmt: skip
    for wrong in (
        ([128], [True], [1]),
        ([1.0], [True], [1]),
        ([True], [True], [1]),
        ([1], [1], [1]),
        ([1], [True], [1e5]),
    ):
        assert send(*wrong).status_code == 400


def test_binary_tensors_one_after_the_other():
    from tessera.serving import ServedModel, TensorDescription

    kinds = {"a": "int8", "b": "f64", "c": "bf16", "d": "int16"}
    specs = [TensorDescription(name, kind, (-1, 1)) for name, kind in kinds.items()]
    app = create_app({"echo": ServedModel("echo", lambda *x: x, inputs=specs, outputs=specs)})
    values = [np.arange(i, i + 3)[:, None].astype(as_dtype(k).numpy) for i, k in enumerate(kinds.values())]
    types = ("INT8", "FP64", "BF16", "INT16")
    tensors = [{"name": n, "datatype": t, "shape": [3, 1], "parameters": {"binary_data_size": v.nbytes}}
               for n, t, v in zip(kinds, types, values, strict=True)]  # fmt: skip
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    raw = b"".join(v.tobytes() for v in values)
    response = post(app, head + raw, "/v2/models/echo/infer", Inference_Header_Content_Length=str(len(head)))
    size = int(response.headers["inference-header-content-length"])
    assert response.content[size:] == raw
    assert [o["datatype"] for o in json.loads(response.content[:size])["outputs"]] == list(types)


def test_a_model_that_fails_tells_nothing_of_itself():
    from tessera.serving import ServedModel, TensorDescription

    def fail(x):
        raise RuntimeError("secret")

    spec = [TensorDescription("x", "f32", (-1, 4))]
    app = create_app({"scores": ServedModel("scores", fail, inputs=spec, outputs=spec)})
    response = post(app, describe([0] * 8))
    assert response.status_code == 500 and "secret" not in response.text
