"""Random Tile kernels: programs on blocks with loops, branches and clipped edges, groups of tiles that share memory
with correct synchronisation, and products in loops for matrix units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.inputs import KINDS
from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.programs import Input, PlantedFault, RandomProgram

EXTENTS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 32)
FLOATS = ("f32", "f64", "f16", "bf16")
GROUPS = (4, 2, 8, 32, 16, 64, 3, 1)
STEPS = 7

UNARY = "abs exp sqrt tanh sin floor relu sigmoid log erf rsqrt cos exp2 ceil".split()
BINARY = ("{} + {}", "{} - {}", "{} * {}", "tile.maximum({}, {})", "tile.minimum({}, {})", "{} / {}")
WHOLE = (
    "{} + {}",
    "{} - {}",
    "{} * {}",
    "tile.maximum({}, {})",
    "tile.minimum({}, {})",
    "{} ^ {}",
    "{} & {}",
    "{} | {}",
)
REDUCE = ("sum", "max", "min")
SCANS = ("cumsum", "cummax", "cummin", "sort", "flip")


@dataclass
class KernelScope:
    """The blocks of a kernel in construction: name to (shape, kind); kind is "f", "i" or "b"."""

    choices: Choices
    blocks: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, text: str, shape: tuple[int, ...], kind: str) -> None:
        """One more statement with its value."""
        name = f"v{self.count}"
        self.count += 1
        self.lines.append(f"{name} = {text}")
        self.blocks[name] = (shape, kind)

    def find(self, fits: Callable[[tuple[int, ...], str], bool]) -> str | None:
        """The name of a block that fits, the last one first."""
        names = [n for n, (shape, kind) in reversed(self.blocks.items()) if fits(shape, kind)]
        return self.choices.pick(names) if names else None

    def find_like(self, name: str) -> str:
        """A block of the same shape and kind, a row or column that broadcasts to it, or a number."""
        shape, kind = self.blocks[name]
        found = [n for n, b in reversed(self.blocks.items()) if b == (shape, kind)]
        if len(shape) == 2:
            found += [f"{n}[:, None]" for n, b in self.blocks.items() if b == (shape[:1], kind)]
            found += [f"{n}[None, :]" for n, b in self.blocks.items() if b == (shape[1:], kind)]
        return self.choices.pick([*found, *(("0.5", "2.0", "-1.0") if kind == "f" else ("1", "3", "-2"))])


def _pointwise(c: Choices, s: KernelScope) -> None:
    name = s.find(lambda shape, kind: kind in "fi")
    assert name is not None
    shape, kind = s.blocks[name]
    if kind == "f" and c.chance(3):
        s.add(f"tile.{c.pick(UNARY)}({name})", shape, kind)
    else:
        s.add(c.pick(BINARY if kind == "f" else WHOLE).format(name, s.find_like(name)), shape, kind)


def _select(c: Choices, s: KernelScope) -> None:
    name = s.find(lambda shape, kind: kind in "fi")
    assert name is not None
    test = f"{name} {c.pick(('>', '<', '>=', '=='))} {s.find_like(name)}"
    s.add(f"tile.where({test}, {name}, {s.find_like(name)})", *s.blocks[name])


def _reduce(c: Choices, s: KernelScope) -> None:
    name = s.find(lambda shape, kind: len(shape) > 0 and kind in "fi")
    if name is None:
        return
    shape, kind = s.blocks[name]
    axis = c.draw(len(shape))
    op = c.pick((*REDUCE, "argmax", "argmin"))
    text = f"tile.{op}({name}, axis={axis})"
    if kind == "i" or op.startswith("arg"):
        text = f"tile.cast({text}, ts.int32)"
    s.add(text, shape[:axis] + shape[axis + 1 :], "i" if op.startswith("arg") else kind)


def _scan(c: Choices, s: KernelScope) -> None:
    name = s.find(lambda shape, kind: len(shape) > 0 and kind in "fi")
    if name is None:
        return
    shape, kind = s.blocks[name]
    text = f"tile.{c.pick(SCANS)}({name}, axis={c.draw(len(shape))})"
    s.add(f"tile.cast({text}, ts.int32)" if kind == "i" else text, shape, kind)


def _rearrange(c: Choices, s: KernelScope) -> None:
    name = s.find(lambda shape, kind: len(shape) == 2)
    if name is None:
        return
    (rows, columns), kind = s.blocks[name]
    if c.chance(3):
        s.add(f"tile.reshape({name}, ({rows * columns},))", (rows * columns,), kind)
    else:
        s.add(f"tile.transpose({name})", (columns, rows), kind)


def _product(c: Choices, s: KernelScope) -> None:
    name = s.find(lambda shape, kind: len(shape) == 2 and kind == "f")
    if name is None:
        return
    shape, _ = s.blocks[name]
    other = s.find(lambda found, kind: kind == "f" and len(found) == 2 and found[1] == shape[1])
    assert other is not None
    width = s.blocks[other][0][0]
    s.add(f"tile.cast(tile.dot({name}, tile.transpose({other})), DTYPE)", (shape[0], width), "f")


def _loop(c: Choices, s: KernelScope) -> None:
    name = s.find(lambda shape, kind: kind == "f")
    if name is None:
        return
    count = c.pick(("1", "2", "5", "turns", "turns + 1", "0"))
    body = c.pick(
        ("{a} * 0.5 + {b}", "tile.where({b} > {a}, {b}, {a} - 1.0)", "tile.maximum({a}, {b}) * 0.5", "{b} - {a}")
    )
    out, other = f"v{s.count}", s.find_like(name)
    s.count += 1
    head = c.pick((f"for i in tile.range(0, {count}):", f"for i in tile.range({count}, 0, -1):", ""))
    if head:
        s.lines += [f"{out} = {name}", head, f"    {out} = {body.format(a=out, b=other)}"]
    else:
        s.lines += [f"{out} = {name}", f"left{out} = {count}", f"while left{out} > 0:",
                    f"    {out} = {body.format(a=out, b=other)}", f"    left{out} = left{out} - 1"]  # fmt: skip
    s.blocks[out] = s.blocks[name]


def _branch(c: Choices, s: KernelScope) -> None:
    name = s.find(lambda shape, kind: kind in "fi")
    assert name is not None
    out = f"v{s.count}"
    s.count += 1
    first, second = (c.pick(BINARY[:5]).format(name, s.find_like(name)) for _ in range(2))
    test = c.pick(("turns > 1", "turns % 2 == 0", "pid > 0", "turns > 1 and pid < 2"))
    s.lines += [f"if {test}:", f"    {out} = {first}", "else:", f"    {out} = {second}"]
    s.blocks[out] = s.blocks[name]


def _load_more(c: Choices, s: KernelScope) -> None:
    """Another block of the input, which may lie partly or wholly outside."""
    rows, columns = s.blocks["v0"][0]
    start = c.pick(("pid", "pid + 1", "turns", f"pid * {rows}"))
    edge = c.pick(("other=0.0", "other=1.5", "edge='clip'"))
    s.add(f"tile.load(x[{start} : {start} + {rows}, 0:{columns}], {edge})", (rows, columns), "f")


STATEMENTS = (_pointwise, _pointwise, _select, _reduce, _scan, _rearrange, _product, _loop, _branch, _load_more)


def make_kernel(choices: Choices, refused: Counter[str] | None = None) -> RandomProgram:
    """A random kernel of one of the four forms; products for matrix units are few, since they take longest."""
    forms = (_make_block_kernel, _make_block_kernel, _make_group_kernel, _make_flat_kernel)
    return (*forms * 4, _make_product_kernel)[choices.draw(17)](choices)


def _make_block_kernel(c: Choices) -> RandomProgram:
    """Each program works on blocks of rows, and writes what it made to its own part of each output."""
    rows, columns, programs = c.pick(EXTENTS), c.pick(EXTENTS), 1 + c.draw(3)
    height = max(1, programs * rows - c.draw(3))
    scope = KernelScope(c)
    scope.add(f"tile.load(x[pid * {rows} : pid * {rows} + {rows}, 0:{columns}], other=0.0)", (rows, columns), "f")
    scope.add(f"tile.load(n[0:{columns}])", (columns,), "i")
    for _ in c.repeat(STEPS):
        c.pick(STATEMENTS)(c, scope)
    dtype = c.pick(FLOATS)
    results = [n for n in list(scope.blocks)[-3:] if scope.blocks[n][1] in "fi"]
    outputs = []
    for i, name in enumerate(results):
        shape, kind = scope.blocks[name]
        outputs.append(Input(f"out{i}", (programs, *shape), dtype if kind == "f" else "int32", "zeros"))
        place = ", ".join(["pid", *(f"0:{size}" for size in shape)])
        cast = f"tile.cast({name}, out{i}.dtype)"
        scope.lines.append(f"tile.store(out{i}[{place}], {cast})" if shape else f"out{i}[pid] = {cast}")
    inputs = (Input("x", (height, columns), dtype, c.pick(KINDS), c.draw(8)),
              Input("n", (max(columns, programs),), "int32", c.pick(KINDS[:4]), c.draw(4)))  # fmt: skip
    head = ["pid = tile.program_id(0)", "turns = n[pid]"]
    faults = [PlantedFault("a store past the end", "out0[pid", "out0[pid + 1")] if outputs else []
    faults.append(_fail_assertion("turns = n[pid]", f"pid != {programs - 1}"))
    return _finish([*head, *scope.lines], (*inputs, *outputs), (programs,), None, {}, dtype, (), faults)


def _finish(
    lines: Sequence[str], inputs: Sequence[Input], grid: tuple[int, ...], group: int | None,
    constants: dict[str, Any], dtype: str, variants: Any = (), faults: Sequence[PlantedFault] = (),
) -> RandomProgram:  # fmt: skip
    names = ", ".join([*(i.name for i in inputs), *(f"{k}: ts.constexpr" for k in constants)])
    text = "".join(f"    {line}\n" for line in lines).replace("DTYPE", f"ts.{dtype}")
    return RandomProgram(
        f"@ts.kernel\ndef program({names}):\n{text}", tuple(inputs), grid, group, constants, tuple(variants),
        tuple(faults),
    )  # fmt: skip


def _make_flat_kernel(c: Choices) -> RandomProgram:
    """A pointwise kernel with masks or clipped edges: any block size gives the same."""
    size, blocks = c.pick((1, 5, 16, 17, 33, 100, 0)), (16, 1, 8, 64, 33)
    dtype = c.pick(FLOATS)
    masked = c.chance(2)
    place = "at + tile.arange(0, B)" if masked else "at : at + B"
    guard = f", mask={place} < {size}" if masked else ""
    scope = KernelScope(c)
    load = "tile.load({0}, " + place + guard + ", other=0.5)" if masked else "tile.load({0}[" + place + "], other=0.5)"
    for name in ("x", "y"):
        scope.add(load.format(name), (0,), "f")
    for _ in c.repeat(STEPS):
        c.pick((_pointwise, _select))(c, scope)
    value = f"tile.cast({list(scope.blocks)[-1]}, out.dtype)"
    store = f"tile.store(out, {place}, {value}{guard})" if masked else f"tile.store(out[{place}], {value}, edge='clip')"
    inputs = tuple(Input(n, (size,), dtype, c.pick(KINDS), c.draw(8)) for n in ("x", "y"))
    block = c.pick(blocks)
    variants = [((max(1, -(-size // b)),), {"B": b}) for b in blocks if b != block][:2]
    lines = ["at = tile.program_id(0) * B", *scope.lines, store]
    out, grid = Input("out", (size,), dtype, "zeros"), (max(1, -(-size // block)),)
    faults = [_fail_assertion(lines[0], f"at + tile.arange(0, B) != {grid[0] * block - 1}")]
    if grid[0] * block > size:
        limit = guard if masked else ", edge='clip'"
        bare = store[: -len(limit) - 1]
        faults.append(PlantedFault("a store without its limit", f"{bare}{limit})", f"{bare})"))
    return _finish(lines, (*inputs, out), grid, None, {"B": block}, dtype, variants, faults)


def _make_product_kernel(c: Choices) -> RandomProgram:
    """Products in a loop, of blocks for matrix units: sums that go on in each other, are kept, and change places."""
    dtype, length = c.pick(("bf16", "f16")), 64 * (1 + c.draw(3))
    held, body = ["first", "second"], []
    for number in c.repeat(3, one_in=3):
        product = f"tile.dot(rows, tile.load({c.pick('yz')}[k : k + 64, 0:64]))"
        form = c.pick(("{0} + {1}", "{0} + {1}", "{0} * 0.5 + {1}", "{1}"))
        body.append(f"v{number} = {form.format(c.pick(held), product)}")
        held.append(f"v{number}")
    body.append(f"first, second = {c.pick(held[::-1])}, {c.pick(held[::-1])}")
    lines = ["rows = tile.load(x[0:64, 0:64])", "first = tile.zeros((64, 64), ts.f32)",
             "second = tile.zeros((64, 64), ts.f32)", f"for k in tile.range(0, {length}, 64):",
             *(f"    {line}" for line in body), "tile.store(out[0:64, 0:64], first)",
             "tile.store(out[64:128, 0:64], second)"]  # fmt: skip
    sizes = {"x": 64, "y": length, "z": length}
    inputs = [Input(name, (rows, 64), dtype, c.pick(KINDS), c.draw(8)) for name, rows in sizes.items()]
    return _finish(lines, (*inputs, Input("out", (128, 64), "f32", "zeros")), (1,), None, {}, dtype)


READS = ("N - 1 - me", "(me + 1) % N", "(me * 3 + 1) % N", "me", "(me + turn) % N", "me ^ 1 if (me ^ 1) < N else me")
COMBINE = (
    "value + other",
    "tile.maximum(value, other)",
    "value * 0.5 - other",
    "tile.where(other > value, other, value)",
)


def _make_group_kernel(c: Choices) -> RandomProgram:
    """Tiles of a group exchange values through shared memory: written, a barrier, read, a barrier."""
    size, programs = c.pick(GROUPS), 1 + c.draw(3)
    dtype = c.pick(FLOATS[:3])
    lines = ["pid, me = tile.program_id(0), tile.local_id()", "value = x[pid * N + me]",
             "shared = tile.alloc_shared((2, N), DTYPE, swizzle=SWIZZLE, padding=PAD)"]  # fmt: skip
    for number in c.repeat(3, one_in=2):
        lines += _make_round(c, number)
    lines.append("out[pid * N + me] = tile.cast(value, out.dtype)")
    if c.chance(3):
        lines.append("tile.atomic_add(total[0], tile.cast(tile.where(value > 0.5, 1, 2), ts.int32))")
    inputs = (Input("x", (programs * size,), dtype, c.pick(KINDS), c.draw(8)),
              Input("n", (programs,), "int32", "positive", c.draw(4)),
              Input("out", (programs * size,), dtype, "zeros"), Input("total", (1,), "int32", "zeros"))  # fmt: skip
    constants = {"N": size, "SWIZZLE": c.pick((None, "xor")), "PAD": c.draw(3)}
    grid = (programs,)
    variants = [(grid, {"SWIZZLE": "xor", "PAD": 0}), (grid, {"SWIZZLE": None, "PAD": 1})]
    return _finish(lines, inputs, grid, size, constants, dtype, variants, _list_group_faults(lines, size))


def _fail_assertion(line: str, holds: str) -> PlantedFault:
    """An assertion after a line: of all programs, tiles and elements one alone breaks it."""
    return PlantedFault("an assertion", f"    {line}\n", f"    {line}\n    tile.assert_({holds})\n")


def _list_group_faults(lines: Sequence[str], size: int) -> list[PlantedFault]:
    """What makes an exchange wrong: a barrier or a write that is missing, and a place past the end."""
    faults = [PlantedFault("a store past the end", "out[pid * N + me]", "out[pid * N + me + 1]")]
    if lines[0].startswith("pid, me"):
        faults.append(_fail_assertion(lines[0], "(pid > 0) | (me < N - 1)"))
    text = "".join(f"    {line}\n" for line in lines)
    before, _, rest = text.partition("other = ")
    read = rest.partition("\n")[0]
    # Whole lines, of the first exchange: what an exchange before it, or one in a loop, has written is there.
    write, barrier, use = "    shared[0, me] = value\n", "    tile.barrier()\n", f"    other = {read}\n"
    if before.endswith(f"\n{write}{barrier}    ") and size > 3:
        old = f"\n{write}{barrier}{use}"
        faults.append(PlantedFault("memory that is not written", old, f"\n{barrier}{use}"))
        if read in OTHERS:
            faults.append(PlantedFault("no barrier between a write and a read", old, f"\n{write}{use}"))
    return faults


OTHERS = tuple(f"shared[0, {read}]" for read in ("N - 1 - me", "(me + 1) % N", "(me + 1) % N"))


def _make_round(c: Choices, number: int) -> list[str]:
    """One exchange: alone, in a loop of equal turns for all tiles, under a condition, or by a group's functions."""
    read, combine = c.pick(READS), c.pick(COMBINE)
    kind = c.draw(5)
    if kind == 4:
        call = c.pick(("block.reduce_sum(value)", "block.reduce_max(value)", "block.reduce_min(value)",
                       "block.broadcast(value, N - 1)", "block.shuffle(value, N - 1 - me)"))  # fmt: skip
        return [f"other = tile.{call}", f"value = {combine}"]
    body = [f"shared[{number % 2}, me] = value", "tile.barrier()",
            f"other = shared[{number % 2}, {read.replace('turn', '1')}]",
            f"value = {combine}", "tile.barrier()"]  # fmt: skip
    if kind == 1:
        body[2] = f"other = shared[{number % 2}, {read}]"
        return [f"for turn in tile.range(0, {c.pick(('2', '3', 'n[pid]'))}):", *(f"    {line}" for line in body)]
    if kind == 2:
        test = c.pick(("me % 2 == 0", "me < N // 2", "value > 0.5", "me != 0"))
        return [*body[:3], f"if {test}:", f"    {body[3]}", body[4]]
    if kind == 3:  # a tree, as of a sum: pairs at halved distances
        return [body[0], body[1], "reach = N // 2", "while reach > 0:", "    if me < reach:",
                f"        shared[{number % 2}, me] = shared[{number % 2}, me] + shared[{number % 2}, me + reach]",
                "    tile.barrier()", "    reach //= 2",
                f"other = shared[{number % 2}, 0]", body[3], body[4]]  # fmt: skip
    return body
