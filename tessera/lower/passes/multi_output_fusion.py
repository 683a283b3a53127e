"""Multi-output fusion: kernels over the same elements become one kernel with several results (XLA's term).

A step of a host loop takes as long as its launches: the gates of a recurrent cell, the state that it updates, and the
copies of the state to the next step and to the stacked results are one kernel. What one of them stores, the next ones
read in registers; memory that nothing else reads goes. Outside loops, kernels are joined that read or write the same
memory at their own element and nothing else: the parameters and moments of an optimizer step are read once. So are
kernels that load the same elements, such as those of a window, and reductions of the same elements, such as both sums
of a norm's gradient. A pointwise kernel of the results of a reduction alone is the epilogue of that reduction's kernel.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tessera.core.symbolic_dim import Size
from tessera.core.types import RefType
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Module, Node, Value
from tessera.lower.graph_to_schedule.tile_sizes import choose_tile_sizes
from tessera.lower.indexing_maps import BodyIndexing, KernelDims, analyse_body, linearise, make_index
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import host, schedule

ACCESSES = (schedule.load, schedule.store)
COMBINING = (schedule.reduce, schedule.contract)  # ops that need other elements than the kernel's own
VIEWS = (host.view, host.at)
MAX_NODES = 1024  # of a kernel: generators walk chains recursively
MAX_MEMORIES = 24  # that a kernel takes
MAX_FLAT_NODES, MAX_FLAT_MEMORIES = 192, 12  # the same outside loops, where memory is the limit and registers hold it
# Reductions of one kernel, each of which adds up in registers of its own: on targets of many programs, and on others.
MAX_REDUCTIONS, MAX_SERIAL_REDUCTIONS = 8, 2
SMALL_REDUCTION = 1 << 16  # elements, fewer of which are reduced in less time than a launch takes
SMALL_POINTWISE = 1 << 14  # the same of pointwise kernels


def fuse_loop_steps(module: Module, plan: LoweringPlan) -> Module:
    """Join the pointwise kernels of each step of a Schedule module's host loops, where order and elements allow it."""
    memory = MemoryMap.of(module.main.body)
    body = replace(module.main.body, nodes=tuple(_fuse_inside(n, memory, plan) for n in module.main.body.nodes))
    return module.replace(replace(module.main, body=body), *module.functions[1:])


def fuse_multi_output(module: Module, plan: LoweringPlan) -> Module:
    """Join the pointwise kernels of a Schedule module outside its loops that share memory, where order allows it."""
    body = _RegionFusion(MemoryMap.of(module.main.body), plan, module.main.body, flat=True).run()
    return module.replace(replace(module.main, body=body), *module.functions[1:])


def _fuse_inside(node: Node, memory: MemoryMap, plan: LoweringPlan) -> Node:
    """A node of the entry function whose regions are fused: those of loops and branches."""
    if node.op not in (host.loop, host.while_, host.if_):
        return node
    inner = [replace(r, nodes=tuple(_fuse_inside(n, memory, plan) for n in r.nodes)) for r in node.regions]
    return replace(node, regions=tuple(_RegionFusion(memory, plan, block).run() for block in inner))


# What kernels touch.


@dataclass(frozen=True)
class MemoryMap:
    """The views and slices of an entry function: which values are the same memory, and which may overlap."""

    views: Mapping[Value, Node]

    @staticmethod
    def of(block: Block) -> MemoryMap:
        """The views and slices of a block and of its regions."""
        return MemoryMap({n.out: n for n in block.walk() if n.op in VIEWS})

    def base(self, value: Value) -> Value:
        """The value below reshapes: equal ones are the same memory, element by element."""
        while value in self.views and self.views[value].op is host.view:
            value = self.views[value].args[0]
        return value

    def storage(self, value: Value) -> Value:
        """The buffer or parameter below reshapes and slices: only values of one storage overlap."""
        while value in self.views:
            value = self.views[value].args[0]
        return value


