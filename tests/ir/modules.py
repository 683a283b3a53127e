"""Random valid modules of every level, for properties of the printer, the parser and the verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tessera.core.errors import UNKNOWN, Location
from tessera.core.symbolic_dim import Dim
from tessera.core.types import DTYPES, SPACES, Policy, RefType, TensorType, bool_, f32, int64, scalar
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Value
from tessera.ops.dialects import control_flow, host, schedule, tile
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape

INDEX = scalar(int64)
B, C, NAMELESS = Dim.of("B"), Dim.of("C"), Dim.of("?0")
DIMS = (B, C, NAMELESS, 2 * B + 1, B * C, B // 2, 2 * ((B + C) % 3) - 4, 7 // B, 2 * NAMELESS + B, -B + 100)

text = st.text(max_size=8) | st.sampled_from(["", "\ud800", '"', "\\", "\x00\n\t", "a b", "é%#{}>"])
names = st.sampled_from(["axis", "i64", "loc", "true", "a.b", "a b", "1x", "é", "f32", "unit", '"'])
# xDSL reads a string with both escapes and letters beyond ASCII as bytes, and takes no bytes for a file or a name.
files = st.text(st.characters(max_codepoint=127), max_size=8) | st.sampled_from(["/home/zoë/日本.py", "C:\\a.py"])
locations = st.just(UNKNOWN) | st.builds(
    Location, files, *(st.integers(0, 999),) * 2, st.just(0) | st.integers(1, 999)
)  # fmt: skip
dtypes = st.sampled_from(DTYPES)
policies = st.builds(
    Policy,
    dtypes,
    compute=st.none() | dtypes,
    accumulate=st.none() | dtypes,
    rounding=st.sampled_from(["nearest", "stochastic"]),
    saturate=st.booleans(),
    loss_scale=st.floats(allow_nan=False),
)
sizes = st.sampled_from([1, 2, 4, 64, 0])
dims = st.sampled_from(DIMS)


@st.composite
def tensor_types(draw: Any, size: Any = sizes) -> TensorType:
    """A tensor type; sometimes with a policy of its element type or (as the IR allows) another."""
    policy = draw(st.none() | policies)
    dtype = policy.storage if policy and draw(st.booleans()) else draw(dtypes)
    return TensorType(tuple(draw(st.lists(size, max_size=3))), dtype, policy)


def ref_types(space: str | None = None) -> Any:
    """A ref type."""
    spaces = st.just(space) if space else st.sampled_from(SPACES)
    shapes = st.lists(sizes, max_size=3).map(tuple)
    return st.builds(RefType, shapes, dtypes, spaces, st.none() | policies)


scalars = st.one_of(
    st.booleans(),
    st.none(),
    st.integers(),
    st.sampled_from([2**63 - 1, -(2**63), 2**63]),
    st.floats(),
    st.sampled_from([-0.0, 5e-324, 1e16, 1e-7]),
    text,
    dtypes,
    dims,
    policies,
    locations,
    tensor_types(sizes | dims),
    ref_types(),
)
attributes = st.recursive(
    scalars,
    lambda each: st.lists(each, max_size=3).map(tuple) | st.dictionaries(names, each, max_size=3),
    max_leaves=6,
)
dictionaries = st.dictionaries(names, attributes, max_size=3)


@dataclass
class Site:
    """An insertion point: the draw function, the builder, the refs in scope and the legal growers."""

    draw: Callable[[Any], Any]
    builder: Builder
    refs: Sequence[Value]
    growers: Sequence[Grower]

    def add(self, op: Any, args: Sequence[Value], attrs: Any = None, **more: Any) -> list[Value]:
        """One node at a drawn location; its results."""
        return list(self.builder.add(op, args, attrs, loc=self.draw(locations), **more).results)

    def pick(self, pool: Sequence[Value], fits: Callable[[Any], bool]) -> Value | None:
        """A value whose type fits, if there is one."""
        found = [v for v in pool if fits(v.type)]
        return self.draw(st.sampled_from(found)) if found else None

    def starts(self, count: int) -> list[Value]:
        """Constant indices."""
        attrs = {"shape": (), "value": self.draw(st.integers(0, 9)), "dtype": int64}
        return [self.add(basic.full, [], attrs)[0] for _ in range(count)]


Pool = list[Value]
# A grower adds nodes that use values of the pool and hands back the new ones.
Grower = Callable[[Site, Pool, int], Pool]


def grow(site: Site, pool: Pool, depth: int) -> Pool:
    """The pool after a few more nodes."""
    for grower in site.draw(st.lists(st.sampled_from(site.growers), max_size=4)):
        pool = pool + grower(site, pool, depth)
    return pool


def unary(site: Site, pool: Pool, depth: int) -> Pool:
    """exp or neg of a float."""
    x = site.pick(pool, lambda t: t.dtype.is_float)
    return site.add(site.draw(st.sampled_from([elementwise.exp, elementwise.neg])), [x]) if x else []


def binary(site: Site, pool: Pool, depth: int) -> Pool:
    """A sum or comparison of values of one type."""
    x = site.pick(pool, lambda t: t.dtype is not bool_)
    y = site.pick(pool, lambda t: x is not None and t == x.type)
    return site.add(site.draw(st.sampled_from([elementwise.add, elementwise.less])), [x, y]) if x and y else []


def reduction(site: Site, pool: Pool, depth: int) -> Pool:
    """The sum along the last axis."""
    x = site.pick(pool, lambda t: t.rank)
    return site.add(reduce.sum, [x], {"axis": (-1,), "keepdims": site.draw(st.booleans())}) if x else []


def constant(site: Site, pool: Pool, depth: int) -> Pool:
    """A block of one float."""
    attrs = {"shape": tuple(site.draw(st.lists(sizes, max_size=2))), "value": site.draw(st.floats()), "dtype": f32}
    return site.add(basic.full, [], attrs)


def convert(site: Site, pool: Pool, depth: int) -> Pool:
    """A cast."""
    x = site.pick(pool, lambda t: True)
    return site.add(basic.cast, [x], {"dtype": site.draw(dtypes)}) if x else []


def product(site: Site, pool: Pool, depth: int) -> Pool:
    """A matrix times its transpose."""
    x = site.pick(pool, lambda t: t.rank == 2 and t.dtype is not bool_)
    return (
        site.add(contractions.dot, [x, *site.add(shape.permute, [x], {"axes": (-1, -2)})], {"dtype": f32}) if x else []
    )


def _inner(site: Site, pool: Pool, params: Sequence[Value], wanted: Sequence[Any], depth: int) -> Block:
    with site.builder.region() as nodes:
        inner = grow(site, [*pool, *params], depth - 1)
        results = [site.pick(inner, lambda t, want=want: t == want) for want in wanted]  # type: ignore[misc]
    return Block(tuple(params), tuple(nodes), tuple(results))  # type: ignore[arg-type]


def _truth(site: Site) -> Value:
    return site.add(basic.full, [], {"shape": (), "value": True, "dtype": bool_})[0]


def _carried(site: Site, pool: Pool) -> Pool:
    return site.draw(st.lists(st.sampled_from(pool), max_size=2)) if pool else []


def loop(site: Site, pool: Pool, depth: int) -> Pool:
    """A for with up to two carried values."""
    if not depth:
        return []
    bounds, carried = site.starts(3), _carried(site, pool)
    types = tuple(v.type for v in carried)
    region = _inner(site, pool, [Value(INDEX), *map(Value, types)], types, depth)
    return site.add(control_flow.for_, [*bounds, *carried], types=types, regions=(region,))


def repeat(site: Site, pool: Pool, depth: int) -> Pool:
    """A while that never begins again."""
    if not depth:
        return []
    carried = _carried(site, pool)
    types = tuple(v.type for v in carried)
    with site.builder.region() as nodes:
        test = _truth(site)
    condition = Block(tuple(map(Value, types)), tuple(nodes), (test,))
    body = _inner(site, pool, [Value(t) for t in types], types, depth)
    return site.add(control_flow.while_, carried, types=types, regions=(condition, body))


def branch(site: Site, pool: Pool, depth: int) -> Pool:
    """An if whose branches give values that were known before."""
    if not depth:
        return []
    types = tuple(v.type for v in _carried(site, pool))
    regions = tuple(_inner(site, pool, [], types, depth) for _ in range(2))
    return site.add(control_flow.if_, [_truth(site)], types=types, regions=regions)


def load(site: Site, pool: Pool, depth: int) -> Pool:
    """A block read from a ref."""
    ref = site.draw(st.sampled_from(site.refs))
    block, edge = tuple(site.draw(sizes) for _ in ref.type.shape), site.draw(st.sampled_from(["error", "clip"]))
    return site.add(tile.load, [ref, *site.starts(ref.type.rank)], {"shape": block, "edge": edge})


def store(site: Site, pool: Pool, depth: int) -> Pool:
    """A block written to a ref."""
    ref = site.draw(st.sampled_from(site.refs))
    x = site.pick(pool, lambda t: t.dtype == ref.type.dtype and t.rank == ref.type.rank)
    return site.add(tile.store, [ref, x, *site.starts(ref.type.rank)], {"edge": "error"}) if x else []


def shared(site: Site, pool: Pool, depth: int) -> Pool:
    """Shared memory, a copy into it, and a barrier."""
    source = site.draw(st.sampled_from(site.refs))
    attrs = {"shape": source.type.shape, "dtype": source.type.dtype, "space": "shared", "alignment": 16, "swizzle": ""}
    memory = site.add(tile.alloc, [], attrs)
    starts = site.starts(2 * source.type.rank)
    site.add(tile.async_copy, [*memory, source, *starts], {"shape": source.type.shape, "edge": "clip"})
    site.add(tile.async_wait, [], {"pending": 0})
    return site.add(tile.barrier, [])


ON_TENSORS = (unary, binary, reduction, constant, convert, product, loop, repeat, branch)
AT_AN_INDEX = (unary, binary, convert)


def _finish(site: Site, name: str, params: Sequence[Value], results: Sequence[Value], **attrs: Any) -> Function:
    block = site.builder.block(params, results)
    return Function(name, block, Attrs({**site.draw(dictionaries), **attrs}), site.draw(locations))


@st.composite
def graphs(draw: Any) -> Module:
    """A graph module."""
    params = [Value(t, "hint") for t in draw(st.lists(tensor_types(sizes | dims), max_size=3))]
    site = Site(draw, Builder(), (), ON_TENSORS)
    pool = grow(site, params, 2)
    results = draw(st.lists(st.sampled_from(pool), max_size=2)) if pool else []
    return Module("graph", (_finish(site, draw(text), params, results),), Attrs(draw(dictionaries)))


def _tile_function(draw: Any, name: str, params: Sequence[Value]) -> Function:
    refs = [p for p in params if isinstance(p.type, RefType)]
    site = Site(draw, Builder(), refs, (*ON_TENSORS, load, store, shared) if refs else ON_TENSORS)
    ids = site.add(tile.program_id, [], {"axis": 0})
    grow(site, [*ids, *(p for p in params if p not in refs)], 2)
    return _finish(site, name, params, [], group=draw(st.integers(1, 4)))


def _copies(values: Sequence[Value]) -> list[Value]:
    return [Value(v.type) for v in values]


def _kernel(site: Site, refs: Sequence[Value]) -> None:
    inner = Site(site.draw, site.builder, _copies(refs), AT_AN_INDEX)
    with site.builder.region() as nodes:
        for ref in inner.refs:
            places = [inner.add(schedule.index, [], {"dim": 0})[0] for _ in range(ref.type.rank)]
            (x,) = inner.add(schedule.load, [ref, *places])
            (y,) = inner.add(schedule.reduce, [x], {"kind": "sum", "dim": 1})
            grow(inner, [x, y], 0)
            inner.add(schedule.store, [ref, y, *places])
    attrs = {"dims": (("i", 8, "parallel"), ("k", 4, "reduce")), "schedule": site.draw(attributes)}
    site.add(schedule.kernel, refs, attrs, regions=(Block(tuple(inner.refs), tuple(nodes), ()),))


@st.composite
def programs(draw: Any, level: str) -> Module:
    """A schedule or tile module: an entry that launches a tile function (and holds a kernel)."""
    refs = [Value(t) for t in draw(st.lists(ref_types("global"), max_size=2))]
    params = [*(Value(scalar(t)) for t in draw(st.lists(dtypes, max_size=1))), *refs]
    function = _tile_function(draw, "kernel", _copies(params))
    site = Site(draw, Builder(), (), ())
    buffer = site.add(host.alloc, [], {"shape": (4, 2), "dtype": draw(dtypes), "offset": -1})
    site.add(host.view, buffer, {"shape": (8,)})
    if level == "schedule":
        _kernel(site, refs)
    site.add(host.launch, params, {"kernel": "kernel", "grid": (draw(st.integers(0, 9)), 1)})
    entry = _finish(site, draw(text), params, [], outputs=draw(st.integers(0, len(refs))))
    return Module(level, (entry, function), Attrs(draw(dictionaries)))


modules = st.one_of(graphs(), programs("schedule"), programs("tile"))
