"""Fuzz the readers of files that may come from strangers: only typed errors, within 2 seconds and 512 MB.

    python scripts/fuzz_parsers.py --seconds 60 [--reader ir] [--seed 0] [--report out.json]
    python scripts/fuzz_parsers.py --inputs 1000000 --reader npy --reader chat
    python scripts/fuzz_parsers.py --guided --reader ir --seconds 600

Inputs are mutations of valid ones: bytes and tokens are deleted, repeated, swapped, replaced, and numbers made extreme.
With `--guided` the inputs that reach new lines are kept and mutated further (needs the package atheris). The limits are
of processor time and of the memory that a reader adds.
"""

from __future__ import annotations

import argparse
import json
import os
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
from types import FrameType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
GUIDED = "--guided" in sys.argv
if GUIDED:
    import atheris
import fuzz_readers  # noqa: E402

import tessera as ts  # noqa: E402
from tessera.serving.json_bodies import ProtocolError  # noqa: E402

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


class TimeOver(BaseException):
    """A reader took longer than its limit."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TimeOver


class Session:
    """The inputs that one reader has had: counts of each outcome, and the first input of each kind of failure."""

    def __init__(self, name: str, read: Callable[[bytes], Any]) -> None:
        self.name, self.read = name, read
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}

    def feed(self, data: bytes) -> None:
        """Read one input within the limit of processor time."""
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
        try:
            self.read(data)
            kind = "read"
        except (ts.TesseraError, ProtocolError):
            kind = "typed error"
        except TimeOver:
            kind = "too long"
        except (Exception, SystemExit) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.counts[kind] += 1
        if kind not in ("read", "typed error"):
            self.failures.setdefault(kind, repr(data[:4000]))

    def report(self) -> dict[str, Any]:
        """What was read, as JSON."""
        found = {"inputs": self.counts.total(), "counts": dict(self.counts), "failures": self.failures}
        return {"reader": self.name, "guided": GUIDED, **found}


def run(
    name: str, seeds: list[bytes], read: Callable[[bytes], Any], seconds: float, seed: int, inputs: int = 0
) -> dict[str, Any]:
    """Read mutations for some seconds, or a number of them."""
    draw, session = random.Random(f"{name}/{seed}"), Session(name, read)
    end = time.perf_counter() + seconds
    while session.counts.total() < inputs if inputs else time.perf_counter() < end:
        session.feed(mutate(draw.choice(seeds), draw, seeds))
    return session.report()


def run_guided(session: Session, seeds: list[bytes], folder: Path, seconds: float, seed: int, report: str) -> None:
    """Read inputs that atheris chooses by the lines that they reach; its own mutations and ours take turns.

    It ends the process: status 0 only if every input gave a value or a typed error.
    """
    for function in list_functions(fuzz_readers.MODULES[session.name]):
        atheris.instrument_func(function)
    corpus, end = folder / "corpus", time.perf_counter() + seconds
    corpus.mkdir()
    for number, data in enumerate(seeds):
        (corpus / str(number)).write_bytes(data)

    def feed(data: bytes) -> None:
        session.feed(data)
        if time.perf_counter() > end:
            write_reports([session.report()], report)
            sys.stdout.flush()
            os._exit(1 if session.failures else 0)

    def change(data: bytes, size: int, number: int) -> bytes:
        draw = random.Random(number)
        return (mutate(data, draw, seeds) if draw.random() < 0.5 else atheris.Mutate(data, len(data)))[:size]

    longest = 2 * max(map(len, seeds)) + 4096
    settings = [
        f"-seed={seed + 1}",
        f"-max_len={longest}",
        "-rss_limit_mb=0",
        "-verbosity=0",
        f"-artifact_prefix={folder}/",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *settings], feed, custom_mutator=change)
    atheris.Fuzz()


def list_functions(prefixes: tuple[str, ...]) -> list[Any]:
    """The functions and methods of the loaded modules whose names begin with one of these."""
    found: dict[int, Any] = {}
    for module in [m for n, m in sorted(sys.modules.items()) if n.startswith(prefixes)]:
        classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        for each in [v for scope in (module, *classes) for v in vars(scope).values()]:
            each = getattr(each, "__wrapped__", getattr(each, "__func__", each))
            if isinstance(each, FunctionType) and each.__module__ == module.__name__:
                found[id(each)] = each
    return list(found.values())


def write_reports(results: list[dict[str, Any]], report: str) -> None:
    """Print the counts of readers, and write them as JSON."""
    for result in results:
        print(f"{result['reader']}: {result['inputs']} inputs, {result['counts']}")
    if report:
        Path(report).write_text(json.dumps(results, indent=1))


def main() -> int:
    """Status 0 only if every input gave a value or a typed error."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="for all readers together")
    options.add_argument("--inputs", type=int, default=0, help="for each reader, instead of the seconds")
    options.add_argument("--reader", action="append", default=[])
    options.add_argument("--guided", action="store_true", help="choose inputs by coverage, of one reader (atheris)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--report", default="")
    given = options.parse_args()
    signal.signal(signal.SIGPROF, _stop)
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz_readers.list_readers(Path(folder))
        chosen = given.reader or list(found)
        if unknown := [n for n in chosen if n not in found]:
            options.error(f"{unknown[0]} is no reader; there are {', '.join(found)}")
        held = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
        resource.setrlimit(resource.RLIMIT_AS, (held + LIMIT_BYTES,) * 2)
        if given.guided:
            seeds, read = found[chosen[0]]
            run_guided(Session(chosen[0], read), seeds, Path(folder), given.seconds, given.seed, given.report)
        results = []
        for name in chosen:
            results.append(run(name, *found[name], given.seconds / len(chosen), given.seed, given.inputs))
            write_reports(results[-1:], "")
    if given.report:
        Path(given.report).write_text(json.dumps(results, indent=1))
    return 1 if any(r["failures"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
