"""The table of builtins, and those that concern the program as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.coerce import coerce
from tessera.interp.target.csl.sema.frame import Frame, meaning
from tessera.interp.target.csl.sema.operand import Operand, known
from tessera.interp.target.csl.values import Value

Rule = Callable[[Frame, s.Builtin], Operand]


class Builtin(NamedTuple):
    """One builtin: how many arguments it takes, and its meaning."""

    least: int
    most: int
    rule: Rule


BUILTINS: dict[str, Builtin] = {}


def builtin(name: str, least: int, most: int | None = None) -> Callable[[Rule], Rule]:
    """Register the meaning of `@name`."""

    def add(rule: Rule) -> Rule:
        BUILTINS["@" + name] = Builtin(least, least if most is None else most, rule)
        return rule

    return add


@meaning(s.Builtin)
def _builtin(f: Frame, node: s.Builtin) -> Operand:
    found = BUILTINS.get(node.name)
    if found is None:
        fail(node.loc, f"invalid builtin function: '{node.name}'")
    if not found.least <= len(node.args) <= found.most:
        wanted = str(found.least) if found.least == found.most else f"{found.least} to {found.most}"
        fail(node.loc, f"{node.name} expects {wanted} arguments, {len(node.args)} provided")
    return found.rule(f, node)


def constant(f: Frame, node: s.Syntax, type_: t.Type | None = None) -> Operand:
    """An argument that must be known at compile time."""
    with f.evaluating():
        o = f.value(node)
    return coerce(f, o, type_, node.loc) if type_ is not None else o


def number(f: Frame, node: s.Syntax) -> int:
    """An integer argument that must be known at compile time."""
    o = constant(f, node)
    if not t.is_integer(o.type):
        type_mismatch(node.loc, "integer", o.type)
    return int(o.const)


def only_in(f: Frame, node: s.Builtin, *sections: str) -> None:
    """Refuse a builtin outside of the top-level blocks it belongs to."""
    if f.section not in sections and not (f.comptime and f.unit.depth):
        fail(node.loc, f"'{node.name}' is only valid while evaluating a top level {' or '.join(sections)} block")


@builtin("is_arch", 1)
def _is_arch(f: Frame, node: s.Builtin) -> Operand:
    return known(t.BOOL, constant(f, node.args[0], t.STRING).const == f.unit.options.arch, node.loc)


@builtin("fp16", 0)
def _fp16(f: Frame, node: s.Builtin) -> Operand:
    return known(t.TYPE, t.NAMED[f.unit.options.fp16_format], node.loc)


@builtin("get_int", 1)
def _get_int(f: Frame, node: s.Builtin) -> Operand:
    o = f.value(node.args[0])
    if t.is_integer(o.type):
        return o
    if not isinstance(o.type, (t.Cell, t.Enum)) or o.type in (t.BOOL, t.DIRECTION):
        type_mismatch(node.args[0].loc, "color, queue or task id", o.type)
    return Operand(o.type.tag if isinstance(o.type, t.Enum) else t.U16, o.const, o.code, loc=node.loc)


@builtin("get_rectangle", 0)
def _get_rectangle(f: Frame, node: s.Builtin) -> Operand:
    width, height = f.unit.rectangle
    if not width:
        fail(node.loc, "'@get_rectangle' is only valid after '@set_rectangle'")
    rows = {"fabric": f.unit.options.fabric_dims, "offsets": f.unit.options.fabric_offsets}
    found = {n: Value(t.ANON, _size(pair)) for n, pair in rows.items() if pair is not None}
    return known(t.ANON, _size((width, height)) | found, node.loc)


def _size(pair: tuple[int, int]) -> dict[str, Value]:
    return {"width": Value(t.U16, pair[0]), "height": Value(t.U16, pair[1])}


@builtin("import_module", 1, 2)
def _import_module(f: Frame, node: s.Builtin) -> Operand:
    name = constant(f, node.args[0], t.STRING).const
    given = constant(f, node.args[1]) if len(node.args) > 1 else known(t.ANON, {})
    if given.type is not t.ANON:
        type_mismatch(node.args[1].loc, t.ANON, given.type)
    return known(t.MODULE, f.unit.import_module(f.module, name, given.const, node.loc), node.loc)
