"""Opcodes that mean one thing for integers and another for floats: two tables, chosen by the type."""

from __future__ import annotations

from collections.abc import Callable

from tessera.interp.target.ptx.decode import RULES, Decoder
from tessera.interp.target.ptx.machine import Step
from tessera.interp.target.ptx.syntax import Instruction
from tessera.interp.target.ptx.types import TYPES

Rule = Callable[[Decoder, Instruction], Step]
INTEGER: dict[str, Rule] = {}
FLOAT: dict[str, Rule] = {}


def join() -> None:
    """Put both tables behind the general one, once they are filled."""
    for name in {*INTEGER, *FLOAT}:
        RULES[name] = _either(name)


def _either(name: str) -> Rule:
    return lambda d, inst: (FLOAT if TYPES[inst.op[-1]].kind == "f" else INTEGER)[name](d, inst)
