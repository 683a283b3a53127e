"""Rule V4: each op with regions takes and yields what its meaning needs, and no other op has regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tessera.ir.breach import Breach, differing, nodes, types
from tessera.ir.core import Block, Module, Node
from tessera.ir.levels import FLOW, KERNEL, Level
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
            if node.op.name in FLOW and any(region.free for region in node.regions):
                yield Breach(node, "a region uses what is not its parameter")


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


def _scan(node: Node) -> Iterator[Breach]:
    (body,) = node.regions
    carry, xs, length = (node.attrs[k] for k in ("carry", "xs", "length"))
    stacks = node.args[carry : carry + xs]
    if len(node.args) < carry + xs or not all(s.type.shape[:1] == (length,) for s in stacks):
        yield Breach(node, "the stacks are not of the scan's length", length, types(stacks))
        return
    slices = tuple(s.type.with_shape(s.type.shape[1:]) for s in stacks)  # type: ignore[union-attr]
    carried, consts = types(node.args[:carry]), types(node.args[carry + xs :])
    made = tuple(v.type.with_shape((length, *v.type.shape)) for v in body.results[carry:])  # type: ignore[union-attr]
    yield from differing(node, "the parameters of the region", (*carried, *slices, *consts), types(body.params))
    yield from differing(node, "the values carried on", carried, types(body.results[:carry]))
    yield from differing(node, "the results", (*carried, *made), types(node.results))


def _cond(node: Node) -> Iterator[Breach]:
    yield from differing(node, "the condition", (_TRUTH,), types(node.args[:1]))
    for branch in node.regions:
        yield from differing(node, "the parameters of a branch", types(node.args[1:]), types(branch.params))
        yield from differing(node, "the values of a branch", types(node.results), types(branch.results))


def _while_loop(node: Node) -> Iterator[Breach]:
    test, body = node.regions
    carry, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    carried = types(node.args[:carry])
    asked, consts = types(node.args[carry:end]), types(node.args[end:])
    yield from differing(node, "the parameters of the condition", (*carried, *asked), types(test.params))
    yield from differing(node, "the values of the condition", (_TRUTH,), types(test.results))
    yield from differing(node, "the parameters of the region", (*carried, *consts), types(body.params))
    yield from differing(node, "the values yielded", carried, types(body.results))
    yield from differing(node, "the results", carried, types(node.results))


def _loop(node: Node) -> Iterator[Breach]:
    yield from differing(node, "the parameters of the region", (_INDEX,), types(node.regions[0].params))
    yield from _bare(node, node.regions[0])


def _bare(node: Node, *regions: Block) -> Iterator[Breach]:
    for region in regions:
        yield from differing(node, "the values yielded", (), types(region.results))


def _host(node: Node) -> Iterator[Breach]:
    yield from _bare(node, *node.regions)
    for region in node.regions:
        yield from differing(node, "the parameters of a region", (), types(region.params))


_RULES: Mapping[str, tuple[int, Callable[[Node], Iterator[Breach]]]] = {
    "ts.for": (1, _for),
    "ts.while": (2, _while),
    "ts.if": (2, _if),
    KERNEL: (1, _kernel),
    "ts.scan": (1, _scan),
    "ts.cond": (2, _cond),
    "ts.while_loop": (2, _while_loop),
    "host.loop": (1, _loop),
    "host.while": (2, _host),
    "host.if": (2, _host),
}