@dataclass(frozen=True)
class FusibleKernel:
    """A kernel that others may join: pointwise, or of `reductions` along dims of its own.

    `aligned` are the accesses of a pointwise kernel at the element that its indices count.
    """

    node: Node
    bases: tuple[Value, ...]
    found: BodyIndexing
    aligned: frozenset[Node]
    reductions: int = 0

    @property
    def block(self) -> Block:
        """Its body."""
        return self.node.regions[0]

    @cached_property
    def extents(self) -> tuple[Size, ...]:
        """The sizes of its dims."""
        return tuple(extent for _, extent, _ in self.node.attrs["dims"])

    @cached_property
    def accesses(self) -> list[Node]:
        """Its loads and stores, in order."""
        return [n for n in self.block.nodes if n.op in ACCESSES]

    def base(self, access: Node) -> Value:
        """The memory that an access touches."""
        return self.bases[self.block.params.index(access.args[0])]

    @cached_property
    def written(self) -> set[Value]:
        """The memories that it stores to."""
        return {self.base(n) for n in self.accesses if n.op is schedule.store}

    @property
    def is_flat(self) -> bool:
        """Whether it may run over any dims of as many elements: it uses indices for aligned accesses alone."""
        needed = _find_needed(self)
        return self.aligned.issuperset(self.accesses) and all(
            n.out not in needed for n in self.block.nodes if n.op is schedule.index
        )


def find_fusible(node: Node, memory: MemoryMap) -> FusibleKernel | None:
    """A Schedule node as a pointwise kernel or one of reductions, if it is one of formats without a policy."""
    if node.op is not schedule.kernel:
        return None
    (block,) = node.regions
    if any(v.type.policy is not None for v in block.params):  # type: ignore[union-attr]
        return None
    found = analyse_body(block, node.attrs["dims"])
    reduced = [n for n in block.nodes if n.op in COMBINING]
    if reduced or any(kind != "parallel" for _, _, kind in found.dims):
        return _find_reductions(node, memory, found, reduced)
    own = _count_elements(found.dims)
    aligned = frozenset(n for n in block.nodes if n.op in ACCESSES and _is_aligned(n, found, own))
    return FusibleKernel(node, tuple(map(memory.base, node.args)), found, aligned)


def _find_reductions(
    node: Node, memory: MemoryMap, found: BodyIndexing, reduced: Sequence[Node]
) -> FusibleKernel | None:
    """A kernel of reductions to numbers: what it stores has no index along the dims that it reduces."""
    kinds = [kind for _, _, kind in found.dims]
    if any(n.op is not schedule.reduce or kinds[n.attrs["dim"]] == "parallel" for n in reduced):
        return None
    stores = [found.indices(n) for n in node.regions[0].nodes if n.op is schedule.store]
    if any(kinds[d] != "parallel" for indices in stores for i in indices for d in i.dims):
        return None
    return FusibleKernel(node, tuple(map(memory.base, node.args)), found, frozenset(), len(reduced))


def _count_elements(dims: KernelDims) -> Size:
    return math.prod(extent for _, extent, _ in dims)


def _is_aligned(access: Node, found: BodyIndexing, count: Size) -> bool:
    """Whether an access without a mask touches the element that the kernel's indices count."""
    ref, extents = access.args[0].type, [extent for _, extent, _ in found.dims]
    assert isinstance(ref, RefType)
    indices = found.indices(access)
    if len(access.args) != len(indices) + (1 if access.op is schedule.load else 2):
        return False
    own = linearise([make_index(d, extent) for d, extent in enumerate(extents)], extents)
    return bool(math.prod(ref.shape) == count) and linearise(indices, ref.shape) == own


def _find_needed(kernel: FusibleKernel) -> set[Value]:
    """The values of a body that it needs where aligned accesses take their indices from elsewhere."""
    needed: set[Value] = set()
    for node in reversed(kernel.block.nodes):
        if node in kernel.aligned:
            needed.update(node.args[1:2] if node.op is schedule.store else ())
        elif node.op is schedule.store or not needed.isdisjoint(node.results):
            needed.update(node.args)
    return needed


# Regions.


