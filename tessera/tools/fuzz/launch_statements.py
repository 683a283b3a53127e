"""Statements of random Graph programs that launch kernels: grids of one to three axes, loops, products, two results."""

from __future__ import annotations

from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.value_pool import ValuePool, is_float, rule

# The kernels, by name: a program whose statements name one has its source above the function.
KERNELS: dict[str, str] = {
    "squared_blocks": """
@ts.kernel
def squared_blocks(x, out, *, BM: int = 4, BN: int = 4):
    i, j = tile.program_id(0) * BM, tile.program_id(1) * BN
    v = tile.load(x[i : i + BM, j : j + BN], edge="clip")
    tile.store(out[i : i + BM, j : j + BN], tile.cast(v * v - v, out.dtype), edge="clip")
""",
    "turned_blocks": """
@ts.kernel
def turned_blocks(x, out, *, BM: int = 4, BN: int = 4):
    i, j = tile.program_id(2) * BM, tile.program_id(1) * BN
    v = tile.load(x[i : i + BM, j : j + BN], edge="clip")
    tile.store(out[j : j + BN, i : i + BM], tile.transpose(v), edge="clip")
""",
    "row_totals": """
@ts.kernel
def row_totals(x, out, *, COUNT: int, BN: int = 4):
    i = tile.program_id(0)
    total = tile.load(x[i : i + 1, 0:BN], other=0.0)
    for j in tile.range(1, COUNT):
        total = total * 0.5 + tile.load(x[i : i + 1, j * BN : j * BN + BN], other=0.0)
    tile.store(out[i : i + 1], tile.cast(tile.sum(total, axis=1), out.dtype))
""",
    "dot_blocks": """
@ts.kernel
def dot_blocks(x, y, out, *, COUNT: int, BM: int = 4, BN: int = 4):
    i, j = tile.program_id(0) * BM, tile.program_id(1) * BN
    total = tile.cast(tile.load(x[i : i + BM, 0:4], other=0.0), ts.f32) @ tile.cast(
        tile.load(y[0:4, j : j + BN], other=0.0), ts.f32
    )
    for k in tile.range(1, COUNT):
        total = total + tile.cast(tile.load(x[i : i + BM, k * 4 : k * 4 + 4], other=0.0), ts.f32) @ tile.cast(
            tile.load(y[k * 4 : k * 4 + 4, j : j + BN], other=0.0), ts.f32
        )
    tile.store(out[i : i + BM, j : j + BN], tile.cast(total, out.dtype), edge="clip")
""",
    "copied_rows": """
@ts.kernel
def copied_rows(x, out, *, COLUMNS: int = 4):
    i = tile.program_id(0)
    held = tile.alloc_shared((1, COLUMNS), x.dtype)
    tile.async_copy(x[i : i + 1, 0:COLUMNS], held)
    tile.wait_async()
    tile.barrier()
    v = held[0:1, 0:COLUMNS]
    tile.store(out[i : i + 1, 0:COLUMNS], v * v)
""",
    "parted": """
@ts.kernel
def parted(x, low, high, *, BM: int = 4, COLUMNS: int = 4):
    i = tile.program_id(0) * BM
    v = tile.load(x[i : i + BM, 0:COLUMNS], edge="clip")
    tile.store(low[i : i + BM, 0:COLUMNS], tile.minimum(v, 0.5), edge="clip")
    tile.store(high[i : i + BM, 0:COLUMNS], tile.where(v > 0.5, v * 2.0, 0.0), edge="clip")
""",
    "stored_twice": """
@ts.kernel
def stored_twice(x, out, *, COLUMNS: int = 4):
    i = tile.program_id(0)
    v = tile.load(x[i : i + 1, 0:COLUMNS])
    chosen = tile.reshape(tile.arange(0, COLUMNS), shape=(1, COLUMNS)) % 2 == 0
    tile.store(out[i : i + 1, 0:COLUMNS], v * 0.5)
    tile.store(out[i : i + 1, 0:COLUMNS], v - 1.0, mask=chosen)
""",
    "placed_rows": """
@ts.kernel
def placed_rows(x, places, out, *, COLUMNS: int = 4):
    i = tile.program_id(0)
    at = places[i]
    v = tile.load(x[i : i + 1, 0:COLUMNS])
    tile.store(out[at : at + 1, 0:COLUMNS], v * 0.5)
""",
    "folded_rows": """
@ts.kernel
def folded_rows(x, out, *, COLUMNS: int = 4):
    i = tile.program_id(0)
    v = tile.reshape(tile.load(x[i : i + 1, 0:COLUMNS]), shape=(COLUMNS,))
    halves = tile.reshape(tile.arange(0, COLUMNS), shape=(2, COLUMNS // 2))
    turned = tile.reshape(tile.transpose(halves), shape=(COLUMNS,))
    out[turned * 0 + i, turned] = v - 1.0
""",
    "met_rows": """
@ts.kernel
def met_rows(x, totals, out, *, COLUMNS: int = 4):
    i = tile.program_id(0)
    v = tile.load(x[i : i + 1, 0:COLUMNS])
    tile.store(totals[i : i + 1], tile.cast(tile.sum(v * 0.25, axis=1), x.dtype))
    tile.grid_barrier()
    tile.store(out[i : i + 1, 0:COLUMNS], v + tile.reshape(tile.load(totals[0:1]), shape=(1, 1)))
""",
    "shared_edges": """
@ts.kernel
def shared_edges(x, out, *, BN: int = 4):
    i, j = tile.program_id(0), tile.program_id(1) * BN
    v = tile.load(x[i : i + 1, j : j + BN], other=0.0)
    tile.store(out[i : i + 1, j : j + BN], v + tile.load(x[i : i + 1, j - 1 : j - 1 + BN], other=0.0), edge="clip")
""",
}


