"""Word check: refuses phrases that a reader has to guess, in the package, the documents and the changelog.

    python scripts/check_words.py [FILE ...]

Without files, it checks every Python file of `tessera`, every page of `docs`, README.md and CHANGELOG.md. It prints one
line for each phrase that it finds, with the term to write instead, and exits with status 1. docs/glossary.md lists the
terms.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Each phrase, as a regular expression, with what to write instead.
PHRASES = {
    r"what stands (?:behind|before|after|there|in|on|at)": "name the code: the predecessor, the successor, the operand",
    r"(?:is|are|was|were) to be had|is had\b": "is available",
    r"(?:gone|goes|going|go) round\b": "iterates, or: rotated",
    r"\basleep\b": "blocked, or: suspended",
    r"\bin turns\b": "alternately, or: in round-robin order",
    r"\btake turns\b": "alternate",
    r"\bmeets? at\b": "synchronise at, or: reach",
    r"\bat its place\b": "at its index, or: at its address",
    r"\b(?:lies|lie|lying) beside\b": "is adjacent to",
    r"\bstands? beside\b": "is adjacent to, or: is defined in the same file",
    r"\bwhat is given\b": "the argument, or: the input",
    r"\bhas no such\b": "does not have X",
    r"\bof that name\b": "named X",
    r"\bone of its own\b": "its own X",
    r"\bpart ways\b": "diverge",
    r"\bturned round\b": "transposed, or: rotated",
    r"\bat hand\b": "available",
    r"\bleave beside\b": "state the two numbers: needed and available",
}
RULES = [(re.compile(pattern, re.IGNORECASE), term) for pattern, term in PHRASES.items()]


def list_files() -> list[Path]:
    """The files that the check covers, in order."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    return sorted([*pages, *(ROOT / "tessera").rglob("*.py")])


def find_phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Each refused phrase in a text: its line number, the phrase, the term to write instead."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, term in RULES:
            for match in pattern.finditer(line):
                yield number, match[0], term


def main(arguments: list[str]) -> int:
    """Print what the files contain; the exit status."""
    files = [Path(a).resolve() for a in arguments] or list_files()
    lines = [
        f'{file.relative_to(ROOT)}:{number}: "{phrase}" (write: {term})'
        for file in files
        for number, phrase, term in find_phrases(file.read_text(encoding="utf-8"))
    ]
    print("\n".join(lines) if lines else f"{len(files)} files contain none of {len(RULES)} refused phrases")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
