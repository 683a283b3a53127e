"""Fuzz the readers of files that may come from strangers: only typed errors, within 2 seconds and 512 MB.

    python scripts/fuzz_parsers.py --seconds 60 [--reader ir] [--seed 0] [--report out.json]

Inputs are mutations of valid ones: bytes and tokens are deleted, repeated, swapped, replaced, and numbers made extreme.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.core.io import load_npy
from tessera.interp.target.csl.text.parser import parse as parse_csl
from tessera.interp.target.llvm.text.module_parser import parse_module as parse_llvm
from tessera.interp.target.ptx.text.parser import parse_module as parse_ptx
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.verify import verify
from tessera.runtime.artifacts import load
from tessera.runtime.program import prepare

LIMIT_SECONDS = 2.0
LIMIT_BYTES = 512 << 20
NUMBERS = (
    b"0",
    b"-1",
    b"1",
    b"9223372036854775807",
    b"-9223372036854775809",
    b"4294967296",
    b"1e999",
    b"NaN",
    b"0x",
    b"",
)
BRACKETS = (b"(", b")", b"{", b"}", b"[", b"]", b"<", b">", b'"', b"\\", b"\x00", b"\xff", b",", b":", b"%", b"@")


def mutate(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """A neighbour of a valid input."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        place, width = draw.randrange(len(out) + 1), draw.choice((1, 2, 8, 64))
        draw.choice(CHANGES)(out, place, width, draw, others)
    return bytes(out)


def _delete(out: bytearray, place: int, width: int, draw: random.Random, others: list[bytes]) -> None:
    del out[place : place + draw.choice((width, len(out)))]


def _repeat(out: bytearray, place: int, width: int, draw: random.Random, others: list[bytes]) -> None:
    out[place:place] = out[place : place + width] * draw.choice((1, 2, 40))


def _replace(out: bytearray, place: int, width: int, draw: random.Random, others: list[bytes]) -> None:
    out[place : place + 1] = bytes([draw.randrange(256)])


def _nest(out: bytearray, place: int, width: int, draw: random.Random, others: list[bytes]) -> None:
    out[place:place] = draw.choice(BRACKETS) * draw.choice((1, 1, 3, 2000))


def _set_number(out: bytearray, place: int, width: int, draw: random.Random, others: list[bytes]) -> None:
    if found := list(re.finditer(rb"-?\d+", bytes(out))):
        number = draw.choice(found)
        out[number.start() : number.end()] = draw.choice(NUMBERS)


def _set_word(out: bytearray, place: int, width: int, draw: random.Random, others: list[bytes]) -> None:
    words = list(re.finditer(rb"[A-Za-z_.]+", bytes(out)))
    if len(words) > 1:
        first, second = draw.sample(words, 2)
        out[first.start() : first.end()] = bytes(out[second.start() : second.end()])


def _splice(out: bytearray, place: int, width: int, draw: random.Random, others: list[bytes]) -> None:
    other = draw.choice(others)
    start = draw.randrange(len(other) + 1)
    out[place:place] = other[start : start + width]


CHANGES = (_delete, _repeat, _replace, _nest, _set_number, _set_word, _splice)


def _program(x: Any, y: Any) -> Any:
    return ts.softmax(x @ y, axis=-1), ts.where(x > 0, x, 1.0).sum(axis=0)


def _flow(x: Any, y: Any) -> Any:
    return ts.scan(lambda s, r: (ts.tanh(s) + r, s), x[0], x)[1] * y.sum()


def list_seeds(folder: Path) -> dict[str, tuple[list[bytes], Callable[[bytes], Any]]]:
    """For each reader valid inputs and the function that reads one."""
    x, y = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    programs = [prepare(ts.jit(f), (x, y)) for f in (_program, _flow)]
    texts = [print_module(m).encode() for p in programs for m in p.levels.values()]
    path = folder / "file"

    def in_file(read: Callable[[Path], Any], name: str = "file") -> Callable[[bytes], Any]:
        target = folder / name

        def run(data: bytes) -> Any:
            target.write_bytes(data)
            return read(target)

        return run

    emitted = {
        t: [emit_artifact(get_backend(t), p.lower_for_target(t)["tile"], {}) for p in programs] for t in ("llvm", "ptx")
    }
    csl = emit_artifact(get_backend("csl"), programs[0].lower_for_target("csl:2x2")["tile"], {})
    np.save(path.with_suffix(".npy"), x)
    ts.save({"w": ts.Tensor(x), "b": ts.Tensor(y)}, folder / "w.safetensors")
    return {
        "ir": (texts, lambda d: verify(parse_module(d.decode(errors="replace")))),
        "llvm": (_read_texts(emitted["llvm"]), lambda d: parse_llvm(d.decode(errors="replace"))),
        "ptx": (_read_texts(emitted["ptx"]), lambda d: parse_ptx(d.decode(errors="replace"))),
        "csl": (_read_texts([csl], ".csl"), lambda d: parse_csl(d.decode(errors="replace"))),
        "npy": ([path.with_suffix(".npy").read_bytes()], in_file(load_npy, "x.npy")),
        "safetensors": ([(folder / "w.safetensors").read_bytes()], in_file(ts.load, "x.safetensors")),
        "manifest": _list_manifests(folder, x, y),
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


class TimeOver(BaseException):
    """A reader took longer than its limit."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TimeOver


def run(name: str, seeds: list[bytes], read: Callable[[bytes], Any], seconds: float, seed: int) -> dict[str, Any]:
    """Read mutations for some seconds: the counts, and the first input of each kind of failure."""
    draw, counts, failures = random.Random(f"{name}/{seed}"), Counter[str](), {}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        data = mutate(draw.choice(seeds), draw, seeds)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
        try:
            read(data)
            kind = "read"
        except ts.TesseraError:
            kind = "typed error"
        except TimeOver:
            kind = "too long"
        except (Exception, SystemExit) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        counts[kind] += 1
        if kind not in ("read", "typed error"):
            failures.setdefault(kind, repr(data[:4000]))
    return {"reader": name, "inputs": counts.total(), "counts": dict(counts), "failures": failures}


def main() -> int:
    """Status 0 only if every input gave a value or a typed error."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="for all readers together")
    options.add_argument("--reader", action="append", default=[])
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--report")
    given = options.parse_args()
    signal.signal(signal.SIGALRM, _stop)
    with tempfile.TemporaryDirectory() as folder:
        found = list_seeds(Path(folder))
        chosen = given.reader or list(found)
        held = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
        resource.setrlimit(resource.RLIMIT_AS, (held + LIMIT_BYTES,) * 2)
        results = [run(n, *found[n], given.seconds / len(chosen), given.seed) for n in chosen]
    for result in results:
        print(f"{result['reader']}: {result['inputs']} inputs, {result['counts']}")
    if given.report:
        Path(given.report).write_text(json.dumps(results, indent=1))
    return 1 if any(r["failures"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
