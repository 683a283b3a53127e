"""The inner product kernel: a tile of C in registers, over all of K."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from tessera.codegen.llvm.types import Vec

UNROLL = 4
Sums = dict[str, str]  # the name of each register of the tile, by its place


@dataclass(frozen=True)
class Micro:
    """A tile of `rows` by `vectors` registers, all of one type; strides in elements.

    C[r, n] (+)= sum over k of A[r, k] B[k, n], where A has strides (`a_row`, `a_depth`), the rows of B
    lie `b_row` apart and those of C `c_row`.
    """

    type: Vec
    rows: int
    vectors: int
    depth: int
    a_row: int
    a_depth: int
    b_row: int
    c_row: int
    add: bool

    @property
    def name(self) -> str:
        """The name of the function, which says all of this."""
        word = "add" if self.add else "set"
        strides = f"a{self.a_row}x{self.a_depth}.b{self.b_row}.c{self.c_row}"
        return f"ts.dot.{self.type.suffix}.{self.rows}x{self.vectors}x{self.depth}.{strides}.{word}"

    def text(self) -> Iterator[str]:
        """The function."""
        yield f"define internal void @{self.name}(ptr noalias %a, ptr noalias %b, ptr noalias %c) noinline #0 {{"
        yield "entry:"
        rounds = self.depth // UNROLL
        state = {name: self.type.const(0) for name in self._tile()}
        if rounds:
            state = yield from self._loop(rounds, state)
        for k in range(rounds * UNROLL, self.depth):
            state = yield from self._step(f"t{k}", str(k), 0, state)
        yield from self._finish(state)
        yield "  ret void"
        yield "}"

    def _tile(self) -> list[str]:
        return [f"{r}.{n}" for r in range(self.rows) for n in range(self.vectors)]

    def _loop(self, rounds: int, state: Sums) -> Generator[str, None, Sums]:
        """The loop over K, a few steps a round; gives what is accumulated then."""
        yield "  br label %loop"
        yield "loop:"
        yield "  %k = phi i64 [ 0, %entry ], [ %k.next, %loop ]"
        for name, first in state.items():
            yield f"  %c.{name} = phi {self.type} [ {first}, %entry ], [ %c.{name}.{UNROLL - 1}, %loop ]"
        inner = {name: f"%c.{name}" for name in state}
        for u in range(UNROLL):
            inner = yield from self._step(str(u), "%k", u, inner)
        yield f"  %k.next = add nuw nsw i64 %k, {UNROLL}"
        yield f"  %again = icmp ult i64 %k.next, {rounds * UNROLL}"
        yield "  br i1 %again, label %loop, label %done"
        yield "done:"
        return inner

    def _step(self, tag: str, k: str, more: int, state: Sums) -> Generator[str, None, Sums]:
        """One k: a row of B, and each element of a column of A times it."""
        t, e = self.type, self.type.element
        yield f"  %pb.{tag} = getelementptr [{self.b_row} x {e}], ptr %b, i64 {k}, i64 {more * self.b_row}"
        for n in range(self.vectors):
            yield f"  %pb.{n}.{tag} = getelementptr {e}, ptr %pb.{tag}, i64 {n * t.width}"
            yield f"  %b.{n}.{tag} = load {t}, ptr %pb.{n}.{tag}, align {t.bits // 8}"
        yield f"  %pa.{tag} = getelementptr [{self.a_depth} x {e}], ptr %a, i64 {k}, i64 {more * self.a_depth}"
        for r in range(self.rows):
            yield from self._element(tag, r)
            for n in range(self.vectors):
                yield from self._multiply(f"{r}.{n}", tag, state[f"{r}.{n}"], f"%a.{r}.{tag}", f"%b.{n}.{tag}")
        return {name: f"%c.{name}.{tag}" for name in state}

    def _element(self, tag: str, r: int) -> Iterator[str]:
        t, e, to = self.type, self.type.element, f"%a.{r}.{tag}"
        yield f"  %pa.{r}.{tag} = getelementptr {e}, ptr %pa.{tag}, i64 {r * self.a_row}"
        if t.width == 1:
            yield f"  {to} = load {e}, ptr %pa.{r}.{tag}, align {t.bits // 8}"
            return
        yield f"  {to}.e = load {e}, ptr %pa.{r}.{tag}, align {t.bits // 8}"
        yield f"  {to}.s = insertelement {t} poison, {e} {to}.e, i64 0"
        yield f"  {to} = shufflevector {t} {to}.s, {t} poison, <{t.width} x i32> zeroinitializer"

    def _multiply(self, name: str, tag: str, total: str, a: str, b: str) -> Iterator[str]:
        t, d = self.type, f"%c.{name}.{tag}"
        if t.is_float:
            yield f"  {d} = call {t} @llvm.fma.{t.suffix}({t} {a}, {t} {b}, {t} {total})"
        else:
            yield f"  {d}.p = mul {t} {a}, {b}"
            yield f"  {d} = add {t} {total}, {d}.p"

    def _finish(self, state: Sums) -> Iterator[str]:
        """The tile put into C, or added to it: the product is rounded as a whole, then the sum."""
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


def shape_of(rows: int, vectors: int, registers: int) -> tuple[int, int]:
    """The tile (rows, vectors) with which a product of this size takes the least time.

    Per step of k a tile takes an instruction for each register of it, and part of one for each load;
    fewer than 8 sums leave the multiplier idle while it waits for the sum before.
    """

    def time(tile: tuple[int, int]) -> float:
        return sum(
            count * times * (max(8, r * v) + 0.4 * (r + v) + 0.5)
            for r, count in _parts(rows, tile[0])
            for v, times in _parts(vectors, tile[1])
        )

    tiles = [(r, v) for r in range(1, 15) for v in range(1, 5) if r * v + v + 2 <= registers]
    return min((t for t in tiles if t[0] <= rows and t[1] <= vectors), key=time, default=(1, 1))


def _parts(count: int, size: int) -> list[tuple[int, int]]:
    """A count as (size, how often), with the rest last."""
    return [(n, times) for n, times in ((size, count // size), (count % size, 1)) if n and times]
