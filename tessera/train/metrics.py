"""Metrics: rows of numbers written as a CSV file, and as event files of TensorBoard by its own package."""

from __future__ import annotations

import csv
import importlib
import io
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError, user_location
from tessera.core.io import check_writable, write_text


def _format_rows(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


class CsvLog:
    """Rows of numbers in a CSV file; a run that goes on appends, after the rows before its step.

    Raises:
        FileError: the file cannot be written.
        ArgumentError: a row has other columns than the first.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = check_writable(path)
        self.columns: list[str] | None = None

    def keep_until(self, step: int) -> None:
        """Drop the rows after a step: the run goes on from there."""
        if not self.path.is_file():
            return
        with open(self.path, newline="") as file:
            rows = list(csv.reader(file))
        if not rows:
            return
        self.columns = rows[0]
        place = self.columns.index("step") if "step" in self.columns else 0
        kept = [r for r in rows[1:] if len(r) == len(rows[0]) and int(r[place]) <= step]
        write_text(self.path, _format_rows([rows[0], *kept]))

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row; it is in the file when this returns, or nothing of it is."""
        columns = list(row) if self.columns is None else self.columns
        if list(row) != columns:
            raise ArgumentError(
                "a row of metrics has other columns", location=user_location(), expected=", ".join(columns),
                received=", ".join(row),
            )  # fmt: skip
        if self.columns is None:
            write_text(self.path, _format_rows([columns, [row[name] for name in columns]]))
        else:
            self._append(_format_rows([[row[name] for name in columns]]))
        self.columns = columns

    def _append(self, text: str) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with open(self.path, "ab") as file:
                file.write(text.encode())
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, size)  # a part of a row would spoil the next one
            raise FileError(
                f"{self.path} cannot be written", location=user_location(), received=error.strerror
            ) from None

    def close(self) -> None:
        """The file is closed after each row."""


class TensorBoardLog:
    """Numbers as event files in a folder, written by the package `tensorboard`.

    Raises:
        DeviceUnavailable: the package is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            self._files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            self._proto = importlib.import_module("tensorboard.compat.proto.summary_pb2")
            self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        except ImportError:
            raise DeviceUnavailable(
                "TensorBoard's files need the package tensorboard", suggestion="pip install tessera[train]"
            ) from None
        self.folder = str(folder)
        self._writer: Any = None

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of a row at its step."""
        values = [
            self._proto.Summary.Value(tag=name, simple_value=float(value))
            for name, value in row.items()
            if name != "step"
        ]
        event = self._events.Event(
            step=int(row["step"]), wall_time=time.time(), summary=self._proto.Summary(value=values)
        )
        if self._writer is None:  # a run that goes on writes a file of its own
            self._writer = self._files.EventFileWriter(self.folder)
        self._writer.add_event(event)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.flush()
            self._writer.close()
        self._writer = None
