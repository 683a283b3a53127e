"""Builtins of the SDKs before 1.0, where a color is the id of a task; accepted for these versions alone."""

from __future__ import annotations

from typing import NoReturn

from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.builtins import (
    EARLY_BUILTINS,
    BuiltinRule,
    BuiltinSpec,
    evaluate_constant,
    require_section,
)
from tessera.interp.target.csl.sema.coercion import render_code
from tessera.interp.target.csl.sema.context import VOID, AnalysisContext, ExprValue
from tessera.interp.target.csl.sema.dsd_builtins import FORBIDDEN_DSDS
from tessera.interp.target.csl.sema.functions import FunctionValue
from tessera.interp.target.csl.sema.task_builtins import bind_task
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch


def _register(name: str, count: int, rule: BuiltinRule, successor: str) -> None:
    """Register a builtin; later versions refuse it and name its successor."""

    def evaluate(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
        if not f.unit.options.early:
            _refuse(f, node, successor)
        return rule(f, node)

    EARLY_BUILTINS[f"@{name}"] = BuiltinSpec(count, count, evaluate)


def _refuse(f: AnalysisContext, node: s.BuiltinCall, successor: str) -> NoReturn:
    fail(
        node.loc,
        f"invalid builtin function: '{node.name}' does not exist in SDK {f.unit.options.sdk}",
        suggestion=f"use {successor}, or compile a program for an earlier SDK with --sdk 0.9",
    )


def _bind_task(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    """Bind a task to a color: a data task if it has parameters, else a local task."""
    require_section(f, node, "comptime")
    task, number = evaluate_constant(f, node.args[0]), evaluate_constant(f, node.args[1])
    if not isinstance(task.type, t.CslFunctionType) or not task.type.task or not isinstance(task.const, FunctionValue):
        type_mismatch(node.args[0].loc, "task", task.type)
    if number.type not in (t.COLOR, t.LOCAL_TASK, t.DATA_TASK, t.CONTROL_TASK):
        type_mismatch(node.args[1].loc, t.COLOR, number.type)
    kind = "control" if number.type is t.CONTROL_TASK else "data" if task.const.decl.params else "local"
    bind_task(f, task.const, kind, int(number.const), node.loc)
    return VOID


def _set_dsr_base(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    """Let the memory DSD of a register begin at another address."""
    dsr, base = f.evaluate(node.args[0]), f.evaluate(node.args[1])
    if dsr.type not in FORBIDDEN_DSDS:
        type_mismatch(node.args[0].loc, "DSR", dsr.type)
    if not isinstance(base.type, t.CslPointer):
        type_mismatch(node.args[1].loc, "pointer", base.type)
    f.cost += 4
    f.emit(f"pe.move_dsr({render_code(f, dsr)}, {render_code(f, base)})", node.loc)
    return VOID


_register("bind_task", 2, _bind_task, "@bind_local_task, @bind_data_task or @bind_control_task")
_register("set_dsr_base_addr", 2, _set_dsr_base, "@set_dsd_base_addr and @load_to_dsr")
