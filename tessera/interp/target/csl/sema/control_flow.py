"""Control flow: blocks, conditions, switches, jumps, and loops (comptime, unrolled, or as Python loops)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.access import access_element, dereference_pointer
from tessera.interp.target.csl.sema.coercion import coerce, render_code
from tessera.interp.target.csl.sema.context import (
    VOID,
    AnalysisContext,
    ComptimeJump,
    ExprValue,
    GeneratedLine,
    LoopScope,
    make_known,
    make_runtime,
    register_rule,
)
from tessera.interp.target.csl.sema.operators import evaluate_condition, unify_types
from tessera.interp.target.csl.sema.product_loops import combine_products
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail

# Blocks, conditions, switches and jumps.


_STATEMENT_CLASSES = (s.BlockStmt, s.ReturnStmt, s.AssignStmt, s.JumpStmt, s.WhileStmt, s.ForStmt, s.VariableDecl)


@register_rule(s.BlockStmt)
def _evaluate_block(f: AnalysisContext, node: s.BlockStmt) -> ExprValue:
    if node.label:
        return _evaluate_labelled_block(f, node) if f.comptime else _emit_labelled_block(f, node)
    with f.scope():
        for statement in node.body:
            f.run(statement)
    return VOID


def _evaluate_labelled_block(f: AnalysisContext, node: s.BlockStmt) -> ExprValue:
    try:
        with f.scope():
            for statement in node.body:
                f.run(statement)
    except ComptimeJump as jump:
        if jump.kind != "break" or jump.label != node.label:
            raise
        return jump.value or VOID
    return VOID


def _emit_labelled_block(f: AnalysisContext, node: s.BlockStmt) -> ExprValue:
    loop = LoopScope(node.label, "block")
    loop.result = f.make_name("r")

    def write() -> None:
        _emit_statements(f, node.body)
        f.flush(node.loc)
        f.emit("valueless()" if loop.types else "break", node.loc)

    emit_loop(f, loop, write, node.loc, "while True:")
    if not loop.types:
        return VOID
    type_ = loop.types[0].type
    return make_runtime(t.F32 if type_ is t.COMPTIME_FLOAT else type_, loop.result, node.loc)


def _emit_statements(f: AnalysisContext, nodes: tuple[s.SyntaxNode, ...]) -> None:
    with f.scope():
        for statement in nodes:
            f.run(statement)


def emit_loop(f: AnalysisContext, loop: LoopScope, write: Callable[[], None], loc: Location, head: str) -> None:
    """Generate a Python loop around the lines that `write` generates, and the jumps that leave an outer loop."""
    f.flush(loc)
    f.held.clear()
    f.loops.append(loop)
    with f.capture_lines() as lines:
        f.emit(head, loc)
        with f.indent_lines():
            write()
            f.flush(loc)
    f.loops.pop()
    f.held.clear()
    if loop.flag:
        f.emit(f"{loop.flag} = 0", loc)
    f.lines.extend(combine_products(lines, f.make_name))
    for outer in reversed(f.loops):
        if outer.flag:
            _emit_outer_jump(f, outer, loc)


def _emit_once(f: AnalysisContext, loop: LoopScope, write: Callable[[], None], loc: Location) -> None:
    """Generate a loop that runs once, for lines that jump to its end."""

    def run_once() -> None:
        write()
        f.flush(loc)
        f.emit("break", loc)

    emit_loop(f, loop, run_once, loc, "while True:")


def _emit_outer_jump(f: AnalysisContext, outer: LoopScope, loc: Location) -> None:
    """Generate, after an inner loop, the jump that ended it."""
    if outer is not f.loops[-1]:
        f.emit(f"if {outer.flag}: break", loc)
        return
    f.emit(f"if {outer.flag} == 1: break", loc)
    f.emit(f"if {outer.flag} == 2:", loc)
    with f.indent_lines():
        f.emit(f"{outer.flag} = 0", loc)
        _emit_continue(f, outer, loc)


def _emit_continue(f: AnalysisContext, loop: LoopScope, loc: Location) -> None:
    if loop.step is not None:
        loop.step()
    f.emit("continue" if loop.kind == "loop" else "break", loc)


@register_rule(s.JumpStmt)
def _evaluate_jump(f: AnalysisContext, node: s.JumpStmt) -> ExprValue:
    value = f.evaluate_operand(node.value) if node.value is not None else None
    if f.comptime:
        raise ComptimeJump(node.kind, node.label, value)
    target = _find_jump_target(f, node)
    if value is not None and value is not VOID:
        if target.types:
            value = coerce(f, value, target.types[0].type, node.loc)
        target.types.append(value)
        f.emit(f"{target.result} = {render_code(f, value)}", node.loc)
    f.flush(node.loc)
    if target is f.loops[-1]:
        if node.kind == "continue":
            _emit_continue(f, target, node.loc)
        else:
            f.emit("break", node.loc)
        return VOID
    target.flag = target.flag or f.make_name("jump")
    f.emit(f"{target.flag} = {1 if node.kind == 'break' else 2}", node.loc)
    f.emit("break", node.loc)
    return VOID


def _find_jump_target(f: AnalysisContext, node: s.JumpStmt) -> LoopScope:
    for loop in reversed(f.loops):
        if node.label == loop.label if node.label else loop.kind != "block":
            return loop
    fail(node.loc, f"{node.kind} outside of a loop" if not node.label else f"use of undeclared label '{node.label}'")


@register_rule(s.IfStmt)
def _evaluate_if(f: AnalysisContext, node: s.IfStmt) -> ExprValue:
    condition = evaluate_condition(f, node.condition)
    if condition.known:
        branch = node.then if condition.const else node.other
        return VOID if branch is None else evaluate_branch(f, branch)
    then = _capture_branch(f, node.then)
    other = _capture_branch(f, node.other) if node.other is not None else (VOID, [], node.loc)
    return emit_conditional(f, [(condition.code, *then), ("", *other)], node.loc)


ConditionalArm = tuple[str, ExprValue, list[GeneratedLine], Location]


def evaluate_branch(f: AnalysisContext, node: s.SyntaxNode) -> ExprValue:
    """Evaluate one arm of a condition; a statement has no value."""
    if isinstance(node, _STATEMENT_CLASSES) and not (isinstance(node, s.BlockStmt) and node.label):
        f.run(node)
        return VOID
    return f.evaluate_operand(node)


def _capture_branch(f: AnalysisContext, node: s.SyntaxNode) -> tuple[ExprValue, list[GeneratedLine], Location]:
    cost, f.cost, held = f.cost, 0, set(f.held)
    with f.capture_lines() as lines, f.scope():
        f.depth += 1
        o = evaluate_branch(f, node)
        if o.type is t.VOID and not o.known:
            f.emit(o.code, node.loc)
            o = VOID
        f.flush(node.loc)
        f.depth -= 1
    f.cost, f.held = cost, held if held <= f.held else set()  # a call or a store may have changed them
    return o, lines, node.loc


def emit_conditional(f: AnalysisContext, arms: list[ConditionalArm], loc: Location) -> ExprValue:
    """Generate a chain of conditions; the last has no condition. Returns the value if the arms have values."""
    valued = [o for _, o, _, _ in arms if o is not VOID]
    f.cost += COSTS.branch
    if valued:
        type_ = _common_type(f, valued, loc)
        arms = [(c, o if o is VOID else coerce(f, o, type_, at), lines, at) for c, o, lines, at in arms]
        if not any(lines for _, _, lines, _ in arms) and len(valued) == len(arms):
            return make_runtime(type_, _render_conditional(f, arms), loc)
    f.flush(loc)
    name = f.make_name("v") if valued else ""
    for i, (condition, o, lines, at) in enumerate(arms):
        if not condition and not lines and o is VOID:
            continue
        f.emit(f"{'el' if i and condition else ''}{'if ' + condition if condition else 'else'}:", at)
        with f.indent_lines():
            f.lines.extend(lines)
            if o is not VOID:
                f.emit(f"{name} = {render_code(f, o)}", at)
    return make_runtime(_common_type(f, valued, loc), name, loc) if valued else VOID


def _common_type(f: AnalysisContext, valued: list[ExprValue], loc: Location) -> t.CslType:
    first = valued[0]
    for o in valued[1:]:
        first = unify_types(f, first, o, loc)[0]
    return first.type


def _render_conditional(f: AnalysisContext, arms: list[ConditionalArm]) -> str:
    text = render_code(f, arms[-1][1])
    for condition, o, _, _ in reversed(arms[:-1]):
        text = f"({render_code(f, o)} if {condition} else {text})"
    return text


@register_rule(s.SwitchStmt)
def _evaluate_switch(f: AnalysisContext, node: s.SwitchStmt) -> ExprValue:
    subject = f.evaluate(node.subject)
    if subject.known:
        return _select_case(f, node, subject)
    name = subject.code
    if not name.isidentifier():
        name = f.make_name("v")
        f.emit(f"{name} = {subject.code}", node.loc)
    if all(case.values for case in node.cases) and not _is_exhaustive(f, node, subject):
        fail(node.loc, "switch must handle all possibilities")
    cases = sorted(node.cases, key=lambda case: not case.values)
    arms: list[ConditionalArm] = []
    for case in cases:
        tests = " or ".join(_render_case_test(f, name, subject, v) for v in case.values)
        arms.append((tests, *_capture_branch(f, case.body)))
    if arms[-1][0]:
        arms.append(("", VOID, [], node.loc))
    return emit_conditional(f, arms, node.loc)


def _is_exhaustive(f: AnalysisContext, node: s.SwitchStmt, subject: ExprValue) -> bool:
    values = [v for case in node.cases for v in case.values]
    kinds: dict[Any, int] = {t.BOOL: 2}
    case_count = len(subject.type.members) if isinstance(subject.type, t.CslEnum) else kinds.get(subject.type, 0)
    return bool(case_count) and len(values) == case_count


def _evaluate_case_label(f: AnalysisContext, subject: ExprValue, node: s.SyntaxNode) -> ExprValue:
    with f.at_comptime():
        return coerce(f, f.evaluate(node), subject.type, node.loc)


def _render_case_test(f: AnalysisContext, name: str, subject: ExprValue, value: s.SyntaxNode) -> str:
    if isinstance(value, s.CaseRange):
        first, last = _evaluate_case_label(f, subject, value.first), _evaluate_case_label(f, subject, value.last)
        return f"{render_code(f, first)} <= {name} <= {render_code(f, last)}"
    return f"{name} == {render_code(f, _evaluate_case_label(f, subject, value))}"


def _select_case(f: AnalysisContext, node: s.SwitchStmt, subject: ExprValue) -> ExprValue:
    other = None
    for case in node.cases:
        if not case.values:
            other = case
        if any(_matches_case(f, subject, v) for v in case.values):
            return evaluate_branch(f, case.body)
    if other is None:
        fail(node.loc, "switch must handle all possibilities")
    return evaluate_branch(f, other.body)


def _matches_case(f: AnalysisContext, subject: ExprValue, value: s.SyntaxNode) -> bool:
    if isinstance(value, s.CaseRange):
        return bool(
            _evaluate_case_label(f, subject, value.first).const
            <= subject.const
            <= _evaluate_case_label(f, subject, value.last).const
        )
    return bool(_evaluate_case_label(f, subject, value).const == subject.const)


@register_rule(s.TopLevelBlock)
def _evaluate_top_level_block(f: AnalysisContext, node: s.TopLevelBlock) -> ExprValue:
    with f.at_comptime():
        f.run(node.body)
    return VOID


__all__ = ["make_known"]


# Loops: executed at comptime, unrolled, or generated as Python loops.


LoopStmt = s.WhileStmt | s.ForStmt
MAX_UNROLLED_ITERATIONS = 4  # of loops whose trip count is known: no cycles for the loop itself
MAX_UNCHECKED_ITERATIONS = 1024  # of loops without loops in them, which cannot pass the limit by much
_LIMIT_CHECK = "if pe.clock > pe.limit: pe.overrun()"  # a loop without an end stops at the limit of cycles


@register_rule(s.WhileStmt)
def _evaluate_while(f: AnalysisContext, node: s.WhileStmt) -> ExprValue:
    if f.comptime:
        _run_while(f, node, None)
    elif node.inline:
        _unroll_loop(f, node, _run_while_steps(f, node))
    else:
        _emit_while(f, node)
    return VOID


def _evaluate_loop_condition(f: AnalysisContext, node: s.WhileStmt) -> bool:
    with f.at_comptime():
        return bool(evaluate_condition(f, node.condition).const)


def _run_while(f: AnalysisContext, node: s.WhileStmt, limit: int | None) -> None:
    while _evaluate_loop_condition(f, node):
        if run_iteration(f, node.label, node.body):
            return
        if node.step is not None:
            f.run(node.step)


def run_iteration(f: AnalysisContext, label: str, node: s.SyntaxNode) -> bool:
    """Execute one iteration at comptime; returns whether it breaks the loop."""
    f.unit.count_comptime_iteration(node.loc)
    try:
        with f.scope():
            f.run(node)
    except ComptimeJump as jump:
        if jump.kind == "return" or (jump.label and jump.label != label):
            raise
        return jump.kind == "break"
    return False


def _run_while_steps(f: AnalysisContext, node: s.WhileStmt) -> Iterator[dict[str, ExprValue]]:
    while _evaluate_loop_condition(f, node):
        yield {}
        if node.step is not None:
            with f.at_comptime():
                f.run(node.step)


def _unroll_loop(f: AnalysisContext, node: LoopStmt, steps: Iterable[dict[str, ExprValue]]) -> None:
    """Unroll an inline loop."""
    if node.jumps:
        _emit_once(f, LoopScope(node.label, "whole"), lambda: _emit_iterations(f, node, steps), node.loc)
    else:
        _emit_iterations(f, node, steps)


def _emit_iterations(f: AnalysisContext, node: LoopStmt, steps: Iterable[dict[str, ExprValue]]) -> None:
    limit = f.unit.options.max_inlined_iterations
    for count, names in enumerate(steps, 1):
        if count > limit:
            fail(node.loc, f"exceeded the maximum of {limit} inlined iterations")
        with f.scope() as scope:
            scope.update(names)
            if node.jumps:
                _emit_once(f, LoopScope(node.label, "iteration"), lambda: f.run(node.body), node.loc)
            else:
                f.run(node.body)


def _emit_while(f: AnalysisContext, node: s.WhileStmt) -> None:
    loop = LoopScope(node.label, "loop")
    step = node.step
    if step is not None:

        def advance() -> None:
            f.run(step)
            f.flush(step.loc)

        loop.step = advance

    def write() -> None:
        f.cost += COSTS.iteration
        f.emit(_LIMIT_CHECK, node.loc)
        condition = evaluate_condition(f, node.condition)
        if not (condition.known and condition.const):
            f.emit(f"if not {render_code(f, condition)}: break", node.loc)
        with f.scope():
            f.run(node.body)
        f.flush(node.loc)
        if loop.step is not None:
            loop.step()

    emit_loop(f, loop, write, node.loc, "while True:")


@register_rule(s.ForStmt)
def _evaluate_for(f: AnalysisContext, node: s.ForStmt) -> ExprValue:
    items = f.evaluate_operand(node.items)
    if not 1 <= len(node.names) <= 2:
        fail(node.loc, f"for loop expects 1 or 2 names, {len(node.names)} provided")
    if items.type is t.RANGE:
        _evaluate_for_range(f, node, items)
        return VOID
    if isinstance(items.type, t.CslPointer) and isinstance(items.type.element, t.CslArray):
        items = dereference_pointer(f, items, node.loc)
    if not isinstance(items.type, t.CslArray) or len(items.type.dims) != 1:
        fail(node.items.loc, f"type '{items.type}' cannot be iterated")
    _evaluate_for_array(f, node, items)
    return VOID


def _bind_loop_names(node: s.ForStmt, item: ExprValue, index: ExprValue) -> dict[str, ExprValue]:
    return dict(zip(node.names, (item, index), strict=False))


def _evaluate_for_range(f: AnalysisContext, node: s.ForStmt, items: ExprValue) -> None:
    assert items.fields is not None
    type_, bounds = items.fields["type"].const, [items.fields[n] for n in ("start", "stop", "step")]
    if f.comptime or node.inline:
        if not all(o.known for o in bounds):
            fail(node.items.loc, "range is not known at compile time")
        values = range(*(int(o.const) for o in bounds))
        steps = (_bind_loop_names(node, make_known(type_, v), make_known(t.U16, i)) for i, v in enumerate(values))
        _run_or_unroll(f, node, steps)
        return
    name, index = f.make_name(node.names[0]), f.make_name("i")
    item = make_runtime(type_, name)
    names = _bind_loop_names(node, item, make_runtime(t.U16, index))
    text = f"range({', '.join(render_code(f, o) for o in bounds)})"
    count = None
    if all(o.known for o in bounds):
        turns = range(*(int(o.const) for o in bounds))
        count = len(turns)
        item.span = (min(turns[0], turns[-1]), max(turns[0], turns[-1])) if count else (0, 0)
    head = f"for {name} in {text}:" if len(names) < 2 else f"for {index}, {name} in enumerate({text}):"
    _emit_for(f, node, names, head, count)


def _run_or_unroll(f: AnalysisContext, node: s.ForStmt, steps: Iterable[dict[str, ExprValue]]) -> None:
    if not f.comptime:
        _unroll_loop(f, node, steps)
        return
    for names in steps:
        with f.scope() as scope:
            scope.update(names)
            if run_iteration(f, node.label, node.body):
                return


def _evaluate_for_array(f: AnalysisContext, node: s.ForStmt, items: ExprValue) -> None:
    type_ = items.type
    assert isinstance(type_, t.CslArray)
    if f.comptime or node.inline:
        steps = (
            _bind_loop_names(node, access_element(f, items, [make_known(t.U16, i)], node.loc), make_known(t.U16, i))
            for i in range(type_.count)
        )
        _run_or_unroll(f, node, steps)
        return
    index = f.make_name("i")
    at = make_runtime(t.U16, index)
    _emit_for(
        f,
        node,
        _bind_loop_names(node, access_element(f, items, [at], node.loc), at),
        f"for {index} in range({type_.count}):",
        type_.count,
    )


def _emit_for(f: AnalysisContext, node: s.ForStmt, names: dict[str, ExprValue], head: str, count: int | None) -> None:
    """Generate a loop; `count`: its iterations, if they are known. The vendor's compiler unrolls a short loop."""

    def write() -> None:
        f.cost += 0 if count is not None and count <= MAX_UNROLLED_ITERATIONS else COSTS.iteration
        if node.nested or count is None or count > MAX_UNCHECKED_ITERATIONS:
            f.emit(_LIMIT_CHECK, node.loc)
        with f.scope() as scope:
            scope.update(names)
            f.run(node.body)

    emit_loop(f, LoopScope(node.label, "loop"), write, node.loc, head)
