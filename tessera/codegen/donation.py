"""Donation: results of a program take the memory of arguments that its caller gives up (XLA: input-output aliasing).

A result may take an argument's memory if every launch that reads the argument comes before those that write the result,
or is the launch that writes it and reads each element in the program that overwrites it, before it does. A launch that
only copies the argument to the result then copies memory to itself, and is left out: what comes after it updates the
argument in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tessera.codegen.host_plan import find_touched_parameters
from tessera.core.types import RefType
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.rules import REGISTRY
from tessera.ops.dialects import control_flow, host, tile


def reuse_donated(module: Module, donated: Collection[int]) -> Module:
    """Let results take the memory of donated arguments where that is safe; `donated` are places of parameters.

    The pairs (result, argument) are the attribute `reused` of the entry function, which the host plan follows.
    """
    uses = _EntryUses(module)
    return _reuse(module, uses, _find_pairs(uses, donated))


def overwrite_arguments(module: Module, wanted: Mapping[int, int]) -> Module:
    """Let results take the memory of given arguments where that is safe: for each number of a result, a parameter."""
    uses = _EntryUses(module)
    first = len(module.main.params) - int(module.main.attrs.get("outputs", 0))
    pairs = {first + r: i for r, i in wanted.items() if _may_share(uses, i, first + r)}
    return _reuse(module, uses, pairs if _is_static(module.main) else {})


def _reuse(module: Module, uses: _EntryUses, pairs: Mapping[int, int]) -> Module:
    if not pairs:
        return module
    nodes = tuple(n for n in module.main.body.nodes if not uses.copies_to_itself(n, pairs))
    body = replace(module.main.body, nodes=nodes)
    main = replace(module.main, body=body, attrs=Attrs({**module.main.attrs, "reused": tuple(pairs.items())}))
    return replace(module, functions=(main, *module.functions[1:]))


def find_reusable(module: Module, donated: Collection[int]) -> dict[int, int]:
    """For each result that may take the memory of a donated argument, that argument; by places of parameters."""
    return _find_pairs(_EntryUses(module), donated)


def _find_pairs(uses: _EntryUses, donated: Collection[int]) -> dict[int, int]:
    main = uses.main
    outputs = int(main.attrs.get("outputs", 0))
    if not outputs or not _is_static(main):
        return {}
    first = len(main.params) - outputs
    found: dict[int, int] = {}
    for o in range(first, len(main.params)):
        for i in sorted(set(donated) - set(found.values())):
            if _may_share(uses, i, o):
                found[o] = i
                break
    return found


def _is_static(main: Function) -> bool:
    return "sizes" not in main.attrs and "mesh" not in main.attrs


def _may_share(uses: _EntryUses, i: int, o: int) -> bool:
    given, result = (uses.main.params[k].type for k in (i, o))
    return isinstance(given, RefType) and given == result and uses.allow(i, o)


class _EntryUses:
    """What each node of an entry function does to the memory of the parameters."""

    def __init__(self, module: Module) -> None:
        self.module, self.main = module, module.main
        self._kernels: dict[str, _KernelUses] = {}
        self.origin: dict[Value, int] = {p: i for i, p in enumerate(self.main.params)}
        for node in _walk(self.main.body):
            if node.op in (host.view, host.at) and node.args[0] in self.origin:
                self.origin[node.out] = self.origin[node.args[0]]
        self.steps = [self._find_uses(node) for node in self.main.body.nodes]

    def _find_uses(self, node: Node) -> tuple[Node, set[int], set[int]]:
        """A node with the parameters that it reads and those that it writes, in its regions too."""
        read: set[int] = set()
        written: set[int] = set()
        for each in [node, *(n for region in node.regions for n in _walk(region))]:
            places = [self.origin.get(a, -1) for a in each.args]
            if each.op is host.launch:
                kernel = self.module.function(each.attrs["kernel"])
                read |= {places[k] for k in find_touched_parameters(kernel, "read")}
                written |= {places[k] for k in find_touched_parameters(kernel, "write")}
            elif each.op in (host.call, host.start):
                read |= set(places[: each.attrs["operands"]])
                written |= set(places[each.attrs["operands"] :])
            elif each.op is host.wait:  # until here a collective reads and writes; which is known where it starts
                read |= set(places)
            elif each.op not in (host.view, host.at):
                read |= set(places)
                written |= set(places)
        return node, read, written

    def allow(self, i: int, o: int) -> bool:
        """Whether result `o` may take the memory of argument `i`."""
        last = max((k for k, (_, read, _) in enumerate(self.steps) if i in read), default=-1)
        first = min((k for k, (_, read, written) in enumerate(self.steps) if o in read | written), default=-1)
        if first < 0 or any(i in written for _, _, written in self.steps):
            return False
        if last != first:
            return last < first
        node = self.steps[first][0]
        return node.op is host.launch and self._is_elementwise(node, i, o)

    def copies_to_itself(self, node: Node, pairs: Mapping[int, int]) -> bool:
        """Whether a launch only copies an argument to the result that takes its memory."""
        if node.op is not host.launch or len(node.args) != 2:
            return False
        source, target = (self.origin.get(a, -1) for a in node.args)
        if pairs.get(target) != source or not self._is_elementwise(node, source, target):
            return False
        nodes = self.module.function(node.attrs["kernel"]).body.nodes
        stored = [n.args[1] for n in nodes if n.op is tile.store]
        return any(n.op is tile.load and n.out in stored for n in nodes)

    def _is_elementwise(self, node: Node, i: int, o: int) -> bool:
        """Whether a launch reads each element of `i` in the program that overwrites it with `o`, before it does."""
        uses = self._find_kernel_uses(node.attrs["kernel"])
        places = [self.origin.get(a, -1) for a in node.args]
        sources = [uses.params[k] for k, place in enumerate(places) if place == i]
        targets = [uses.params[k] for k, place in enumerate(places) if place == o]
        if len(sources) != 1 or len(targets) != 1:
            return False
        loads, stores = uses.sites[sources[0]], uses.sites[targets[0]]
        if len(stores) != 1 or len({block for block, _ in (*loads, *stores)}) != 1 or stores[0][0] == IN_A_LOOP:
            return False
        (number, at), nodes = stores[0], uses.blocks[stores[0][0]].nodes
        store = nodes[at]
        # `tile.store` has the memory, the block and the indices; `tile.load` the memory and the indices.
        plain = store.op is tile.store and all(nodes[k].op is tile.load and k < at for _, k in loads)
        return (
            plain
            and uses.covers_once(store, node.attrs["grid"])
            and all(_reads_what(nodes[k], store) for _, k in loads)
            and _is_pointwise([nodes[k].out for _, k in loads], uses.blocks[number])
        )

    def _find_kernel_uses(self, name: str) -> _KernelUses:
        if name not in self._kernels:
            self._kernels[name] = _KernelUses(self.module.function(name))
        return self._kernels[name]


IN_A_LOOP = -1  # the number of every block that may run more than once in a program


class _KernelUses:
    """Where a kernel uses the memory of its parameters: in its body, or in a branch, which runs once at most."""

    def __init__(self, kernel: Function) -> None:
        self.kernel, self.params = kernel, kernel.params
        self.blocks: list[Block] = []
        self.sites: dict[Value, list[tuple[int, int]]] = {p: [] for p in kernel.params}  # block, place in the block
        self.producers: dict[Value, Node] = {}
        self._visit(kernel.body, True)

    def _visit(self, block: Block, once: bool) -> None:
        number = len(self.blocks) if once else IN_A_LOOP
        self.blocks += [block] if once else []
        for k, node in enumerate(block.nodes):
            self.producers.update(dict.fromkeys(node.results, node))
            for a in node.args:
                if a in self.sites:
                    self.sites[a].append((number, k))
            for region in node.regions:
                self._visit(region, once and node.op is control_flow.if_)

    def covers_once(self, store: Node, grid: Sequence[int]) -> bool:
        """Whether a store has no mask, and no two programs of the grid store to the same element.

        Each axis of the grid must move the block along an axis of the memory, by its size or more.
        """
        indices, shape = store.args[2:], store.args[1].type.shape
        if len(indices) != len(shape) or int(self.kernel.attrs.get("group", 1)) != 1:
            return False
        moves: dict[int, bool] = {}
        for index, size in zip(indices, shape, strict=True):
            form = _find_form(index, self.producers)
            if form is None or len(form) > 1:
                return False
            for axis, factor in form.items():
                moves[axis] = moves.get(axis, False) or abs(factor) >= size
        return all(n == 1 or moves.get(axis, False) for axis, n in enumerate(grid))


def _is_pointwise(loaded: Sequence[Value], block: Block) -> bool:
    """Whether what was loaded reaches stores through pointwise ops alone: each element depends on its own.

    A reshape keeps the order of the elements, in which a block of the loaded shape is stored.
    """
    tainted = set(loaded)
    for node in block.nodes:
        if not tainted & {*node.args, *(a for region in node.regions for n in _walk(region) for a in n.args)}:
            continue
        moves = node.op is REGISTRY["ts.reshape"] or (node.op.pointwise and not node.regions)
        if node.op is not tile.store and not moves:
            return False
        tainted.update(node.results)
    return not tainted & set(block.results)


def _reads_what(load: Node, store: Node) -> bool:
    """Whether a load has the indices, the shape and the edge of a store."""
    return (
        load.args[1:] == store.args[2:]
        and tuple(load.attrs["shape"]) == tuple(store.args[1].type.shape)
        and load.args[0].type == store.args[0].type
        and load.attrs.get("edge") == store.attrs.get("edge")
    )


def _find_form(value: Value, producers: Mapping[Value, Node]) -> dict[int, int] | None:
    """The factor of each program number in an index that is a sum of multiples of them; None for any other index."""
    node = producers.get(value)
    if node is None:
        return None
    if node.op is tile.program_id:
        return {int(node.attrs["axis"]): 1}
    if node.op is REGISTRY["ts.full"]:
        return {}
    parts = [_find_form(a, producers) for a in node.args]
    if any(p is None for p in parts):
        return None
    if node.op is REGISTRY["ts.mul"]:
        return _multiply(node, parts, producers)  # type: ignore[arg-type]
    if node.op not in (REGISTRY["ts.add"], REGISTRY["ts.sub"]):
        return None
    left, right = parts
    sign = 1 if node.op is REGISTRY["ts.add"] else -1
    return {k: left.get(k, 0) + sign * right.get(k, 0) for k in {**left, **right}}  # type: ignore[union-attr, dict-item]


def _multiply(node: Node, parts: list[dict[int, int]], producers: Mapping[Value, Node]) -> dict[int, int] | None:
    for form, other in ((parts[0], node.args[1]), (parts[1], node.args[0])):
        constant = producers[other]
        if constant.op is REGISTRY["ts.full"]:
            return {axis: factor * int(constant.attrs["value"]) for axis, factor in form.items()}
    return None


def _walk(block: Block) -> Iterator[Node]:
    for node in block.nodes:
        yield node
        for region in node.regions:
            yield from _walk(region)
