"""Evaluator: walks a block and applies one semantics function to each node, to interpret, copy or rewrite it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import TesseraError
from tessera.ir.builder import Builder, override_numerics
from tessera.ir.core import Block, Function, Node, Value

# semantics(node, operands, walk) gives the results; walk(block, *inputs) evaluates an inner region.
NodeSemantics = Callable[[Node, list[Any], Any], Sequence[Any]]


class Evaluation:
    """An evaluation in progress: the values so far; a call evaluates an inner region on inputs."""

    __slots__ = ("env", "meaning")

    def __init__(self, meaning: NodeSemantics, env: dict[Value, Any]) -> None:
        self.meaning = meaning
        self.env = env

    def __call__(self, block: Block, *inputs: Any) -> list[Any]:
        return evaluate_block(block, inputs, self.meaning, self.env)

    def with_values(self, env: dict[Value, Any]) -> Evaluation:
        """The same evaluation with other values."""
        return Evaluation(self.meaning, env)


def evaluate_block(
    block: Block, args: Sequence[Any], meaning: NodeSemantics, env: dict[Value, Any] | None = None
) -> list[Any]:
    """Evaluate a block: apply the semantics function to each node in order.

    With NumPy semantics this interprets; with a builder it copies, inlines or rewrites.
    """
    env = {} if env is None else env
    env.update(zip(block.params, args, strict=True))
    walk, node = Evaluation(meaning, env), None
    try:
        for node in block.nodes:
            results = meaning(node, [env[v] for v in node.args], walk)
            env.update(zip(node.results, results, strict=True))
    except TesseraError as error:
        assert node is not None
        raise error.at(node.loc) from None
    return [env[v] for v in block.results]


def make_copier(builder: Builder) -> NodeSemantics:
    """Make the semantics function that copies each node into a builder, at its own location."""

    def copy(node: Node, args: list[Value], run: Callable[..., list[Any]]) -> tuple[Value, ...]:
        regions = tuple(copy_region(builder, region, run) for region in node.regions)
        types = tuple(v.type for v in node.results)
        return builder.add(node.op, args, node.attrs, types=types, regions=regions, loc=node.loc).results

    return copy


def copy_region(builder: Builder, region: Block, run: Callable[..., list[Any]]) -> Block:
    """Evaluate a region into a builder, with fresh parameters."""
    params = tuple(Value(p.type, p.hint) for p in region.params)
    with builder.region() as nodes:
        results = run(region, *params)
    return Block(params, tuple(nodes), tuple(results))


def rebuild_function(
    function: Function, meaning_of: Callable[[Builder], NodeSemantics], builder: Builder | None = None
) -> Function:
    """Evaluate a function with semantics that record into a builder, and make a function of what is recorded."""
    builder = builder or Builder()
    params = tuple(Value(p.type, p.hint) for p in function.params)
    with builder.active(), override_numerics(None):  # types say already what a numeric context asked for
        results = evaluate_block(function.body, params, meaning_of(builder))
    assert not builder.captures, "a rewrite captured an array"
    return Function(function.name, builder.block(params, results), function.attrs, function.loc)
