"""cslc: checks a program as the vendor's compiler does, and writes the files that `SdkRuntime` needs to run it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, FileError, TesseraError
from tessera.interp.target.csl.compiler import CompiledLayout, compile_program
from tessera.interp.target.csl.sema.compilation_unit import LANGUAGE_VERSIONS

MEMCPY_FRAME = (7, 2)  # columns and rows of the memcpy frame around a program rectangle
SETTINGS_KEY = "tessera"  # the key of the additional settings in out.json
COPIES_KEY = "copies"  # of these settings: the copied sources, relative to the folder `src`


def default_language() -> str:
    """The language version without an option."""
    return os.environ.get("TESSERA_CSL_SDK") or "1.4"


def make_parser() -> argparse.ArgumentParser:
    """The options of `cslc`, as `--flag v` or `--flag=v`."""
    parser = argparse.ArgumentParser(prog="cslc", description="Checks a CSL program and prepares it for the simulator.")
    parser.add_argument("layout", help="the top-level CSL file")
    parser.add_argument("-o", dest="output", default="out", metavar="FOLDER")
    parser.add_argument("--arch", choices=("wse2", "wse3"), default="wse2")
    parser.add_argument(
        "--sdk",
        choices=LANGUAGE_VERSIONS,
        default=default_language(),
        help="the language version (option of this simulator; default: TESSERA_CSL_SDK, else 1.4)",
    )
    parser.add_argument("--fabric-dims", default="", metavar="W,H")
    parser.add_argument("--fabric-offsets", default="", metavar="X,Y")
    parser.add_argument("--params", action="append", default=[], metavar="NAME:VALUE,…")
    parser.add_argument("--colors", action="append", default=[], metavar="NAME:VALUE,…")
    parser.add_argument("--import-path", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--fp16-format", choices=("f16", "bf16", "cb16"), default="f16")
    parser.add_argument("--max-inlined-iterations", type=int, default=50, metavar="N")
    parser.add_argument("--output-json", metavar="PATH", help="write the values of --params, by default to FOLDER.json")
    parser.add_argument("--memcpy", action="store_true")
    parser.add_argument("--channels", type=int, default=0, metavar="N")
    for ignored in ("--width-west-buf", "--width-east-buf", "--max-parallelism", "--comptime-func-depth-limit"):
        parser.add_argument(ignored, type=int, metavar="N", help="accepted without effect")
    for ignored in ("--verbose", "-g0", "--warnings-as-errors", "--out-routes"):
        parser.add_argument(ignored, action="store_true", help="accepted without effect")
    return parser


def parse_numbers(texts: Sequence[str], option: str) -> dict[str, int]:
    """The values of `NAME:VALUE,…`, from one or more options.

    >>> parse_numbers(["P:4,Mt:14", "Kt:0x10"], "--params")
    {'P': 4, 'Mt': 14, 'Kt': 16}
    """
    values = {}
    for pair in (pair for text in texts for pair in text.split(",") if pair):
        name, _, value = pair.partition(":")
        try:
            values[name.strip()] = int(value, 0)
        except ValueError:
            raise ArgumentError(f"{option} cannot be parsed", expected="NAME:INTEGER,…", received=pair) from None
    return values


def _parse_pair(text: str, option: str) -> tuple[int, int] | None:
    if not text:
        return None
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError(f"{option} cannot be parsed", expected="two integers: A,B", received=text) from None
    return first, second


def compile_settings(settings: dict[str, Any]) -> CompiledLayout:
    """Compile with the settings of out.json."""
    layout = compile_program(
        settings["layout"],
        params=settings["params"],
        colors=settings["colors"],
        arch=settings["arch"],
        sdk=settings["sdk"],
        fabric_dims=settings["fabric_dims"],
        fabric_offsets=settings["fabric_offsets"],
        import_paths=tuple(settings["import_paths"]),
        fp16_format=settings["fp16_format"],
        max_inlined_iterations=settings["max_inlined_iterations"],
        confined=settings.get("confined", False),
    )
    _check_fabric(layout, settings)
    return layout


def _check_fabric(layout: CompiledLayout, settings: dict[str, Any]) -> None:
    """Check that the program and its memcpy frame fit into the fabric.

    Raises:
        ArgumentError: they do not fit.
    """
    dims, offsets = settings["fabric_dims"], settings["fabric_offsets"]
    if dims is None or not settings["memcpy"]:
        return
    need = (layout.width + MEMCPY_FRAME[0], layout.height + MEMCPY_FRAME[1])
    if dims[0] < need[0] or dims[1] < need[1]:
        raise ArgumentError(
            "the fabric is too small for the program and its memcpy frame",
            expected=f"--fabric-dims of at least {need[0]},{need[1]}",
            received=f"{dims[0]},{dims[1]}",
        )
    if offsets is not None and (offsets[0] < 4 or offsets[1] < 1):
        raise ArgumentError(
            "the program overlaps its memcpy frame",
            expected="--fabric-offsets of at least 4,1",
            received=f"{offsets[0]},{offsets[1]}",
        )


def collect_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a command line, with absolute paths."""
    return {
        "layout": str(Path(options.layout).resolve()),
        "params": parse_numbers(options.params, "--params"),
        "colors": parse_numbers(options.colors, "--colors"),
        "arch": options.arch,
        "sdk": options.sdk,
        "fabric_dims": _parse_pair(options.fabric_dims, "--fabric-dims"),
        "fabric_offsets": _parse_pair(options.fabric_offsets, "--fabric-offsets"),
        "import_paths": [str(Path(folder).resolve()) for folder in options.import_path],
        "fp16_format": options.fp16_format,
        "max_inlined_iterations": options.max_inlined_iterations,
        "memcpy": options.memcpy,
        "channels": options.channels,
    }


