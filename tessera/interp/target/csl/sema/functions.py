"""Functions and tasks: calls, specialisation of generic functions, compilation to Python, comptime evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.access import evaluate_type
from tessera.interp.target.csl.sema.coercion import coerce, render_code
from tessera.interp.target.csl.sema.context import (
    VOID,
    AnalysisContext,
    ComptimeJump,
    ExprValue,
    GeneratedLine,
    LValue,
    list_members,
    make_known,
    make_runtime,
    register_rule,
)
from tessera.interp.target.csl.sema.values import ComptimeValue, NativeFunction
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import attach_location, fail, name_argument_errors

if TYPE_CHECKING:
    from tessera.interp.target.csl.sema.compilation_unit import CslModule

_MAX_CALL_DEPTH = 200


@dataclass(frozen=True, eq=False)
class FunctionValue:
    """A function or task of a module."""

    module: CslModule
    decl: s.FunctionDecl

    @property
    def generic(self) -> bool:
        """Whether calls may need separate specialisations."""
        return any(
            p.comptime or (isinstance(p.type, s.NameExpr) and p.type.text == "anytype") for p in self.decl.params
        )

    @property
    def recursion(self) -> str:
        """The name of the function in messages."""
        return self.decl.name


@dataclass(eq=False)
class FunctionInstance:
    """One compiled specialisation of a function: its Python name, its lines, whether it is a generator."""

    name: str
    value: FunctionValue
    params: tuple[t.CslType, ...] = ()
    result: t.CslType = t.VOID
    lines: Sequence[GeneratedLine] = ()
    arguments: str = ""
    waits: bool = False
    done: bool = False

    @property
    def constant(self) -> int | None:
        """The whole number that the function always returns, and does nothing else; None: there is no such."""
        found = _CONSTANT_BODY.fullmatch(self.lines[0].text) if self.done and self.lines else None
        return None if found is None else int(found[1])


_CONSTANT_BODY = re.compile(r"return (\d+)")


def compute_signature(value: FunctionValue) -> t.CslFunctionType:
    """The type of a function; generic parameters have none."""
    frame = AnalysisContext(value.module.unit, value.module, True)
    decl = value.decl
    if value.generic:
        return t.CslFunctionType("", (None,) * len(decl.params), t.ANYTYPE, decl.kind == "task")
    params = tuple(evaluate_type(frame, p.type) for p in decl.params)
    return t.CslFunctionType("", params, evaluate_type(frame, decl.result), decl.kind == "task")


@register_rule(s.CallExpr)
def _evaluate_call_expr(f: AnalysisContext, node: s.CallExpr) -> ExprValue:
    callee = f.evaluate_operand(node.callee)
    if not isinstance(callee.type, t.CslFunctionType):
        fail(node.callee.loc, f"type '{callee.type}' is not a function")
    if callee.type.task:
        fail(node.loc, "tasks cannot be called", suggestion="activate the task through its id")
    target: Any = callee.const if callee.known else None
    if not (isinstance(target, NativeFunction) and len(node.args) in target.shorter):
        _check_count(callee.type, node)
    args = [f.evaluate_operand(a) for a in node.args]
    if isinstance(target, NativeFunction):
        return call_native(f, target, callee.type, args, node.loc)
    f.held.clear()
    f.cost += COSTS.call + COSTS.argument * len(args)
    if not callee.known:
        return _call_indirect(f, callee, args, node.loc)
    return call_function(f, target, args, node.loc)


def _check_count(type_: t.CslFunctionType, node: s.CallExpr) -> None:
    expected, received = len(type_.params), len(node.args)
    if expected != received:
        fail(node.loc, f"function expects {expected} argument{'s' * (expected != 1)}, {received} provided")


def call_function(f: AnalysisContext, target: FunctionValue, args: list[ExprValue], loc: Location) -> ExprValue:
    """Generate the call of a CSL function."""
    frame = AnalysisContext(f.unit, target.module, True)
    typed: list[ExprValue] = []
    for p, a in zip(target.decl.params, args, strict=True):
        type_ = evaluate_type(frame, p.type)
        o = coerce(f, a, a.type if type_ is t.ANYTYPE else type_, a.loc)
        if p.comptime and not o.known:
            fail(loc, f"argument '{p.name}' is not known at compile time")
        typed.append(o)
        frame.scopes[-1][p.name] = o if p.comptime or o.known else ExprValue(o.type, code="_")
    result = evaluate_type(frame, target.decl.result)
    if f.comptime or (result.comptime_only and all(o.known or o.fields for o in typed)):
        return evaluate_call(f, target, typed, result, loc)
    instance = f.unit.specialise(target, tuple(typed), result)
    if f.function and instance.waits:
        f.function.waits = True
    passed = [o for p, o in zip(target.decl.params, typed, strict=True) if not p.comptime]
    f.flush(loc)
    text = f"{instance.name}({', '.join(render_code(f, o) for o in passed)})"
    if instance.constant is not None and not passed:
        f.unit.constant_calls[text] = instance.constant
    return make_runtime(result, f"(yield from {text})" if instance.waits else text, loc)


def evaluate_call(
    f: AnalysisContext, target: FunctionValue, args: list[ExprValue], result: t.CslType, loc: Location
) -> ExprValue:
    """Evaluate a call at comptime."""
    frame = AnalysisContext(f.unit, target.module, True)
    f.unit.depth += 1
    f.unit.evaluated.add(id(target.decl))
    if f.unit.depth > _MAX_CALL_DEPTH:
        fail(loc, f"evaluation of '{target.decl.name}' exceeded {_MAX_CALL_DEPTH} nested calls")
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


def compile_instance(unit: Any, instance: FunctionInstance, args: tuple[ExprValue, ...]) -> None:
    """Generate the Python of one specialisation of a function."""
    decl, module = instance.value.decl, instance.value.module
    f = AnalysisContext(unit, module, False, instance)
    f.cells = decl.addressed
    names = []
    for p, a in zip(decl.params, args, strict=True):
        if p.comptime:
            f.declare(p.name, a, p.loc)
            continue
        name = f.make_name(p.name)
        names.append(name)
        f.declare(p.name, declare_parameter(f, p, a.type, name), p.loc)
    if decl.body is None:
        fail(decl.loc, f"function '{decl.name}' has no body")
    f.run(decl.body)
    f.flush(decl.loc)
    if instance.waits:
        f.emit("if False: yield", decl.loc)
    instance.arguments, instance.lines, instance.done = ", ".join(names), f.lines, True


def declare_parameter(f: AnalysisContext, p: s.ParameterDecl, type_: t.CslType, name: str) -> ExprValue:
    """Declare a parameter in its function; a parameter whose address is taken gets memory."""
    if type_.aggregate:
        return make_runtime(type_, name, p.loc, LValue(False, name))
    if p.name not in f.cells:
        return make_runtime(type_, name, p.loc)
    cell = f.make_name(p.name)
    f.emit(f"{cell} = zeros(1, {f.unit.add_constant(type_.dtype)})", p.loc)
    f.emit(f"put({cell}, 0, {name})", p.loc)
    return make_runtime(type_, name, p.loc, LValue(False, cell))


def call_native(
    f: AnalysisContext, target: NativeFunction, type_: t.CslFunctionType, args: list[ExprValue], loc: Location
) -> ExprValue:
    """Generate the call of a library function."""
    params = type_.params[: len(args)]
    typed = [o if p is None else coerce(f, o, p, o.loc) for o, p in zip(args, params, strict=True)]
    now = f.comptime and not target.live and target.result is None
    if target.comptime or (now and all(o.known for o in typed)):
        return _evaluate_native(f, target, type_, typed, loc)
    with attach_location(loc):
        result = target.result(*(o.type for o in typed)) if target.result else type_.result
    if f.comptime and target.preloadable:
        arguments = ", ".join(render_code(f, o) for o in typed)
        f.unit.tables.preloads.append((f"{f.unit.bind_native(target)}({arguments})", loc))
        return VOID
    if f.comptime:
        fail(loc, f"function '{target.name}' can only be called at run time")
    f.held.clear()
    f.cost += target.cycles
    f.flush(loc)
    types = [f.unit.add_constant(tuple(x.type for x in list_members(typed[-1]).values()))] if target.typed else []
    text = (
        f"{f.unit.bind_native(target)}({', '.join([*types, *(render_code(f, convert_literal(f, o)) for o in typed)])})"
    )
    if target.waits and f.function:
        f.function.waits = True
    return make_runtime(result, f"(yield from {text})" if target.waits else text, loc)


def convert_literal(f: AnalysisContext, o: ExprValue) -> ExprValue:
    """Convert a literal to the value that a library function takes."""
    if o.type is t.COMPTIME_FLOAT and o.known:
        return make_known(t.F32, np.float32(o.const), o.loc)
    return o


def _evaluate_native(
    f: AnalysisContext, target: NativeFunction, type_: t.CslFunctionType, args: list[ExprValue], loc: Location
) -> ExprValue:
    lacking = next((o for o in args if not o.known), None)
    if lacking is not None:
        fail(lacking.loc, f"argument of '{target.name}' is not known at compile time")
    received = ", ".join(f"'{o.type}'" for o in args)
    if target.comptime:
        with name_argument_errors(target.name, loc, received):
            result = target.run(f.unit, *(o.value for o in args))
        return ExprValue(result.type, result.data, loc=loc) if isinstance(result, ComptimeValue) else VOID
    with name_argument_errors(target.name, loc, received):
        return make_known(type_.result, target.run(None, *(o.const for o in args)), loc)


def _call_indirect(f: AnalysisContext, callee: ExprValue, args: list[ExprValue], loc: Location) -> ExprValue:
    type_ = callee.type
    assert isinstance(type_, t.CslFunctionType)
    typed = [coerce(f, a, p, a.loc) for a, p in zip(args, type_.params, strict=True) if p]
    if f.function:
        f.function.waits = True
    f.flush(loc)
    text = ", ".join([callee.code, *(render_code(f, o) for o in typed)])
    return make_runtime(type_.result, f"(yield from invoke({text}))", loc)
