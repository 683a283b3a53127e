"""Rule V4: each op with regions takes and yields what its meaning needs, and no other op has regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tessera.ir.breach import Breach, differing, nodes, types
from tessera.ir.core import Module, Node
from tessera.ir.levels import KERNEL, Level
from tessera.types import bool_, int64, scalar

_INDEX, _TRUTH = scalar(int64), scalar(bool_)


def regions(module: Module, level: Level) -> Iterator[Breach]:
    """V4: the regions of a node have the parameters and results that its op asks for."""
    for node in nodes(module):
        count, rule = _RULES.get(node.op.name, (0, _nothing))
        if len(node.regions) != count:
            yield Breach(node, "another number of regions", count, len(node.regions))
        else:
            yield from rule(node)


def _nothing(node: Node) -> Iterator[Breach]:
    return iter(())


def _for(node: Node) -> Iterator[Breach]:
    (body,) = node.regions
    carried = types(node.args[3:])
    yield from differing(node, "the bounds", (_INDEX,) * 3, types(node.args[:3]))
    yield from differing(node, "the parameters of the region", (_INDEX, *carried), types(body.params))
    yield from differing(node, "the values yielded", carried, types(body.results))
    yield from differing(node, "the results", carried, types(node.results))


def _while(node: Node) -> Iterator[Breach]:
    condition, body = node.regions
    carried = types(node.args)
    yield from differing(node, "the parameters of the condition", carried, types(condition.params))
    yield from differing(node, "the values of the condition", (_TRUTH,), types(condition.results))
    yield from differing(node, "the parameters of the region", carried, types(body.params))
    yield from differing(node, "the values yielded", carried, types(body.results))
    yield from differing(node, "the results", carried, types(node.results))


def _if(node: Node) -> Iterator[Breach]:
    yield from differing(node, "the operands", (_TRUTH,), types(node.args))
    for branch in node.regions:
        yield from differing(node, "the parameters of a branch", (), types(branch.params))
        yield from differing(node, "the values of a branch", types(node.results), types(branch.results))


def _kernel(node: Node) -> Iterator[Breach]:
    (body,) = node.regions
    yield from differing(node, "the parameters of the region", types(node.args), types(body.params))
    yield from differing(node, "the values yielded", (), types(body.results))


_RULES: Mapping[str, tuple[int, Callable[[Node], Iterator[Breach]]]] = {
    "ts.for": (1, _for),
    "ts.while": (2, _while),
    "ts.if": (2, _if),
    KERNEL: (1, _kernel),
}
