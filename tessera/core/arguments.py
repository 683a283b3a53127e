"""Arguments of users that are names, texts and paths: checked where they enter, so that no error comes from within."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, FileError, user_location


def as_text(value: Any, what: str) -> str:
    """A text.

    >>> as_text("edge", "the target")
    'edge'

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, str):
        return value
    raise ArgumentError(
        f"{what} is no text", location=user_location(), received=f"{type(value).__name__} {value!r:.60}"
    )


def as_names(value: Any, what: str) -> tuple[str, ...]:
    """Names: a list of texts, or one text.

    >>> as_names(["w", "b"], "weights"), as_names("w", "weights")
    (('w', 'b'), ('w',))

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, str):
        return (value,)
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, bytes) else (None,)
    if all(isinstance(name, str) for name in found):
        return found
    raise ArgumentError(f"{what} is no list of names", location=user_location(),
                        received=f"{type(value).__name__} {value!r:.60}")  # fmt: skip


def as_path(value: Any, what: str = "the path") -> Path:
    """A path that the system can have.

    Raises:
        ArgumentError: it is no text or path. FileError: it is too long, or has a character that no path has.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise ArgumentError(f"{what} is no path", location=user_location(),
                            received=f"{type(value).__name__} {value!r:.60}")  # fmt: skip
    path = Path(value)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # to be written, or for its reader to say
    except (OSError, ValueError) as error:
        raise FileError(f"{str(path)[:60]!r} cannot be a path", location=user_location(),
                        received=getattr(error, "strerror", None) or str(error)) from None  # fmt: skip
    return path
