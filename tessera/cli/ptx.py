"""`tessera ptx run`: launch an entry of a PTX file in the interpreter."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, FileError
from tessera.interp.target.ptx import Module


def main(options: argparse.Namespace) -> int:
    """Run the entry; print arrays in short, or save those that were asked for."""
    try:
        with open(options.file) as file:
            module = Module(file.read(), options.file)
        args = [_argument(a) for a in options.arg]
    except OSError as error:
        raise FileError(str(error)) from error
    module.launch(options.entry, _extent(options.grid), _extent(options.block), args, options.shared, options.debug)
    for pair in options.output:
        index, _, path = pair.partition("=")
        if not path or not index.isdigit() or int(index) >= len(args):
            raise ArgumentError("--output names no argument", expected="I=OUT.npy", received=pair)
        np.save(path, args[int(index)])
    for index, value in enumerate(args if not options.output else []):
        if isinstance(value, np.ndarray):
            print(f"{index}: {np.array2string(value, threshold=16)}")
    return 0


def _argument(text: str) -> Any:
    if text.endswith(".npy"):
        return np.load(text)
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ArgumentError("an argument is a .npy file or a number", received=text) from None


def _extent(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError("a grid or block is up to three integers", received=text) from None
