"""Index inputs: the parameters of a Tile module whose elements select elements of memory (forward data flow).

An index that depends on a parameter's elements, or a loop whose extent does, makes it an index input. What a kernel
reads through such an input is checked by no compiled kernel, so that nobody may choose its elements at random.
"""

from __future__ import annotations

from tessera.core.types import RefType
from tessera.ir.core import Block, Module, Node, Value

# The operands before the indices, for each op that takes indices into its first operand.
OPERANDS_BEFORE_INDICES = {
    "tile.load": 1, "tile.gather": 1, "tile.store": 2, "tile.scatter": 2, "tile.atomic": 2, "tile.compare_exchange": 3,
    "tile.async_copy": 2, "host.at": 1,
}  # fmt: skip


def find_index_inputs(module: Module) -> set[int]:
    """The numbers of the entry's parameters that hold indices, or numbers from which a program computes them."""
    flow = _Flow(module)
    main = module.main
    for number, param in enumerate(main.params):
        flow.sources[param] = {number}
    changed = True
    while changed:
        before = flow.size()
        flow.visit(main.body)
        changed = flow.size() != before
    return flow.found


class _Flow:
    """For each value the parameters that it depends on; a view shares the set of its memory."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.sources: dict[Value, set[int]] = {}
        self.found: set[int] = set()

    def size(self) -> int:
        """A number that grows whenever a dependence is added."""
        return len(self.found) + sum(map(len, self.sources.values()))

    def visit(self, block: Block) -> None:
        """Add the dependences of each node of a block."""
        for node in block.nodes:
            if node.op.name == "host.launch":
                self._visit_launch(node)
            else:
                self._visit_node(node)

    def _get(self, value: Value) -> set[int]:
        return self.sources.setdefault(value, set())

    def _visit_launch(self, node: Node) -> None:
        kernel = self.module.function(node.attrs["kernel"])
        for param, argument in zip(kernel.params, node.args, strict=False):
            sources = self._get(argument)
            self.sources[param] = sources if isinstance(argument.type, RefType) else self._get(param) | sources
        self.visit(kernel.body)

    def _visit_node(self, node: Node) -> None:
        first = node.args[0] if node.args else None
        is_view = len(node.results) == 1 and isinstance(node.results[0].type, RefType) and first is not None
        if is_view:
            self.sources[node.results[0]] = self._get(first)  # type: ignore[arg-type]
        sources = set().union(*map(self._get, node.args))
        for region in node.regions:
            for param in region.params:
                self._get(param).update(sources)
            self.visit(region)
            sources = sources.union(*map(self._get, region.results))
        for value in self._find_written(node):
            self._get(value).update(sources)
        before = OPERANDS_BEFORE_INDICES.get(node.op.name)
        if before is not None:
            rank = len(node.args) if node.op.name == "tile.async_copy" else first.type.rank  # type: ignore[union-attr]
            self.found.update(*map(self._get, node.args[before : before + rank]))

    def _find_written(self, node: Node) -> list[Value]:
        """The values that take on what a node reads: its results, and memories that it may write."""
        results = [value for value in node.results if not isinstance(value.type, RefType)]
        if node.op.name.startswith("host."):
            return results + [value for value in node.args if isinstance(value.type, RefType)]
        return results + list(node.args[:1] if "write" in node.op.effects else ())
