"""Target ops in the Tile interpreter: an op of one target is executed as the Tile ops that it stands for.

A generator's passes introduce ops that no other target sees (staged operands, asynchronous products). Each has a rule
that expands it into Tile ops, so that a module after any pass runs in every mode of the interpreter: debug mode checks
the copies, waits and buffers that a pass has put into the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tessera.interp.tile import memory, op_rules
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, rewrite_function
from tessera.ir.rules import Op, Rules

# rule(builder, node, operands) adds Tile ops and gives the results.
expansion_rules = Rules("expansion into Tile ops")


def expand_target_ops(function: Function) -> Function:
    """A tile function without target ops that have an expansion."""
    body = _expand_body(function.body)
    return function if body is function.body else replace(function, body=body)


@lru_cache(maxsize=1024)
def _expand_body(body: Block) -> Block:
    patterns = RewritePatterns("expansion into Tile ops")
    patterns(*expansion_rules)(_expand_node)
    return rewrite_function(Function("", body), patterns).body


def _expand_node(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value]:
    return expansion_rules.of(node.op)(rewriter.builder, node, args)


def needs_whole_blocks(*ops: Op) -> None:
    """Let these ops see their operands at full size, where a block holds 1 for what is the same everywhere."""

    def prepare(node: Node, args: list[Any]) -> list[Any]:
        return [memory.expand_block(a, tuple(map(int, v.type.shape))) for a, v in zip(args, node.args, strict=True)]

    op_rules.operand_rules(*ops)(prepare)
    op_rules.array_rules(*ops)(
        lambda machine, node, args, run: op_rules.evaluate_pure(machine, node, prepare(node, args))
    )
