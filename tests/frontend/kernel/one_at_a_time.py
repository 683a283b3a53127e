"""A reference interpreter of Tile modules that is meant to be obvious: one tile at a time, one element at a time.

Each tile of a program is a generator that runs until the tiles of its group must meet; there it gives the node and
what it brings, and gets what each tile of the group has brought. Nothing here is shared with the interpreter that
it checks but the ops' own NumPy semantics.
"""

import itertools

import numpy as np

from tessera.ops.dialects import control_flow, tile

ATOMIC = {
    "add": lambda old, new: old + new,
    "max": max,
    "min": min,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exchange": lambda old, new: new,
}


def run(module, arrays):
    """Run a kernel's module on copies of its arrays; all of them as they are at the end."""
    arrays = [np.array(a) for a in arrays]
    values = dict(zip(module.main.params, arrays, strict=True))
    for node in module.main.body.nodes:
        function = module.function(node.attrs["kernel"])
        for program in itertools.product(*map(range, node.attrs["grid"])):
            run_program(function, program, node.attrs["grid"], [values[v] for v in node.args])
    return arrays


def run_program(function, program, grid, args):
    """All tiles of one program, in turns from one meeting to the next."""
    count = function.attrs["group"]
    shared = {}
    tiles = [Tile(program, grid, me, count, shared).run(function, args) for me in range(count)]
    waiting = [next(t, None) for t in tiles]
    while any(w is not None for w in waiting):
        places = {w[0] for w in waiting if w is not None}
        assert None not in waiting and len(places) == 1, "some tiles meet and others do not"
        brought = [w[1] for w in waiting]
        waiting = [sent(t, brought) for t in tiles]


def sent(tile_under_way, brought):
    try:
        return tile_under_way.send(brought)
    except StopIteration:
        return None


class Tile:
    """One tile: where it is, the group's memory, and its values."""

    def __init__(self, program, grid, me, count, shared):
        self.program, self.grid, self.me, self.count, self.shared = program, grid, me, count, shared
        self.env, self.made = {}, {}

    def run(self, function, args):
        yield from self.block(function.body, args)

    def block(self, block, inputs):
        self.env.update(zip(block.params, inputs, strict=True))
        for node in block.nodes:
            args = [self.env[v] for v in node.args]
            rule = RULES.get(node.op, pure)
            results = yield from rule(self, node, args)
            self.env.update(zip(node.results, results, strict=True))
        return [self.env[v] for v in block.results]


def pure(t, node, args):
    return node.op.execute(node.types, node.result_types, node.attrs, args)
    yield


def constant(function):
    """A rule for what needs no meeting."""

    def rule(t, node, args):
        return function(t, node, args)
        yield

    return rule


def if_(t, node, args):
    return (yield from t.block(node.regions[0 if args[0] else 1], []))


def for_(t, node, args):
    lower, upper, step = (int(a) for a in args[:3])
    carried = args[3:]
    for i in range(lower, upper, step):
        carried = yield from t.block(node.regions[0], [np.int64(i), *carried])
    return carried


def while_(t, node, args):
    while True:
        (going,) = yield from t.block(node.regions[0], args)
        if not going:
            return args
        args = yield from t.block(node.regions[1], args)


def meet(t, node, args):
    yield node, None
    return ()


def collect(t, node, args):
    brought, width = (yield node, args[0]), node.attrs["width"]
    first = t.me // width * width
    return (np.stack([np.asarray(b) for b in brought[first : first + width]]),)


