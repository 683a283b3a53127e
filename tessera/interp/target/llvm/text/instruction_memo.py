"""Memoisation of parsed instructions by their line of text: modules repeat most lines, in another order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tessera.interp.target.llvm.text.syntax import LlvmInstruction
from tessera.interp.target.tokens import TextToken

_MAX_LINES = 1 << 15  # an instruction takes about a kilobyte
_DEBUG = ", !dbg !"
# What a line means may depend on a type that is defined elsewhere.
_NAMED_TYPE = re.compile(r"=\s*type\b")
# A line that may continue the instruction of the line before, although that was whole.
_CONTINUATION = re.compile(
    r"^[ \t\r]*(?:[,*(]|(?:addrspace|syncscope|unordered|monotonic|acquire|release|acq_rel|seq_cst)\b)", re.MULTILINE
)


class ParsedLine(NamedTuple):
    """An instruction that is alone in its line: its first token, at its column, and the instruction."""

    first: TextToken
    instruction: LlvmInstruction


_LINES: dict[str, ParsedLine] = {}


def split_debug(line: str) -> tuple[str, str]:
    """A line without the debug metadata at its end, and the name of that metadata: lines differ in it alone."""
    at = line.rfind(_DEBUG)
    number = line[at + len(_DEBUG) :] if at >= 0 else ""
    return (line[:at], f"!{number}") if number.isdigit() else (line, "")


def is_line_based(text: str) -> bool:
    """Whether each line can be read alone: no string or instruction goes on in the next line, no type has a name."""
    if _NAMED_TYPE.search(text) or _CONTINUATION.search(text):
        return False
    return all(line.count('"') % 2 == 0 for line in text.split("\n") if '"' in line)


def find_parsed_lines(text: str) -> Iterator[tuple[int, int, ParsedLine, str]]:
    """The lines that were parsed before: first and last offset, what they were parsed to, their debug metadata."""
    start = 0
    for line in text.split("\n"):
        end = start + len(line)
        key, debug = split_debug(line)
        if (parsed := _LINES.get(key)) is not None:
            yield start, end, parsed, debug
        start = end + 1


def remember_line(line: str, first: TextToken, instruction: LlvmInstruction) -> None:
    """Record what a line was parsed to."""
    if len(_LINES) >= _MAX_LINES:
        _LINES.clear()
    _LINES[split_debug(line)[0]] = ParsedLine(first, instruction)
