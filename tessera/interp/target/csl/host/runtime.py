"""`SdkRuntime` on the simulator: load, run, copy, launch, stop."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, DeviceUnavailable, FileError
from tessera.interp.target.csl.commands import Command
from tessera.interp.target.csl.host import cslc
from tessera.interp.target.csl.host.paths import Compiled
from tessera.interp.target.csl.host.regions import Port
from tessera.interp.target.csl.host.tensors import MemcpyDataType, MemcpyOrder, Tensor
from tessera.interp.target.csl.pictures import draw, write_trace
from tessera.interp.target.csl.simulation import LIMIT, Simulation, region, shortened

# The last run of each output folder: the debug tools look into it after `stop()`.
RUNS: dict[str, Simulation] = {}


class State(Enum):
    """What a runtime has done so far."""

    CREATED = 0
    LOADED = 1
    RUNNING = 2
    STOPPED = 3


class SdkRuntime:
    """Manages one run of a program that `cslc` prepared.

    Args:
        bindir: the folder that `cslc -o` wrote, or what `SdkLayout.compile` returned (with its platform).
        cmaddr: the address of a real machine: there is none here.
        seed: shuffles the order of events and link delays to expose races; default: the variable TESSERA_CSL_SEED.

    Other options of the vendor's runtime (`suppress_simfab_trace`, `simfab_numthreads`, `msg_level`,
    `memcpy_required`) are accepted.

    Raises:
        DeviceUnavailable: `cmaddr` names a machine. FileError: the folder holds no compiled program.
        ArgumentError: a call in the wrong order or with the wrong arguments. CslFault: the program goes wrong.
    """

    def __init__(
        self,
        bindir: str | Path | Compiled,
        platform: Any = None,
        *,
        cmaddr: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        unknown = set(options) - {"suppress_simfab_trace", "simfab_numthreads", "msg_level", "memcpy_required"}
        if unknown:
            raise ArgumentError(f"SdkRuntime has no option {', '.join(sorted(unknown))}")
        if cmaddr:
            raise DeviceUnavailable(f"no machine at {cmaddr}", suggestion="leave cmaddr out: the program is simulated")
        seed = variable("SEED") if seed is None else seed
        compiled = bindir if isinstance(bindir, Compiled) else read(Path(bindir))
        self._compiled, self._layout = compiled, compiled.layout
        self._simulation = Simulation(self._layout, seed, limit=variable("LIMIT") or LIMIT)
        self._state = State.CREATED
        self._ids = {export.id: export for export in self._layout.exports.values()}
        self._open: list[tuple[Command, Tensor | None]] = []
        RUNS[compiled.folder] = self._simulation

    def load(self) -> None:
        """Put the program onto the PEs."""
        self._expect(State.CREATED, "load")
        self._state = State.LOADED

    def run(self) -> None:
        """Start it."""
        self._expect(State.LOADED, "run")
        self._state = State.RUNNING
        for place, symbols in self._compiled.symbols.items():
            for name, values in symbols.items():
                self._simulation.pes[place].variable(name)[: values.size] = values
        self._simulation.boot()

    def stop(self) -> None:
        """Wait until all commands are over and nothing happens any more, then end the run."""
        self._expect(State.RUNNING, "stop")
        for command, tensor in list(self._open):
            self._finish(command, tensor)
        self._simulation.settle()
        self._state = State.STOPPED
        self._report()

    def _report(self) -> None:
        """What the PEs printed, what was left over, and the pictures that the environment asks for."""
        for pe in self._simulation.pes.values():
            for line in pe.output:
                print(line)
        notes = [f"PE {place}: {note}" for place, one in self._simulation.streams.items() for note in one.notes]
        for line in shortened(notes + self._simulation.fabric.stuck()):
            print(f"warning: {line}", file=sys.stderr)
        for name, write in (("PICTURE", draw), ("TRACE", write_trace)):
            if path := os.environ.get(f"TESSERA_CSL_{name}"):
                write(self._simulation, path)

    def get_id(self, symbol: str) -> int:
        """The number that stands for an exported symbol in copies."""
        if symbol not in self._layout.exports:
            raise ArgumentError(
                f"the program exports no symbol '{symbol}'",
                expected=", ".join(self._layout.exports) or "an @export_name",
            )
        return self._layout.exports[symbol].id

    def launch(self, symbol: str, *args: Any, nonblock: bool = False) -> Command:
        """Call an exported function on all PEs; `nonblock`: do not wait until they unblock the command stream."""
        self._expect(State.RUNNING, "launch")
        self.get_id(symbol)
        return self._issued(self._simulation.launch(symbol, *args), None, nonblock)

    def call(self, symbol: str, args: Sequence[Any] = (), nonblock: bool = False) -> Command:
        """`launch` with the arguments in a list; a string is a number in hexadecimal: the bits of the argument."""
        words = [int(arg, 16) if isinstance(arg, str) else arg for arg in args]
        return self.launch(symbol, *words, nonblock=nonblock)

    def memcpy_h2d(
        self, dest: int, src: np.ndarray, px: int, py: int, w: int, h: int, elem_per_pe: int, *,
        streaming: bool = False, data_type: MemcpyDataType, order: MemcpyOrder, nonblock: bool = False,
    ) -> Command:  # fmt: skip
        """Copy `src`, a tensor (h, w, elem_per_pe), to a symbol (or, streaming, to a color) of a region of PEs."""
        self._expect(State.RUNNING, "memcpy_h2d")
        tensor = Tensor(src, self._region(px, py, w, h), (h, w, elem_per_pe), data_type, order)
        return self._send(dest, tensor, streaming, nonblock)

    def memcpy_h2d_rowbcast(
        self, dest: int, src: np.ndarray, px: int, py: int, w: int, h: int, elem_per_pe: int, *,
        streaming: bool = False, data_type: MemcpyDataType, order: MemcpyOrder, nonblock: bool = False,
    ) -> Command:  # fmt: skip
        """Copy `src`, a tensor (h, 1, elem_per_pe): each row's part goes to all PEs of the row."""
        self._expect(State.RUNNING, "memcpy_h2d_rowbcast")
        one = Tensor(src, [(px, y) for y in range(py, py + h)], (h, 1, elem_per_pe), data_type, order).rows(streaming)
        rows = {(x, y): one[px, y] for x, y in self._region(px, py, w, h)}
        return self._send_rows(dest, rows, streaming, nonblock)

    def memcpy_h2d_colbcast(
        self, dest: int, src: np.ndarray, px: int, py: int, w: int, h: int, elem_per_pe: int, *,
        streaming: bool = False, data_type: MemcpyDataType, order: MemcpyOrder, nonblock: bool = False,
    ) -> Command:  # fmt: skip
        """Copy `src`, a tensor (1, w, elem_per_pe): each column's part goes to all PEs of the column."""
        self._expect(State.RUNNING, "memcpy_h2d_colbcast")
        one = Tensor(src, [(x, py) for x in range(px, px + w)], (1, w, elem_per_pe), data_type, order).rows(streaming)
        rows = {(x, y): one[x, py] for x, y in self._region(px, py, w, h)}
        return self._send_rows(dest, rows, streaming, nonblock)

    def memcpy_d2h(
        self, dest: np.ndarray, src: int, px: int, py: int, w: int, h: int, elem_per_pe: int, *,
        streaming: bool = False, data_type: MemcpyDataType, order: MemcpyOrder, nonblock: bool = False,
    ) -> Command:  # fmt: skip
        """Fill `dest`, a tensor (h, w, elem_per_pe), from a symbol (or, streaming, a color) of a region of PEs."""
        self._expect(State.RUNNING, "memcpy_d2h")
        tensor = Tensor(dest, self._region(px, py, w, h), (h, w, elem_per_pe), data_type, order)
        rows = tensor.empty(streaming)
        copy = self._simulation.stream_out(src, rows) if streaming else self._simulation.copy_out(self._name(src), rows)
        return self._issued(copy, tensor, nonblock)

    def send(self, stream: Port, data: np.ndarray, nonblock: bool = False) -> Command:
        """Send 32-bit elements on a stream of an `SdkLayout`."""
        self._expect(State.RUNNING, "send")
        place, color = self._compiled.streams[id(stream)]
        rows = {place: np.ascontiguousarray(data).reshape(-1).view(np.uint32)}
        return self._issued(self._simulation.stream_in(color, rows), None, nonblock)

    def receive(self, stream: Port, data: np.ndarray, size: int, nonblock: bool = False) -> Command:
        """Fill `data` with `size` 32-bit elements of a stream of an `SdkLayout`."""
        self._expect(State.RUNNING, "receive")
        place, color = self._compiled.streams[id(stream)]
        words = data.reshape(-1).view(np.uint32)[:size]
        return self._issued(self._simulation.stream_out(color, {place: words}), None, nonblock)

    def task_wait(self, task: Command) -> None:
        """Wait until a command that was not waited for is over."""
        for command, tensor in list(self._open):
            if command is task:
                self._finish(command, tensor)

    def is_task_done(self, task: Command) -> bool:
        """Whether a command is over."""
        return task.done

    def read_symbol(self, x: int, y: int, symbol: str, dtype: Any = np.uint16) -> np.ndarray:
        """The bytes of a variable of the PE at (x, y), as elements of `dtype`."""
        return np.ascontiguousarray(self._simulation.pes[x, y].variable(symbol)).reshape(-1).view(dtype).copy()

    def coord_logical_to_physical(self, x: int, y: int) -> tuple[int, int]:
        """Where the PE (x, y) of the program lies in the fabric."""
        dx, dy = self._layout.fabric_offsets or (0, 0)
        return x + dx, y + dy

    def dump_core(self, corefile: str) -> None:
        """Accepted: the debug tools read the memory of the run itself."""

    def _send(self, dest: int, tensor: Tensor, streaming: bool, nonblock: bool) -> Command:
        return self._send_rows(dest, tensor.rows(streaming), streaming, nonblock)

    def _send_rows(self, dest: int, rows: dict, streaming: bool, nonblock: bool) -> Command:
        copy = self._simulation.stream_in(dest, rows) if streaming else self._simulation.copy_in(self._name(dest), rows)
        return self._issued(copy, None, nonblock)

    def _issued(self, command: Command, tensor: Tensor | None, nonblock: bool) -> Command:
        self._open.append((command, tensor))
        if not nonblock:
            self._finish(command, tensor)
        return command

    def _finish(self, command: Command, tensor: Tensor | None) -> None:
        self._simulation.wait(command, None if tensor is None else tensor.nbytes)
        self._open = [pair for pair in self._open if pair[0] is not command]
        if tensor is not None:
            tensor.fill()

    def _region(self, x: int, y: int, width: int, height: int) -> list[tuple[int, int]]:
        return list(region((self._layout.width, self._layout.height), x, y, width, height))

    def _name(self, number: int) -> str:
        if number not in self._ids:
            raise ArgumentError(
                f"{number} is no symbol's id", expected="what get_id() returned, or streaming=True for a color"
            )
        return self._ids[number].name

    def _expect(self, state: State, call: str) -> None:
        if self._state is not state:
            raise ArgumentError(
                f"{call}() does not come here", expected="load(), run(), copies and launches, stop()",
                received=f"{call}() of a runtime that is {self._state.name.lower()}",
            )  # fmt: skip


def variable(name: str) -> int | None:
    """The number in an environment variable of the simulator; None where it is not set.

    Raises:
        ArgumentError: it is no integer.
    """
    text = os.environ.get(f"TESSERA_CSL_{name}", "")
    try:
        return int(text) if text else None
    except ValueError:
        raise ArgumentError(f"TESSERA_CSL_{name} is not an integer", received=text) from None


def read(folder: Path) -> Compiled:
    """The compiled program of a folder that `cslc` wrote.

    Raises:
        FileError: there is none.
    """
    try:
        settings = json.loads((folder / "out.json").read_text())[cslc.KEY]
    except (OSError, ValueError, KeyError) as error:
        raise FileError(f"{folder} holds no compiled program", suggestion="compile it with cslc -o") from error
    kept = (folder / "src").resolve()
    inside = {
        **settings,
        "layout": str(kept / settings["layout"]),
        "import_paths": [str(kept / path) for path in settings["import_paths"]],
    }
    return Compiled(str(folder.resolve()), cslc.build(inside), {}, {})
