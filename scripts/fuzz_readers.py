"""The readers of files that may come from strangers, each with valid inputs: what scripts/fuzz_parsers.py mutates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.core.io import load_npy
from tessera.core.schedule import Schedule
from tessera.interp.target.csl.text.parser import parse as parse_csl
from tessera.interp.target.llvm.text.module_parser import parse_module as parse_llvm
from tessera.interp.target.ptx.text.parser import parse_module as parse_ptx
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.verify import verify
from tessera.runtime.launch.tuner import TuningCache
from tessera.runtime.loading import load
from tessera.runtime.program import prepare

# The modules whose lines guide the choice of inputs.
MODULES = {
    "ir": ("tessera.ir.parser", "tessera.ir.verify", "tessera.ir.levels"),
    "llvm": ("tessera.interp.target.llvm.text",), "ptx": ("tessera.interp.target.ptx.text",),
    "csl": ("tessera.interp.target.csl.text",), "npy": ("tessera.core.io", "numpy.lib._format_impl"),
    "safetensors": ("tessera.runtime.tensor_files",), "tuning": ("tessera.runtime.launch.tuner",),
    "manifest": ("tessera.runtime.loading", "tessera.codegen.artifact"), "schedule": ("tessera.core.schedule",),
    "bundle": ("tessera.runtime.bundle", "zipfile"), "stablehlo": ("tessera.stablehlo",), "onnx": ("tessera.onnx",),
    "tensors": ("tessera.serving", "json"), "chat": ("tessera.serving", "json"),
    "completion": ("tessera.serving", "json"),
}  # fmt: skip
TRIAL = {"config": {"BM": 64}, "latency_ms": 0.5}
Readers = dict[str, tuple[list[bytes], Callable[[bytes], Any]]]


def _program(x: Any, y: Any) -> Any:
    return ts.softmax(x @ y, axis=-1), ts.where(x > 0, x, 1.0).sum(axis=0)


def _flow(x: Any, y: Any) -> Any:
    return ts.scan(lambda s, r: (ts.tanh(s) + r, s), x[0], x)[1] * y.sum()


def in_file(read: Callable[[Path], Any], path: Path) -> Callable[[bytes], Any]:
    """A reader of a path as one of bytes."""

    def run(data: bytes) -> Any:
        path.write_bytes(data)
        return read(path)

    return run


def list_readers(folder: Path) -> Readers:
    """For each reader valid inputs and the function that reads one."""
    x, y = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    programs = [prepare(ts.jit(f), (x, y)) for f in (_program, _flow)]
    texts = [print_module(m).encode() for p in programs for m in p.levels.values()]
    emitted = {
        t: [emit_artifact(get_backend(t), p.lower_for_target(t)["tile"], {}) for p in programs] for t in ("llvm", "ptx")
    }
    csl = emit_artifact(get_backend("csl"), programs[0].lower_for_target("csl:2x2")["tile"], {})
    np.save(folder / "file.npy", x)
    ts.save({"w": ts.Tensor(x), "b": ts.Tensor(y)}, folder / "w.safetensors")
    return {
        "ir": (texts, lambda d: verify(parse_module(d.decode(errors="replace")))),
        "llvm": (_read_texts(emitted["llvm"]), lambda d: parse_llvm(d.decode(errors="replace"))),
        "ptx": (_read_texts(emitted["ptx"]), lambda d: parse_ptx(d.decode(errors="replace"))),
        "csl": (_read_texts([csl], ".csl"), lambda d: parse_csl(d.decode(errors="replace"))),
        "npy": ([(folder / "file.npy").read_bytes()], in_file(load_npy, folder / "x.npy")),
        "safetensors": ([(folder / "w.safetensors").read_bytes()], in_file(ts.load, folder / "x.safetensors")),
        "manifest": _list_manifests(folder, x, y),
        **_list_settings(folder),
        **_list_models(folder, x, y),
        **_list_requests(),
    }


def _read_texts(artifacts: list[Any], suffix: str = "") -> list[bytes]:
    files = [(n, f) for a in artifacts for n, f in a.files.items() if n.endswith(suffix)]
    return [f.encode() for _, f in files if isinstance(f, str) and len(f) < 200_000]


def _list_manifests(folder: Path, x: Any, y: Any) -> tuple[list[bytes], Callable[[bytes], Any]]:
    built = ts.build(ts.jit(_program), x, y, target="llvm", out=folder / "artifact")
    manifest = built / "manifest.json"

    def read(data: bytes) -> Any:
        manifest.write_bytes(data)
        return load(built)

    return [manifest.read_bytes()], read


def _list_settings(folder: Path) -> Readers:
    """Files of settings: a tuning cache, a schedule, the reference of a drift detector."""
    cache, schedule = TuningCache(folder / "tuning.json"), folder / "schedule.json"
    cache.put("a kernel", {"config": {"BM": 64}, "latency_ms": 0.5, "trials": [TRIAL], "about": "one"})
    Schedule(tile_m=64, tile_n=32, warps=4).save(schedule)

    def merge(path: Path) -> int:
        (folder / "held.json").unlink(missing_ok=True)
        held = TuningCache(folder / "held.json")
        held.put("a kernel", {"config": {"BM": 32}, "latency_ms": 0.7, "trials": [], "about": "one"})
        return held.merge(path)

    return {
        "tuning": ([cache.path.read_bytes()], in_file(merge, folder / "x-tuning.json")),
        "schedule": ([schedule.read_bytes()], in_file(Schedule.load, folder / "x-schedule.json")),
    }


def _list_models(folder: Path, x: np.ndarray, y: np.ndarray) -> Readers:
    """Models of other projects, and bundles. A reader whose package is not installed is left out."""
    bundle = folder / "model.bundle"
    ts.save(ts.bundle(ts.jit(_program), x, y, targets=["llvm"]), bundle)
    found: Readers = {"bundle": ([bundle.read_bytes()], in_file(_read_bundle, folder / "x.bundle"))}
    text = ts.stablehlo.export(ts.jit(_program), x, y)
    found["stablehlo"] = ([text.encode()], lambda d: ts.stablehlo.load(d.decode(errors="replace")))
    try:
        model = folder / "model.onnx"
        ts.onnx.export(ts.jit(_program), model, x, y)
        found["onnx"] = ([model.read_bytes()], in_file(_read_onnx, folder / "x.onnx"))
    except ts.errors.DeviceUnavailable as error:
        print(error)
    return found


def _read_bundle(path: Path) -> Any:
    from tessera.runtime.bundle_files import read_bundle_file

    return read_bundle_file(path, lambda index: [])


def _read_onnx(path: Path) -> Any:
    model = ts.onnx.load(path)
    return model.parameters, repr(model)


def _list_requests() -> Readers:
    """Bodies of requests to `tessera serve`."""
    from tessera.serving.completion_requests import read_completion
    from tessera.serving.json_bodies import parse_json
    from tessera.serving.tensor_protocol import read_call

    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stop": ["a"], "n": 1}
    text = {"model": "m", "prompt": ["a", "b"], "temperature": 0.5, "top_p": 0.9, "seed": 7, "stream": True}
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
    raw = {"name": "y", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}
    head = json.dumps({"id": "1", "inputs": [tensor, raw], "outputs": [{"name": "z"}]}).encode()

    plain = json.dumps({"inputs": [tensor]}).encode()

    def read_tensors(data: bytes) -> Any:
        """The first line is the header's length."""
        length, _, body = data.partition(b"\n")
        return read_call(body, length.decode("latin-1") if length else None, 1 << 20)

    return {
        "tensors": ([b"%d\n%s\x01\x02" % (len(head), head), b"\n" + plain], read_tensors),
        "chat": ([json.dumps(chat).encode()], lambda d: read_completion(parse_json(d), "chat")),
        "completion": ([json.dumps(text).encode()], lambda d: read_completion(parse_json(d), "completions")),
    }
