"""Web export: a model as one page that runs it in a browser, through WebAssembly and through WebGPU."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tessera.codegen.c_plan import DESCRIPTION_FILE, MACHINE, OBJECT_FILE, make_c_name
from tessera.codegen.contract import emit_artifact, get_backend, get_capable_backend, list_backends
from tessera.core.errors import (
    ArgumentError,
    DeviceUnavailable,
    ResourceError,
    UnsupportedOpError,
    as_text,
    user_location,
)
from tessera.core.io import as_path
from tessera.deploy.optimisation import OptimisedModel
from tessera.deploy.standalone import write_folder
from tessera.deploy.webassembly import link_module
from tessera.runtime.artifacts import describe_interface
from tessera.runtime.program import PreparedProgram
from tessera.runtime.storage.memory_pool import as_bytes

PAGE_FOLDER = Path(__file__).parent / "page"
# The element types that a script has arrays of.
PAGE_TYPES = (
    "f32", "f64", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)  # fmt: skip
WEBASSEMBLY = "WebAssembly"
LEAST_SPLIT = 1024  # bytes of a file


@dataclass(frozen=True)
class WebExport:
    """What was written: the page, the names of its engines, and why a generator for browsers was left out."""

    page: Path
    engines: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def export_web(
    model: Any,
    *args: Any,
    out: str | Path | None = None,
    weights: Sequence[str] = (),
    title: str | None = None,
    split_size: int | str | None = None,
    compression: str | None = None,
    **named: Any,
) -> WebExport:
    """Write a page that runs a model on inputs that its reader gives; the arguments are the example it starts with.

    `model` is a `ts.nn.Module`, a function, or what `ts.optimize` made; arguments named in `weights` travel with it, as
    do tensors that it closes over. `out` is a file `.html`, which holds everything, or a folder, which also gets the
    WebAssembly module, its description and its weights. The path may also be the only argument of what `ts.optimize`
    made. Installed generators with a method `web_engine` are packed too where they have every op of the model.

    Of a folder, `split_size` ("4MB", or bytes) puts module and weights into files of at most this size, which the page
    fetches and checks by their SHA-256: it is then small, and needs a server. `compression` ("brotli" or "gzip") writes
    a compressed copy beside each file, for servers and CDNs that give such copies (`Content-Encoding`).

    >>> import tempfile
    >>> import tessera as ts
    >>> folder = tempfile.mkdtemp()
    >>> made = export_web(lambda x: ts.tanh(x) * 2.0, ts.ones((2, 3)), out=f"{folder}/model.html")  # doctest: +SKIP
    >>> made.engines  # doctest: +SKIP
    ('WebAssembly',)

    Raises:
        DeviceUnavailable: there is no wasm-ld, or no brotli. UnsupportedOpError: an op needs Python, or a type is none
        of scripts. ArgumentError: `out` is neither a folder nor a page, or one that cannot be split or compressed.
        FileError: it cannot be written.
    """
    if out is None and len(args) == 1 and isinstance(args[0], (str, Path)):
        (out,), args = args, ()
    if out is None:
        raise ArgumentError("a page needs a path", location=user_location(), expected='out="model.html", or a folder')
    out = as_path(out)
    target = _find_page(out)
    compress = _find_compression(compression)
    most = _check_files(target.parent == out, split_size, compression)
    compiled = _compile(model, args, named, weights)
    program = compiled.prepare_program("llvm")
    stored = compiled.find_stored_parameters()
    own = make_c_name(program.name)
    module, description = _link_program(program, stored, own)
    blobs = {description["parameters"][i]["name"]: program.arrays[i] for i in range(len(program.arrays))}
    engines, left_out = _find_engines(compiled)
    data, parts = _place_data(description, module, blobs, most)
    page = _format_page(program.name if title is None else as_text(title, "the title"), data, engines)
    files: dict[str, bytes] = {target.name: page.encode(), **parts}
    if target.name == "index.html" and target.parent == out:
        text = json.dumps(description, indent=1) + "\n"
        files |= {f"{own}.wasm": module, DESCRIPTION_FILE: text.encode()}
    files |= {f"{name}.{ending}": pack(held) for ending, pack in compress for name, held in sorted(files.items())}
    write_folder(target.parent, files)
    return WebExport(target, tuple(engines), left_out)


# Files beside the page.


def _check_files(is_folder: bool, split_size: Any, compression: str | None) -> int | None:
    """The most bytes of a file, or None for a page that holds everything."""
    if not is_folder and (split_size is not None or compression is not None):
        raise ArgumentError(
            "one page cannot be split or compressed", location=user_location(), expected="a folder", received="*.html",
            suggestion="give a folder as out=",
        )  # fmt: skip
    most = None if split_size is None else as_bytes(split_size)
    if most is not None and most < LEAST_SPLIT:
        raise ArgumentError(
            f"files of {most} bytes are too small", location=user_location(), expected=f"at least {LEAST_SPLIT:,} bytes"
        )
    return most


def _find_compression(name: str | None) -> list[tuple[str, Callable[[bytes], bytes]]]:
    """The ending of a compressed copy, and what makes it."""
    if name is None:
        return []
    if name not in ("brotli", "gzip"):
        raise ArgumentError(
            f"there is no compression {name!r}", location=user_location(), expected='"brotli", "gzip" or None'
        )
    if name == "gzip":
        return [("gz", lambda content: gzip.compress(content, 9, mtime=0))]
    try:
        brotli = import_module("brotli")
    except ImportError:
        raise DeviceUnavailable(
            "the package brotli is not installed", location=user_location(), suggestion="pip install tessera[web]"
        ) from None
    return [("br", brotli.compress)]


def _place_data(
    description: Mapping[str, Any], module: bytes, blobs: Mapping[str, Any], most: int | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The description with the data of the page, and the files that hold its module and weights."""
    weights = {p["name"]: _to_bytes(blobs[p["name"]]) for p in description["parameters"] if p["role"] == "weight"}
    roles = ("input", "scalar")
    example = {p["name"]: _encode(blobs[p["name"]]) for p in description["parameters"] if p["role"] in roles}
    data = {**description, "example": example}
    if most is None:
        return data | {"module": _encode(module), "weights": {n: _encode(w) for n, w in weights.items()}}, {}
    whole, sections = bytearray(module), {}
    for name, content in weights.items():
        sections[name] = [len(whole), len(whole) + len(content)]
        whole += content
    pieces = [bytes(whole[start : start + most]) for start in range(0, len(whole), most)]
    files = {f"data.{i:04d}.bin": piece for i, piece in enumerate(pieces)}
    parts = [{"name": n, "bytes": len(c), "integrity": _make_integrity(c)} for n, c in files.items()]
    return data | {"parts": parts, "module": [0, len(module)], "weights": sections}, files


