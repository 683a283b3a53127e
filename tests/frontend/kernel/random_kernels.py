"""Random kernels as Python text: loops, branches that part tiles, masks, shared memory with the barriers it needs.

All numbers stay small whole ones, so that every order of float operations gives the same bits. A kernel reads `x`
and `n`, and writes what its tile has found to places of its own; counts go to `counts` by atomics.
"""

import linecache
from dataclasses import dataclass

from hypothesis import strategies as st

import tessera as ts
from tessera import tile

SIZE = 16  # of x and n
BLOCK = 5
NAMES = ("s", "t", "b", "c", "i")  # two scalars, two blocks, an integer


@dataclass(frozen=True)
class Drawn:
    """A kernel with its text, grid and group size."""

    text: str
    grid: tuple[int, ...]
    group: int

    def kernel(self):
        """The text compiled; kernels are read from their source, which lies in no file here."""
        name = f"<random kernel {hash(self.text) & 0xFFFFFFFF:x}>"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(True), name)
        scope = {"ts": ts, "tile": tile, "part": part}
        exec(compile(self.text, name, "exec"), scope)
        return ts.kernel(scope["drawn"])


def part(x, at):
    """A block that may lie outside."""
    return tile.load(x[at : at + BLOCK], edge="clip")


def clamped(text):
    return f"tile.maximum(tile.minimum({text}, 9.0), -9.0)"


def integer(draw, depth=2):
    """An integer scalar."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(["me", "pid", "i", "0", "1", "2", "3"]))
    left, right = integer(draw, depth - 1), integer(draw, depth - 1)
    operator = draw(st.sampled_from(["+", "-", "*", "&", "|", "^", "//", "%"]))
    if operator in ("//", "%"):  # by what is not 0: a quotient goes down, a remainder has the divisor's sign
        return f"({left} {operator} {draw(st.sampled_from([2, 3, -2, -3]))})"
    return f"({left} {operator} {right})"


def place(draw, room):
    return f"({integer(draw)}) % {room}"


def condition(draw):
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return f"{integer(draw)} {draw(st.sampled_from(['<', '==', '>=']))} {integer(draw)}"
    if kind == 1:
        return f"{scalar(draw, 0)} > {draw(st.integers(-3, 3))}.0"
    return f"n[{place(draw, SIZE)}] % 2 == 0"


def scalar(draw, depth=2):
    """A float scalar."""
    kind = draw(st.integers(0, 5 if depth else 2))
    if kind == 0:
        return draw(st.sampled_from(["s", "t"]))
    if kind == 1:
        return f"{draw(st.integers(-4, 4))}.0"
    if kind == 2:
        return f"x[{place(draw, SIZE)}]"
    if kind == 3:
        return clamped(f"tile.{draw(st.sampled_from(['sum', 'max', 'min']))}({block(draw, depth - 1)})")
    if kind == 4:
        return f"tile.where({condition(draw)}, {scalar(draw, depth - 1)}, {scalar(draw, depth - 1)})"
    return clamped(f"{scalar(draw, depth - 1)} {draw(st.sampled_from('+-*'))} {scalar(draw, depth - 1)}")


def block(draw, depth=2):
    """A float block of BLOCK elements."""
    kind = draw(st.integers(0, 7 if depth else 2))
    if kind == 0:
        return draw(st.sampled_from(["b", "c"]))
    if kind == 7:
        call = draw(st.sampled_from(["tile.cumsum", "tile.cummax", "tile.sort", "tile.flip"]))
        return clamped(f"{call}({block(draw, depth - 1)})")
    if kind == 1:
        start = place(draw, SIZE - BLOCK + 1)
        return f"tile.load(x[{start} : {start} + {BLOCK}])"
    if kind == 2:
        return f"tile.cast(tile.arange(0, {BLOCK}), ts.f32)"
    if kind == 3:
        start = integer(draw)  # it may lie outside: what does is masked off
        mask = f"({start} + tile.arange(0, {BLOCK}) >= 0) & ({start} + tile.arange(0, {BLOCK}) < {SIZE})"
        return f"tile.load(x, {start} + tile.arange(0, {BLOCK}), mask={mask}, other={draw(st.integers(-2, 2))}.0)"
    if kind == 4:
        return f"tile.where({block(draw, depth - 1)} > {scalar(draw, 0)}, {block(draw, depth - 1)}, {scalar(draw, 0)})"
    if kind == 5:
        return f"part(x, me + {integer(draw)})"
    return clamped(f"{block(draw, depth - 1)} {draw(st.sampled_from('+-*'))} {scalar(draw, depth - 1)}")


def assignment(draw):
    name = draw(st.sampled_from(NAMES))
    make = {"s": scalar, "t": scalar, "b": block, "c": block}.get(name)
    return [f"{name} = {make(draw)}" if make else f"i = ({integer(draw)}) % 7"]


def count(draw):
    return [f"tile.atomic_add(counts[{place(draw, 4)}], {integer(draw, 1)})"]


def indented(lines):
    return ["    " + line for line in lines]


def branch(draw, depth):
    other = draw(st.booleans())
    tail = ["else:", *indented(statements(draw, depth - 1))] if other else []
    return [f"if {condition(draw)}:", *indented(statements(draw, depth - 1)), *tail]


def loop(draw, depth):
    variable = f"k{depth}"
    bounds = draw(st.sampled_from(["0, 3", "me, 4", f"0, n[{place(draw, SIZE)}] % 4", "3, me, -1", "pid, 4, 2"]))
    body = [f"i = ({variable} + i) % 7", *statements(draw, depth - 1)]
    return [f"for {variable} in tile.range({bounds}):", *indented(body)]


def repeat(draw, depth):
    body = [*statements(draw, depth - 1), f"w{depth} = w{depth} - 1"]
    return [f"w{depth} = ({integer(draw)}) % 4", f"while w{depth} > 0:", *indented(body)]


def early(draw):
    return [f"if {condition(draw)}:", "    s = s + 1.0", f"    i = ({integer(draw)}) % 5"]


def statements(draw, depth):
    """A few statements that only change variables and counts."""
    kinds = [assignment, count, early]
    found = []
    for _ in range(draw(st.integers(1, 3))):
        if depth and draw(st.integers(0, 2)) == 0:
            found += draw(st.sampled_from([branch, loop, repeat]))(draw, depth)
        else:
            found += draw(st.sampled_from(kinds))(draw)
    return found


def shared(draw, group):
    """What each tile holds, seen by its neighbours: one barrier before they read, one before the next write."""
    source = draw(st.sampled_from(["s", "t"]))
    return [
        f"shared[me] = {source}", "tile.barrier()", f"t = shared[(me + {draw(st.integers(1, 5))}) % {group}]",
        f"shared_blocks[me, 0:{BLOCK}] = b", "tile.barrier()",
        f"c = tile.load(shared_blocks[({integer(draw)}) % {group}, 0:{BLOCK}])", "tile.barrier()",
    ]  # fmt: skip


def together(draw, group):
    call = draw(st.sampled_from(["reduce_sum", "reduce_max", "reduce_min"]))
    return [f"s = {clamped(f'tile.block.{call}(s)')}", f"t = tile.block.shuffle(t, {integer(draw)})"]


def copied(draw, group):
    """A copy under way while something else is computed, into memory of the tile's own or of the group."""
    start = draw(st.integers(0, SIZE - BLOCK))
    return [
        f"tile.cp_async(shared_blocks[me, 0:{BLOCK}], x[{start} : {start} + {BLOCK}])", "tile.cp_commit_group()",
        *assignment(draw), "tile.cp_wait_group(0)", "tile.barrier()",
        f"c = tile.load(shared_blocks[({integer(draw)}) % {group}, 0:{BLOCK}])", "tile.barrier()",
    ]  # fmt: skip


