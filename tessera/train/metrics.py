"""Metrics: rows of numbers written as a CSV file, and as event files of TensorBoard by its own package."""

from __future__ import annotations

import csv
import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tessera.core.errors import ArgumentError, DeviceUnavailable, user_location
from tessera.core.io import check_writable


class CsvLog:
    """Rows of numbers in a CSV file; a run that goes on appends, after the rows before its step.

    Raises:
        FileError: the file cannot be written.
        ArgumentError: a row has other columns than the first.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = check_writable(path)
        self.columns: list[str] | None = None
        self._file: IO[str] | None = None

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
        self._file = open(self.path, "w", newline="")  # noqa: SIM115 - open while the run lasts
        csv.writer(self._file).writerows([rows[0], *kept])

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row; it is on disk when this returns."""
        if self._file is None:
            self._file = open(self.path, "w", newline="")  # noqa: SIM115
        if self.columns is None:
            self.columns = list(row)
            csv.writer(self._file).writerow(self.columns)
        if list(row) != self.columns:
            raise ArgumentError(
                "a row of metrics has other columns", location=user_location(), expected=", ".join(self.columns),
                received=", ".join(row),
            )  # fmt: skip
        csv.writer(self._file).writerow([row[name] for name in self.columns])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardLog:
    """Numbers as event files in a folder, written by the package `tensorboard`.

    Raises:
        DeviceUnavailable: the package is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            self._proto = importlib.import_module("tensorboard.compat.proto.summary_pb2")
            self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        except ImportError:
            raise DeviceUnavailable(
                "TensorBoard's files need the package tensorboard", suggestion="pip install tessera[train]"
            ) from None
        self._writer = writer.EventFileWriter(str(folder))

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
        self._writer.add_event(event)

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._writer.flush()
        self._writer.close()
