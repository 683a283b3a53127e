"""Donation: results of a program take the memory of arguments that its caller gives up (XLA: input-output aliasing).

A result may take an argument's memory if every launch that reads the argument comes before those that write the result,
or is the launch that writes it and reads each element in the program that overwrites it, before it does. A launch that
only copies the argument to the result then copies memory to itself, and is left out: what comes after it updates the
argument in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tessera.codegen.host_plan import find_touched_parameters
from tessera.core.symbolic_dim import Size
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


def overwrite_arguments(module: Module, wanted: Mapping[int, int], parts: Collection[int] = ()) -> Module:
    """Let results take the memory of given arguments where that is safe: for each number of a result, a parameter.

    `parts`: results that must be updates of a slice of their argument (`ts.update_slice`), so that nothing else of it
    is written.
    """
    uses = _EntryUses(module)
    first = len(module.main.params) - int(module.main.attrs.get("outputs", 0))
    pairs = {
        first + r: i
        for r, i in wanted.items()
        if _may_share(uses, i, first + r) and (r not in parts or uses.updates(i, first + r))
    }
    return _reuse(module, uses, pairs if _is_static(module.main) else {})


def _reuse(module: Module, uses: _EntryUses, pairs: Mapping[int, int]) -> Module:
    if not pairs:
        return module
    copies = [n for n in module.main.body.nodes if uses.copies_to_itself(n, pairs)]
    body = replace(module.main.body, nodes=tuple(n for n in module.main.body.nodes if n not in copies))
    main = replace(module.main, body=body, attrs=Attrs({**module.main.attrs, "reused": tuple(pairs.items())}))
    launched = {n.attrs["kernel"] for n in body.walk() if n.op is host.launch}
    unused = {n.attrs["kernel"] for n in copies} - launched
    return replace(module, functions=(main, *(f for f in module.functions[1:] if f.name not in unused)))


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
        free = set(donated) - set(found.values())
        for i in sorted(free, key=lambda i: (not uses.updates(i, o), i)):  # noqa: B023
            if _may_share(uses, i, o):
                found[o] = i
                break
    return found


def _is_static(main: Function) -> bool:
    return "sizes" not in main.attrs and "mesh" not in main.attrs


def _may_share(uses: _EntryUses, i: int, o: int) -> bool:
    given, result = (uses.main.params[k].type for k in (i, o))
    return isinstance(given, RefType) and given == result and uses.allow(i, o)


def find_loose_reads(module: Module) -> frozenset[int]:
    """The parameters of an entry function of whose memory it may read elements that it does not use.

    Of the others it loads whole blocks within their edges, each element of which is that of a point of a kernel.
    """
    uses = _EntryUses(module)
    found: set[int] = set()
    for node in _walk(module.main.body):
        places = [uses.origin.get(a, -1) for a in node.args]
        if node.op is host.launch:
            kernel = module.function(node.attrs["kernel"])
            loose = {a for n in _walk(kernel.body) if "read" in n.op.effects and not _loads_block(n) for a in n.args}
            found |= {places[k] for k, p in enumerate(kernel.params) if p in loose}
        elif node.op is not host.view:
            found |= set(places)
    return frozenset(found - {-1})


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
        self._first: dict[int, int] = {}  # by parameter: the first step that reads or writes it
        for number, (_, read, written) in enumerate(self.steps):
            for place in read | written:
                self._first.setdefault(place, number)

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
        first = self._first.get(o, -1)
        if first < 0 or any(i in written for _, _, written in self.steps):
            return False
        steps = self.steps
        if self.updates(i, o):
            steps = [*steps[:first], *steps[first + 1 :]]
            first = min((k for k, (_, read, written) in enumerate(steps) if o in read or o in written), default=-1)
        last = max((k for k, (_, read, _) in enumerate(steps) if i in read), default=-1)
        if first < 0 or last != first:
            return first < 0 or last < first
        node = steps[first][0]
        return node.op is host.launch and self._is_elementwise(node, i, o)

    def updates(self, i: int, o: int) -> bool:
        """Whether result `o` begins as a copy of argument `i`, which what comes after the copy updates."""
        first = self._first.get(o, -1)
        return first >= 0 and self.copies_to_itself(self.steps[first][0], {o: i})

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
        stored = StoredBlock.of(nodes[at], uses.producers)
        if stored is None or not all(nodes[k].op is tile.load and k < at for _, k in loads):
            return False
        return (
            uses.covers_once(stored, node.attrs["grid"])
            and all(stored.is_read_by(nodes[k], uses.producers) for _, k in loads)
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

    def covers_once(self, stored: StoredBlock, grid: Sequence[int]) -> bool:
        """Whether no two programs of the grid store to the same element.

        Each axis of the grid must move the block along an axis of the memory, by its size or more.
        """
        if int(self.kernel.attrs.get("group", 1)) != 1:
            return False
        moves: dict[int, bool] = {}
        for index, size in zip(stored.starts, stored.shape, strict=True):
            if len(index.form) > 1:
                return False
            for axis, factor in index.form.items():
                moves[axis] = moves.get(axis, False) or abs(factor) >= size
        return all(n == 1 or moves.get(axis, False) for axis, n in enumerate(grid))


@dataclass(frozen=True)
class BlockIndices:
    """Indices along an axis of memory: the first, as multiples of program numbers and a constant, and the axis of a
    block along which they count up, counted from its end; None where they are all the first."""

    form: Mapping[int, int]
    constant: int
    axis: int | None = None

    @staticmethod
    def of(value: Value, producers: Mapping[Value, Node]) -> BlockIndices | None:
        """A number or a block of them; None for one of another form."""
        node, shape = producers.get(value), tuple(value.type.shape)
        if node is None:
            return None
        if not shape:
            form, constant = _find_form(value, producers), _find_constant(value, producers)
            return None if form is None or constant is None else BlockIndices(form, constant)
        if node.op is REGISTRY["ts.full"]:
            return BlockIndices({}, int(node.attrs["value"]))
        if node.op is REGISTRY["ts.iota"]:
            return BlockIndices({}, 0, int(node.attrs["axis"]))
        parts = [BlockIndices.of(a, producers) for a in node.args]
        if node.op is REGISTRY["ts.add"] and None not in parts:
            return parts[0].plus(parts[1])  # type: ignore[union-attr, arg-type]
        if node.op in (REGISTRY["ts.broadcast"], REGISTRY["ts.reshape"]) and parts[0] is not None:
            return parts[0].reshape(tuple(node.args[0].type.shape), shape)
        return None

    def plus(self, other: BlockIndices) -> BlockIndices | None:
        """The sum, of which one at most counts up."""
        if None not in (self.axis, other.axis):
            return None
        form = {k: self.form.get(k, 0) + other.form.get(k, 0) for k in {**self.form, **other.form}}
        return BlockIndices(form, self.constant + other.constant, other.axis if self.axis is None else self.axis)

    def reshape(self, before: Sequence[Size], after: Sequence[Size]) -> BlockIndices | None:
        """These indices repeated along other axes. The axis that counts up is the only long one, or keeps its place."""
        if self.axis is None:
            return self
        size, long = before[self.axis], [a for a in range(-len(after), 0) if after[a] != 1]
        if len(long) == 1 and after[long[0]] == size:
            return replace(self, axis=long[0])
        last = after[-len(before) :]
        kept = list(before) == [n if m != 1 else 1 for n, m in zip(last, before, strict=False)]
        return self if kept and after[self.axis] == size else None


@dataclass(frozen=True)
class StoredBlock:
    """The block of memory in which a store writes: its first indices, its shape, and what happens at the edge."""

    memory: RefType
    starts: tuple[BlockIndices, ...]
    shape: tuple[int, ...]
    edge: str

    @staticmethod
    def of(store: Node, producers: Mapping[Value, Node]) -> StoredBlock | None:
        """The block of a `tile.store` without a mask, or of a `tile.scatter` that writes some of a block in order."""
        memory, (block, *indices) = store.args[0].type, store.args[1:]
        assert isinstance(memory, RefType)
        if store.op not in (tile.store, tile.scatter) or (store.op is tile.store and len(indices) != memory.rank):
            return None
        found = [BlockIndices.of(v, producers) for v in indices[: memory.rank]]
        steps = [f for f in found if f is not None]
        if len(steps) < memory.rank:
            return None
        shape = tuple(int(n) for n in block.type.shape)
        if store.op is tile.store:
            return StoredBlock(memory, tuple(steps), shape, store.attrs["edge"])
        if [f.axis for f in steps if f.axis is not None] != list(range(-len(shape), 0)):
            return None
        sizes = tuple(1 if f.axis is None else shape[f.axis] for f in steps)
        return StoredBlock(memory, tuple(replace(f, axis=None) for f in steps), sizes, "clip")

    def is_read_by(self, load: Node, producers: Mapping[Value, Node]) -> bool:
        """Whether a load has the indices, the shape and the edge of a store."""
        starts = tuple(BlockIndices.of(v, producers) for v in load.args[1:])
        kind = (load.args[0].type, tuple(load.attrs["shape"]), load.attrs.get("edge"))
        return starts == self.starts and kind == (self.memory, self.shape, self.edge)


def _loads_block(node: Node) -> bool:
    """Whether a node loads a block without a mask, all of which is within the memory."""
    return node.op is tile.load and node.attrs["edge"] == "error" and len(node.args) == 1 + node.args[0].type.rank  # type: ignore[union-attr]


def _is_pointwise(loaded: Sequence[Value], block: Block) -> bool:
    """Whether what was loaded reaches stores through pointwise ops alone: each element depends on its own.

    A reshape keeps the order of the elements, in which a block of the loaded shape is stored.
    """
    tainted = set(loaded)
    for node in block.nodes:
        if not tainted & {*node.args, *(a for region in node.regions for n in _walk(region) for a in n.args)}:
            continue
        moves = node.op is REGISTRY["ts.reshape"] or (node.op.pointwise and not node.regions)
        places = node.op is tile.scatter and tainted.isdisjoint(node.args[2:]) and not _repeats(node)
        if node.op is not tile.store and not moves and not places:
            return False
        tainted.update(node.results)
    return not tainted & set(block.results)


def _repeats(scatter: Node) -> bool:
    """Whether a scatter has a value that is repeated to the shape of its places."""
    value, *places = (a.type.shape for a in scatter.args[1:])
    return any(n == 1 != m for shape in places for n, m in zip(reversed(value), reversed(shape), strict=False))


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


def _find_constant(value: Value, producers: Mapping[Value, Node]) -> int | None:
    """An index of that kind where all program numbers are 0."""
    node = producers.get(value)
    if node is None or node.op is tile.program_id:
        return None if node is None else 0
    if node.op is REGISTRY["ts.full"]:
        return int(node.attrs["value"])
    parts = [_find_constant(a, producers) for a in node.args]
    join = _INDEX_OPS.get(node.op.name)
    return None if join is None or None in parts else join(*parts)


_INDEX_OPS: dict[str, Callable[..., int]] = {"ts.add": operator.add, "ts.sub": operator.sub, "ts.mul": operator.mul}


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
