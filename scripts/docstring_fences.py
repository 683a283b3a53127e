"""Docstring fences: makes a code block of each doctest in a docstring (an extension of Griffe; mkdocs.yml names it).

Without a fence, Markdown reads the brackets of `>>> k[grid](x)` as a link.
"""

from __future__ import annotations

from typing import Any

import griffe


def fence_doctests(text: str) -> str:
    """A docstring in which each doctest is a fenced block.

    A doctest begins with `>>>` and ends before an empty line.
    """
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        starts = line.lstrip().startswith(">>> ")
        if starts and not inside:
            lines += ["", "```python"]
        if inside and not line.strip():
            lines += ["```"]
        inside = bool(line.strip()) and (inside or starts)
        lines.append(line)
    return "\n".join(lines).rstrip("\n")


class FencedDoctests(griffe.Extension):
    """Rewrites the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of an object."""
        if obj.docstring and ">>> " in obj.docstring.value and "```" not in obj.docstring.value:
            obj.docstring.value = fence_doctests(obj.docstring.value)