def exchange(t, node, args):
    brought, width = (yield node, args[0]), node.attrs["width"]
    return (brought[t.me // width * width + int(args[1]) % width],)


def alloc(t, node, args):
    visit = t.made[node] = t.made.get(node, 0) + 1
    owner = None if node.attrs["space"] == "shared" else t.me
    place = (node, visit, owner)
    if place not in t.shared:
        t.shared[place] = np.zeros(node.attrs["shape"], node.attrs["dtype"].numpy)
    return (t.shared[place],)


def each(shape):
    return itertools.product(*map(range, shape))


def held(memory, place, mask, other, clip):
    """One element, or what stands for it."""
    inside = all(0 <= i < n for i, n in zip(place, memory.shape, strict=True))
    if not mask or (clip and not inside):
        return other
    assert inside, f"{place} is outside {memory.shape}"
    return memory[place]


def load(t, node, args):
    memory, rank, shape = args[0], args[0].ndim, node.attrs["shape"]
    starts, mask, other = args[1 : 1 + rank], *(args[1 + rank :] + [None, None])[:2]
    out = np.zeros(shape, memory.dtype)
    for index in each(shape):
        place = tuple(int(s) + i for s, i in zip(starts, index, strict=True))
        keep = True if mask is None else np.broadcast_to(mask, shape)[index]
        rest = 0 if other is None else np.broadcast_to(other, shape)[index]
        out[index] = held(memory, place, keep, rest, node.attrs["edge"] == "clip")
    return (out,)


def store(t, node, args):
    memory, value, rank = args[0], args[1], args[0].ndim
    starts, mask = args[2 : 2 + rank], (args[2 + rank :] + [None])[0]
    for index in each(value.shape):
        place = tuple(int(s) + i for s, i in zip(starts, index, strict=True))
        keep = True if mask is None else np.broadcast_to(mask, value.shape)[index]
        if held(memory, place, keep, None, node.attrs["edge"] == "clip") is not None:
            memory[place] = value[index]
    return ()


def async_copy(t, node, args):
    """Done at once, element by element; the side of lower rank lacks leading axes."""
    into, source, starts, shape = args[0], args[1], args[2:], node.attrs["shape"]
    here = len(shape) - into.ndim
    there = len(shape) - source.ndim
    for index in each(shape):
        to = tuple(int(s) + i for s, i in zip(starts[: into.ndim], index[max(here, 0) :], strict=True))
        place = tuple(int(s) + i for s, i in zip(starts[into.ndim :], index[max(there, 0) :], strict=True))
        into[to] = held(source, place, True, 0, node.attrs["edge"] == "clip")
    return ()


def points(memory, rest):
    """The places that blocks of indices name, each with its index in the block, and the mask there."""
    blocks = np.broadcast_arrays(*rest[: memory.ndim + 1])
    shape = blocks[0].shape if blocks else ()
    for index in each(shape):
        keep = bool(blocks[memory.ndim][index]) if len(rest) > memory.ndim else True
        yield index, tuple(int(b[index]) for b in blocks[: memory.ndim]), keep


def gather(t, node, args):
    memory, rest = args[0], args[1:]
    out = np.zeros(node.out.type.shape, memory.dtype)
    for index, place, keep in points(memory, rest):
        other = np.broadcast_to(rest[memory.ndim + 1], out.shape)[index] if len(rest) > memory.ndim + 1 else 0
        out[index] = held(memory, place, keep, other, False)
    return (out,)


def scatter(t, node, args):
    memory, value = args[0], args[1]
    for index, place, keep in points(memory, args[2:]):
        if held(memory, place, keep, None, False) is not None:
            memory[place] = np.broadcast_to(value, np.broadcast_shapes(*(np.shape(a) for a in args[1:])))[index]
    return ()


def atomic(t, node, args):
    memory, value = args[0], args[1]
    out = np.zeros(node.out.type.shape, memory.dtype)
    for index, place, keep in points(memory, args[2:]):
        if keep:
            out[index] = memory[place]
            memory[place] = ATOMIC[node.attrs["kind"]](memory[place], np.broadcast_to(value, out.shape)[index])
    return (out,)


def assertion(t, node, args):
    assert np.all(args[0]), node.attrs["message"]
    return ()


def program_id(t, node, args):
    axis = node.attrs["axis"]
    return (np.int64(t.program[axis] if axis < len(t.program) else 0),)


RULES = {
    control_flow.if_: if_, control_flow.for_: for_, control_flow.while_: while_,
    tile.barrier: meet, tile.meet: meet, tile.collect: collect, tile.exchange: exchange,
    tile.program_id: constant(program_id),
    tile.grid_size: constant(lambda t, node, args: (np.int64(t.grid[node.attrs["axis"]]),)),
    tile.local_id: constant(lambda t, node, args: (np.int64(t.me),)),
    tile.group_size: constant(lambda t, node, args: (np.int64(t.count),)),
    tile.alloc: constant(alloc), tile.load: constant(load), tile.store: constant(store),
    tile.gather: constant(gather), tile.scatter: constant(scatter), tile.atomic: constant(atomic),
    tile.async_copy: constant(async_copy), tile.assert_: constant(assertion),
    tile.async_commit: constant(lambda t, node, args: ()), tile.async_wait: constant(lambda t, node, args: ()),
}  # fmt: skip
