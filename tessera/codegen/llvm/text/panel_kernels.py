"""Panel kernels: all rows of A times one panel of B, by microkernels, or by the matrix unit of a processor (AMX).

A text defines each in plain LLVM IR, as calls of microkernels, so that it runs on every processor and in the emulator.
Where the processor has AMX, the runtime replaces the definition (`select_matrix_units`): A as it lies, in rows whose
lanes hold 2 or 4 elements of K, and a panel of B, whose rows hold such a lane for each column, are what its
instructions take (Intel, Architectures Software Developer's Manual, chapter 18; TDPBF16PS, TDPBUSD, TDPBSUD).

A block of 32 rows by 32 columns of C is in four tile registers, 16 rows by 16 lanes each. What is left of K behind the
last whole tile has a configuration of its own, so nothing is read past the operands. TDPBF16PS takes subnormal numbers
as zero: as with vector instructions, operands that may give them go through the plain definition.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tessera.codegen.llvm.text.pair_products import BF16, INT8_UINT8, UINT8_INT8, WIDTH, PairProduct

PANEL_KERNEL = "ts.panel"  # begins the name of each function
TILE_ROWS = 16  # of a tile register, and the lanes of its rows
LANE_BYTES = 4
LEAST_ROWS = 4  # with fewer rows a tile register is nearly empty, and vector instructions read a panel as fast
MATRIX_UNITS = {BF16: "amx-bf16", UINT8_INT8: "amx-int8", INT8_UINT8: "amx-int8"}  # features of processors
_INSTRUCTIONS = {BF16: "tdpbf16ps", UINT8_INT8: "tdpbusd", INT8_UINT8: "tdpbsud"}
DECLARATIONS = (
    "declare void @llvm.x86.ldtilecfg(ptr)",
    "declare void @llvm.x86.tilerelease()",
    "declare void @llvm.x86.tilezero(i8 immarg)",
    "declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)",
    "declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)",
    *(f"declare void @llvm.x86.{name}(i8 immarg, i8 immarg, i8 immarg)" for name in _INSTRUCTIONS.values()),
)
C_TILES, A_TILES, B_TILES = ((0, 1), (2, 3)), (4, 5), (6, 7)  # tile registers, of C by row and column
_NAME = re.compile(
    rf"{re.escape(PANEL_KERNEL)}\.(?P<pair>bf16|u8\.s8|s8\.u8)\.(?P<rows>\d+)x(?P<vectors>\d+)x(?P<depth>\d+)"
    r"\.t(?P<tile>\d+)\.a(?P<a_row>\d+)\.b(?P<b_row>\d+)\.c(?P<c_row>\d+)\.(?P<how>set|add)(?P<offset>\.offset)?"
)


@dataclass(frozen=True)
class PanelKernel:
    """C[r, n] (+)= sum over k of A[r, k] B[k, n] for all `rows` and for `vectors` registers of columns.

    `depth` counts lanes of K. Strides: of A in its elements, of B in lanes, of C in elements. `tile` are the rows of
    the microkernels of the plain definition. With `offset` the sums of a row begin with a number of that row.
    """

    pair: PairProduct
    rows: int
    vectors: int
    depth: int
    tile: int
    a_row: int
    b_row: int
    c_row: int
    add: bool
    offset: bool

    @property
    def name(self) -> str:
        """The name of the function, which encodes all fields."""
        size = f"{self.rows}x{self.vectors}x{self.depth}.t{self.tile}"
        how = ("add" if self.add else "set") + (".offset" if self.offset else "")
        return f"{PANEL_KERNEL}.{self.pair.name}.{size}.a{self.a_row}.b{self.b_row}.c{self.c_row}.{how}"

    @property
    def has_choice(self) -> bool:
        """Whether an argument says that the operands allow the instructions."""
        return self.pair is BF16

    @property
    def head(self) -> str:
        """The first line of the definition."""
        more = ", i1 %native" if self.has_choice else ", ptr noalias %offset" if self.offset else ""
        return f"define internal void @{self.name}(ptr noalias %a, ptr noalias %b, ptr noalias %c{more}) noinline #0 {{"

    def text(self, microkernels: Sequence[tuple[int, int, int, str]]) -> Iterator[str]:
        """The plain definition: for each (first row, count, rows, name) a loop that calls a microkernel."""
        yield self.head
        yield "entry:"
        yield "  br label %rows.0"
        for number, (first, count, size, name) in enumerate(microkernels):
            yield f"rows.{number}:"
            before = f"rows.{number - 1}" if number else "entry"
            yield f"  %n.{number} = phi i64 [ 0, %{before} ], [ %m.{number}, %rows.{number} ]"
            yield f"  %s.{number} = mul i64 %n.{number}, {size}"
            yield f"  %r.{number} = add i64 %s.{number}, {first}"
            yield from self._emit_call(number, name)
            yield f"  %m.{number} = add i64 %n.{number}, 1"
            yield f"  %more.{number} = icmp ult i64 %m.{number}, {count}"
            last = number == len(microkernels) - 1
            yield f"  br i1 %more.{number}, label %rows.{number}, label %{'done' if last else f'rows.{number + 1}'}"
        yield "done:"
        yield "  ret void"
        yield "}"

    def _emit_call(self, number: int, name: str) -> Iterator[str]:
        element = self.pair.element
        yield f"  %ao.{number} = mul i64 %r.{number}, {self.a_row}"
        yield f"  %pa.{number} = getelementptr {self.pair.unit}, ptr %a, i64 %ao.{number}"
        yield f"  %co.{number} = mul i64 %r.{number}, {self.c_row}"
        yield f"  %pc.{number} = getelementptr {element}, ptr %c, i64 %co.{number}"
        more = ", i1 %native" if self.has_choice else ""
        if self.offset:
            yield f"  %po.{number} = getelementptr i32, ptr %offset, i64 %r.{number}"
            more = f", ptr %po.{number}"
        yield f"  call void @{name}(ptr %pa.{number}, ptr %b, ptr %pc.{number}{more})"


def read_name(name: str) -> PanelKernel | None:
    """The panel kernel of that name, or None."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    pair = next(p for p in MATRIX_UNITS if p.name == found["pair"])
    sizes = {n: int(found[n]) for n in ("rows", "vectors", "depth", "tile", "a_row", "b_row", "c_row")}
    return PanelKernel(pair, **sizes, add=found["how"] == "add", offset=bool(found["offset"]))