@dataclass
class _RegionFusion:
    """The nodes of a region with the kernels that are joined so far; what they take is defined first."""

    memory: MemoryMap
    plan: LoweringPlan
    block: Block
    flat: bool = False  # outside loops: only kernels that share memory, at their own elements
    defined: list[Node] = field(default_factory=list)
    made: list[Node | FusibleKernel] = field(default_factory=list)

    def run(self) -> Block:
        """The region with fewer kernels."""
        copied = self.find_updated_copies() if self.flat else ()
        for node in self.block.nodes:
            if node.op in (host.alloc, *VIEWS):
                self.defined.append(node)
                continue
            kernel = None if node in copied else find_fusible(node, self.memory)
            if kernel is None or not self.combine(kernel):
                self.made.append(kernel or node)
        if len(self.made) == sum(node.op not in (host.alloc, *VIEWS) for node in self.block.nodes):
            return self.block
        return self.drop_unread()

    def find_updated_copies(self) -> set[Node]:
        """The kernels whose results others update after them: donation leaves these copies out, if they are alone."""
        kernels = [n for n in self.block.nodes if n.op is schedule.kernel]
        writers: dict[Value, Node] = {}
        found = set()
        for node in kernels:
            for storage in self.find_storages(node)[1]:
                if writers.setdefault(storage, node) is not node:
                    found.add(writers[storage])
        return found

    def drop_unread(self) -> Block:
        """The region without stores to its own buffers that no other node touches."""
        own = {n.out for n in self.defined if n.op is host.alloc}
        touched = [self.find_storages(k)[0] for k in self.made]
        users = Counter(itertools.chain.from_iterable(touched))
        nodes = [
            self.drop_stores(k, {v for v in own & storages if users[v] == 1}) if isinstance(k, FusibleKernel) else k
            for k, storages in zip(self.made, touched, strict=True)
        ]
        return replace(self.block, nodes=(*_keep_used(self.defined, nodes), *nodes))

    def combine(self, kernel: FusibleKernel) -> bool:
        """Join the last kernel that a kernel can join; the nodes after it touch other memory, or only read the same."""
        for place in range(len(self.made) - 1, -1, -1):
            other = self.made[place]
            if isinstance(other, FusibleKernel) and self.may_join(other, kernel):
                self.made[place] = self.join(other, kernel)
                return True
            epilogue = Epilogue.of(other.node if isinstance(other, FusibleKernel) else other, kernel, self.memory)
            if epilogue is not None:
                self.made[place] = self.append(epilogue)
                return True
            if self.conflicts(other, kernel):
                return False
        return False

    def append(self, epilogue: Epilogue) -> Node | FusibleKernel:
        """A kernel with an epilogue."""
        block, args = epilogue.make_block()
        refs = tuple(self.view(v, p) for v, p in zip(args, block.params, strict=True))
        made = replace(epilogue.node, args=refs, regions=(block,))
        return find_fusible(made, self.memory) or made

    def conflicts(self, other: Node | FusibleKernel, kernel: FusibleKernel) -> bool:
        """Whether a node touches memory that a kernel writes, or may write memory that it touches."""
        touched, written = self.find_storages(other)
        own, stored = self.find_storages(kernel)
        return not touched.isdisjoint(stored) or not written.isdisjoint(own)

    def find_storages(self, node: Node | FusibleKernel) -> tuple[set[Value], set[Value]]:
        """What a node touches and what it may write."""
        if isinstance(node, FusibleKernel):
            return set(map(self.memory.storage, node.bases)), set(map(self.memory.storage, node.written))
        inner = [n for r in node.regions for n in r.walk()]
        touched = {self.memory.storage(v) for n in (node, *inner) for v in n.args}
        if node.op is not schedule.kernel:
            return touched, touched
        stored = {n.args[0] for n in inner if n.op is schedule.store}
        places = zip(node.args, node.regions[0].params, strict=True)
        return touched, {self.memory.storage(v) for v, param in places if param in stored}

    def may_join(self, one: FusibleKernel, other: FusibleKernel) -> bool:
        """Whether two kernels, one after the other, may run element by element."""
        if one.reductions or other.reductions:
            most = MAX_SERIAL_REDUCTIONS if self.plan.parallel is None else MAX_REDUCTIONS
            return _reduce_alike(one, other, most) and not self.conflicts(one, other)
        if self.flat and not (_share_elements(one, other) or _read_alike(one, other) or _are_small(one, other)):
            return False
        if len(one.block.nodes) + len(other.block.nodes) > MAX_NODES:
            return False
        if len({*one.bases, *other.bases}) > MAX_MEMORIES:
            return False
        if one.extents != other.extents and not (
            _count_elements(one.found.dims) == _count_elements(other.found.dims) and (one.is_flat or other.is_flat)
        ):
            return False
        written = {self.memory.storage(v) for k in (one, other) for v in k.written}
        accesses = [(k, n) for k in (one, other) for n in k.accesses]
        shared = [(k, n) for k, n in accesses if self.memory.storage(k.base(n)) in written]
        bases: dict[Value, Value] = {}
        for kernel, access in shared:
            base = kernel.base(access)
            if access not in kernel.aligned or bases.setdefault(self.memory.storage(base), base) is not base:
                return False
        return True

    def join(self, one: FusibleKernel, other: FusibleKernel) -> FusibleKernel:
        """One kernel that computes an element of both."""
        dims = (other if one.is_flat and not other.is_flat else one).node.attrs["dims"]  # reductions have the same
        body = _JoinedBody(tuple(extent for _, extent, _ in dims))
        for kernel in (one, other):
            body.add(kernel)
        return self.make_kernel(one.node, dims, body)

    def make_kernel(self, node: Node, dims: KernelDims, body: _JoinedBody) -> FusibleKernel:
        """The kernel of a body, on views of the memories that it touches at its own element."""
        block, args = body.finish()
        refs = [self.view(v, p) for v, p in zip(args, block.params, strict=True)]
        attrs = Attrs({"dims": dims, "schedule": choose_tile_sizes(block, dims, self.plan)})
        made = find_fusible(replace(node, args=tuple(refs), attrs=attrs, regions=(block,)), self.memory)
        assert made is not None, "a joined kernel is of the kinds that were joined"
        return made

    def view(self, value: Value, param: Value) -> Value:
        """A memory with the shape of a parameter."""
        if value.type.shape == param.type.shape:  # type: ignore[union-attr]
            return value
        builder = Builder()
        made = builder.add(host.view, [value], {"shape": tuple(param.type.shape)})  # type: ignore[union-attr]
        self.defined.append(made)
        self.memory.views[made.out] = made  # type: ignore[index]
        return made.out

    def drop_stores(self, kernel: FusibleKernel, private: set[Value]) -> Node:
        """A kernel without stores to the buffers that it alone touches, unless it reads them."""
        read = {self.memory.storage(kernel.base(n)) for n in kernel.accesses if n.op is schedule.load}
        dead = {v for v in kernel.written if self.memory.storage(v) in private - read}
        if not dead or dead == kernel.written or kernel.reductions:
            return kernel.node
        body = _JoinedBody(kernel.extents)
        body.add(kernel)
        for value in dead:
            del body.stored[value]
        return self.make_kernel(kernel.node, kernel.node.attrs["dims"], body).node


