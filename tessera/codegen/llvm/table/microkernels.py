"""Microkernels: a register tile of a product over all of K.

A microkernel of pairs multiplies 16-bit elements, two of K at a time, one of quads 8-bit elements, four at a time
(`tessera/codegen/llvm/text/pair_products.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from tessera.codegen.llvm.text.builder import RegisterType
from tessera.codegen.llvm.text.pair_products import EXACT_BF16, PairProduct

# Microkernels: a register tile of C, over all of K.


K_UNROLL = 4
AccumulatorNames = dict[str, str]  # "row.vector" of the register tile to the register's name


@dataclass(frozen=True)
class MicroKernel:
    """A register tile of `rows` by `vectors` registers of one type; strides in elements.

    C[r, n] (+)= sum over k of A[r, k] B[k, n], where A has strides (`a_row`, `a_depth`), B has row stride `b_row` and C
    `c_row`. With a `pair` product an element of B, and one k, is two numbers of 16 bits or four of 8, and the strides
    of A count such numbers. With `offset` the sums of a row begin with a number of that row. An indexed A
    has A[r, k] at rows[r] + depths[k] bytes from `a`, an indexed B its row k at depths[k] bytes from `b`, as in an
    implicit GEMM of windows (Dukhan 2019, the indirect convolution). With `ahead` the rows of the next tile are
    fetched: A streams from memory.
    """

    type: RegisterType
    rows: int
    vectors: int
    depth: int
    a_row: int
    a_depth: int
    b_row: int
    c_row: int
    add: bool
    pair: PairProduct | None = None
    offset: bool = False
    indexed: str = ""  # "a", "b" or none
    ahead: bool = False

    @property
    def unroll(self) -> int:
        """The steps of K in an iteration of the loop; the kernel for rare operands is short."""
        return 1 if self.pair is EXACT_BF16 else K_UNROLL

    @property
    def name(self) -> str:
        """The name of the function, which encodes all fields."""
        word = ("add" if self.add else "set") + (f".{self.pair.name}" if self.pair else "")
        word += (".offset" if self.offset else "") + (f".indexed.{self.indexed}" if self.indexed else "")
        word += ".ahead" if self.ahead else ""
        strides = f"a{self.a_row}x{self.a_depth}.b{self.b_row}.c{self.c_row}"
        return f"ts.dot.{self.type.suffix}.{self.rows}x{self.vectors}x{self.depth}.{strides}.{word}"

    def text(self) -> Iterator[str]:
        """The function's lines."""
        more = ("offset",) if self.offset else {"a": ("rows", "depths"), "b": ("depths",)}.get(self.indexed, ())
        names = ("a", "b", "c", *more)
        parameters = ", ".join(f"ptr noalias %{name}" for name in names)
        yield f"define internal void @{self.name}({parameters}) noinline #0 {{"
        yield "entry:"
        iterations = self.depth // self.unroll
        if self.indexed == "a":
            yield from self._load_rows()
        state = yield from self._load_offsets() if self.offset else self._clear()
        if iterations:
            state = yield from self._emit_loop(iterations, state)
        for k in range(iterations * self.unroll, self.depth):
            state = yield from self._emit_step(f"t{k}", str(k), 0, state)
        yield from self._store_tile(state)
        yield "  ret void"
        yield "}"

    def _accumulator_names(self) -> list[str]:
        return [f"{r}.{n}" for r in range(self.rows) for n in range(self.vectors)]

    def _clear(self) -> Generator[str, None, AccumulatorNames]:
        yield from ()
        return {name: self.type.const(0) for name in self._accumulator_names()}

    def _load_offsets(self) -> Generator[str, None, AccumulatorNames]:
        """The number with which the sums of each row begin."""
        t = self.type
        for r in range(self.rows):
            yield f"  %po.{r} = getelementptr {t.element}, ptr %offset, i64 {r}"
            yield f"  %o.{r}.e = load {t.element}, ptr %po.{r}, align {t.bits // 8}"
            yield f"  %o.{r}.s = insertelement {t} poison, {t.element} %o.{r}.e, i64 0"
            yield f"  %o.{r} = shufflevector {t} %o.{r}.s, {t} poison, <{t.width} x i32> zeroinitializer"
        return {name: f"%o.{name.split('.')[0]}" for name in self._accumulator_names()}

    def _load_rows(self) -> Iterator[str]:
        """The offset of each row of A."""
        for r in range(self.rows):
            yield f"  %pr.{r} = getelementptr i64, ptr %rows, i64 {r}"
            yield f"  %row.{r} = load i64, ptr %pr.{r}, align 8"

    def _emit_loop(self, iterations: int, state: AccumulatorNames) -> Generator[str, None, AccumulatorNames]:
        """The loop over K, unrolled; the accumulators after it."""
        yield "  br label %loop"
        yield "loop:"
        yield "  %k = phi i64 [ 0, %entry ], [ %k.next, %loop ]"
        for name, first in state.items():
            yield f"  %c.{name} = phi {self.type} [ {first}, %entry ], [ %c.{name}.{self.unroll - 1}, %loop ]"
        inner = {name: f"%c.{name}" for name in state}
        for u in range(self.unroll):
            inner = yield from self._emit_step(str(u), "%k", u, inner)
        yield f"  %k.next = add nuw nsw i64 %k, {self.unroll}"
        yield f"  %again = icmp ult i64 %k.next, {iterations * self.unroll}"
        yield "  br i1 %again, label %loop, label %done"
        yield "done:"
        return inner

    def _emit_step(
        self, tag: str, k: str, more: int, state: AccumulatorNames
    ) -> Generator[str, None, AccumulatorNames]:
        """One k: a row of B times each element of a column of A."""
        t = self._operand_type()
        e, own = t.element, self.pair.unit if self.pair else t.element
        if self.indexed:
            yield f"  %pk.{tag} = getelementptr [1 x i64], ptr %depths, i64 {k}, i64 {more}"
            yield f"  %depth.{tag} = load i64, ptr %pk.{tag}, align 8"
        if self.indexed == "b":
            yield f"  %pb.{tag} = getelementptr i8, ptr %b, i64 %depth.{tag}"
        else:
            yield f"  %pb.{tag} = getelementptr [{self.b_row} x {e}], ptr %b, i64 {k}, i64 {more * self.b_row}"
        for n in range(self.vectors):
            yield f"  %pb.{n}.{tag} = getelementptr {e}, ptr %pb.{tag}, i64 {n * t.width}"
            yield f"  %b.{n}.{tag} = load {t}, ptr %pb.{n}.{tag}, align {t.bits // 8}"
        if self.indexed == "a":
            yield f"  %pa.{tag} = getelementptr i8, ptr %a, i64 %depth.{tag}"
        else:
            yield f"  %pa.{tag} = getelementptr [{self.a_depth} x {own}], ptr %a, i64 {k}, i64 {more * self.a_depth}"
        if (self.indexed or self.ahead) and tag == "0":
            yield from self._prefetch_next(tag)
        for r in range(self.rows):
            yield from self._broadcast_a(tag, r)
            for n in range(self.vectors):
                yield from self._emit_fma(f"{r}.{n}", tag, state[f"{r}.{n}"], f"%a.{r}.{tag}", f"%b.{n}.{tag}")
        return {name: f"%c.{name}.{tag}" for name in state}

    def _prefetch_next(self, tag: str) -> Iterator[str]:
        """Fetch what the next tile reads of an operand, once in an iteration of the loop: the lines of an indexed one
        have no order that the processor would see, and those of some rows are too few for it to see one."""
        for r in range(self.rows if self.ahead else 0):
            yield f"  %pf.{r} = getelementptr {self.type.element}, ptr %pa.{tag}, i64 {(self.rows + r) * self.a_row}"
            yield f"  call void @llvm.prefetch.p0(ptr %pf.{r}, i32 0, i32 2, i32 1)"
        for r in range(self.rows if self.indexed == "a" else 0):
            yield f"  %pn.{r} = getelementptr i64, ptr %rows, i64 {self.rows + r}"
            yield f"  %next.{r} = load i64, ptr %pn.{r}, align 8"
            yield f"  %pf.{r} = getelementptr i8, ptr %pa.{tag}, i64 %next.{r}"
            yield f"  call void @llvm.prefetch.p0(ptr %pf.{r}, i32 0, i32 3, i32 1)"
        for n in range(self.vectors if self.indexed == "b" else 0):
            t = self._operand_type()
            yield f"  %pf.{n} = getelementptr {t.element}, ptr %pb.{tag}, i64 {(self.vectors + n) * t.width}"
            yield f"  call void @llvm.prefetch.p0(ptr %pf.{n}, i32 0, i32 3, i32 1)"

    def _operand_type(self) -> RegisterType:
        """The type of the registers of A and B: a pair is an integer of 32 bits."""
        return self.type.of("i32") if self.pair else self.type

    def _broadcast_a(self, tag: str, r: int) -> Iterator[str]:
        t, to = self._operand_type(), f"%a.{r}.{tag}"
        e, own = t.element, self.pair.unit if self.pair else t.element
        aligned = t.bits // 8 // (self.pair.parts if self.pair else 1)
        step = (
            f"i8, ptr %pa.{tag}, i64 %row.{r}" if self.indexed == "a" else f"{own}, ptr %pa.{tag}, i64 {r * self.a_row}"
        )
        yield f"  %pa.{r}.{tag} = getelementptr {step}"
        if t.width == 1:
            yield f"  {to} = load {e}, ptr %pa.{r}.{tag}, align {aligned}"
            return
        yield f"  {to}.e = load {e}, ptr %pa.{r}.{tag}, align {aligned}"
        yield f"  {to}.s = insertelement {t} poison, {e} {to}.e, i64 0"
        yield f"  {to} = shufflevector {t} {to}.s, {t} poison, <{t.width} x i32> zeroinitializer"

    def _emit_fma(self, name: str, tag: str, total: str, a: str, b: str) -> Iterator[str]:
        t, d = self.type, f"%c.{name}.{tag}"
        if self.pair:
            yield f"  {d} = {self.pair.call(total, a, b)}"
        elif t.is_float:
            yield f"  {d} = call {t} @llvm.fma.{t.suffix}({t} {a}, {t} {b}, {t} {total})"
        else:
            yield f"  {d}.p = mul {t} {a}, {b}"
            yield f"  {d} = add {t} {total}, {d}.p"

    def _store_tile(self, state: AccumulatorNames) -> Iterator[str]:
        """Store the tile in C, or add it to C: the product is rounded, then the sum."""
        t = self.type
        for r in range(self.rows):
            for n in range(self.vectors):
                name, total = f"{r}.{n}", state[f"{r}.{n}"]
                place = r * self.c_row + n * t.width
                yield f"  %pc.{name} = getelementptr {t.element}, ptr %c, i64 {place}"
                if self.add:
                    yield f"  %old.{name} = load {t}, ptr %pc.{name}, align {t.bits // 8}"
                    yield f"  %sum.{name} = {'fadd' if t.is_float else 'add'} {t} %old.{name}, {total}"
                    total = f"%sum.{name}"
                yield f"  store {t} {total}, ptr %pc.{name}, align {t.bits // 8}"


def choose_register_tile(rows: int, vectors: int, registers: int) -> tuple[int, int]:
    """The register tile (rows, vectors) of least cost for a product of this size.

    A step of k costs an instruction for each register of the tile and a fraction for each load; fewer than 8
    accumulators do not hide the latency of an FMA.
    """

    def estimate_cost(tile: tuple[int, int]) -> float:
        return sum(
            count * times * (max(8, r * v) + 0.4 * (r + v) + 0.5)
            for r, count in _count_tiles(rows, tile[0])
            for v, times in _count_tiles(vectors, tile[1])
        )

    tiles = [(r, v) for r in range(1, 15) for v in range(1, 5) if r * v + v + 2 <= registers]
    return min((t for t in tiles if t[0] <= rows and t[1] <= vectors), key=estimate_cost, default=(1, 1))


def _count_tiles(count: int, size: int) -> list[tuple[int, int]]:
    """A size as (tile size, count) pairs, the remainder last."""
    return [(n, times) for n, times in ((size, count // size), (count % size, 1)) if n and times]
