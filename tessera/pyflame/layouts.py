"""Mesh layouts: how a tensor is distributed over a grid of processing elements (PyFlame API reference, "Layouts")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, OutOfBoundsError, user_location
from tessera.lower.mesh import MeshShape
from tessera.ops.dialects.mesh import UNSPLIT

MAX_ROWS, MAX_COLUMNS = 1172, 762  # of the largest fabric, that of the WSE-3
KINDS = ("single_pe", "row_partition", "col_partition", "grid")


@dataclass(frozen=True, init=False)
class PECoord:
    """The coordinate of a processing element: its row and its column, from 0.

    >>> PECoord(2, 3).row, PECoord(2, 3).col
    (2, 3)

    Raises:
        ArgumentError: a coordinate is not an integer from 0 on.
    """

    row: int
    col: int

    def __init__(self, row: int, col: int) -> None:  # written out: errors name the caller of it
        for name, value in (("row", row), ("column", col)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ArgumentError(
                    f"the {name} of a processing element", location=user_location(), received=repr(value),
                    expected="an integer from 0 on",
                )  # fmt: skip
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "col", col)


def _check_count(value: Any, most: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(
            f"a layout over a number of {what} that is not a count", location=user_location(), received=repr(value),
            expected="an integer from 1 on",
        )  # fmt: skip
    if value > most:
        raise ArgumentError(
            f"the layout is larger than every wafer: {value} {what}", location=user_location(), received=str(value),
            expected=f"at most {MAX_ROWS} rows and {MAX_COLUMNS} columns of processing elements",
        )  # fmt: skip
    return value


@dataclass(frozen=True, init=False)
class MeshLayout:
    """A distribution of the last two axes of a tensor over rows and columns of processing elements (PEs).

    The axis before the last is cut over the rows of PEs, the last over the columns. Pieces are equal; the last ones are
    padded where a size is no multiple. A tensor of one axis has columns only, so `row_partition` cuts that axis.

    >>> MeshLayout.grid(4, 4), MeshLayout.grid(4, 4).num_pes
    (MeshLayout.grid(4, 4), 16)
    """

    kind: str
    rows: int
    cols: int

    def __init__(self, kind: str, rows: int = 1, cols: int = 1) -> None:
        if kind not in KINDS:
            raise ArgumentError(
                f"there is no layout {kind!r}", location=user_location(), expected=", ".join(KINDS),
                received=repr(kind), suggestion="write pf.MeshLayout.grid(4, 4)",
            )  # fmt: skip
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "rows", _check_count(rows, MAX_ROWS, "rows"))
        object.__setattr__(self, "cols", _check_count(cols, MAX_COLUMNS, "columns"))

    @classmethod
    def single_pe(cls) -> MeshLayout:
        """All data on a single PE; where other tensors of a program are distributed, each PE has a copy."""
        return cls("single_pe")

    @classmethod
    def row_partition(cls, n: int) -> MeshLayout:
        """The rows distributed over `n` PEs, which are a column of the mesh.

        Raises:
            ArgumentError: `n` is not a count, or larger than a wafer.
        """
        return cls("row_partition", rows=n)

    @classmethod
    def col_partition(cls, n: int) -> MeshLayout:
        """The columns distributed over `n` PEs, which are a row of the mesh.

        Raises:
            ArgumentError: `n` is not a count, or larger than a wafer.
        """
        return cls("col_partition", cols=n)

    @classmethod
    def grid(cls, rows: int, cols: int) -> MeshLayout:
        """Tiles of rows and columns distributed over `rows` x `cols` PEs.

        Raises:
            ArgumentError: a number is not a count, or larger than a wafer.
        """
        return cls("grid", rows, cols)

    def __repr__(self) -> str:
        sizes = {"single_pe": (), "row_partition": (self.rows,), "col_partition": (self.cols,)}
        return f"MeshLayout.{self.kind}({', '.join(map(str, sizes.get(self.kind, (self.rows, self.cols))))})"

    @property
    def num_pes(self) -> int:
        """The number of PEs."""
        return self.rows * self.cols

    def sharding(self, rank: int) -> tuple[int, ...]:
        """For each axis of a tensor the mesh axis over which it is cut (0: rows, 1: columns), or -1.

        >>> MeshLayout.grid(2, 2).sharding(3), MeshLayout.row_partition(2).sharding(1)
        ((-1, 0, 1), (0,))
        """
        cuts = [UNSPLIT] * rank
        if rank and self.cols > 1:
            cuts[-1] = 1
        if self.rows > 1 and rank >= 2:
            cuts[-2] = 0
        elif self.rows > 1 and rank == 1 and self.cols == 1:
            cuts[0] = 0
        return tuple(cuts)

    def tile(self, shape: Sequence[int], pe: PECoord) -> tuple[slice, ...]:
        """The part of a tensor that a PE holds, as a subscript.

        >>> MeshLayout.grid(2, 4).tile((8, 8), PECoord(1, 3))
        (slice(4, 8, None), slice(6, 8, None))

        Raises:
            OutOfBoundsError: the layout does not have the PE.
        """
        if not isinstance(pe, PECoord) or pe.row >= self.rows or pe.col >= self.cols:
            raise OutOfBoundsError(
                f"{self!r} does not have the processing element", location=user_location(), received=repr(pe),
                expected=f"rows from 0 to {self.rows - 1}, columns from 0 to {self.cols - 1}",
            )  # fmt: skip
        found, mesh = [], MeshShape(self.rows, self.cols)
        for size, cut in zip(shape, self.sharding(len(shape)), strict=True):
            place, count = ((pe.row, self.rows), (pe.col, self.cols))[cut] if cut != UNSPLIT else (0, 1)
            piece = mesh.piece(size, cut) if count > 1 else size
            found.append(slice(min(place * piece, size), min((place + 1) * piece, size)))
        return tuple(found)


def check_layout(layout: Any) -> MeshLayout | None:
    """A layout or None, as arguments have it.

    Raises:
        ArgumentError: it is something else.
    """
    if layout is None or isinstance(layout, MeshLayout):
        return layout
    raise ArgumentError(
        "this is not a layout", location=user_location(), expected=", ".join(f"pf.MeshLayout.{k}" for k in KINDS),
        received=repr(layout), suggestion="write layout=pf.MeshLayout.grid(4, 4)",
    )  # fmt: skip