def _share_elements(one: FusibleKernel, other: FusibleKernel) -> bool:
    """Whether two kernels touch some memory both, and no element but their own."""
    both = {*one.bases, *other.bases}
    if len(both) > MAX_FLAT_MEMORIES or len(one.block.nodes) + len(other.block.nodes) > MAX_FLAT_NODES:
        return False
    return len(both) < len({*one.bases}) + len({*other.bases}) and one.is_flat and other.is_flat


def _read_alike(one: FusibleKernel, other: FusibleKernel) -> bool:
    """Whether two kernels of the same dims load the same elements, such as those of a window: each is loaded once."""
    if one.extents != other.extents or len({*one.bases, *other.bases}) > MAX_FLAT_MEMORIES:
        return False
    return _list_loads(one) == _list_loads(other)


def _are_small(one: FusibleKernel, other: FusibleKernel) -> bool:
    """Whether two kernels have as many elements, and so few that a launch takes longer."""
    nodes, count = len(one.block.nodes) + len(other.block.nodes), _count_elements(one.found.dims)
    few = nodes <= MAX_FLAT_NODES and len({*one.bases, *other.bases}) <= MAX_FLAT_MEMORIES
    return few and count == _count_elements(other.found.dims) and isinstance(count, int) and count <= SMALL_POINTWISE


def _reduce_alike(one: FusibleKernel, other: FusibleKernel, most: int) -> bool:
    """Whether two kernels reduce along the same dims some elements that both load, or few elements."""
    if not (one.reductions and other.reductions and one.reductions + other.reductions <= most):
        return False
    dims = [[(extent, kind) for _, extent, kind in kernel.found.dims] for kernel in (one, other)]
    if dims[0] != dims[1] or len({*one.bases, *other.bases}) > MAX_MEMORIES:
        return False
    if len(one.block.nodes) + len(other.block.nodes) > MAX_NODES:
        return False
    count = _count_elements(one.found.dims)
    return (isinstance(count, int) and count <= SMALL_REDUCTION) or bool(_list_loads(one) & _list_loads(other))


def _list_loads(kernel: FusibleKernel) -> set[tuple[Value, object]]:
    """The memories that a kernel loads from, each with the elements that it loads, counted in the order of memory."""
    loads = [n for n in kernel.accesses if n.op is schedule.load]
    shapes = [n.args[0].type.shape for n in loads]  # type: ignore[union-attr]
    places = [linearise(kernel.found.indices(n), shape) for n, shape in zip(loads, shapes, strict=True)]
    return set(zip(map(kernel.base, loads), places, strict=True))


