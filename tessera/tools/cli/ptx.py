"""`tessera ptx run`: launch an entry of a PTX file in the emulator."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, FileError
from tessera.core.io import check_writable, read_array, write_array
from tessera.core.progress import operation, report_progress
from tessera.core.types import as_dtype
from tessera.interp.target.ptx import PtxModule, TensorMap

_ARRAY = re.compile(r"(?P<file>.+\.npy)(:(?P<dtype>\w+))?(@(?P<box>\d+(x\d+)*)(/(?P<swizzle>\d+))?)?")
_ZEROS = re.compile(r"zeros:(?P<shape>\d+(x\d+)*):(?P<dtype>\w+)(@(?P<box>\d+(x\d+)*)(/(?P<swizzle>\d+))?)?")
_EXPECTED = "X.npy, X.npy:DTYPE, X.npy@BOX/SWIZZLE for a tensor map, zeros:8x16:f32, or a number"


def main(options: argparse.Namespace) -> int:
    """Run the entry; print a summary of each array, or save the requested ones."""
    module = PtxModule(_text(options.file), options.file)
    outputs = [_output(pair, len(options.arg)) for pair in options.output]
    args = [_argument(a) for a in options.arg]
    module.progress = lambda entry, done, total: report_progress(f"emulating {entry}", done, total)
    with operation(f"emulating {options.entry}"):
        module.launch(
            options.entry,
            _extent(options.grid),
            _extent(options.block),
            args,
            options.shared,
            options.debug,
            _extent(options.cluster),
            options.cooperative,
        )
    arrays = [a.array if isinstance(a, TensorMap) else a for a in args]
    for index, path in outputs:
        write_array(path, np.asarray(arrays[index]))
    for index, value in enumerate(arrays if not outputs else []):
        if isinstance(value, np.ndarray):
            print(f"{index}: {np.array2string(value, threshold=16)}")
    return 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(f"{path} cannot be read: {reason}", expected="a PTX text file") from None
    except UnicodeDecodeError:
        raise FileError(f"{path} is not text", expected="a PTX text file") from None


def _output(pair: str, many: int) -> tuple[int, str]:
    index, _, path = pair.partition("=")
    if not path or not index.isdigit() or int(index) >= many:
        raise ArgumentError("--output does not name an argument", expected="I=OUT.npy", received=pair)
    return int(index), str(check_writable(path))


def _argument(text: str) -> Any:
    """An array, a tensor map of one, or a number."""
    if found := _ZEROS.fullmatch(text):
        array = np.zeros(_sizes(found["shape"]), _dtype(found["dtype"]))
    elif found := _ARRAY.fullmatch(text):
        array = read_array(found["file"], found["dtype"] and _load_array(found["dtype"]))
        if array.dtype.type is np.void and array.dtype.names is None:
            raise ArgumentError(f"the element type of {found['file']} is not in the file", expected="X.npy:bf16")
    else:
        return _number(text)
    if found["box"]:
        return TensorMap(array, _sizes(found["box"]), int(found["swizzle"] or 0))
    return array


def _load_array(name: str) -> object:
    try:
        return as_dtype(name)
    except DTypeError as error:
        raise ArgumentError(f"unknown element type {name}", expected="f32, bf16, int32 ...") from error


def _dtype(name: str) -> np.dtype:
    return as_dtype(_load_array(name)).numpy


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def _number(text: str) -> int | float:
    for kind in (lambda t: int(t, 0), float):
        try:
            return kind(text)  # type: ignore[operator]
        except ValueError:
            pass
    raise ArgumentError("an argument is an array or a number", expected=_EXPECTED, received=text)


def _extent(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError("an extent is up to three integers", expected="4 or 4,2,1", received=text) from None