def list_kernel_sources(text: str) -> str:
    """The sources of the kernels that the text of a program names."""
    return "".join(source.lstrip("\n") + "\n" for name, source in KERNELS.items() if f"({name}, " in text)


@rule(lambda s: s.ndim == 2 and is_float(s) and s.type.policy is None and 0 < s.size <= 400, 8)
def _launch(c: Choices, _pool: ValuePool, name: str) -> str:
    """A kernel on blocks of a matrix, which may reach beyond its edges."""
    # By the shape: at other sizes the grid must reach every element, too.
    rows, columns = f"{name}.shape[0]", f"{name}.shape[1]"
    high, wide = c.pick((4, 1, 2, 8)), c.pick((4, 1, 3, 16))
    down, across = f"-(-{rows} // {high})", f"-(-{columns} // {wide})"
    like, blocks = f"ts.like({name})", f"BM={high}, BN={wide}"
    turned = f"ts.like(shape=({columns}, {rows}), dtype={name}.dtype)"
    square = f"ts.like(shape=({rows}, {rows}), dtype={name}.dtype)"
    column = f"ts.like(shape=({rows},), dtype={name}.dtype)"
    return c.pick((
        f"ts.launch(squared_blocks, ({down}, {across}), {name}, {like}, {blocks})",
        f"ts.launch(turned_blocks, (1, {across}, {down}), {name}, {turned}, {blocks})",
        f"ts.launch(row_totals, ({rows},), {name}, {column}, COUNT={across}, BN={wide})",
        f"ts.launch(dot_blocks, ({down}, -(-{rows} // {wide})), {name}, ts.permute({name}, (1, 0)), {square}, "
        f"COUNT=-(-{columns} // 4), {blocks})",
        f"ts.launch(copied_rows, ({rows},), {name}, {like}, COLUMNS={columns})",
        f"ts.launch(parted, ({down},), {name}, {like}, {like}, BM={high}, COLUMNS={columns})[{c.draw(2)}]",
        f"ts.launch(stored_twice, ({rows},), {name}, {like}, COLUMNS={columns})",
        f"ts.launch(placed_rows, ({rows},), {name}, ts.flip(ts.arange({rows}), 0), {like}, COLUMNS={columns})",
        f"ts.launch(shared_edges, ({rows}, {across}), {name}, {like}, BN={wide})",
        f"ts.launch(met_rows, ({rows},), {name}, {column}, {like}, COLUMNS={columns})[1]",
        f"ts.launch(folded_rows, ({rows},), {name}, {like}, COLUMNS={columns})",
    ))  # fmt: skip
