"""Functions and tasks: calls, compilation to Python, evaluation at compile time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, located
from tessera.interp.target.csl.sema.coerce import code, coerce
from tessera.interp.target.csl.sema.frame import ComptimeJump, Frame, Line, meaning
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import VOID, Operand, Place, known, members, runtime
from tessera.interp.target.csl.values import NativeFunction, Value

if TYPE_CHECKING:
    from tessera.interp.target.csl.sema.module import Module

_DEPTH = 200


@dataclass(frozen=True, eq=False)
class FunctionValue:
    """A function or task of a module."""

    module: Module
    decl: s.Function

    @property
    def generic(self) -> bool:
        """Whether each call may need a version of its own."""
        return any(p.comptime or (isinstance(p.type, s.Name) and p.type.text == "anytype") for p in self.decl.params)

    @property
    def recursion(self) -> str:
        """Its name for messages."""
        return self.decl.name


@dataclass(eq=False)
class Instance:
    """One compiled version of a function: its Python name, its lines, whether it is a generator."""

    name: str
    value: FunctionValue
    params: tuple[t.Type, ...] = ()
    result: t.Type = t.VOID
    lines: Sequence[Line] = ()
    arguments: str = ""
    waits: bool = False
    done: bool = False


def signature(value: FunctionValue) -> t.Fn:
    """The type of a function; generic parameters have none."""
    frame = Frame(value.module.unit, value.module, True)
    decl = value.decl
    if value.generic:
        return t.Fn("", (None,) * len(decl.params), t.ANYTYPE, decl.kind == "task")
    params = tuple(type_of(frame, p.type) for p in decl.params)
    return t.Fn("", params, type_of(frame, decl.result), decl.kind == "task")


def address_taken(node: Any, found: set[str]) -> set[str]:
    """The names whose address a body takes."""
    if isinstance(node, s.Unary) and node.sign == "&" and isinstance(node.operand, s.Name):
        found.add(node.operand.text)
    if isinstance(node, tuple):
        for item in node:
            address_taken(item, found)
    elif hasattr(node, "__dataclass_fields__") and not isinstance(node, Location):
        for name in node.__dataclass_fields__:
            address_taken(getattr(node, name), found)
    return found


@meaning(s.Call)
def _call(f: Frame, node: s.Call) -> Operand:
    callee = f.operand(node.callee)
    if not isinstance(callee.type, t.Fn):
        fail(node.callee.loc, f"type '{callee.type}' is not a function")
    if callee.type.task:
        fail(node.loc, "tasks cannot be called", suggestion="activate the task through its id")
    _check_count(callee.type, node)
    args = [f.operand(a) for a in node.args]
    f.cost += 4 + len(args)
    if not callee.known:
        return _indirect(f, callee, args, node.loc)
    target: Any = callee.const
    if isinstance(target, NativeFunction):
        return call_native(f, target, callee.type, args, node.loc)
    return call(f, target, args, node.loc)


def _check_count(type_: t.Fn, node: s.Call) -> None:
    wanted, given = len(type_.params), len(node.args)
    if wanted != given:
        fail(node.loc, f"function expects {wanted} argument{'s' * (wanted != 1)}, {given} provided")


def call(f: Frame, target: FunctionValue, args: list[Operand], loc: Location) -> Operand:
    """A call of a CSL function."""
    frame = Frame(f.unit, target.module, True)
    typed: list[Operand] = []
    for p, a in zip(target.decl.params, args, strict=True):
        type_ = type_of(frame, p.type)
        o = coerce(f, a, a.type if type_ is t.ANYTYPE else type_, a.loc)
        if p.comptime and not o.known:
            fail(loc, f"argument '{p.name}' is not known at compile time")
        typed.append(o)
        frame.scopes[-1][p.name] = o if p.comptime or o.known else Operand(o.type, code="_")
    result = type_of(frame, target.decl.result)
    if f.comptime or (result.comptime_only and all(o.known or o.fields for o in typed)):
        return evaluate(f, target, typed, result, loc)
    instance = f.unit.instance(target, tuple(typed), result)
    if f.function and instance.waits:
        f.function.waits = True
    passed = [o for p, o in zip(target.decl.params, typed, strict=True) if not p.comptime]
    f.flush(loc)
    text = f"{instance.name}({', '.join(code(f, o) for o in passed)})"
    return runtime(result, f"(yield from {text})" if instance.waits else text, loc)


def evaluate(f: Frame, target: FunctionValue, args: list[Operand], result: t.Type, loc: Location) -> Operand:
    """The value of a call at compile time."""
    frame = Frame(f.unit, target.module, True)
    f.unit.depth += 1
    f.unit.evaluated.add(id(target.decl))
    if f.unit.depth > _DEPTH:
        fail(loc, f"evaluation of '{target.decl.name}' exceeded {_DEPTH} nested calls")
    for p, a in zip(target.decl.params, args, strict=True):
        frame.scopes[-1][p.name] = a
    value = VOID
    try:
        if target.decl.body is None:
            fail(loc, f"function '{target.decl.name}' has no body")
        frame.run(target.decl.body)
    except ComptimeJump as jump:
        value = jump.value or VOID
    finally:
        f.unit.depth -= 1
    if value is VOID and result is not t.VOID:
        fail(target.decl.loc, f"function '{target.decl.name}' must return a value")
    return coerce(f, value, result, loc) if result is not t.VOID else VOID


def compile_instance(unit: Any, instance: Instance, args: tuple[Operand, ...]) -> None:
    """Write the Python of one version of a function."""
    decl, module = instance.value.decl, instance.value.module
    f = Frame(unit, module, False, instance)
    f.cells = frozenset(address_taken(decl.body, set()))
    names = []
    for p, a in zip(decl.params, args, strict=True):
        if p.comptime:
            f.declare(p.name, a, p.loc)
            continue
        name = f.fresh(p.name)
        names.append(name)
        f.declare(p.name, parameter(f, p, a.type, name), p.loc)
    if decl.body is None:
        fail(decl.loc, f"function '{decl.name}' has no body")
    f.run(decl.body)
    f.flush(decl.loc)
    if instance.waits:
        f.emit("if False: yield", decl.loc)
    instance.arguments, instance.lines, instance.done = ", ".join(names), f.lines, True


def parameter(f: Frame, p: s.Parameter, type_: t.Type, name: str) -> Operand:
    """A parameter inside its function; one whose address is taken is given memory."""
    if type_.aggregate:
        return runtime(type_, name, p.loc, Place(False, name))
    if p.name not in f.cells:
        return runtime(type_, name, p.loc)
    cell = f.fresh(p.name)
    f.emit(f"{cell} = zeros(1, {f.unit.constant(type_.dtype)})", p.loc)
    f.emit(f"put({cell}, 0, {name})", p.loc)
    return runtime(type_, name, p.loc, Place(False, cell))


def call_native(f: Frame, target: NativeFunction, type_: t.Fn, args: list[Operand], loc: Location) -> Operand:
    """A call of a library function."""
    typed = [o if p is None else coerce(f, o, p, o.loc) for o, p in zip(args, type_.params, strict=True)]
    now = f.comptime and not target.live and target.result is None
    if target.comptime or (now and all(o.known for o in typed)):
        return _native_now(f, target, type_, typed, loc)
    with located(loc):
        result = target.result(*(o.type for o in typed)) if target.result else type_.result
    if f.comptime and target.early:
        given = ", ".join(code(f, o) for o in typed)
        f.unit.tables.loaded.append((f"{f.unit.native(target)}({given})", loc))
        return VOID
    if f.comptime:
        fail(loc, f"function '{target.name}' can only be called at run time")
    f.cost += target.cycles
    f.flush(loc)
    types = [f.unit.constant(tuple(x.type for x in members(typed[-1]).values()))] if target.typed else []
    text = f"{f.unit.native(target)}({', '.join([*types, *(code(f, literal(f, o)) for o in typed)])})"
    if target.waits and f.function:
        f.function.waits = True
    return runtime(result, f"(yield from {text})" if target.waits else text, loc)


def literal(f: Frame, o: Operand) -> Operand:
    """A literal as the value a library function takes."""
    if o.type is t.COMPTIME_FLOAT and o.known:
        return known(t.F32, np.float32(o.const), o.loc)
    return o


def _native_now(f: Frame, target: NativeFunction, type_: t.Fn, args: list[Operand], loc: Location) -> Operand:
    lacking = next((o for o in args if not o.known), None)
    if lacking is not None:
        fail(lacking.loc, f"argument of '{target.name}' is not known at compile time")
    if target.comptime:
        with located(loc):
            found = target.run(f.unit, *(o.value for o in args))
        return Operand(found.type, found.data, loc=loc) if isinstance(found, Value) else VOID
    with located(loc):
        return known(type_.result, target.run(None, *(o.const for o in args)), loc)


def _indirect(f: Frame, callee: Operand, args: list[Operand], loc: Location) -> Operand:
    type_ = callee.type
    assert isinstance(type_, t.Fn)
    typed = [coerce(f, a, p, a.loc) for a, p in zip(args, type_.params, strict=True) if p]
    if f.function:
        f.function.waits = True
    f.flush(loc)
    text = ", ".join([callee.code, *(code(f, o) for o in typed)])
    return runtime(type_.result, f"(yield from invoke({text}))", loc)
