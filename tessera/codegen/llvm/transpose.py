"""A square of vectors turned about its diagonal: columns of memory become rows by shuffles, not gathers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tessera.codegen.llvm.types import Vec


@dataclass(frozen=True)
class Transpose:
    """dst[i, j] = src[j, i] for a square as wide as a register; rows lie `source` and `target` elements apart."""

    type: Vec
    source: int
    target: int

    @property
    def name(self) -> str:
        """The name of the function."""
        return f"ts.transpose.{self.type.suffix}.{self.source}.{self.target}"

    def text(self) -> Iterator[str]:
        """The function."""
        t, n = self.type, self.type.width
        yield f"define internal void @{self.name}(ptr noalias %src, ptr noalias %dst) noinline #0 {{"
        yield "entry:"
        for i in range(n):
            yield f"  %p{i} = getelementptr {t.element}, ptr %src, i64 {i * self.source}"
            yield f"  %x{i}.0 = load {t}, ptr %p{i}, align {t.bits // 8}"
        step = 1
        while step < n:
            for i in range(n):
                yield from self._exchange(i, step)
            step *= 2
        for i in range(n):
            yield f"  %q{i} = getelementptr {t.element}, ptr %dst, i64 {i * self.target}"
            yield f"  store {t} %x{i}.{n.bit_length() - 1}, ptr %q{i}, align {t.bits // 8}"
        yield "  ret void"
        yield "}"

    def _exchange(self, i: int, step: int) -> Iterator[str]:
        """Rows `step` apart swap the halves (of squares of 2 `step`) that lie off the diagonal."""
        t, n, stage = self.type, self.type.width, step.bit_length() - 1
        first, second = i & ~step, i | step
        low = i == first
        # A pick from n on is an element of the second row.
        picks = [
            (lane if low else lane + step) if not lane & step else (n + lane - (step if low else 0))
            for lane in range(n)
        ]
        listed = ", ".join(f"i32 {p}" for p in picks)
        rows = f"{t} %x{first}.{stage}, {t} %x{second}.{stage}"
        yield f"  %x{i}.{stage + 1} = shufflevector {rows}, <{n} x i32> <{listed}>"
