"""JSON files of schedules and of what was measured: written whole or not at all, read with errors that say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tessera.errors import FileError

SCHEMA = 1


def write_json(path: str | Path, content: dict[str, Any]) -> Path:
    """Replace the file at `path` in one step: a reader sees the old file or the new one, never a part."""
    from tessera.arrays import write_file  # not needed by who only imports schedules

    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, **content}, indent=2, sort_keys=True) + "\n"
    write_file(target, lambda file: file.write(text.encode()))
    return target


def read_json(path: str | Path, *keys: str) -> dict[str, Any]:
    """The file's content, which must hold `keys`.

    Raises:
        FileError: the file is missing, no JSON, of another schema, or lacks a key.
    """
    source = Path(path).expanduser()
    try:
        content = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read", received=error.strerror) from None
    except ValueError as error:
        raise FileError(f"{path} is not JSON", received=str(error), suggestion="save it again") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise FileError(f"{path} has another schema", expected=f"schema {SCHEMA}", received=found)
    missing = [k for k in keys if k not in content]
    if missing:
        raise FileError(f"{path} has no `{missing[0]}`", expected=", ".join(keys), received=", ".join(content))
    return content
