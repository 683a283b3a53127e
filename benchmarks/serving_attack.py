"""Hostile requests against a server over sockets: the status of each, and what it costs the server.

    python -m benchmarks.serving_attack --json benchmarks/results/serving_attack.json

For each case the status, the processor time of the server for one request (the least of several), and the growth of its
memory. Then 300 slow clients hold connections open, some of which send a byte now and then, while a well-behaved client
asks: its answers and latencies. The exit status is 1 if a case is not refused with 4xx, if a refusal costs more than a
quarter of a second, or if the well-behaved client gets no answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from benchmarks.serving import WIDTH, make_models, read_memory, start_server
from benchmarks.serving_peers import read_processor_seconds

INFER, COMPLETE, CHAT = "/v2/models/perceptron/infer", "/v1/completions", "/v1/chat/completions"
MOST_SECONDS = 0.25  # of the processor, for a refusal


def tensor(**changes: Any) -> bytes:
    """A request for one row, changed."""
    held = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "data": [0.0] * WIDTH, **changes}
    return json.dumps({"inputs": [held]}).encode()


def binary(shape: list[int], size: int, content: bytes, header: int | None = None) -> tuple[bytes, dict[str, str]]:
    """A request with bytes after its JSON."""
    held = {"name": "x", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [held]}).encode()
    return head + content, {"Inference-Header-Content-Length": str(len(head) if header is None else header)}


def list_cases() -> dict[str, tuple[str, bytes, dict[str, str]]]:
    """The path, body and headers of each case."""
    none: dict[str, str] = {}
    row = bytes(4 * WIDTH)
    prompt = {"model": "text", "prompt": "x", "max_tokens": 4}
    bodies = {
        "no body": b"", "deep lists": b"[" * 1_000_000, "deep objects": b'{"a":' * 500_000,
        "deep data": b'{"inputs":[{"name":"x","shape":[1,256],"datatype":"FP32","data":' + b"[" * 900_000,
        "a long number": b'{"inputs":' + b"9" * 3_000_000 + b"}",
        "a long exponent": b'{"inputs":[1e' + b"9" * 100_000 + b"]}",
        "NaN": b'{"inputs": NaN}', "not UTF-8": b"\xff\xfe{}", "a name twice": b'{"inputs":[],"inputs":[]}',
        "many tensors": json.dumps({"inputs": [{"name": "x"}] * 100_000}).encode(),
        "many names": json.dumps({"inputs": [], **{f"a{i}": 0 for i in range(100_000)}}).encode(),
        "another shape": tensor(shape=[1, WIDTH - 1]), "a huge shape": tensor(shape=[2**62, 2**62]),
        "a huge shape, no data": tensor(shape=[2**40, WIDTH], data=[]), "a negative shape": tensor(shape=[-1, WIDTH]),
        "a shape of text": tensor(shape="256"), "a long shape": tensor(shape=[1] * 100_000),
        "data too short": tensor(data=[0.0]), "data too long": tensor(data=[0.0] * 200_000),
        "ragged data": tensor(data=[[0.0] * 255, [0.0]]), "data of text": tensor(data=["0"] * WIDTH),
        "no rows": tensor(shape=[0, WIDTH], data=[]), "huge integers": tensor(data=[10**400] * WIDTH),
        "another type": tensor(datatype="BYTES"), "another name": tensor(name="y" * 100_000),
    }  # fmt: skip
    found = {name: (INFER, body, none) for name, body in bodies.items()}
    binaries = {
        "truncated bytes": binary([1, WIDTH], len(row), row[:-1]), "no bytes": binary([1, WIDTH], len(row), b""),
        "bytes left over": binary([1, WIDTH], len(row), row + b"x"),
        "a size of 2**62": binary([1, WIDTH], 2**62, row), "a negative size": binary([1, WIDTH], -4, row),
        "a shape of 2**62 bytes": binary([2**40, WIDTH], 2**50, row),
        "a header past the end": binary([1, WIDTH], len(row), row, 10**9),
        "a header that is no number": (row, {"Inference-Header-Content-Length": "0x10"}),
    }  # fmt: skip
    found |= {name: (INFER, *case) for name, case in binaries.items()}
    texts: dict[str, dict[str, Any]] = {
        "a long prompt": {"prompt": "x" * 3_000_000}, "many prompts": {"prompt": ["x"] * 10_000},
        "tokens out of range": {"prompt": [2**62]}, "negative tokens": {"prompt": [-1]},
        "many tokens": {"max_tokens": 2**62}, "many choices": {"n": 10**9},
        "a temperature of 1e308": {"temperature": 1e308},
        "many stops": {"stop": ["a"] * 100_000}, "half a surrogate": {"prompt": "\ud800"},
        "an unknown field": {"a" * 100_000: 1}, "a missing model": {"model": "m" * 100_000},
    }  # fmt: skip
    found |= {name: (COMPLETE, json.dumps({**prompt, **change}).encode(), none) for name, change in texts.items()}
    message = {"role": "user", "content": "x"}
    found["many messages"] = (CHAT, json.dumps({"model": "text", "messages": [message] * 60_000}).encode(), none)
    found["a body too long"] = (INFER, b"", {"Content-Length": str(2**40)})
    found["a compressed body"] = (INFER, b"\x1f\x8b" + bytes(100), {"Content-Encoding": "gzip"})
    return found


def send(port: int, path: str, body: bytes, headers: dict[str, str]) -> int:
    """One request over a socket of its own: the status, or 0 without an answer."""
    given = {"Host": "x", "Content-Length": str(len(body)), "Connection": "close", **headers}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in given.items()) + "\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with contextlib.suppress(OSError):  # the server may answer before it has read all
            connection.sendall(head.encode() + body)
        try:
            line = connection.recv(4096).split(b"\r\n")[0].split()
        except OSError:
            return 0
    return int(line[1]) if len(line) > 1 else 0


def measure(port: int, pid: int, case: tuple[str, bytes, dict[str, str]]) -> dict[str, Any]:
    """The status and the cost of a case."""
    memory, costs = read_memory(pid), []
    for _ in range(3):
        before = read_processor_seconds(pid)
        status = send(port, *case)
        costs.append(read_processor_seconds(pid) - before)
    return {"status": status, "processor_ms": round(1e3 * min(costs)), "grown_MiB": read_memory(pid) - memory,
            "body_bytes": len(case[1])}  # fmt: skip


def hold_connections(port: int, count: int) -> list[socket.socket]:
    """Connections that never finish a request: silent ones, half a head, half a body."""
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\n".encode()
    beginnings = [b"", head + b"X-A: ", head + b"Content-Length: 100000\r\n\r\n{"]
    held = []
    for i in range(count):
        held.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        held[-1].sendall(beginnings[i % 3])
    return held


def attack_slowly(port: int, pid: int, count: int, seconds: float) -> dict[str, Any]:
    """What a well-behaved client sees while slow clients hold connections."""
    body, memory = tensor(data=[1.0] * WIDTH), read_memory(pid)
    held = hold_connections(port, count)
    times, statuses, end = [], set(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for each in held[::7]:
            with contextlib.suppress(OSError):
                each.send(b"a")
        start = time.perf_counter()
        statuses.add(send(port, INFER, body, {}))
        times.append(time.perf_counter() - start)
        time.sleep(0.05)
    for each in held:
        each.close()
    return {"connections": count, "answers": len(times), "statuses": sorted(statuses),
            "p50_ms": round(1e3 * float(np.median(times)), 1), "most_ms": round(1e3 * max(times), 1),
            "grown_MiB": read_memory(pid) - memory}  # fmt: skip


def main() -> int:
    """Attack a server and print the costs."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=10)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = make_models(folder, "small") | {"perceptron": str(folder / "perceptron")}
        with start_server(models, 4) as (port, process):
            assert send(port, INFER, tensor(), {}) == 200
            cases = {n: measure(port, process.pid, case) for n, case in list_cases().items()}
            slow = attack_slowly(port, process.pid, 300, chosen.seconds)
            assert send(port, INFER, tensor(), {}) == 200
    wrong = [n for n, c in cases.items() if not 400 <= c["status"] < 500 or c["processor_ms"] > 1e3 * MOST_SECONDS]
    report = {"machine": describe(), "wrong": wrong, "slow_clients": slow, "cases": cases}
    print(json.dumps(report, indent=1, default=str))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return int(bool(wrong) or slow["statuses"] != [200])


if __name__ == "__main__":
    sys.exit(main())
