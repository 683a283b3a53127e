"""WebAssembly modules: an object file for wasm32 linked by `wasm-ld`, and run in Python through wasmtime."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tessera.codegen.c_plan import BASE, MAX_BYTES, OBJECT_FILE, RUN
from tessera.core.errors import (
    ArgumentError,
    ArtifactError,
    DeviceUnavailable,
    DTypeError,
    ExecutionError,
    FileError,
    ShapeError,
    UnsupportedOpError,
    user_location,
)
from tessera.core.types import as_dtype

LINKER_VARIABLE = "WASM_LD"
STACK_BYTES = 1 << 20
PAGE_BYTES = 1 << 16
# The functions that a module may import from `Math`: of f64, and remainders, which are exact.
MATH_IMPORTS: dict[str, Callable[..., float]] = {
    "exp": np.exp, "log": np.log, "log2": np.log2, "pow": np.power, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "exp2": np.exp2, "fmod": np.fmod, "fmodf": np.fmod,
}  # fmt: skip
_UNDEFINED = re.compile(r"undefined symbol: (\S+)")


def find_linker() -> list[str]:
    """The command of a linker for WebAssembly: the variable WASM_LD, `wasm-ld` on the path, or that of `ziglang`.

    Raises:
        DeviceUnavailable: there is none.
    """
    if os.environ.get(LINKER_VARIABLE):
        return os.environ[LINKER_VARIABLE].split()
    names = ["wasm-ld", *(f"wasm-ld-{n}" for n in range(25, 13, -1))]
    found = next((name for name in names if shutil.which(name)), None)
    if found is not None:
        return [found]
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "wasm-ld"]
    raise DeviceUnavailable(
        "there is no wasm-ld to link a WebAssembly module with", location=user_location(),
        suggestion="pip install tessera[web] (its package ziglang has one), or install lld (Debian: apt install lld), "
        f"or set {LINKER_VARIABLE}",
    )  # fmt: skip


def link_module(code: bytes, memory: int) -> bytes:
    """A module of one object file, whose memory has `memory` bytes beyond the object's own.

    Raises:
        DeviceUnavailable: there is no linker. ArgumentError: it refuses.
        UnsupportedOpError: the object calls a function that neither it nor `Math` has.
    """
    pages = -(-(memory + len(code) + STACK_BYTES + PAGE_BYTES) // PAGE_BYTES)
    linker = find_linker()
    with tempfile.TemporaryDirectory(prefix="tessera-web-") as folder:
        Path(folder, OBJECT_FILE).write_bytes(code)
        Path(folder, "imports").write_text("\n".join(MATH_IMPORTS) + "\n")
        command = [*linker, OBJECT_FILE, "-o", "module.wasm", "--no-entry", "--stack-first", "--strip-all"]
        command += ["-z", f"stack-size={STACK_BYTES}", f"--export={RUN}", f"--export={BASE}"]
        command += [f"--initial-memory={pages * PAGE_BYTES}", f"--max-memory={max(pages * PAGE_BYTES, MAX_BYTES)}"]
        command += ["--allow-undefined-file=imports"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        except OSError as error:
            raise DeviceUnavailable(
                f"the linker {linker[0]} does not start", location=user_location(), received=str(error),
                suggestion=f"set {LINKER_VARIABLE} to a wasm-ld",
            ) from None  # fmt: skip
        if done.returncode == 0:
            return Path(folder, "module.wasm").read_bytes()
    missing = _UNDEFINED.findall(done.stderr)
    if missing:
        raise UnsupportedOpError(
            f"the machine wasm32 has no function {', '.join(dict.fromkeys(missing))}", location=user_location(),
            expected=", ".join(MATH_IMPORTS), suggestion="compute this part in ts.f32, or outside of the program",
        )  # fmt: skip
    raise ArgumentError(
        f"the linker {linker[0]} did not link the module", location=user_location(),
        received=done.stderr.strip()[-800:], suggestion=f"set {LINKER_VARIABLE} to another wasm-ld",
    )  # fmt: skip


class WebModule:
    """A WebAssembly module in wasmtime (the extra `web`): called with arrays, it returns the results.

    Raises:
        DeviceUnavailable: wasmtime is not installed.
        ArtifactError: these bytes are no module of a program.
    """

    def __init__(self, code: bytes, description: Mapping[str, Any]) -> None:
        wasmtime = _import_wasmtime()
        self.description = description
        engine = wasmtime.Engine()
        self._store = wasmtime.Store(engine)
        try:
            module = wasmtime.Module(engine, code)
            imports = [_make_import(wasmtime, self._store, i) for i in module.imports]
            self._exports = wasmtime.Instance(self._store, module, imports).exports(self._store)
            self._memory, self._run = self._exports["memory"], self._exports[RUN]
            self._base = int(self._exports[BASE](self._store))
        except (wasmtime.WasmtimeError, KeyError) as error:
            raise ArtifactError("this is no WebAssembly module of a program", received=str(error)[:300]) from None

    @staticmethod
    def load(folder: str | Path) -> WebModule:
        """The module of a folder that `ts.deploy.standalone(..., machine="wasm32")` wrote.

        Raises:
            FileError: a file of it is missing.
        """
        try:
            description = json.loads(Path(folder, "program.json").read_text())
            return WebModule(Path(folder, f"{description['name']}.wasm").read_bytes(), description)
        except (OSError, ValueError, KeyError) as error:
            raise FileError(f"{folder} is no folder of a WebAssembly module", received=str(error)) from None

    def __call__(self, *arrays: Any) -> Any:
        """The results for these arguments: one array, or a tuple of them.

        Raises:
            ArgumentError, ShapeError, DTypeError: the arguments are not those of the program.
            ExecutionError: an assertion or an index of the program failed.
        """
        parameters = self.description["parameters"]
        inputs = [p for p in parameters if p["role"] != "output"]
        if len(arrays) != len(inputs):
            raise ArgumentError("wrong number of arguments", expected=len(inputs), received=len(arrays))
        for parameter, array in zip(inputs, arrays, strict=True):
            self._memory.write(self._store, _to_bytes(parameter, array), self._base + parameter["offset"])
        code = self._run(self._store)
        if code:
            raise ExecutionError(self.description["errors"].get(str(code), f"the program failed with {code}"))
        results = tuple(self._read(p) for p in parameters if p["written"])
        return results[0] if len(results) == 1 else results

    def _read(self, parameter: Mapping[str, Any]) -> np.ndarray:
        start = self._base + parameter["offset"]
        data = self._memory.read(self._store, start, start + parameter["bytes"])
        return np.frombuffer(bytes(data), as_dtype(parameter["dtype"]).numpy).reshape(parameter["shape"]).copy()


def _to_bytes(parameter: Mapping[str, Any], value: Any) -> bytes:
    dtype = as_dtype(parameter["dtype"])
    array = np.asarray(value) if hasattr(value, "dtype") else np.asarray(value, dtype.numpy)
    name, shape = parameter["name"], tuple(parameter["shape"])
    if array.shape != shape:
        raise ShapeError(f"argument {name} has the wrong shape", expected=shape, received=array.shape)
    if array.dtype != dtype.numpy:
        raise DTypeError(f"argument {name} has the wrong dtype", expected=dtype, received=array.dtype)
    return np.ascontiguousarray(array).tobytes()


def _import_wasmtime() -> Any:
    try:
        import wasmtime
    except ImportError:
        raise DeviceUnavailable(
            "wasmtime is not installed", location=user_location(), suggestion="pip install tessera[web]"
        ) from None
    return wasmtime


def _make_import(wasmtime: Any, store: Any, wanted: Any) -> Any:
    """A function of `Math`, as NumPy computes it in f64."""
    function = MATH_IMPORTS[wanted.name]

    def call(*operands: float) -> float:
        with np.errstate(all="ignore"):
            found = float(function(*operands))
        return math.nan if math.isnan(found) else found

    return wasmtime.Func(store, wanted.type, call)
