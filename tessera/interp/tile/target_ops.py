"""Target ops in the Tile interpreter: an op of one target is executed as the Tile ops that it stands for.

A generator's passes introduce ops that no other target sees (staged operands, asynchronous products). Each has a rule
that expands it into Tile ops, so that a module after any pass runs in every mode of the interpreter: debug mode checks
the copies, waits and buffers that a pass has put into the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tessera.interp.tile import memory, op_rules
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.evaluator import make_copier, rebuild_function
from tessera.ir.rules import Op, Rules

# rule(builder, node, operands) adds Tile ops and gives the results.
expansion_rules = Rules("expansion into Tile ops")


def expand_target_ops(function: Function) -> Function:
    """A tile function without target ops that have an expansion."""
    body = _expand_body(function.body)
    return function if body is function.body else replace(function, body=body)


@lru_cache(maxsize=1024)
def _expand_body(body: Block) -> Block:
    if not any(node.op in expansion_rules for node in body.walk()):
        return body
    return rebuild_function(Function("", body), _make_expander).body


def _make_expander(builder: Builder) -> Callable[..., Any]:
    copy = make_copier(builder)

    def meaning(node: Node, args: list[Value], run: Any) -> Sequence[Value]:
        rule = expansion_rules.get(node.op)
        if rule is None:
            return copy(node, args, run)
        with builder.at(node.loc):
            return rule(builder, node, args)

    return meaning


def needs_whole_blocks(*ops: Op) -> None:
    """Let these ops see their operands at full size, where a block holds 1 for what is the same everywhere."""

    def prepare(node: Node, args: list[Any]) -> list[Any]:
        return [memory.expand_block(a, tuple(map(int, v.type.shape))) for a, v in zip(args, node.args, strict=True)]

    op_rules.operand_rules(*ops)(prepare)
    op_rules.array_rules(*ops)(
        lambda machine, node, args, run: op_rules.evaluate_pure(machine, node, prepare(node, args))
    )
