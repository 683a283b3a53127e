"""Machine: calls functions of a parsed module; of the blocks with waiting lanes the first in block order runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ExecutionError, Location, TesseraError, UnknownNameError
from tessera.interp.target.llvm.control_flow import (
    BlockEdge,
    DecodedBlock,
    DecodedFunction,
    LaneSubset,
    LlvmFrame,
    enter_block,
    number_active_lanes,
    take_edge,
    write_back,
)
from tessera.interp.target.llvm.decoder import FunctionDecoder, GlobalAddresses, HostFunction, build_global_image
from tessera.interp.target.llvm.lanes import (
    LaneFault,
    PerLane,
    RegisterValue,
    broadcast_lanes,
    canonicalise,
    map_members,
    wrap_integers,
)
from tessera.interp.target.llvm.memory import SegmentedMemory, get_base_address
from tessera.interp.target.llvm.text.module_parser import parse_module
from tessera.interp.target.llvm.text.syntax import (
    LlvmFloat,
    LlvmFunction,
    LlvmInstruction,
    LlvmParameter,
    LlvmPointer,
    LlvmType,
    ParsedModule,
    find_source_location,
)

# Execution of decoded functions.


_MAX_CALL_DEPTH = 128  # a call takes 5 of the 1000 frames that Python allows


class DecodedLibrary:
    """The decoded functions of a module, decoded on their first call."""

    def __init__(
        self, program: ParsedModule, addresses: GlobalAddresses, externals: Mapping[str, HostFunction]
    ) -> None:
        self.program = program
        self._externals = externals
        self._addresses = addresses
        self._codes: dict[str, DecodedFunction] = {}

    def decode(self, function: LlvmFunction) -> DecodedFunction:
        """The decoded function."""
        if function.name not in self._codes:
            self._codes[function.name] = FunctionDecoder(
                self.program, function, self._addresses, self._externals
            ).decode()
        return self._codes[function.name]


class LlvmMachine:
    """One call from the host: the decoded functions and the memory."""

    def __init__(self, library: DecodedLibrary, memory: SegmentedMemory) -> None:
        self._library = library
        self.memory = memory
        self._depth = 0

    def run(
        self, function: LlvmFunction, arguments: list[RegisterValue], lane_numbers: np.ndarray
    ) -> RegisterValue | None:
        """Run a function in the lanes with these numbers; its return value."""
        if self._depth >= _MAX_CALL_DEPTH:
            raise LaneFault(f"calls are nested deeper than {_MAX_CALL_DEPTH}")
        frame = LlvmFrame(self, self._library.decode(function), arguments, lane_numbers)
        self._depth += 1
        try:
            self._schedule(frame)
        finally:
            self._depth -= 1
            for address in frame.allocated:
                self.memory.free(address)
        return frame.result

    def _schedule(self, frame: LlvmFrame) -> None:
        blocks = frame.code.blocks
        ready: dict[int, LaneSubset] = {0: None}  # None: all lanes
        while ready:
            number = min(ready)
            block = blocks[number]
            enter_block(frame, block, ready.pop(number))
            for edge, part in self._run_block(frame, block):
                lanes = take_edge(frame, edge, part)
                ready[edge.target] = _merge_lanes(ready, edge, lanes, frame.total)

    def _run_block(self, frame: LlvmFrame, block: DecodedBlock) -> list[tuple[BlockEdge, LaneSubset]]:
        at = 0
        try:
            for at, step in enumerate(block.steps):  # noqa: B007 (read when a step fails)
                step(frame)
            at = -1
            write_back(frame, block)
            return block.leave(frame)
        except LaneFault as fault:
            raise self._report(fault, frame, block.body[at]) from None

    def _report(self, fault: LaneFault, frame: LlvmFrame, i: LlvmInstruction) -> TesseraError:
        """The error of a fault: it names the instruction, the lane and the source line, if debug metadata has one."""
        message = fault.message
        running = number_active_lanes(frame)
        if fault.lane is not None or (len(running) == 1 and frame.total > 1):
            message += f", lane {running[fault.lane or 0]}"
        source = find_source_location(self._library.program, i)
        return fault.kind(f"{message} [{i} at {i.where}]", location=source or i.where)


def _merge_lanes(ready: dict[int, LaneSubset], edge: BlockEdge, lanes: LaneSubset, total: int) -> LaneSubset:
    """The lanes that wait at a block, and those that arrive now (reconvergence)."""
    if lanes is None or edge.target not in ready:
        return lanes
    waiting = ready[edge.target]
    if waiting is None:
        raise ExecutionError("a lane waits twice at one block", location=Location())
    both = np.sort(np.concatenate([waiting, lanes]))
    return None if len(both) == total else both


# Modules.


class LlvmModule:
    """A parsed module; `call` runs one of its functions. `externals` are host functions that the text declares."""

    def __init__(self, text: str, name: str = "<llvm>", externals: Mapping[str, HostFunction] | None = None) -> None:
        self.text = text
        self.program = parse_module(text, name)
        variables = self.program.variables
        self._numbers = {name: k for k, name in enumerate(variables, 1)}
        addresses = {name: get_base_address(k) for name, k in self._numbers.items()}
        self._images = {
            name: build_global_image(v.type, v.value, addresses) for name, v in variables.items() if v.value is not None
        }
        self._library = DecodedLibrary(self.program, addresses, externals or {})

    @property
    def functions(self) -> list[str]:
        """The names of the functions that are defined."""
        return [name for name, function in self.program.functions.items() if function.blocks]

    def variable(self, name: str) -> np.ndarray:
        """The bytes of a global variable, which keep their values between calls; to be written by the host."""
        if name not in self._images:
            raise UnknownNameError(f"there is no variable @{name}", expected=", ".join(self._images))
        return self._images[name]

    def source_line(self, instruction: LlvmInstruction) -> str:
        """The line of the text with an instruction."""
        return self.text.splitlines()[instruction.where.line - 1].strip()

    def call(self, name: str, arguments: Sequence[Any], lanes: int = 1) -> Any:
        """Run a function in all lanes; its return value for each lane, or None.

        A NumPy array is passed as a pointer and used in place; `PerLane` gives each lane its own scalar.
        """
        function = self._find_function(name)
        parameters = function.parameters
        if len(arguments) != len(parameters):
            message = f"@{name}: wrong number of arguments"
            raise ArgumentError(message, expected=len(parameters), received=len(arguments))
        memory = self._make_memory()
        values = [_bind_argument(memory, p, a, lanes) for p, a in zip(parameters, arguments, strict=True)]
        with np.errstate(all="ignore"):
            result = LlvmMachine(self._library, memory).run(function, values, np.arange(lanes))
        return None if result is None else map_members(lambda x: np.array(broadcast_lanes(x, lanes)), result)

    def _find_function(self, name: str) -> LlvmFunction:
        result = self.program.functions.get(name)
        if result is None or not result.blocks:
            raise UnknownNameError(f"there is no function @{name}", expected=", ".join(self.functions))
        return result

    def _make_memory(self) -> SegmentedMemory:
        memory = SegmentedMemory(first=len(self._numbers) + 1)
        for name, data in self._images.items():
            constant = self.program.variables[name].constant
            memory.add(f"global @{name}", data, not constant, self._numbers[name])
        return memory


def _bind_argument(memory: SegmentedMemory, parameter: LlvmParameter, argument: Any, lanes: int) -> RegisterValue:
    """An argument as a register value."""
    if isinstance(argument, PerLane):
        values = np.asarray(argument.values)
        if values.shape[:1] != (lanes,):
            message = f"argument %{parameter.name} needs one value for each lane"
            raise ArgumentError(message, expected=f"{lanes} values", received=f"shape {values.shape}")
        return _convert_argument(values, parameter.type)
    if isinstance(parameter.type, LlvmPointer) and isinstance(argument, np.ndarray):
        return np.array([memory.map(parameter.name, argument)])
    if isinstance(parameter.type, LlvmPointer):
        return np.array([argument or 0], np.int64)
    return _convert_argument(np.asarray(argument)[None], parameter.type)


def _convert_argument(values: np.ndarray, type: LlvmType) -> np.ndarray:
    """Numbers in the register format of a type; integers wrap."""
    if values.shape[1:] != type.lanes:
        raise ArgumentError(
            f"an argument of type {type} has the wrong shape", expected=type.lanes, received=values.shape[1:]
        )
    if isinstance(type.scalar, LlvmFloat):
        return values.astype(type.dtype)
    if values.dtype.kind not in "biuO":
        raise ArgumentError(f"an argument of type {type} must be an integer", received=values.dtype)
    if values.dtype == object or type.dtype == bool:
        return wrap_integers([int(v) for v in values.reshape(-1)], type.scalar).reshape(values.shape)
    return canonicalise(values.astype(type.dtype), type.scalar)