# Epilogues: what is computed of the elements of a result alone, where a kernel of any kind stores them.


@dataclass(frozen=True)
class Epilogue:
    """A flat kernel that reads each element of what a node stores, such as the narrow form of a sum.

    `values` has what the node stores, by memory; `store` is one of its stores, at whose index it has all of them.
    """

    node: Node
    kernel: FusibleKernel
    bases: dict[Value, Value]  # the memories of the node's parameters
    values: Mapping[Value, Value]
    store: Node

    @staticmethod
    def of(node: Node, kernel: FusibleKernel, memory: MemoryMap) -> Epilogue | None:
        """A flat kernel as an epilogue of a node, if it is one."""
        if node.op is not schedule.kernel or kernel.reductions or not kernel.is_flat:
            return None
        (block,) = node.regions
        stores = {n.args[0]: n for n in block.nodes if n.op is schedule.store}
        bases = dict(zip(block.params, map(memory.base, node.args), strict=True))
        by_base = {bases[ref]: n for ref, n in stores.items()}
        read = {kernel.base(n) for n in kernel.accesses if n.op is schedule.load}
        held = {base: n for base, n in by_base.items() if base in read}
        ops = {n.op for n in block.nodes}
        if not held or schedule.reduce not in ops or schedule.contract in ops:
            return None
        if any(v.type.policy is not None for v in block.params):  # type: ignore[union-attr]
            return None
        if (
            len(block.nodes) + len(kernel.block.nodes) > MAX_NODES
            or len({*bases.values(), *kernel.bases}) > MAX_MEMORIES
        ):
            return None
        if not is_covered(node, kernel, list(held.values())):
            return None
        touched = {memory.storage(v) for v in bases.values()}
        stored = {memory.storage(v) for v in by_base}
        rest = {memory.storage(v) for v in read - held.keys()}
        if not rest.isdisjoint(stored) or not touched.isdisjoint(map(memory.storage, kernel.written)):
            return None
        return Epilogue(node, kernel, bases, {v: n.args[1] for v, n in held.items()}, next(iter(held.values())))

    def make_block(self) -> tuple[Block, list[Value]]:
        """The body of the kernel with its epilogue, whose memories that it stores to are its last parameters."""
        builder, index, env = Builder(), self.store.args[2:], dict[Value, Value]()
        shape = tuple(self.store.args[0].type.shape)  # type: ignore[union-attr]
        params = {(base, tuple(p.type.shape)): p for p, base in self.bases.items()}  # type: ignore[union-attr]
        for node in self.node.regions[0].nodes:
            builder.append(node)

        def find_param(base: Value, like: Value) -> Value:
            return params.setdefault((base, shape), Value(replace(like.type, shape=shape), like.hint))  # type: ignore[type-var]

        needed = _find_needed(self.kernel)
        for node in self.kernel.block.nodes:
            with builder.at(node.loc):
                base = self.kernel.base(node) if node.op in ACCESSES else None
                if base is not None and base in self.values:
                    env[node.out] = self.values[base]
                elif base is not None and node.op is schedule.load:
                    env[node.out] = builder.add(schedule.load, [find_param(base, node.args[0]), *index]).out
                elif base is not None:
                    builder.add(schedule.store, [find_param(base, node.args[0]), env[node.args[1]], *index])
                elif not needed.isdisjoint(node.results):
                    operands = [env[v] for v in node.args]
                    made = builder.add(node.op, operands, node.attrs, types=tuple(v.type for v in node.results))
                    env.update(zip(node.results, made.results, strict=True))
        memories = self.bases | {p: base for (base, _), p in params.items()}
        block = builder.block(list(memories), ())
        written = {n.args[0] for n in block.nodes if n.op is schedule.store}
        order = sorted(memories, key=written.__contains__)
        return replace(block, params=tuple(order)), [memories[p] for p in order]


def is_covered(node: Node, kernel: FusibleKernel, stores: Sequence[Node]) -> bool:
    """Whether a node stores, at one place and without a mask, all elements that a flat kernel runs over."""
    found, count = analyse_body(node.regions[0], node.attrs["dims"]), _count_elements(kernel.found.dims)
    places = {linearise(found.indices(n), n.args[0].type.shape) for n in stores}  # type: ignore[union-attr]
    if any(math.prod(found.dims[d][1] for d in place.dims) != count for place in places):
        return False  # a part of them
    plain = all(len(n.args) == len(found.indices(n)) + 2 for n in stores)
    whole = all(math.prod(n.args[0].type.shape) == count for n in stores)  # type: ignore[union-attr]
    return len(places) == 1 and plain and bool(whole)