# The definition for AMX.


class MatrixUnitText:
    """The definition of a panel kernel with tile registers: a loop over blocks of rows, and the block that is left."""

    def __init__(self, panel: PanelKernel) -> None:
        self.panel = panel
        self.whole, self.rest = divmod(panel.depth, TILE_ROWS)  # tiles along K, and the lanes behind them
        self.held = panel.add or panel.offset  # whether the sums wait in memory for what is added to them
        self.configurations: dict[tuple[int, int, int], str] = {}
        self.count = 0

    def text(self, plain: Sequence[str]) -> list[str]:
        """The function; `plain` are the lines of the plain definition between its first label and its end."""
        panel = self.panel
        blocks, left = divmod(panel.rows, 2 * TILE_ROWS)
        body = [panel.head, "entry:"]
        if self.held:
            body.append(f"  %sums = alloca [{2 * TILE_ROWS * panel.vectors * WIDTH} x {panel.pair.element}], align 64")
        if panel.has_choice:
            body += ["  br i1 %native, label %unit, label %plain", "plain:"]
            body += [line.replace("%entry ]", "%plain ]") for line in plain]
            body.append("unit:")
        if blocks:
            label = "unit" if panel.has_choice else "entry"
            body += ["  br label %block", "block:", f"  %i = phi i64 [ 0, %{label} ], [ %i.next, %block.end ]"]
            body += [f"  %row = mul i64 %i, {2 * TILE_ROWS}", *self._emit_block("%row", TILE_ROWS, TILE_ROWS)]
            body += ["  br label %block.end", "block.end:", "  %i.next = add i64 %i, 1"]
            body += [f"  %again = icmp ult i64 %i.next, {blocks}", "  br i1 %again, label %block, label %left", "left:"]
        if left:
            body += self._emit_block(str(blocks * 2 * TILE_ROWS), min(left, TILE_ROWS), max(left - TILE_ROWS, 0))
        body += ["  call void @llvm.x86.tilerelease()", "  ret void", "}"]
        return [*self._define_configurations(), *body]

    def _next(self, word: str) -> str:
        self.count += 1
        return f"{word}.u{self.count}"

    def _offset(self, base: str, element: str, index: str, stride: int, more: int = 0) -> Iterator[str]:
        """A pointer to `base` + index * stride + more elements; its name is that of the last line."""
        scaled, total, pointer = (self._next(w) for w in ("%m", "%t", "%p"))
        yield f"  {scaled} = mul i64 {index}, {stride}"
        yield f"  {total} = add i64 {scaled}, {more}"
        yield f"  {pointer} = getelementptr {element}, ptr {base}, i64 {total}"

    def _point(self, lines: list[str], *arguments: object) -> str:
        lines += self._offset(*arguments)  # type: ignore[arg-type]
        return lines[-1].split(" = ")[0].strip()

    def _emit_block(self, row: str, upper: int, lower: int) -> list[str]:
        """`upper` rows, and `lower` more rows behind 16, times the whole panel."""
        panel, lines = self.panel, list[str]()
        a = self._point(lines, "%a", panel.pair.unit, row, panel.a_row)
        c = self._point(lines, "%c", panel.pair.element, row, panel.c_row)
        target, stride = ("%sums", panel.vectors * WIDTH) if self.held else (c, panel.c_row)
        rows = (upper, lower) if lower else (upper,)
        if self.whole:
            lines.append(self._configure(rows, TILE_ROWS))
            for first in range(0, panel.vectors, 2):
                lines += self._emit_whole(rows, first, a, target, stride)
        if self.rest:
            lines.append(self._configure(rows, self.rest))
            for first in range(0, panel.vectors, 2):
                lines += self._emit_rest(rows, first, a, target, stride)
        return [*lines, *self._add_sums(row, c, upper + lower)] if self.held else lines

    def _columns(self, first: int) -> range:
        return range(min(2, self.panel.vectors - first))

    def _move_c(self, name: str, rows: Sequence[int], first: int, target: str, stride: int) -> list[str]:
        """Load the tiles of C, store them, or clear them."""
        lines: list[str] = []
        for r in range(len(rows)):
            for n in self._columns(first):
                if name == "tilezero":
                    lines.append(f"  call void @llvm.x86.tilezero(i8 {C_TILES[r][n]})")
                    continue
                at = self._point(
                    lines, target, self.panel.pair.element, str(r * TILE_ROWS), stride, (first + n) * WIDTH
                )
                lines.append(f"  call void @llvm.x86.{name}(i8 {C_TILES[r][n]}, ptr {at}, i64 {LANE_BYTES * stride})")
        return lines

    def _multiply(self, rows: Sequence[int], first: int, a: str, k: str) -> list[str]:
        """One tile along K, the number `k`: the tiles of A and B, and every product."""
        panel, lines = self.panel, list[str]()
        for r in range(len(rows)):
            more = r * TILE_ROWS * panel.a_row
            at = self._point(lines, a, panel.pair.unit, k, TILE_ROWS * panel.pair.parts, more)
            stride = panel.a_row * LANE_BYTES // panel.pair.parts
            lines.append(f"  call void @llvm.x86.tileloadd64(i8 {A_TILES[r]}, ptr {at}, i64 {stride})")
        for n in self._columns(first):
            at = self._point(lines, "%b", "i32", k, TILE_ROWS * panel.b_row, (first + n) * WIDTH)
            lines.append(
                f"  call void @llvm.x86.tileloadd64(i8 {B_TILES[n]}, ptr {at}, i64 {LANE_BYTES * panel.b_row})"
            )
        for n in self._columns(first):
            for r in range(len(rows)):
                tiles = f"i8 {C_TILES[r][n]}, i8 {A_TILES[r]}, i8 {B_TILES[n]}"
                lines.append(f"  call void @llvm.x86.{_INSTRUCTIONS[panel.pair]}({tiles})")
        return lines

    def _emit_whole(self, rows: Sequence[int], first: int, a: str, target: str, stride: int) -> list[str]:
        """All whole tiles along K, for two registers of columns."""
        before, loop, after, k, again = (self._next(w) for w in ("before", "loop", "after", "%k", "%again"))
        return [
            f"  br label %{before}", f"{before}:",
            *self._move_c("tilezero", rows, first, target, stride),
            f"  br label %{loop}", f"{loop}:",
            f"  {k} = phi i64 [ 0, %{before} ], [ {k}.next, %{loop} ]",
            *self._multiply(rows, first, a, k),
            f"  {k}.next = add i64 {k}, 1", f"  {again} = icmp ult i64 {k}.next, {self.whole}",
            f"  br i1 {again}, label %{loop}, label %{after}", f"{after}:",
            *self._move_c("tilestored64", rows, first, target, stride),
        ]  # fmt: skip

    def _emit_rest(self, rows: Sequence[int], first: int, a: str, target: str, stride: int) -> list[str]:
        """What is left of K, for two registers of columns."""
        return [
            *self._move_c("tileloadd64" if self.whole else "tilezero", rows, first, target, stride),
            *self._multiply(rows, first, a, str(self.whole)),
            *self._move_c("tilestored64", rows, first, target, stride),
        ]

    def _add_sums(self, row: str, c: str, rows: int) -> list[str]:
        """Add the sums of a block to C, or to the number of each row: a loop over its rows."""
        panel = self.panel
        t = f"<{WIDTH} x {panel.pair.element}>"
        add = "fadd" if panel.pair.element == "float" else "add"
        before, loop, after, r, again = (self._next(w) for w in ("before", "add", "after", "%r", "%again"))
        lines = [f"  br label %{before}", f"{before}:", f"  br label %{loop}", f"{loop}:"]
        lines.append(f"  {r} = phi i64 [ 0, %{before} ], [ {r}.next, %{loop} ]")
        offset = self._load_offset(lines, row, r) if panel.offset else ""
        for n in range(panel.vectors):
            at, place = (
                self._point(lines, base, panel.pair.element, r, stride, n * WIDTH)
                for base, stride in (("%sums", panel.vectors * WIDTH), (c, panel.c_row))
            )
            total, old, new, out = (self._next(w) for w in ("%sum", "%old", "%new", "%out"))
            lines.append(f"  {total} = load {t}, ptr {at}, align 64")
            if offset:
                lines.append(f"  {new} = add {t} {total}, {offset}")
                total = new
            if panel.add:
                lines.append(f"  {old} = load {t}, ptr {place}, align 4")
                lines.append(f"  {out} = {add} {t} {old}, {total}")
                total = out
            lines.append(f"  store {t} {total}, ptr {place}, align 4")
        lines += [f"  {r}.next = add i64 {r}, 1", f"  {again} = icmp ult i64 {r}.next, {rows}"]
        return [*lines, f"  br i1 {again}, label %{loop}, label %{after}", f"{after}:"]

    def _load_offset(self, lines: list[str], row: str, r: str) -> str:
        """The number that the sums of a row begin with, in every lane."""
        number, one, lane, every = (self._next(w) for w in ("%row", "%one", "%lane", "%every"))
        lines.append(f"  {number} = add i64 {row}, {r}")
        at = self._point(lines, "%offset", "i32", number, 1)
        lines.append(f"  {one} = load i32, ptr {at}, align 4")
        lines.append(f"  {lane} = insertelement <{WIDTH} x i32> poison, i32 {one}, i64 0")
        lines.append(
            f"  {every} = shufflevector <{WIDTH} x i32> {lane}, <{WIDTH} x i32> poison, <{WIDTH} x i32> zeroinitializer"
        )
        return every

    def _configure(self, rows: Sequence[int], lanes: int) -> str:
        """Load the configuration for blocks of these rows and for so many lanes of K."""
        upper, lower = (*rows, 0)[:2]
        name = f"@{self.panel.name}.tiles.{upper}.{lower}.{lanes}"
        self.configurations[upper, lower, lanes] = name
        return f"  call void @llvm.x86.ldtilecfg(ptr {name})"

    def _define_configurations(self) -> Iterator[str]:
        """Palette 1: the bytes of a row of each tile register, then its rows."""
        for (upper, lower, lanes), name in self.configurations.items():
            shapes = [(0, 0)] * 16
            for r, rows in enumerate((upper, lower)):
                for tile in (*C_TILES[r], A_TILES[r]):
                    shapes[tile] = (rows, LANE_BYTES * (lanes if tile in A_TILES else TILE_ROWS) if rows else 0)
            for tile in B_TILES:
                shapes[tile] = (lanes, LANE_BYTES * TILE_ROWS)
            data = bytes([1, *[0] * 15]) + b"".join(n.to_bytes(2, "little") for _, n in shapes)
            data += bytes(rows for rows, _ in shapes)
            shown = "".join(f"\\{byte:02X}" for byte in data)
            yield f'{name} = internal constant [{len(data)} x i8] c"{shown}", align 64'


_DEFINITION = re.compile(rf"^define internal void @({re.escape(PANEL_KERNEL)}\.[\w.]+)\([^\n]*\n(.*?)^}}$", re.M | re.S)


def select_matrix_units(text: str, features: Collection[str]) -> str:
    """A text with the panel kernels that a processor has a matrix unit for as its instructions."""
    used = False

    def replace(found: re.Match[str]) -> str:
        nonlocal used
        panel = read_name(found[1])
        if panel is None or MATRIX_UNITS[panel.pair] not in features or panel.rows < LEAST_ROWS:
            return found[0]
        used = True
        return "\n".join(MatrixUnitText(panel).text(found[2].splitlines()[1:]))

    new = _DEFINITION.sub(replace, text)
    return "\n".join([new, *(d for d in DECLARATIONS if d not in new), ""]) if used else text
