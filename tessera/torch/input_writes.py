"""In-place ops of a graph: results that PyTorch copies into inputs are computed in the memory of these inputs.

AOTAutograd ends a graph with `copy_` nodes, one for each input that the function writes. They become results of the
graph, and what they name may take the input's memory (`tessera.codegen.donation`). Where it cannot, it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from tessera.torch.partition import get_fake

COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class InputWrites:
    """What a graph without its copies returns, and writes.

    `returned` has for each of the original results its place among the new ones, or -1 - i for input i.
    `written` has pairs of an input and the new result that it becomes; `private` are the results among these that
    nobody else receives, and whose input nobody receives as it was.
    """

    returned: tuple[int, ...]
    written: tuple[tuple[int, int], ...]
    private: frozenset[int]

    def apply(self, run: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
        """The original function, from one that gives the new results."""
        returned, written = self.returned, self.written

        def call(*inputs: Any) -> list[Any]:
            found = run(*inputs)
            for place, result in written:
                _write(inputs[place], found[result])
            return [found[k] if k >= 0 else inputs[-1 - k] for k in returned]

        return call


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    if target.data_ptr() != value.data_ptr() or target.stride() != value.stride():
        with torch.no_grad():
            target.copy_(value)


def extract_writes(module: GraphModule) -> InputWrites | None:
    """Take the copies into inputs out of a graph, whose sources become results; None where it has none."""
    nodes = list(module.graph.nodes)
    inputs, output = [n for n in nodes if n.op == "placeholder"], nodes[-1]
    copies = [n for n in nodes if n.target is COPY]
    if not copies or not all(_is_final(n, inputs, output) for n in copies):
        return None
    homes: dict[Any, Any] = {c: c.args[0] for c in copies}
    results = cast(Sequence[Any], output.args[0])
    old = [homes.get(r, r) for r in results]
    new = [r for r in old if not (isinstance(r, Node) and r in inputs)]
    own = len(new)
    for source in dict.fromkeys(c.args[1] for c in copies):
        if source not in new:
            new.append(source)
    raw = {r for r in results if isinstance(r, Node) and r in inputs}
    written = [(inputs.index(homes[c]), new.index(c.args[1])) for c in copies]
    sources = [result for _, result in written]
    private = {
        result for place, result in written if result >= own and sources.count(result) == 1 and inputs[place] not in raw
    }
    returned = [-1 - inputs.index(r) if isinstance(r, Node) and r in inputs else new.index(r) for r in old]
    output.args = (tuple(new),)
    for node in reversed(copies):
        module.graph.erase_node(node)
    module.recompile()
    return InputWrites(tuple(returned), tuple(written), frozenset(private))


def _is_final(copy: Node, inputs: Sequence[Node], output: Node) -> bool:
    """Whether a copy is the last use of an input, to which it copies a value of its type, and only a result."""
    target, source = cast(tuple[Node, Node], copy.args[:2])
    if not (target in inputs and isinstance(source, Node) and source.op == "call_function"):
        return False
    if any(copy < user for user in target.users if user is not output):  # in the order of the graph
        return False
    given, value = get_fake(target), get_fake(source)
    alike = isinstance(value, torch.Tensor) and (given.shape, given.dtype) == (value.shape, value.dtype)
    return alike and set(copy.users) <= {output} and len(copy.args) == 2
