"""Files of a build: counts the files of the package whose functions run while softmax is built.

    python scripts/count_files.py [--list]

A function is built for each target once: what happens on first use, as imports, does not count. Then another function
is built, under `sys.setprofile`; a file counts where one of its functions is called. `docs/architecture.md` has the
counts.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

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

    with tempfile.TemporaryDirectory() as folder:
        ts.build(ts.jit(lambda x: ts.softmax(x) + 0.0), x, target=target, out=f"{folder}/first", **options)
        other = ts.jit(lambda x: ts.softmax(x))
        sys.setprofile(note)
        try:
            ts.build(other, x, target=target, out=f"{folder}/second", **options)
        finally:
            sys.setprofile(None)
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