def _make_integrity(content: bytes) -> str:
    """The hash of a file as browsers check it (W3C, Subresource Integrity)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"


def _find_page(out: Path) -> Path:
    if out.suffix == ".html":
        return out
    if out.is_file():
        raise ArgumentError(
            f"{out} is a file", location=user_location(), expected="a folder, or a page: model.html", received=str(out)
        )
    return out / "index.html"


def _compile(model: Any, args: Sequence[Any], named: Mapping[str, Any], weights: Sequence[str]) -> OptimisedModel:
    """The model with its weights as constants, compiled for the example."""
    if isinstance(model, OptimisedModel):
        return model.compile(*args, **named)
    if not args and not named:
        raise ArgumentError(
            "a page needs an example", location=user_location(), expected='export_web(model, x, out="model.html")'
        )
    return OptimisedModel(model, "llvm", (), {}, weights).compile(*args, **named)


def _link_program(program: PreparedProgram, stored: Sequence[int], name: str) -> tuple[bytes, dict[str, Any]]:
    """The WebAssembly module of a program, which takes its weights as arguments, and its description."""
    generator: Any = get_capable_backend("llvm", "standalone")
    artifact = emit_artifact(generator, program.levels["tile"], generator.standalone_options(MACHINE))
    described = {**artifact.manifest, "interface": describe_interface(program, stored)}
    files = generator.standalone(type(artifact)(described, artifact.files), name, {}, MACHINE)
    description = json.loads(files[DESCRIPTION_FILE])
    _mark_weights(description, stored)
    _check_types(description)
    return link_module(files[OBJECT_FILE], description["bytes"]), description


def _check_types(description: Mapping[str, Any]) -> None:
    for p in description["parameters"]:
        if p["dtype"] not in PAGE_TYPES and p["role"] != "weight":
            raise UnsupportedOpError(
                f"a script has no arrays of {p['dtype']}, the type of {p['name']}", location=user_location(),
                expected=", ".join(PAGE_TYPES), suggestion="cast inside the model: its inputs and results as ts.f32",
            )  # fmt: skip


def _mark_weights(description: Mapping[str, Any], stored: Sequence[int]) -> None:
    for i in stored:
        parameter = description["parameters"][i]
        if parameter["written"]:
            raise UnsupportedOpError(
                f"the model writes its weights {parameter['name']}", location=user_location(),
                expected="weights that it reads",
            )  # fmt: skip
        parameter["role"] = "weight"


def _find_engines(compiled: OptimisedModel) -> tuple[dict[str, str], dict[str, str]]:
    """The scripts of the engines by name, WebAssembly first; and why other generators for browsers are left out."""
    engines = {WEBASSEMBLY: (PAGE_FOLDER / "engine.mjs").read_text().strip() + "\nreturn openWebAssembly(program);"}
    left_out = {}
    for name in sorted(list_backends()):
        try:
            generator: Any = get_backend(name)
            if not hasattr(generator, "web_engine"):
                continue
            artifact = emit_artifact(generator, compiled.prepare_program(name).levels["tile"], {})
            title, script = generator.web_engine(artifact)
            engines[title] = script
        except (UnsupportedOpError, ResourceError, DeviceUnavailable) as error:
            left_out[name] = error.message
    return engines, left_out


def _format_page(title: str, data: Mapping[str, Any], engines: Mapping[str, str]) -> str:
    scripts = [f"engines[{json.dumps(name)}] = async (program) => {{\n{text}\n}};" for name, text in engines.items()]
    parts = {
        "@TITLE@": html.escape(title), "@PROGRAM@": json.dumps(data).replace("<", "\\u003c"),
        "@ENGINES@": "\n".join(scripts).replace("</", "<\\/"), "@CONNECT@": "connect-src 'self'; " * ("parts" in data),
    }  # fmt: skip
    page = (PAGE_FOLDER / "page.html").read_text()
    return re.sub("|".join(parts), lambda found: parts[found[0]], page)


def _to_bytes(array: Any) -> bytes:
    return bytes(np.ascontiguousarray(array).tobytes())


def _encode(data: Any) -> str:
    return base64.b64encode(data if isinstance(data, bytes) else _to_bytes(data)).decode()
