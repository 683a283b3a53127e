"""Metaprogramming: kernels and functions from generated source, whose errors and debugger show that source.

>>> @generate
... def make_scale(factor):
...     return Template('''
...         @tessera.kernel
...         def scale_{name}(x: Tensor["N"]):
...             i = tile.program_id(0)
...             x[i] = x[i] * {factor}
...     ''').render(name="x", factor=float(factor))
>>> make_scale(3).__name__
'scale_x'
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, FileError, Location, UnsupportedSyntaxError, user_location
from tessera.core.io import find_cache_folder, hash_text, write_text

_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


class Template:
    """Source text with fields `{name}`; `{{` and `}}` are braces. Common indentation is removed.

    >>> Template("x + {n} + {{}}").render(n=2)
    'x + 2 + {}'
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise ArgumentError("a template is text", location=user_location(), received=repr(text)[:80])
        self.text = textwrap.dedent(text).strip("\n")

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(dict.fromkeys(m[1] for m in _FIELD.finditer(self.text) if m[1]))

    def render(self, **values: Any) -> str:
        """The text with its fields filled in; lines of a value are indented as the field is.

        Raises:
            ArgumentError: a field has no value, or a value no field.
        """
        missing, extra = set(self.fields) - set(values), set(values) - set(self.fields)
        if missing or extra:
            raise ArgumentError(
                "the values do not fit the template", location=user_location(),
                expected=", ".join(self.fields) or "none", received=", ".join(values) or "none",
            )  # fmt: skip
        return _FIELD.sub(lambda m: self._fill(m, values), self.text)

    def _fill(self, match: re.Match[str], values: dict[str, Any]) -> str:
        if match[1] is None:
            return match[0][0]
        start = self.text.rfind("\n", 0, match.start()) + 1
        before = self.text[start : match.start()]
        lines = textwrap.dedent(str(values[match[1]])).strip("\n").splitlines() or [""]
        indent = before if not before.strip() else " " * (len(before) - len(before.lstrip()))
        return f"\n{indent}".join(lines)


def write_source(text: str) -> Path:
    """The file of some generated source, by its hash, so that errors and the debugger can show it.

    It is in the cache folder, or in a temporary one where that cannot be written.
    """
    path = find_cache_folder() / "generated" / f"{hash_text(text)[:16]}.py"
    try:
        if not path.is_file() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
    except (OSError, FileError):
        path = Path(tempfile.mkdtemp()) / path.name
        write_text(path, text)
    return path


def compile_source(text: str, names: dict[str, Any] | None = None) -> Any:
    """Execute source, and give the last thing that it defines. Only source that you trust: it is Python.

    `tessera`, `ts`, `tile` and the names of `tessera` are known in it, and `names`.

    Raises:
        UnsupportedSyntaxError: it is no Python; the error shows its line.
        ArgumentError: it defines nothing.
    """
    path = write_source(text)
    package = sys.modules["tessera"]
    known = {**vars(package), "tessera": package, "ts": package, "tile": package.tile, **(names or {})}
    scope = dict(known)
    try:
        exec(compile(text, str(path), "exec"), scope)  # noqa: S102  # what the user asks for
    except SyntaxError as error:
        raise UnsupportedSyntaxError(
            f"the generated source is no Python: {error.msg}",
            location=Location(str(path), error.lineno or 0, error.offset or 0),
        ) from None
    made = [v for k, v in scope.items() if k != "__builtins__" and (k not in known or known[k] is not v)]
    if not made:
        raise ArgumentError("the generated source defines nothing", location=user_location(), expected="a kernel")
    return made[-1]


def generate(function: Callable[..., str]) -> Callable[..., Any]:
    """A function that gives source; a call gives what the source defines last, compiled once for each source.

    Raises (of a call):
        ArgumentError: it gives no text, or source that defines nothing.
        UnsupportedSyntaxError: the source is no Python.
    """
    if not callable(function):
        raise ArgumentError("ts.meta.generate is for a function that gives source", location=user_location(),
                            received=repr(function)[:80])  # fmt: skip
    made: dict[str, Any] = {}

    @functools.wraps(function)
    def build(*args: Any, **named: Any) -> Any:
        text = function(*args, **named)
        if not isinstance(text, str):
            raise ArgumentError(
                f"{function.__name__} gives no source", location=user_location(),
                expected="text, as Template.render gives", received=repr(text)[:80],
            )  # fmt: skip
        if text not in made:
            made[text] = compile_source(text, {k: v for k, v in function.__globals__.items() if not k.startswith("__")})
        return made[text]

    build.source = function  # type: ignore[attr-defined]
    return build
