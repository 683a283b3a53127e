"""SDK runtime: `SdkRuntime` and `debug_util` on the simulator: load, run, copy arrays, launch, stop, read PE memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError, ShapeError
from tessera.interp.target.csl.host import cslc
from tessera.interp.target.csl.host.arguments import (
    describe_value,
    require_array,
    require_dtype,
    require_flag,
    require_integer,
    require_member,
    require_text,
)
from tessera.interp.target.csl.host.sdk_layout import CompiledProgram, Port
from tessera.interp.target.csl.host.visualisation import draw_run, write_trace
from tessera.interp.target.csl.simulation import (
    CYCLE_LIMIT,
    HostCommand,
    PeCoordinate,
    Simulation,
    list_region,
    shorten_report,
)

# The host's tensor of a copy: A[h][w][l], one row of l elements for each PE of a region.


class MemcpyDataType(Enum):
    """The element width of a copy on the PE; on the host each element has 32 bits."""

    MEMCPY_16BIT = 0
    MEMCPY_32BIT = 1


class MemcpyOrder(Enum):
    """The layout of a tensor (h, w, l) in the host's array: whether the last or the first index varies fastest."""

    ROW_MAJOR = 0
    COL_MAJOR = 1


class HostTensor:
    """A host array with the PEs of its parts, in row order.

    Raises:
        ShapeError: the array has too few elements, or a PE would have none. ArgumentError: its elements do not have
            32 bits, or the elements of a PE are no whole number.
    """

    def __init__(
        self,
        array: np.ndarray,
        places: Sequence[PeCoordinate],
        shape: tuple[int, int, int],
        data_type: MemcpyDataType,
        order: MemcpyOrder,
    ) -> None:
        self.array, self.places, self.shape = np.asarray(array), places, shape
        require_integer("the number of elements of a PE", shape[2])
        self.narrow = require_member("data_type", data_type, MemcpyDataType) is MemcpyDataType.MEMCPY_16BIT
        self.order = "F" if require_member("order", order, MemcpyOrder) is MemcpyOrder.COL_MAJOR else "C"
        self.count = count = int(shape[0] * shape[1] * shape[2])
        if count < 1:
            raise ShapeError("a copy has no elements", expected="at least 1 for each PE", received=str(shape[2]))
        if self.array.size < count:
            raise ShapeError(
                "the host array is too small for the copy",
                expected=f"{shape[0]} x {shape[1]} x {shape[2]} elements",
                received=f"{self.array.size}",
            )
        if self.array.dtype.itemsize != 4:
            raise ArgumentError(
                "a copy moves elements of 32 bits",
                expected="a uint32, int32 or float32 array (one 16-bit element per word)",
                received=str(self.array.dtype),
            )
        self._parts: dict[PeCoordinate, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """The size of the host array in bytes."""
        return self.count * 4

    def rows(self, streaming: bool = False) -> dict[PeCoordinate, np.ndarray]:
        """Each PE's elements in the PE's width; a stream has whole wavelets."""
        words = np.ascontiguousarray(self.array).reshape(-1)[: self.count].view(np.uint32)
        cube = words.reshape(self.shape, order=self.order).reshape(-1, self.shape[2])
        kept = np.ascontiguousarray(cube.astype(np.uint16) if self.narrow and not streaming else cube)
        return dict(zip(self.places, kept, strict=True))

    def empty(self, streaming: bool) -> dict[PeCoordinate, np.ndarray]:
        """Rows for the PEs' elements, which `fill` copies into the host array. Elements of a stream have 32 bits."""
        dtype = np.uint16 if self.narrow and not streaming else np.uint32
        self._parts = {place: np.zeros(self.shape[2], dtype) for place in self.places}
        return self._parts

    def fill(self) -> None:
        """Write the rows into the host array; the rest of a longer array is not changed."""
        cube = np.stack([self._parts[place] for place in self.places]).astype(np.uint32).reshape(self.shape)
        flat = cube.reshape(-1, order=self.order).view(self.array.dtype)
        self.array.flat[: self.count] = flat


def check_destination(array: Any) -> None:
    """Check that a copy can fill a host array.

    Raises:
        ArgumentError: it is no array, or must not be written.
    """
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        received = "a read-only array" if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentError("a copy cannot fill this value", expected="an array that may be written", received=received)


# Helpers of the host's scripts: 16-bit elements in 32-bit words, and time stamps.


def input_array_to_u32(np_arr: np.ndarray, sentinel: int | None, fast_dim_sz: int) -> np.ndarray:
    """A flat array of 16- or 32-bit elements as the 32-bit words of a copy.

    16-bit elements are in the lower halves. With a sentinel the upper half is the element's index in rows of
    `fast_dim_sz`; without (None) it is 0.

    >>> [hex(w) for w in input_array_to_u32(np.array([7, 8, 9], np.int16), 1, 2)]
    ['0x7', '0x10008', '0x9']
    """
    if require_array("np_arr", np_arr).ndim != 1:
        raise ArgumentError("the array is not flat", expected="one dimension", received=str(np_arr.shape))
    width = require_integer("fast_dim_sz", fast_dim_sz, 1, (1 << 32) - 1) if sentinel is not None else 1
    if np_arr.dtype.itemsize == 4:
        return np_arr.view(np.uint32)
    words = _view_halves(np_arr).astype(np.uint32)
    if sentinel is None:
        return words
    return words | (np.arange(np_arr.size, dtype=np.uint32) % np.uint32(width)) << np.uint32(16)


def _view_halves(array: np.ndarray) -> np.ndarray:
    if array.dtype.itemsize != 2:
        raise ArgumentError("elements must have 16 or 32 bits", received=str(array.dtype))
    return array.view(np.uint16)


def memcpy_view(arr: np.ndarray, datatype: np.dtype) -> np.ndarray:
    """A writable view of the elements of `datatype`, 16 or 32 bits wide, in an array of 32-bit words.

    >>> memcpy_view(np.array([0x10007, 8], np.uint32), np.dtype(np.int16)).tolist()
    [7, 8]
    """
    kind, arr = require_dtype(datatype), require_array("arr", arr)
    if kind.itemsize == 4:
        return arr.view(kind)
    if kind.itemsize != 2:
        raise ArgumentError("elements must have 16 or 32 bits", received=str(kind))
    if arr.dtype.itemsize != 4:
        raise ArgumentError("the view is of an array of 32-bit words", received=str(arr.dtype))
    return arr.view(kind).reshape(*arr.shape, 2)[..., 0]


def read_variable(pe: Any, symbol: str, dtype: Any) -> np.ndarray:
    """The bytes of a variable of a PE, as elements of `dtype`.

    Raises:
        ArgumentError: there is no such variable, or no such type for its bytes.
    """
    try:
        return np.ascontiguousarray(pe.get_variable(require_text("a symbol", symbol))).reshape(-1).view(dtype).copy()
    except KeyError as error:
        raise ArgumentError(f"the program has no variable '{symbol}'") from error
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"'{symbol}' cannot be read as elements of '{dtype}'") from error