def save_program(layout: CompiledLayout, settings: dict[str, Any], folder: Path) -> None:
    """Write out.json and a copy of every source, so that later edits do not change the compiled program."""
    sources = [Path(source) for source in layout.sources]
    root = Path(settings["layout"]).anchor
    kept = folder / "src"
    names = [str(source.relative_to(root)) for source in sources]
    _clear_copies(folder, names)
    for source, name in zip(sources, names, strict=True):
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, kept / name)
    for path in settings["import_paths"]:
        (kept / Path(path).relative_to(root)).mkdir(parents=True, exist_ok=True)
    inside = {
        **settings,
        COPIES_KEY: names,
        "layout": str(Path(settings["layout"]).relative_to(root)),
        "import_paths": [str(Path(path).relative_to(root)) for path in settings["import_paths"]],
    }
    texts = format_values(settings)
    (folder / "out.json").write_text(json.dumps({**texts, SETTINGS_KEY: inside}, indent=1) + "\n")


def format_values(settings: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The values of --params and --colors, as host scripts read them."""
    return {key: {name: str(value) for name, value in settings[key].items()} for key in ("params", "colors")}


def _clear_copies(folder: Path, names: Sequence[str]) -> None:
    """Remove the copies that an earlier compilation into `folder` wrote, and nothing else.

    Raises:
        FileError: a file that this command did not write is where a copy goes.
    """
    kept = folder / "src"
    if kept.is_symlink():
        raise FileError(f"{kept} is a link", expected="a folder of copies", suggestion="name another folder with -o")
    copies = _list_copies(folder)
    foreign = next((n for n in names if (kept / n).exists() and copies is not None and n not in copies), None)
    if foreign is not None:
        raise FileError(
            f"{kept / foreign} exists and was not written by cslc", expected="a folder of cslc, or a new one",
            suggestion="name another folder with -o",
        )  # fmt: skip
    for name in copies or ():
        if ".." not in Path(name).parts and not Path(name).is_absolute():
            (kept / name).unlink(missing_ok=True)


def _list_copies(folder: Path) -> set[str] | None:
    """The copies that out.json lists; empty where cslc wrote none, and None where it is of a version without a list."""
    try:
        settings = json.loads((folder / "out.json").read_text())[SETTINGS_KEY]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    copies = settings.get(COPIES_KEY) if isinstance(settings, dict) else []
    return None if copies is None else {name for name in copies if isinstance(name, str)}


def main(arguments: Sequence[str]) -> int:
    """Compile one program; returns the exit status."""
    try:
        # The path of --output-json follows "=" only: the next argument is the layout's.
        words = [f"{word}=" if word == "--output-json" else word for word in arguments]
        options = make_parser().parse_args(words)
        settings = collect_settings(options)
        layout = compile_settings(settings)
        for line in layout.printed:
            print(line)
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        save_program(layout, settings, folder)
        if options.output_json is not None:
            path = Path(options.output_json or f"{options.output.rstrip('/')}.json")
            path.write_text(json.dumps(format_values(settings), indent=1) + "\n")
    except (TesseraError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
