"""Explanation of a sharding plan: a table of the layouts and collectives, with bytes and predicted time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, FileError, user_location
from tessera.dist.partition import Partitioned
from tessera.dist.propagation import ShardingPlan, Transfer, count_bytes, tensor_type

WIDTH = 140


class Explanation:
    """What `ts.dist.explain` gives: its text is a table, `save_svg` a picture of it; `plan` has the numbers."""

    def __init__(self, name: str, plan: ShardingPlan, inputs: list[tuple[str, Any]], results: list[Any]) -> None:
        self.name, self.plan = name, plan
        self._inputs, self._results = inputs, results

    @property
    def bytes(self) -> int:
        """The bytes that each rank sends in one call."""
        return sum(t.bytes for t in self.plan.transfers())

    @property
    def seconds(self) -> float:
        """The predicted time of all collectives of one call, one after the other."""
        return sum(t.seconds for t in self.plan.transfers())

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The table: line, value, type, layout, and the collectives before it."""
        mesh, seen = self.plan.mesh, set()
        found = [
            ("", f"argument {name}", _show_type(value, layout, mesh), str(layout), "")
            for (name, value), layout in zip(self._inputs, self.plan.inputs, strict=True)
        ]
        for step in self.plan.steps:
            moves = [
                _show_transfer(t)
                for value, listed in zip(step.node.args, step.moves, strict=True)
                if (value, tuple(listed)) not in seen
                for t in listed
                if t.op != "local_part"
            ]
            place = f"{Path(step.node.loc.file).name}:{step.node.loc.line}"
            seen |= {(v, tuple(m)) for v, m in zip(step.node.args, step.moves, strict=True)}
            for value, layout in zip(step.node.results, step.results, strict=True):
                shown = _show_type(value, layout, mesh)
                found.append((place, step.node.op.__name__, shown, str(layout), "; ".join(moves)))
                moves = []
        for i, (value, last, layout) in enumerate(zip(self._results, self.plan.moves, self.plan.outputs, strict=True)):
            texts = [_show_transfer(t) for t in last if t.op != "local_part" and (value, tuple(last)) not in seen]
            found.append(("", f"result {i}", _show_type(value, layout, mesh), str(layout), "; ".join(texts)))
        return found

    def _render(self, console: Any) -> None:
        from rich.markup import escape
        from rich.table import Table

        sent = f"{_show_bytes(self.bytes)} sent by each rank, {self.seconds * 1e6:.1f} us"
        title = f"{self.name} on {self.plan.mesh}: {sent}"
        table = Table(title=title, title_justify="left")
        for column in ("line", "value", "type, bytes of a rank", "layout", "collectives before it"):
            table.add_column(column, overflow="fold")
        for row in self.rows():
            table.add_row(*map(escape, row))  # a layout is no markup
        console.print(table)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        self._render(console)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    def save_svg(self, path: str | Path) -> None:
        """Write the table as a picture.

        Raises:
            FileError: the file cannot be written.
        """
        from rich.console import Console

        console = Console(file=io.StringIO(), width=WIDTH, record=True)
        self._render(console)
        try:
            Path(path).write_text(console.export_svg(title="tessera.dist", unique_id="plan"))
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}", location=user_location()) from None


def _show_bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"


def _show_type(value: Any, layout: Any, mesh: Any) -> str:
    return f"{tensor_type(value)}, {_show_bytes(count_bytes(tensor_type(value), layout.dims, mesh))}"


def _show_transfer(t: Transfer) -> str:
    return f"{t.op} over {'+'.join(t.axes)} ({_show_bytes(t.bytes)}, {t.seconds * 1e6:.1f} us)"


def explain(function: Any, *args: Any, **named: Any) -> Explanation:
    """The layouts and collectives of a partitioned function for these arguments, or for their types.

    >>> import tessera as ts
    >>> mesh = ts.Mesh((2,), "tp")
    >>> f = ts.dist.partition(lambda x, w: x @ w, mesh=mesh, in_specs=(ts.dist.P(None, "tp"), ts.dist.P("tp")))
    >>> for line, value, type, layout, collectives in explain(f, ts.ones((4, 8)), ts.ones((8, 4))).rows():
    ...     print(value, layout, collectives)
    argument x [-, tp]
    argument w [tp, -]
    dot [-, -] sum over tp
    result 0 [-, -] all_reduce over tp (64 B, 6.0 us)

    Raises:
        ArgumentError: the function is not one that `ts.dist.partition` made, or as its `plan`.
    """
    if not isinstance(function, Partitioned):
        raise ArgumentError(
            "explain takes a partitioned function", location=user_location(), received=type(function).__name__,
            suggestion="ts.dist.partition(function, mesh=mesh, in_specs=...)",
        )  # fmt: skip
    call = function.jit.bind(args, named)
    traced, plan, _ = function._compile(call)
    body = function.block(call)
    names = [*call.names, *(p.hint for p in body.params[len(call.names) :])]
    return Explanation(function.jit.name, plan, list(zip(names, body.params, strict=True)), list(body.results))
