"""The server as a whole: queue, drain, streams that end early, failures of the model, metrics, the command."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest
import services

from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError
from tessera.serving import ServedModel, ServerOptions, TensorDescription, create_app, run_server
from tessera.serving.generation_engine import GenerationEngine
from tessera.serving.language_models import TextStream
from tessera.serving.openapi import describe_api
from tessera.serving.server import name_models, read_api_keys

SPEC = [TensorDescription("x", "f32", (1,))]
BODY = {"json": {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [3]}]}}
INFER = "/v2/models/m/infer"


class Gate:
    """A model that waits."""

    def __init__(self):
        self.started, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self, x):
        self.started.release()
        assert self.open.wait(20)
        return x


def serve_gate(**options):
    gate = Gate()
    return gate, create_app({"m": ServedModel("m", gate, inputs=SPEC, outputs=SPEC)}, ServerOptions(**options))


def test_queue_limit():
    gate, app = serve_gate(max_queue=3, retry_after=1.5)

    async def main():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            tasks = [asyncio.ensure_future(client.post(INFER, **BODY)) for _ in range(3)]
            await asyncio.sleep(0.2)
            refused = await client.post(INFER, **BODY)
            health = await client.get("/v2/health/ready")
            gate.open.set()
            return refused, health, await asyncio.gather(*tasks), await client.post(INFER, **BODY)

    refused, health, done, after = asyncio.run(main())
    assert refused.status_code == 429 and refused.headers["retry-after"] == "2" and "queue" in refused.json()["error"]
    assert [r.status_code for r in (health, *done, after)] == [200] * 5 and app.open == 0


def test_limit_of_all_bodies():
    gate, app = serve_gate(max_buffered_bytes=400)
    long = json.dumps(BODY["json"]) + " " * 200

    async def main():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            task = asyncio.ensure_future(client.post(INFER, content=long))
            await asyncio.sleep(0.1)
            refused = await client.post(INFER, content=long)
            gate.open.set()
            return refused.status_code, (await task).status_code, (await client.post(INFER, content=long)).status_code

    assert asyncio.run(main()) == (429, 200, 200) and app.buffered == 0


def test_drain_finishes_what_was_accepted():
    gate, app = serve_gate(drain_timeout=10)

    async def main():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            task = asyncio.ensure_future(client.post(INFER, **BODY))
            await asyncio.sleep(0.1)
            app.drain()
            ready, refused = await client.get("/v2/health/ready"), await client.post(INFER, **BODY)
            live = await client.get("/v2/health/live")
            gate.open.set()
            return ready, refused, live, await task, await app.drained()

    ready, refused, live, done, drained = asyncio.run(main())
    assert [r.status_code for r in (ready, refused, live, done)] == [503, 503, 200, 200] and drained
    assert "retry-after" in refused.headers


def test_keys():
    gate, app = serve_gate(api_keys=("first", "second"))
    gate.open.set()
    for headers, status in (
        ({}, 401), ({"Authorization": "Bearer firs"}, 401), ({"Authorization": "Bearer first"}, 200),
        ({"authorization": "bearer second"}, 200), ({"X-API-Key": "second"}, 200), ({"X-API-Key": ""}, 401),
        ({"Authorization": "Basic first"}, 401), ({"Authorization": "Bearer \u00e9".encode()}, 401),
    ):  # fmt: skip
        assert services.get(app, "/v2", headers=headers).status_code == status, headers
    assert services.post(app, INFER, **BODY).status_code == 401
    assert services.get(app, "/v2/health/live").status_code == 200 and services.get(app, "/metrics").status_code == 401


def test_slow_bodies_end():
    _, app = serve_gate(body_timeout=0.2)
    with services.serve(app) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{{".encode())
        client.settimeout(10)
        assert b" 408 " in client.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("head", [
    "Content-Length: 5\r\nContent-Length: 6\r\n", "Content-Length: -1\r\n", "Content-Length: 99999999999999999999\r\n",
    "Content-Length: 5\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "X: " + "a" * 100_000 + "\r\n",
])  # fmt: skip
def test_hostile_heads(head):
    _, app = serve_gate()
    with services.serve(app) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\n{head}\r\nhello".encode())
        client.settimeout(10)
        assert re.match(rb"HTTP/1.1 4\d\d ", client.recv(4096))


@pytest.fixture
def letters(language_model):
    app = create_app({"letters": language_model}, ServerOptions(slots=4, longest=128, max_queue=8))
    yield app
    app.app.state.served["letters"].close()


def complete(**named):
    return {"json": {"model": "letters", "prompt": "the sea", "temperature": 0, **named}}


def wait_for(condition):
    deadline = time.time() + 60
    while not condition():
        assert time.time() < deadline
        time.sleep(0.01)


def test_a_client_that_goes_ends_its_generation(letters):
    engine = letters.app.state.served["letters"].engine
    compute = engine.scheduler._compute
    engine.scheduler._compute = lambda *a: time.sleep(0.02) or compute(*a)
    with services.serve(letters) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, timeout=60, **complete(max_tokens=110, stream=True, temperature=2)) as response:
            next(response.iter_lines())
        wait_for(lambda: engine.open == 0 and not engine.scheduler.busy)
        assert engine.scheduler.counts.tokens < 100
        with socket.create_connection(("127.0.0.1", port)) as client:
            body = json.dumps(complete(max_tokens=110, temperature=2)["json"]).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_for(lambda: engine.open == 1)
        wait_for(lambda: engine.open == 0 and not engine.scheduler.busy)
        assert engine.scheduler.pages.available == engine.scheduler.pages.count


def test_a_full_queue_of_generations(letters):
    engine = letters.app.state.served["letters"].engine
    assert services.post(letters, "/v1/completions", **complete(n=13)).status_code == 429
    assert engine.open == 0
    assert services.post(letters, "/v1/completions", **complete(n=12, max_tokens=1)).status_code == 200


def test_a_step_that_fails(letters, language_model):
    scheduler = letters.app.state.served["letters"].engine.scheduler
    compute = scheduler._compute

    def fail(*args):
        scheduler._compute = compute
        raise RuntimeError("secret")

    scheduler._compute = fail
    failed = services.post(letters, "/v1/completions", **complete())
    assert (
        failed.status_code == 500 and "secret" not in failed.text and failed.json()["error"]["type"] == "server_error"
    )
    found = services.post(letters, "/v1/completions", **complete(max_tokens=5)).json()
    assert found["choices"][0]["text"] == services.complete_alone(language_model, "the sea", 5).text
    scheduler._compute = fail
    stream = services.post(letters, "/v1/completions", **complete(stream=True)).text
    assert "secret" not in stream and '"server_error"' in stream and stream.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{" * 10**5,
        b'{"model": "letters"}',
        b'{"model": "letters", "prompt": null}',
        b'{"model": "letters", "prompt": "a", "temperature": NaN}',
        b'{"model": "letters", "prompt": "a", "temperature": 1e999}',
        b'{"model": "letters", "prompt": "a", "top_p": "1"}',
        b'{"model": "letters", "prompt": "a", "stream": 1}',
        b'{"model": "letters", "prompt": {"a": 1}}',
        b'{"model": "letters", "prompt": [true]}',
        b'{"model": 3, "prompt": "a"}',
        b'{"model": "letters", "prompt": [99999999999999999999]}',
        b'{"model": "letters", "prompt": []}',
        b'{"model": "letters", "prompt": "a", "max_tokens": 1e3}',
        b'{"model": "letters", "prompt": "a", "stop": [1]}',
        b'{"model": "letters", "prompt": "a", "n": true}',
        b'{"model": "letters", "prompt": "a", "stream_options": {"x": 1}}',
        b'{"model": "letters", "prompt": "a", "model": "letters"}',
        b'{"model": "letters", "prompt": "\\ud800"}',
    ],
)
def test_hostile_completions(letters, body):
    response = services.post(letters, "/v1/completions", content=body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error", response.text
    assert services.post(letters, "/v1/chat/completions", content=body).status_code == 400


def test_long_prompts_are_refused_before_they_are_encoded(letters, monkeypatch):
    monkeypatch.setattr(letters.app.state.served["letters"].tokenizer, "encode", None)
    message = {"role": "user", "content": "a" * 10_000}
    for path, name, value in (
        ("completions", "prompt", message["content"]),
        ("chat/completions", "messages", [message]),
    ):
        body = {"model": "letters", name: value}
        assert services.post(letters, f"/v1/{path}", json=body).status_code == 400
    assert services.post(letters, "/v1/completions", content=b" " * (5 << 20)).status_code == 413


def test_half_a_surrogate_pair(letters):
    body = b'{"model": "letters", "messages": [{"role": "user", "content": "\\ud800"}]}'
    for path, content in (
        ("chat/completions", body),
        ("completions", b'{"model": "\\ud800", "prompt": "a", "\\ud800": 1}'),
    ):
        assert services.post(letters, f"/v1/{path}", content=content).status_code == 400


def test_metrics_of_a_service(letters):
    services.post(letters, "/v1/completions", **complete(max_tokens=3))
    services.get(letters, "/nothing")
    text = services.get(letters, "/metrics").text
    for line in ('tessera_http_requests_total{method="POST",status="200"} 1.0', "tessera_open_requests 0.0",
                 'tessera_http_requests_total{method="GET",status="404"} 1.0',
                 'tessera_tokens_total{kind="generated",model="letters"} 3.0',
                 'tessera_tokens_total{kind="prompt",model="letters"} 7.0',
                 'tessera_open_generations{model="letters"} 0.0'):  # fmt: skip
        assert line in text, line


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_command(scores, tmp_path, stop):
    keys = tmp_path / "keys"
    keys.write_text("# comment\n\nsecret\n")
    command = [sys.executable, "-m", "tessera.tools.cli", "serve", f"m={scores}", "--port", "0", "--api-key-file", keys,
               "--max-batch", "4", "--cache", "2", "--replicas", "2", "--processes"]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    line = json.loads(process.stderr.readline())
    assert line["message"] == "serving" and line["host"] == "127.0.0.1"
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    answer = httpx.post(f"http://127.0.0.1:{line['port']}{INFER}", json={"inputs": [tensor]},
                        headers={"Authorization": "Bearer secret"}, timeout=60)  # fmt: skip
    want = services.want_scores(np.array([[1, 2, 3, 4]], np.float32))[0][0]
    np.testing.assert_allclose(answer.json()["outputs"][0]["data"], want, rtol=1e-5)
    process.send_signal(stop)
    rest = process.communicate(timeout=30)[1]
    assert process.returncode in (0, -stop, 130) and '"draining"' in rest


def test_mistakes_of_the_command(tmp_path, scores):
    def run(*arguments, **environment):
        command = [sys.executable, "-m", "tessera.tools.cli", "serve", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    assert "there is no file or folder" in run(tmp_path / "nothing")[1]
    with socket.create_server(("127.0.0.1", 0)) as held:
        status, text = run(scores, "--port", held.getsockname()[1])
    assert status == 2 and "cannot be served" in text
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "--port", "0")[0] == 2


def test_misuse(scores, tmp_path, language_model):
    for models in ({}, {"a b": scores}, {"m": 3}, {"m": len}, {"": scores}, [scores]):
        with pytest.raises(ArgumentError):
            create_app(models)
    for port in (1 << 16, -1, True, "80"):
        with pytest.raises(ArgumentError, match="port"):
            run_server({"m": scores}, port=port)
    with pytest.raises(DeviceUnavailable, match="cannot be served"):
        run_server({"m": scores}, host="256.0.0.1")
    for named in (
        {"max_queue": 0}, {"api_keys": ("",)}, {"api_keys": 3}, {"drain_timeout": -1}, {"slots": True}, {"pages": 0},
        {"body_timeout": None}, {"batch_timeout_ms": "2"}, {"cache_size": -1}, {"padding": "top"}, {"longest": 1.5},
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            ServerOptions(**named)
    with pytest.raises(ArgumentError, match="two models"):
        name_models(["a/m", "b/m"])
    for shape in (3, None, ("x",), (-2,)):
        with pytest.raises(ArgumentError, match="the shape of x"):
            TensorDescription("x", "f32", shape)
    with pytest.raises(ArgumentError, match="names no file"):
        name_models(["m="])
    with pytest.raises(ArgumentError, match="no batches to pad"):
        ServerOptions(padding="left")
    (tmp_path / "keys").write_text("#\n")
    for path in (tmp_path / "keys", tmp_path / "none", tmp_path):
        with pytest.raises(FileError):
            read_api_keys(path)
    silent = type(language_model)(language_model.config, language_model.weights, target="llvm")
    with pytest.raises(ArgumentError, match="tokenizer"):
        create_app({"m": silent})


def test_a_missing_package_is_a_typed_error(monkeypatch, scores):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(DeviceUnavailable, match=r"uvicorn") as found:
        create_app({"m": scores})
    assert found.value.suggestion == "pip install tessera[serve]"


@pytest.mark.parametrize("count", [0, True, "3"])
def test_the_queue_of_an_engine_is_a_positive_number(count):
    with pytest.raises(ArgumentError, match="max_queue"):
        GenerationEngine(None, max_queue=count)


def test_a_stop_string_at_the_start_leaves_no_text():
    class Letters:
        decode = staticmethod(lambda tokens: "".join(map(chr, tokens)))

    stream = TextStream(Letters(), stops=("ab",))
    assert [stream.push(ord(c)) for c in "abc"] == ["", "", ""] and stream.stopped


def test_the_page_asks_for_prompts_and_messages(letters):
    page = describe_api({}, letters.app.state.served, ServerOptions())
    bodies = page["paths"]["/v1/completions"], page["paths"]["/v1/chat/completions"]
    text, chat = (str(body["post"]["requestBody"]) for body in bodies)
    assert "'prompt': {'anyOf'" in text and "'messages': {'type': 'array', 'minItems': 1" in chat
