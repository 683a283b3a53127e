"""Rules about one op at a time: its result types (V2) and its attributes (V7)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from tessera.errors import TesseraError
from tessera.ir.attributes import printable
from tessera.ir.breach import Breach, differing, nodes, types
from tessera.ir.core import Function, Module, Node
from tessera.ir.levels import CONTROL, FLOW, Level
from tessera.op import Op
from tessera.types import DType, RefType, TensorType

# An operand is a ref where the op's definition calls it so; everything else is a tensor.
_REFS: Mapping[str, Any] = {
    "ref": RefType,
    "refs": RefType,
    "dst": RefType,
    "src": RefType,
    "args": (RefType, TensorType),
}
_KINDS: Mapping[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "tuple": tuple, "DType": DType}
_FIXED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# What Python raises when a type rule meets operands or attributes that it was not written for.
_MISFIT = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError)


def result_types(module: Module, level: Level) -> Iterator[Breach]:
    """V2: operands are of the kind and number the op takes, and results of the types its rule gives."""
    for node in nodes(module):
        if node.op.name in CONTROL | FLOW:  # their types are V4's
            continue
        yield from _operands(node)
        yield from _results(node)


def _operands(node: Node) -> Iterator[Breach]:
    names = operand_names(node.op, len(node.args))
    if names is None:
        yield Breach(node, "another number of operands", ", ".join(node.op.operands) or "none", len(node.args))
        return
    for name, value in zip(names, node.args, strict=True):
        if not isinstance(value.type, _REFS.get(name, TensorType)):
            want = "a ref" if name in _REFS else "a tensor"
            yield Breach(node, f"the operand {name} is of another kind", want, value.type)


def operand_names(op: Op, count: int) -> list[str] | None:
    """The name of each of `count` operands; None where the op does not take so many."""
    parameters = inspect.signature(op.ref).parameters.values()
    fixed = [p for p in parameters if p.kind in _FIXED]
    rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    needed = sum(p.default is p.empty for p in fixed)
    if count < needed or (not rest and count > len(fixed)):
        return None
    names = [p.name for p in fixed][:count]
    return names + rest * (count - len(names))


def _results(node: Node) -> Iterator[Breach]:
    try:
        want = node.op.result_types(types(node.args), node.attrs)
    except TesseraError as error:
        yield Breach(node, error.message, error.expected, error.received)
    except _MISFIT as error:
        yield Breach(node, f"its type rule fails on these operands: {error}")
    else:
        yield from differing(node, "the results", want, types(node.results))


def attributes(module: Module, level: Level) -> Iterator[Breach]:
    """V7: a node has each attribute of its op and no other, of the declared kind and with a spelling in text."""
    for node in nodes(module):
        want, got = set(node.op.attrs), set(node.attrs)
        if want != got:
            yield Breach(node, "other attributes", ", ".join(sorted(want)) or "none", ", ".join(sorted(got)) or "none")
        else:
            yield from _values(node)
    holders: tuple[Module | Function, ...] = (module, *module.functions)
    for holder in holders:
        if not printable(holder.attrs) or "sym_name" in holder.attrs:
            yield Breach(holder, "an attribute cannot be printed", received=dict(holder.attrs))


def _values(node: Node) -> Iterator[Breach]:
    for name, parameter in node.op.attrs.items():
        value = node.attrs[name]
        kind = _KINDS.get(str(parameter.annotation).partition("[")[0], object)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)) or not printable(value):
            yield Breach(node, f"the attribute {name} is of another kind", parameter.annotation, f"{value!r}")
