"""Inspector page: one HTML file with the data of an inspection, its style and its script; it loads nothing else.

The data is JSON in a script element that is not executed; the script puts texts of the program on the page as text, and
never as markup. A content security policy admits this page's own script and style by their hashes, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import linecache
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from tessera.codegen.contract import get_backend
from tessera.core.errors import UNKNOWN, Location, TesseraError
from tessera.ir.core import Block, Module, Node, Value
from tessera.runtime.program import PreparedProgram
from tessera.tools.inspector.differences import VALUE, compare_lines, count_changes
from tessera.tools.inspector.gpu_timeline import record_gpu
from tessera.tools.inspector.mesh_timeline import record_mesh
from tessera.tools.inspector.recording import LevelRecording, RecordedValue, record_level
from tessera.tools.inspector.sections import PageSection, list_level_sections, list_pass_sections

MOST_LINES = 20_000  # of a section
MOST_COLUMNS = 2_000  # of a line
MOST_FILES = 20  # of the user's source


@dataclass(frozen=True)
class InspectorPage:
    """A page: its HTML, its data, and the limits that it reached."""

    html: str
    data: Mapping[str, Any] = field(repr=False)
    notes: Sequence[str] = ()


def make_page(
    program: PreparedProgram, target: str, options: Mapping[str, Any], most_lines: int = MOST_LINES,
    values: bool = True,
) -> InspectorPage:  # fmt: skip
    """Inspect a program and make its page; with `values` it is run at the Graph and the Tile level and on the target.

    Sections of more than `most_lines` lines are cut, and the page says so. The same program and options give the same
    bytes.
    """
    notes: list[str] = []
    levels = program.lower_for_target(target)
    recordings = _record_levels(levels, program, notes) if values else {}
    writer = PageWriter(most_lines, notes)
    level_numbers = [writer.add_section(s) for s in list_level_sections(levels, target, options)]
    for module, recording in recordings.items():
        writer.add_values(module, recording)
    passes = writer.add_passes(list_pass_sections(program, target, options))
    data: dict[str, Any] = {
        "title": program.name, "target": target, "arch": str(options.get("arch", "")), "levels": level_numbers,
        "passes": passes, "mesh": None, "gpu": None, "recorded": bool(recordings),
    }  # fmt: skip
    family = target.partition(":")[0]
    if family in _TIMELINES:
        name, record = _TIMELINES[family]
        data[name] = record(levels["tile"], program.arrays, target, options) if values else None
    data |= writer.finish()
    return InspectorPage(write_html(program.name, data), data, tuple(notes))


def _record_ptx(module: Module, arrays: Sequence[Any], target: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return record_gpu(get_backend(target).emit(module, options), arrays, target)


_TIMELINES = {"csl": ("mesh", record_mesh), "ptx": ("gpu", _record_ptx)}


def _record_levels(
    levels: Mapping[str, Module], program: PreparedProgram, notes: list[str]
) -> dict[str, LevelRecording]:
    """The values of the Graph and the Tile level; what could not be recorded is a note."""
    found = {}
    for level in ("graph", "tile"):
        if level not in levels:
            continue
        try:
            found[level] = record_level(levels[level], program.arrays)
        except TesseraError as error:
            notes.append(f"no values of the {level} level: {error.message}")
            continue
        if found[level].note:
            notes.append(f"{level}: {found[level].note}")
    return found


@dataclass
class PageWriter:
    """The data of a page while it is collected: texts and source locations are stored once and named by number."""

    most_lines: int
    notes: list[str]
    texts: dict[str, int] = field(default_factory=dict)
    places: dict[tuple[str, int, int], int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    sections: list[dict[str, Any]] = field(default_factory=list)
    sources: list[PageSection] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    cut_lines: int = 0

    def add_section(self, section: PageSection) -> int:
        """The number of a section, which is cut after `most_lines` lines."""
        kept = section.lines[: self.most_lines]
        omitted = len(section.lines) - len(kept)
        if omitted:
            self.notes.append(f"{section.name}: the first {len(kept):,} of {len(section.lines):,} lines are shown")
        self.sections.append({
            "name": section.name, "level": section.level, "digest": section.digest[:12], "omitted": omitted,
            "lines": [self._text(line.text) for line in kept], "places": [self._place(line.location) for line in kept],
        })  # fmt: skip
        self.sources.append(section)
        return len(self.sections) - 1

    def _text(self, text: str) -> int:
        if len(text) > MOST_COLUMNS:
            self.cut_lines += 1
            text = f"{text[:MOST_COLUMNS]} … ({len(text) - MOST_COLUMNS:,} more characters)"
        return self.texts.setdefault(text, len(self.texts))

    def _place(self, location: Location) -> int:
        if location == UNKNOWN or not location.line:
            return -1
        key = (os.path.abspath(location.file) if os.path.exists(location.file) else location.file, location.line,
               location.column)  # fmt: skip
        number = self.places.setdefault(key, len(self.places))
        self.ends[number] = max(self.ends.get(number, 0), location.end_column)
        return number

    def add_passes(self, sections: Sequence[PageSection]) -> list[dict[str, Any]]:
        """The passes with their differences from the pass before."""
        found: list[dict[str, Any]] = []
        before: Sequence[str] = ()
        for section in sections:
            number = self.add_section(section)
            after = [line.text for line in section.lines[: self.most_lines]]
            entries = compare_lines(before, after) if found else [("=", 0, 0, len(after))]
            removed, added = count_changes(entries)
            found.append({"section": number, "diff": [list(e) for e in entries], "removed": removed, "added": added})
            before = after
        return found

    def add_values(self, level: str, recording: LevelRecording) -> None:
        """The recorded values of a level, at the lines that define them."""
        number = next(i for i, s in enumerate(self.sections) if s["level"] == level)
        section, shown = self.sections[number], len(self.sections[number]["lines"])
        numbers: dict[Value, int] = {}
        lines: dict[str, list[int]] = {}
        for at, names, defined in _iterate_definitions(self.sources[number]):
            for name, value in zip(names, defined, strict=True):
                if value in recording.values and at < shown and value not in numbers:
                    numbers[value] = len(self.values)
                    lines.setdefault(str(at), []).append(len(self.values))
                    self.values.append({"section": number, "line": at, "name": name, "type": str(value.type),
                                        **_describe_value(recording.values[value])})  # fmt: skip
        for value, own in numbers.items():
            origin = recording.values[value].origin
            if isinstance(origin, Value):
                self.values[own]["origin"] = numbers.get(origin, "a value that the page does not show")
            elif origin is not None:
                self.values[own]["origin"] = origin
        section["values"] = lines

    def finish(self) -> dict[str, Any]:
        """The shared tables: texts, places, source files, values, notes."""
        names = dict.fromkeys(file for file, _, _ in self.places)
        if len(names) > MOST_FILES:
            self.notes.append(f"the first {MOST_FILES} of {len(names)} source files are shown")
        shown = [self._describe_file(name) for name in list(names)[:MOST_FILES]]
        order = {name: i for i, name in enumerate(names)}
        places = [[order[f], line, column, self.ends[i]] for (f, line, column), i in self.places.items()]
        if self.cut_lines:
            self.notes.append(f"{self.cut_lines:,} lines are cut after {MOST_COLUMNS:,} characters")
        return {"texts": list(self.texts), "places": places, "files": shown, "sections": self.sections,
                "values": self.values, "notes": list(self.notes)}  # fmt: skip

    def _describe_file(self, name: str) -> dict[str, Any]:
        lines = [line.rstrip("\r\n") for line in linecache.getlines(name)]
        kept = lines[: self.most_lines]
        if len(kept) < len(lines):
            self.notes.append(f"{os.path.basename(name)}: the first {len(kept):,} of {len(lines):,} lines are shown")
        return {"name": os.path.basename(name), "path": _shorten(name), "lines": [self._text(t) for t in kept],
                "omitted": len(lines) - len(kept)}  # fmt: skip


def _shorten(name: str) -> str:
    """A path relative to the working folder, if the file is in it."""
    relative = os.path.relpath(name) if os.path.isabs(name) else name
    return name if relative.startswith("..") else relative


def _iterate_definitions(section: PageSection) -> Iterator[tuple[int, list[str], Sequence[Value]]]:
    """The lines that define values: the line, the names in its text, the values."""
    seen: set[Any] = set()
    for at, line in enumerate(section.lines):
        owner = line.owner
        if owner in seen or not isinstance(owner, (Node, Block)):
            continue
        seen.add(owner)
        defined = owner.results if isinstance(owner, Node) else owner.params
        names = VALUE.findall(line.text)[: len(defined)]
        if defined and len(names) == len(defined):
            yield at, names, defined


def _describe_value(record: RecordedValue) -> dict[str, Any]:
    """A recorded value as JSON."""
    found: dict[str, Any] = {"runs": record.runs, "first": record.first, "nans": record.nans, "infs": record.infinities}
    if record.count:
        found |= {"low": _round(record.low), "high": _round(record.high), "mean": _round(record.total / record.count)}
    if record.bound is not None:
        found["bound"] = _round(record.bound)
    return found


def _round(number: float) -> float | str:
    return float(f"{number:.7g}") if abs(number) < float("inf") else str(number)


# The file.


def write_html(title: str, data: Mapping[str, Any]) -> str:
    """The page of some data."""
    style, script = (_read(name) for name in ("page.css", "page.js"))
    parts = {
        "policy": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        "title": html.escape(title), "style": style, "data": write_json(data), "script": script,
    }  # fmt: skip
    page = _read("page.html")
    for name in ("policy", "title", "style", "script", "data"):  # the data last: nothing in it is replaced
        page = page.replace("{{" + name + "}}", parts[name], 1)
    return page


def _read(name: str) -> str:
    return files("tessera.tools.inspector").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def write_json(data: Any) -> str:
    """JSON that may stand in a script element: no character of it can end the element or begin a comment.

    >>> write_json({"name": "</script><!--"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    text = json.dumps(data, separators=(",", ":"), sort_keys=True, allow_nan=False)  # ASCII alone
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


__all__ = ["InspectorPage", "make_page", "write_html", "write_json"]