def own(draw, group):
    """Memory of the tile's own, written and read at places that differ between tiles."""
    return [
        f"mine[{place(draw, 3)}] = s", f"t = mine[{place(draw, 3)}] + mine[0]", f"t = {clamped('t')}"
    ]  # fmt: skip


def uniform(draw, group):
    """Statements of which all tiles take the same course, so that they may meet."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            found += statements(draw, 2)
        else:
            found += draw(st.sampled_from([shared, together, copied, own] if group > 1 else [copied, own]))(draw, group)
    if draw(st.booleans()):
        body = shared(draw, group) if group > 1 else assignment(draw)
        found += [f"for r in tile.range({draw(st.integers(0, 3))}):", *indented(body)]
    return found


@st.composite
def kernels(draw):
    """A kernel with its launch."""
    group, grid = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([(1,), (3,), (2, 2)]))
    pid = "tile.program_id(0)" if len(grid) == 1 else f"tile.program_id(0) * {grid[1]} + tile.program_id(1)"
    body = [
        f"me, pid = tile.local_id(), {pid}",
        f"shared = tile.alloc_shared(({group},), ts.f32)",
        "mine = tile.alloc_register((3,), ts.f32)",
        "mine[...] = 0.0",
        f"shared_blocks = tile.alloc_shared(({group}, {BLOCK}), ts.f32)",
        f"s, t, i = x[(pid + me) % {SIZE}], 1.0, (pid + me) % 7",
        f"b = tile.load(x[me : me + {BLOCK}])",
        f"c = tile.zeros(({BLOCK},))",
        *uniform(draw, group),
        f"place = pid * {group} + me",
        "out[place, 0] = s",
        "out[place, 1] = t",
        f"out[place, 2 : {2 + BLOCK}] = b",
        f"out[place, {2 + BLOCK} : {2 + 2 * BLOCK}] = c",
        "last[place] = i",
    ]
    return Drawn("\n".join(["def drawn(x, n, counts, out, last):", *indented(body), ""]), grid, group)
