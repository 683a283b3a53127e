"""Test durations: writes tests/durations.txt, from which tests/conftest.py chooses the quick tests.

    python -m pytest -q --durations=0 --durations-min=0 > report.txt
    python scripts/record_durations.py report.txt

Each line is the time that a file's tests take together, in seconds, and the file.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "tests" / "durations.txt"
LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown)\s+(tests/\S+?\.py)::")


def read_report(text: str) -> dict[str, float]:
    """The seconds of each file, from what `pytest --durations=0` prints."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for match in LINE.finditer(text):
        seconds[match[2]] += float(match[1])
    return seconds


def read_recorded() -> dict[str, float]:
    """The seconds of each file, as recorded before."""
    lines = OUTPUT.read_text(encoding="utf-8").splitlines() if OUTPUT.is_file() else []
    return {name: float(seconds) for seconds, name in (line.split() for line in lines)}


def main(reports: list[str]) -> None:
    """Merge reports into the recorded durations; files that are gone are dropped."""
    seconds = read_recorded()
    for report in reports:
        seconds |= read_report(Path(report).read_text(encoding="utf-8"))
    kept = sorted(name for name in seconds if (ROOT / name).is_file())
    OUTPUT.write_text("".join(f"{seconds[name]:.1f} {name}\n" for name in kept), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
