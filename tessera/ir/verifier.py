"""The verifier: the numbered rules of the IR, in the order in which they lean on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tessera.errors import TesseraError, VerifyError
from tessera.ir.breach import Breach
from tessera.ir.core import Function, Module, Node
from tessera.ir.function_rules import definitions, launches, legal, outputs, static
from tessera.ir.levels import LEVELS, Level
from tessera.ir.op_rules import attributes, result_types
from tessera.ir.region_rules import regions

RULES: Mapping[str, Callable[[Module, Level], Iterator[Breach]]] = {
    "V1": definitions,
    "V2": result_types,
    "V3": legal,
    "V4": regions,
    "V5": launches,
    "V6": outputs,
    "V7": attributes,
    "V8": static,
}


def verify(module: Module) -> Module:
    """The module, if it keeps the rules of its level.

    Raises:
        VerifyError: it does not; the message begins with the number of the rule and names the op.
    """
    level = LEVELS.get(module.level)
    if level is None:
        raise VerifyError("the module's level is unknown", expected=", ".join(LEVELS), received=module.level)
    for number in level.rules:
        for breach in RULES[number](module, level):
            raise _error(number, breach)
    return module


def _error(number: str, breach: Breach) -> TesseraError:
    where = breach.where
    error = VerifyError(
        f"{number}: {_name(where)}: {breach.message}", expected=breach.expected, received=breach.received
    )
    return error if isinstance(where, Module) else error.at(where.loc)


def _name(where: Node | Function | Module) -> str:
    if isinstance(where, Node):
        return where.op.name
    return f"function {where.name}" if isinstance(where, Function) else f"{where.level} module"