def _keep_used(defined: Sequence[Node], nodes: Iterable[Node]) -> Iterator[Node]:
    """Of allocations and views, those that nodes use."""
    used = {v for n in nodes for each in (n, *(m for r in n.regions for m in r.walk())) for v in each.args}
    kept: set[Node] = set()
    for node in reversed(defined):
        if node.out in used:
            kept.add(node)
            used.update(node.args)
    return (n for n in defined if n in kept)


# Bodies.


@dataclass
class _JoinedBody:
    """The body of a joined kernel: stores come last, and loads of what is stored are the stored values."""

    extents: tuple[Size, ...]
    builder: Builder = field(default_factory=Builder)
    env: dict[Value, Value] = field(default_factory=dict)
    params: dict[tuple[Value, tuple[Size, ...]], Value] = field(default_factory=dict)  # by memory and shape
    loaded: dict[Value, Value] = field(default_factory=dict)
    stored: dict[Value, tuple[Value, Node]] = field(default_factory=dict)
    copied: dict[Any, tuple[Value, ...]] = field(default_factory=dict)  # what ops give, by op, operands and attributes
    places: list[Value] = field(default_factory=list)
    last: list[tuple[Node, list[Value]]] = field(default_factory=list)  # stores to other elements, and their operands

    def add(self, kernel: FusibleKernel) -> None:
        """Add the ops of a kernel."""
        needed, args = _find_needed(kernel), dict(zip(kernel.block.params, kernel.node.args, strict=True))
        for node in kernel.block.nodes:
            with self.builder.at(node.loc):
                if node in kernel.aligned:
                    self.access(node, kernel.base(node))
                elif node.op is schedule.store or not needed.isdisjoint(node.results):
                    self.copy(node, args)

    def access(self, node: Node, base: Value) -> None:
        """A load or store of the kernel's own element."""
        if node.op is schedule.store:
            self.stored[base] = (self.env[node.args[1]], node)
        elif base in self.stored:
            self.env[node.out] = self.stored[base][0]
        else:
            if base not in self.loaded:
                ref = self.make_param(base, node.args[0], self.extents)
                self.loaded[base] = self.builder.add(schedule.load, [ref, *self.index()]).out
            self.env[node.out] = self.loaded[base]

    def index(self) -> list[Value]:
        """The kernel's own index."""
        if not self.places:
            self.places += [self.builder.add(schedule.index, [], {"dim": d}).out for d in range(len(self.extents))]
        return self.places

    def copy(self, node: Node, args: Mapping[Value, Value]) -> None:
        """An op as it is, once for both kernels; memory that it touches elsewhere is a parameter of its own."""
        operands = [
            self.make_param(args[v], v, v.type.shape) if v in args else self.env[v]  # type: ignore[union-attr]
            for v in node.args
        ]
        if node.op is schedule.store:
            self.last.append((node, operands))
            return
        types = tuple(v.type for v in node.results)
        key = (node.op, tuple(operands), repr(node.attrs), types)  # as text: 0.0 and -0.0 are equal
        if key not in self.copied:
            self.copied[key] = self.builder.add(node.op, operands, node.attrs, types=types).results
        self.env.update(zip(node.results, self.copied[key], strict=True))

    def make_param(self, memory: Value, like: Value, shape: Sequence[Size]) -> Value:
        """The parameter of a memory, seen with a shape."""
        key = memory, tuple(shape)
        if key not in self.params:
            assert isinstance(like.type, RefType)
            self.params[key] = Value(replace(like.type, shape=key[1]), like.hint)
        return self.params[key]

    def finish(self) -> tuple[Block, list[Value]]:
        """The body with its stores, whose memories are its last parameters, and what the parameters are."""
        for base, (value, node) in self.stored.items():
            with self.builder.at(node.loc):
                ref = self.make_param(base, node.args[0], self.extents)
                self.builder.add(schedule.store, [ref, value, *self.index()])
        for node, operands in self.last:
            with self.builder.at(node.loc):
                self.builder.add(schedule.store, operands, node.attrs)
        order = sorted(self.params, key=lambda key: key[0] in self.stored)
        return self.builder.block([self.params[key] for key in order], ()), [memory for memory, _ in order]
