"""Run Triton's tutorials, of a checkout of Triton, at small sizes in the PTX emulator; write what happened as JSON.

    python scripts/run_triton_tutorials.py TRITON/python/tutorials --arch sm_80 --debug -o tutorials.json

The programs are unmodified except for sizes and for the parts that need a GPU's libraries (SUBSTITUTIONS).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import re
import runpy
import sys
import tempfile
import time
from pathlib import Path

import tessera as ts

# By tutorial: pairs of a pattern and its replacement.
SUBSTITUTIONS = {
    "02": [(r"1823, 781", "183, 781")],
    "05": [(r"test_layer_norm\(1151, 8192", "test_layer_norm(37, 512")],
    "08": [(r"= \[1024, 512, 256, 128\]", "= [256, 128, 128, 128]"), ("gropup", "group")],
    "09": [(r"if is_cuda\(\):\n    from", "is_tileir = lambda: False\nif False:\n    from"),  # cuBLAS
           (r"validate\(8192, 8192, args.K_range\[0\], dtype\)", "validate(256, 320, 160, dtype); raise SystemExit")],
}  # fmt: skip
SKIPPED = {"10": "needs instructions of sm_100"}


def run_attention(path: Path) -> None:
    """The tutorial's own test, forward and backward."""
    specification = importlib.util.spec_from_file_location("attention_tutorial", path)
    module = importlib.util.module_from_spec(specification)  # type: ignore[arg-type]
    sys.modules["attention_tutorial"] = module
    specification.loader.exec_module(module)  # type: ignore[union-attr]
    for causal in (False, True):
        module.test_op(1, 2, 128, 64, causal, False, "bwd", "triton-fp16")
        module.test_op(1, 2, 128, 64, causal, False, "fwd", "triton-fp8")


def run_tutorial(path: Path, folder: Path, arch: str, debug: bool) -> dict[str, object]:
    """Run one tutorial; its launches, seconds and error."""
    number, text = path.name[:2], path.read_text()
    for pattern, new in SUBSTITUTIONS.get(number, ()):
        text = re.sub(pattern, new, text)
    copy = folder / path.name
    copy.write_text(text)
    start, output, error, launches = time.perf_counter(), io.StringIO(), None, 0
    with ts.triton.interpreted(arch, debug=debug) as session:
        try:
            sys.argv = [str(copy)]
            with contextlib.redirect_stdout(output):
                run_attention(copy) if number == "06" else runpy.run_path(str(copy), run_name="__main__")
        except SystemExit:
            pass
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        launches = session.launches
    wrong = [line for line in output.getvalue().splitlines() if "❌" in line]
    seconds = round(time.perf_counter() - start, 1)
    return {"tutorial": path.stem, "launches": launches, "seconds": seconds, "error": error, "wrong": wrong}


def main() -> int:
    """Run all tutorials of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(options.folder.glob("[01][0-9]-*.py")):
            if path.name[:2] not in SKIPPED:
                results.append(run_tutorial(path, Path(folder), options.arch, options.debug))
                print(json.dumps(results[-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(r["error"] or r["wrong"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
