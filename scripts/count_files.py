"""Files of a build: counts the files of the package whose functions run while softmax is built.

    python scripts/count_files.py [--list]

Another function is built for each target first: what happens on first use, as imports, does not count. Softmax is built
with no machine code in the cache, under `sys.setprofile`; a file counts where one of its functions is called.
`docs/architecture.md` has the counts.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np

import tessera as ts

PACKAGE = Path(ts.__file__).parent
TARGETS: dict[str, dict[str, Any]] = {"llvm": {}, "ptx": {"arch": "sm_90a"}}


def list_files(target: str, options: dict[str, Any]) -> list[str]:
    """The files that a build of softmax for a target passes through, relative to the package."""
    x, found = np.ones((64, 128), np.float32), set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            found.add(str(file.relative_to(PACKAGE)))

    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TESSERA_CACHE=f"{folder}/cache"):
        ts.build(ts.jit(lambda x: ts.softmax(x) * 2.0), x, target=target, out=f"{folder}/first", **options)
        other = ts.jit(lambda x: ts.softmax(x))
        gc.collect()  # what the process did before may leave objects whose finalizers would count
        gc.disable()
        sys.setprofile(note)
        try:
            ts.build(other, x, target=target, out=f"{folder}/second", **options)
        finally:
            sys.setprofile(None)
            gc.enable()
    return sorted(found)


def main(arguments: list[str]) -> None:
    """Print the counts, and with --list the files."""
    for target, options in TARGETS.items():
        files = list_files(target, options)
        print(f"{target}: {len(files)} files")
        if "--list" in arguments:
            print("\n".join(f"  {file}" for file in files))
    print(f"modules: {sum(1 for _ in PACKAGE.rglob('*.py'))}")


if __name__ == "__main__":
    main(sys.argv[1:])
