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
    r"\bwhat stands? (?:behind|before|after|there|in|on|at)\b": "name the code: the predecessor, the operand",
    r"\bstands? (?:there|beside)\b": "name the object: is adjacent to, is defined in",
    r"\b(?:lie|lies|lying|leave) beside\b": "is adjacent to; for sizes, state the needed and the available number",
    r"\b(?:is|are|was|were) (?:to be )?had\b": "is available",
    r"\bwhat is given\b": "the argument, the input",
    r"\b(?:gone|goes|going|go|turned) round\b": "iterates, rotates, is transposed",
    r"\basleep\b": "blocked, suspended",
    r"\bin turns\b(?!:)": "alternately, in round-robin order",
    r"\bwhose turn\b": "the next, the active",
    r"\bmeets? at\b": "synchronise at, reach",
    r"\bat its place\b": "at its index, at its address, at its line",
    r"\b(?:handed|hand|hands) on\b": "forwarded, propagated",
    r"\bworked through\b": "executed",
    r"\bin reach\b(?![)\]:])": "available, importable",
    r"\bas (?:it|they) likes?\b": "the default; in any order",
    r"\b(?:is|are) told (?:apart|by)\b": "distinguished by",
    r"\bpart ways\b": "diverge",
    r"\bwhere it lies\b|\blies (?:there|where)\b": "in place, without a copy",
    r"\bstretch(?:es)? of (?:tiles|threads|lanes)\b": "subgroup",
    r"\bat (?:the|its) begin\b": "at the start",
    r"\b(?:by turns|turn about)\b": "alternately",
    r"\babreast\b": "ping-pong",
    r"\ba slip in\b": "an error in",
}
RULES = [(re.compile(pattern, re.IGNORECASE), term) for pattern, term in PHRASES.items()]
# Each begins with a word: one pass over a text, from word to word, finds whether its lines need to be looked at.
ANY = re.compile(rf"\b(?=[a-z])(?:{'|'.join(PHRASES)})", re.IGNORECASE)


def list_files() -> list[Path]:
    """The files that the check covers, in order."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    return sorted([*pages, *(ROOT / "tessera").rglob("*.py")])


def find_phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Each refused phrase in a text: its line number, the phrase, the term to write instead."""
    if not ANY.search(text):
        return
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
