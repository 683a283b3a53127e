"""A module of LLVM IR text that can be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, UnknownNameError
from tessera.interp.target.llvm.constants import image
from tessera.interp.target.llvm.decode import External
from tessera.interp.target.llvm.lanes import Lanes, Value, by_part, canonical, integers, widen
from tessera.interp.target.llvm.machine import Library, Machine
from tessera.interp.target.llvm.memory import Memory
from tessera.interp.target.llvm.parser import parse
from tessera.interp.target.llvm.segment import base_address
from tessera.interp.target.llvm.syntax import Function, Instruction, Parameter
from tessera.interp.target.llvm.types import Float, Pointer, Type


class Module:
    """Parsed text; `call` runs one of its functions. `externals` are functions that the text only declares."""

    def __init__(self, text: str, name: str = "<llvm>", externals: Mapping[str, External] | None = None) -> None:
        self.text = text
        self.program = parse(text, name)
        variables = self.program.variables
        self._numbers = {name: k for k, name in enumerate(variables, 1)}
        addresses = {name: base_address(k) for name, k in self._numbers.items()}
        self._images = {name: image(v.type, v.value, addresses) for name, v in variables.items() if v.value is not None}
        self._library = Library(self.program, addresses, externals or {})

    @property
    def functions(self) -> list[str]:
        """The names of the functions that have a body."""
        return [name for name, function in self.program.functions.items() if function.blocks]

    def source_line(self, instruction: Instruction) -> str:
        """The line of the text that an instruction stands on."""
        return self.text.splitlines()[instruction.where.line - 1].strip()

    def call(self, name: str, arguments: Sequence[Any], lanes: int = 1) -> Any:
        """Run a function in all lanes: its value for each, or None.

        An array stands for a pointer and is used in place; `Lanes` gives each lane a scalar of its own.
        """
        function = self._function(name)
        parameters = function.parameters
        if len(arguments) != len(parameters):
            message = f"@{name}: wrong number of arguments"
            raise ArgumentError(message, expected=len(parameters), received=len(arguments))
        memory = self._memory()
        values = [_bind(memory, p, a, lanes) for p, a in zip(parameters, arguments, strict=True)]
        with np.errstate(all="ignore"):
            result = Machine(self._library, memory).run(function, values, np.arange(lanes))
        return None if result is None else by_part(lambda x: np.array(widen(x, lanes)), result)

    def _function(self, name: str) -> Function:
        found = self.program.functions.get(name)
        if found is None or not found.blocks:
            raise UnknownNameError(f"there is no function @{name}", expected=", ".join(self.functions))
        return found

    def _memory(self) -> Memory:
        memory = Memory(first=len(self._numbers) + 1)
        for name, data in self._images.items():
            constant = self.program.variables[name].constant
            memory.add(f"global @{name}", data, not constant, self._numbers[name])
        return memory


def _bind(memory: Memory, parameter: Parameter, argument: Any, lanes: int) -> Value:
    """An argument as a register value."""
    if isinstance(argument, Lanes):
        values = np.asarray(argument.values)
        if values.shape[:1] != (lanes,):
            message = f"%{parameter.name}: needs one value for each of {lanes} lanes"
            raise ArgumentError(message, received=values.shape)
        return _converted(values, parameter.type)
    if isinstance(parameter.type, Pointer) and isinstance(argument, np.ndarray):
        return np.array([memory.map(parameter.name, argument)])
    if isinstance(parameter.type, Pointer):
        return np.array([argument or 0], np.int64)
    return _converted(np.asarray(argument)[None], parameter.type)


def _converted(values: np.ndarray, type: Type) -> np.ndarray:
    """Numbers in the register format of a type; integers wrap."""
    if values.shape[1:] != type.lanes:
        raise ArgumentError(f"an argument of type {type} is missing", received=f"shape {values.shape[1:]}")
    if isinstance(type.scalar, Float):
        return values.astype(type.dtype)
    if values.dtype.kind not in "biuO":
        raise ArgumentError(f"an argument of type {type} must be an integer", received=values.dtype)
    if values.dtype == object or type.dtype == bool:
        return integers([int(v) for v in values.reshape(-1)], type.scalar).reshape(values.shape)
    return canonical(values.astype(type.dtype), type.scalar)