def calculate_cycles(timestamp_buf: np.ndarray) -> np.int64:
    """The cycles between two 48-bit time stamps, start and end, in three 32-bit words.

    >>> int(calculate_cycles(np.array([5, 25 << 16, 0], np.uint32)))
    20
    """
    found = np.ascontiguousarray(require_array("timestamp_buf", timestamp_buf)).reshape(-1)
    if found.nbytes < 12:
        raise ArgumentError("two time stamps are missing", expected="12 bytes", received=f"{found.nbytes} bytes")
    halves = [int(half) for half in found.view(np.uint16)[:6]]
    start, end = (sum(half << 16 * i for i, half in enumerate(part)) for part in (halves[:3], halves[3:]))
    return np.int64(end - start)


# `SdkRuntime`.


# The last run of each output folder, which the debug tools read after `stop()`.
RUNS: dict[str, Simulation] = {}


class RuntimeState(Enum):
    """The state of a runtime."""

    CREATED = 0
    LOADED = 1
    RUNNING = 2
    STOPPED = 3


class SdkRuntime:
    """One run of a program that `cslc` compiled.

    Args:
        bindir: the folder that `cslc -o` wrote, or the result of `SdkLayout.compile` (with its platform).
        cmaddr: the address of a real machine, which the simulator does not have.
        seed: shuffles the order of events and link delays to expose races; default: the variable TESSERA_CSL_SEED.

    Other options of the vendor's runtime (`suppress_simfab_trace`, `simfab_numthreads`, `msg_level`, `memcpy_required`)
    are accepted.

    Raises:
        DeviceUnavailable: `cmaddr` names a machine. FileError: the folder has no compiled program.
        ArgumentError: a call in the wrong order or with wrong arguments. CslFault: the program faults.
    """

    def __init__(
        self,
        bindir: str | Path | CompiledProgram,
        platform: Any = None,
        *,
        cmaddr: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        unknown = set(options) - {"suppress_simfab_trace", "simfab_numthreads", "msg_level", "memcpy_required"}
        if unknown:
            raise ArgumentError(f"SdkRuntime has no option {', '.join(sorted(unknown))}")
        if cmaddr is not None and require_text("cmaddr", cmaddr):
            raise DeviceUnavailable(
                f"no machine at {cmaddr}", suggestion="omit cmaddr: the program runs in the simulator"
            )
        seed = read_environment("SEED") if seed is None else require_integer("seed", seed)
        compiled = bindir if isinstance(bindir, CompiledProgram) else load_compiled(require_folder(bindir))
        self._compiled, self._layout = compiled, compiled.layout
        self._simulation = Simulation(self._layout, seed, limit=read_environment("LIMIT") or CYCLE_LIMIT,
                                      lockstep=not read_environment("PLAIN"))  # fmt: skip
        self._state = RuntimeState.CREATED
        self._ids = {export.id: export for export in self._layout.exports.values()}
        self._open: list[tuple[HostCommand, HostTensor | None]] = []
        RUNS[compiled.folder] = self._simulation

    def load(self) -> None:
        """Load the program onto the PEs."""
        self._expect(RuntimeState.CREATED, "load")
        self._state = RuntimeState.LOADED

    def run(self) -> None:
        """Start the program."""
        self._expect(RuntimeState.LOADED, "run")
        self._state = RuntimeState.RUNNING
        for place, symbols in self._compiled.symbols.items():
            for name, values in symbols.items():
                self._simulation.pes[place].get_variable(name)[: values.size] = values
        self._simulation.boot()

    def stop(self) -> None:
        """Wait until all commands are complete and the program is idle, then end the run."""
        self._expect(RuntimeState.RUNNING, "stop")
        for command, tensor in list(self._open):
            self._finish(command, tensor)
        self._simulation.settle()
        self._state = RuntimeState.STOPPED
        self._report()

    def _report(self) -> None:
        """Write the output of the PEs, notes about copies, and the requested pictures."""
        for pe in self._simulation.pes.values():
            for line in pe.output:
                print(line)
        notes = [f"PE {place}: {note}" for place, one in self._simulation.streams.items() for note in one.notes]
        for line in shorten_report(notes + self._simulation.fabric.describe_stuck()):
            print(f"warning: {line}", file=sys.stderr)
        for name, write in (("PICTURE", draw_run), ("TRACE", write_trace)):
            if path := os.environ.get(f"TESSERA_CSL_{name}"):
                write(self._simulation, path)

    def get_id(self, symbol: str) -> int:
        """The id of an exported symbol for copies."""
        if require_text("a symbol", symbol) not in self._layout.exports:
            raise ArgumentError(
                f"the program exports no symbol '{symbol}'",
                expected=", ".join(self._layout.exports) or "an @export_name",
            )
        return self._layout.exports[symbol].id

    def launch(self, symbol: str, *args: Any, nonblock: bool = False) -> HostCommand:
        """Call an exported function on all PEs; `nonblock`: do not wait until they unblock the command stream."""
        self._expect(RuntimeState.RUNNING, "launch")
        self.get_id(symbol)
        return self._issued(self._simulation.launch(symbol, *args), None, nonblock)

    def call(self, symbol: str, args: Sequence[Any] = (), nonblock: bool = False) -> HostCommand:
        """`launch` with the arguments in a list; a string is a hexadecimal number: the bits of the argument."""
        if isinstance(args, str) or not isinstance(args, (Sequence, np.ndarray)):
            raise ArgumentError("the arguments are no list", expected="a list", received=describe_value(args))
        words = [_read_hexadecimal(arg) if isinstance(arg, str) else arg for arg in args]
        return self.launch(symbol, *words, nonblock=nonblock)

    def memcpy_h2d(
        self, dest: int, src: np.ndarray, px: int, py: int, w: int, h: int, elem_per_pe: int, *,
        streaming: bool = False, data_type: MemcpyDataType, order: MemcpyOrder, nonblock: bool = False,
    ) -> HostCommand:  # fmt: skip
        """Copy `src`, a tensor (h, w, elem_per_pe), to a symbol of a region of PEs, or to a color when streaming."""
        self._expect(RuntimeState.RUNNING, "memcpy_h2d")
        tensor = HostTensor(src, self._region(px, py, w, h), (h, w, elem_per_pe), data_type, order)
        return self._send(dest, tensor, streaming, nonblock)

    def memcpy_h2d_rowbcast(
        self, dest: int, src: np.ndarray, px: int, py: int, w: int, h: int, elem_per_pe: int, *,
        streaming: bool = False, data_type: MemcpyDataType, order: MemcpyOrder, nonblock: bool = False,
    ) -> HostCommand:  # fmt: skip
        """Copy `src`, a tensor (h, 1, elem_per_pe), with each row broadcast to all PEs of the row."""
        self._expect(RuntimeState.RUNNING, "memcpy_h2d_rowbcast")
        region = self._region(px, py, w, h)
        places = [(px, y) for y in range(py, py + h)]
        one = HostTensor(src, places, (h, 1, elem_per_pe), data_type, order).rows(streaming)
        rows = {(x, y): one[px, y] for x, y in region}
        return self._send_rows(dest, rows, streaming, nonblock)

    def memcpy_h2d_colbcast(
        self, dest: int, src: np.ndarray, px: int, py: int, w: int, h: int, elem_per_pe: int, *,
        streaming: bool = False, data_type: MemcpyDataType, order: MemcpyOrder, nonblock: bool = False,
    ) -> HostCommand:  # fmt: skip
        """Copy `src`, a tensor (1, w, elem_per_pe), with each column broadcast to all PEs of the column."""
        self._expect(RuntimeState.RUNNING, "memcpy_h2d_colbcast")
        region = self._region(px, py, w, h)
        places = [(x, py) for x in range(px, px + w)]
        one = HostTensor(src, places, (1, w, elem_per_pe), data_type, order).rows(streaming)
        rows = {(x, y): one[x, py] for x, y in region}
        return self._send_rows(dest, rows, streaming, nonblock)

    def memcpy_d2h(
        self, dest: np.ndarray, src: int, px: int, py: int, w: int, h: int, elem_per_pe: int, *,
        streaming: bool = False, data_type: MemcpyDataType, order: MemcpyOrder, nonblock: bool = False,
    ) -> HostCommand:  # fmt: skip
        """Fill `dest`, a tensor (h, w, elem_per_pe), from a symbol of a region of PEs, or a color when streaming."""
        self._expect(RuntimeState.RUNNING, "memcpy_d2h")
        check_destination(dest)
        tensor = HostTensor(dest, self._region(px, py, w, h), (h, w, elem_per_pe), data_type, order)
        rows = tensor.empty(streaming)
        run = self._simulation
        copy = run.stream_out(_require_color(src), rows) if streaming else run.copy_out(self._name(src), rows)
        return self._issued(copy, tensor, nonblock)

    def send(self, stream: Port, data: np.ndarray, nonblock: bool = False) -> HostCommand:
        """Send 32-bit elements on a stream of an `SdkLayout`."""
        self._expect(RuntimeState.RUNNING, "send")
        place, color = self._find_stream(stream)
        rows = {place: _view_words(require_array("the data", data))}
        return self._issued(self._simulation.stream_in(color, rows), None, nonblock)

    def _find_stream(self, stream: Any) -> tuple[tuple[int, int], int]:
        found = self._compiled.streams.get(id(stream))
        if found is None:
            raise ArgumentError("the layout has no such stream", expected="a stream of its create_…_stream()")
        return found

    def receive(self, stream: Port, data: np.ndarray, size: int, nonblock: bool = False) -> HostCommand:
        """Fill `data` with `size` 32-bit elements of a stream of an `SdkLayout`."""
        self._expect(RuntimeState.RUNNING, "receive")
        place, color = self._find_stream(stream)
        check_destination(data)
        if not data.flags.c_contiguous:
            raise ArgumentError("the host array to fill is not contiguous", expected="an array in row-major order")
        words = _view_words(data)[: require_integer("the size", size, 0)]
        return self._issued(self._simulation.stream_out(color, {place: words}), None, nonblock)

    def task_wait(self, task: HostCommand) -> None:
        """Wait until a non-blocking command is complete."""
        require_member("the task", task, HostCommand)
        for command, tensor in list(self._open):
            if command is task:
                self._finish(command, tensor)

    def is_task_done(self, task: HostCommand) -> bool:
        """Whether a command is complete."""
        return bool(require_member("the task", task, HostCommand).done)

    def read_symbol(self, x: int, y: int, symbol: str, dtype: Any = np.uint16) -> np.ndarray:
        """The bytes of a variable of the PE at (x, y), as elements of `dtype`."""
        if (require_integer("x", x), require_integer("y", y)) not in self._simulation.pes:
            width, height = self._layout.width, self._layout.height
            raise ArgumentError(f"the program has no PE ({x}, {y})", expected=f"inside {width} x {height}")
        return read_variable(self._simulation.pes[x, y], symbol, dtype)

    def coord_logical_to_physical(self, x: int, y: int) -> tuple[int, int]:
        """The fabric coordinates of the program's PE (x, y)."""
        dx, dy = self._layout.fabric_offsets or (0, 0)
        return require_integer("x", x) + dx, require_integer("y", y) + dy

    def dump_core(self, corefile: str) -> None:
        """Do nothing: the debug tools read the memory of the run."""

    def _send(self, dest: int, tensor: HostTensor, streaming: bool, nonblock: bool) -> HostCommand:
        return self._send_rows(dest, tensor.rows(streaming), streaming, nonblock)

    def _send_rows(self, dest: int, rows: dict, streaming: bool, nonblock: bool) -> HostCommand:
        run = self._simulation
        copy = run.stream_in(_require_color(dest), rows) if streaming else run.copy_in(self._name(dest), rows)
        return self._issued(copy, None, nonblock)

    def _issued(self, command: HostCommand, tensor: HostTensor | None, nonblock: bool) -> HostCommand:
        self._open.append((command, tensor))
        if not require_flag("nonblock", nonblock):
            self._finish(command, tensor)
        return command

    def _finish(self, command: HostCommand, tensor: HostTensor | None) -> None:
        self._simulation.wait(command, None if tensor is None else tensor.nbytes)
        self._open = [pair for pair in self._open if pair[0] is not command]
        if tensor is not None:
            tensor.fill()

    def _region(self, x: int, y: int, width: int, height: int) -> list[tuple[int, int]]:
        for name, value in (("px", x), ("py", y), ("w", width), ("h", height)):
            require_integer(name, value)
        return list(list_region((self._layout.width, self._layout.height), x, y, width, height))

    def _name(self, number: int) -> str:
        if require_integer("the id of a symbol", number) not in self._ids:
            raise ArgumentError(
                f"{number} is not the id of a symbol", expected="the result of get_id(), or streaming=True for a color"
            )
        return self._ids[number].name

    def _expect(self, state: RuntimeState, call: str) -> None:
        if self._state is not state:
            raise ArgumentError(
                f"{call}() is called out of order", expected="load(), run(), copies and launches, stop()",
                received=f"{call}() on a runtime that is {self._state.name.lower()}",
            )  # fmt: skip


def require_folder(bindir: Any) -> Path:
    """The folder of a compiled program.

    Raises:
        ArgumentError: it is no path.
    """
    if not isinstance(bindir, (str, os.PathLike)):
        raise ArgumentError(
            "this is no compiled program",
            expected="the folder that cslc -o wrote, or the result of SdkLayout.compile()",
            received=describe_value(bindir),
        )
    return Path(bindir)


def _require_color(color: Any) -> int:
    return require_integer("the color of a stream", color, 0, 23)


def _read_hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError as error:
        raise ArgumentError(
            "an argument of a call is no number", expected="a number, or hexadecimal digits", received=repr(text)
        ) from error


def _view_words(data: np.ndarray) -> np.ndarray:
    """The 32-bit words of an array; those of a contiguous one are not copied."""
    if data.dtype.itemsize != 4:
        raise ArgumentError("a stream carries elements of 32 bits", received=str(data.dtype))
    return np.ascontiguousarray(data).reshape(-1).view(np.uint32)


def read_environment(name: str) -> int | None:
    """The number in an environment variable of the simulator, or None if it is not set.

    Raises:
        ArgumentError: it is no integer.
    """
    text = os.environ.get(f"TESSERA_CSL_{name}", "")
    try:
        return int(text) if text else None
    except ValueError:
        raise ArgumentError(f"TESSERA_CSL_{name} is not an integer", received=text) from None


def load_compiled(folder: Path) -> CompiledProgram:
    """The compiled program in a folder that `cslc` wrote.

    Raises:
        FileError: the folder has none.
    """
    try:
        settings = json.loads((folder / "out.json").read_text())[cslc.SETTINGS_KEY]
        sources = (folder / "src").resolve()
        inside = {
            **settings,
            "layout": str(sources / settings["layout"]),
            "import_paths": [str(sources / path) for path in settings["import_paths"]],
        }
        layout = cslc.compile_settings(inside)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{folder} has no compiled program", suggestion="compile it with cslc -o") from error
    return CompiledProgram(str(folder.resolve()), layout, {}, {})


# Debug tools: variables and `<debug>` records after a run.


class debug_util:  # noqa: N801  the vendor's name
    """The memory of the last run of a compiled program in this process.

    Args:
        bindir: the folder that `cslc -o` wrote.
        cmaddr: of a real machine; without effect.

    Raises:
        FileError: no program of that folder ran in this process.
    """

    def __init__(self, bindir: str | Path, cmaddr: str | None = None) -> None:
        folder = str(require_folder(bindir).resolve())
        if folder not in RUNS:
            raise FileError(f"no program of {bindir} ran in this process", suggestion="run it with SdkRuntime first")
        self._run = RUNS[folder]

    def _pe(self, col: int, row: int) -> Any:
        dx, dy = self._run.layout.fabric_offsets or (0, 0)
        place = (require_integer("the column", col) - dx, require_integer("the row", row) - dy)
        if place not in self._run.pes:
            raise ArgumentError(
                f"the program has no PE at column {col}, row {row} of the fabric",
                expected=f"{dx} to {dx + self._run.layout.width - 1}, {dy} to {dy + self._run.layout.height - 1}",
            )
        return self._run.pes[place]

    def get_symbol(self, col: int, row: int, symbol: str, dtype: Any) -> np.ndarray:
        """A variable of the PE at fabric coordinates, as elements of `dtype`."""
        return read_variable(self._pe(col, row), symbol, dtype)

    def get_symbol_rect(self, rectangle: Any, symbol: str, dtype: Any) -> np.ndarray:
        """A variable of the PEs in a rectangle ((col, row), (width, height)): an array (width, height, elements)."""
        try:
            (col, row), (width, height) = rectangle
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                "this is no rectangle", expected="((col, row), (width, height))", received=describe_value(rectangle)
            ) from error
        for name, value in (("col", col), ("row", row), ("width", width), ("height", height)):
            require_integer(name, value)
        return np.array(
            [[self.get_symbol(x, y, symbol, dtype) for y in range(row, row + height)] for x in range(col, col + width)]
        )

    def read_trace(self, col: int, row: int, trace: str) -> list[Any]:
        """The records of a PE under a key."""
        return list(self._pe(col, row).traces.get(require_text("a trace", trace), []))
