"""From `!dbg` on an instruction to the source line that it came from."""

from __future__ import annotations

import os

from tessera.errors import Location
from tessera.interp.target.llvm.syntax import Instruction, Node, Program


def source_location(program: Program, i: Instruction) -> Location | None:
    """The file, line and column of a DILocation, if the text has them."""
    node = program.nodes.get(i.debug)
    if node is None or node.kind != "DILocation":
        return None
    file, line, column = _file(program, node), *(int(node.fields.get(n, 0)) for n in ("line", "column"))
    return Location(file, line, column) if file else None


def _file(program: Program, node: Node | None) -> str:
    """The file of the innermost scope that names one."""
    while node is not None:
        if (found := program.nodes.get(node.fields.get("file", ""))) is not None:
            return os.path.join(_text(found, "directory"), _text(found, "filename"))
        node = program.nodes.get(node.fields.get("scope", ""))
    return ""


def _text(node: Node, name: str) -> str:
    return node.fields.get(name, "").strip('"')
