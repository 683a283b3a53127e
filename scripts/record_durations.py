"""Test durations: writes tests/durations.txt, from which tests/conftest.py chooses the quick tests.

    python -m pytest -q -p scripts.record_durations [tests/…]

A pytest plugin for runs in one process. Each line of the file is the processor time that a file's tests take together,
that of the processes they start included, in seconds, and the file. Other programs on the machine do not change it.
Files of which not all tests ran keep their line; files that are gone lose theirs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "tests" / "durations.txt"
SECONDS: Counter[str] = Counter()  # by file, as far as this run has come
PARTLY: set[str] = set()  # files of which a run selects some tests alone


def measure_processor_time() -> float:
    """The processor time of this process and of those that it waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Count a test, with its fixtures, for its file."""
    start = measure_processor_time()
    yield
    SECONDS[name_file(item.path)] += measure_processor_time() - start


def name_file(path: Path) -> str:
    """A test file as the list names it."""
    return path.resolve().relative_to(ROOT).as_posix()


def pytest_configure(config: Any) -> None:
    """Note the files of which single tests are asked for."""
    PARTLY.update(name_file(Path(each.partition("::")[0])) for each in config.args if "::" in each)


def pytest_deselected(items: Iterable[Any]) -> None:
    """Note the files of the tests that `-k` or `-m` leaves out."""
    PARTLY.update(name_file(item.path) for item in items)


def read_recorded() -> dict[str, float]:
    """The seconds of each file, as recorded before."""
    lines = OUTPUT.read_text(encoding="utf-8").splitlines() if OUTPUT.is_file() else []
    return {name: float(seconds) for seconds, name in (line.split() for line in lines)}


def write_durations(seconds: dict[str, float]) -> None:
    """Merge measured seconds into the recorded ones; files that are gone are dropped."""
    merged = read_recorded() | seconds
    kept = sorted(name for name in merged if (ROOT / name).is_file())
    OUTPUT.write_text("".join(f"{merged[name]:.1f} {name}\n" for name in kept), encoding="utf-8")


def pytest_unconfigure() -> None:
    """Write the file when the tests have run."""
    if whole := {name: seconds for name, seconds in SECONDS.items() if name not in PARTLY}:
        write_durations(whole)
