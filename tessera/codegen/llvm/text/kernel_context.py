"""Kernel context: the state of emitting one tile function, which the emission tables and the walk share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tessera.codegen.llvm.passes.bufferisation import BufferisationPlan
from tessera.codegen.llvm.text.builder import LlvmBuilder
from tessera.codegen.llvm.text.memory import ScratchAllocator, StridedMemRef
from tessera.core.errors import Location, TesseraError
from tessera.core.symbolic_dim import Coefficient, Dim, Size
from tessera.ir.analysis import IntervalAnalysis
from tessera.ir.core import Function, Node, Value


class FunctionLibrary:
    """Functions by name, each defined once."""

    def __init__(self) -> None:
        self._functions: dict[str, list[str]] = {}
        self.sites: list[dict[str, Any]] = []  # the prints and assertions of the module, for the manifest

    def require(self, name: str, make: Callable[[], Iterable[str]]) -> str:
        """Define a function unless it is defined; its name."""
        if name not in self._functions:
            self._functions[name] = []
            self._functions[name] = list(make())
        return name

    def add_site(self, described: dict[str, Any]) -> int:
        """The number of a new print or assertion."""
        self.sites.append(described)
        return len(self.sites) - 1

    def text(self) -> Iterator[str]:
        """Every function, in the order of names."""
        for name in sorted(self._functions):
            yield from self._functions[name]
            yield ""


class LlvmSizeRegisters:
    """The registers of symbolic sizes: parameters, and expressions of them that the entry block computes."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[Size, str] = {}

    def find(self, size: Size) -> str:
        """The operand of a size: a literal, or a register."""
        if not isinstance(size, Dim):
            return str(size)
        if size not in self._names:
            terms = [self._multiply(monomial, count) for monomial, count in size.terms]
            total = terms[0]
            for each in terms[1:]:
                total = self._add("add", total, each)
            self._names[size] = total
        return self._names[size]

    def _multiply(self, monomial: tuple, count: Coefficient) -> str:
        product = str(count.numerator)
        for atom in monomial:
            factor = name_size_parameter(atom) if isinstance(atom, str) else self._divide(*atom)
            product = factor if product == "1" else self._add("mul", product, factor)
        return product if count.denominator == 1 else self._add("sdiv", product, str(count.denominator))

    def _divide(self, sign: str, left: Size, right: Size) -> str:
        """A floor quotient or its remainder."""
        a, b = self.find(left), self.find(right)
        rest = self._add("srem", a, b)
        self.lines.append(f"  {rest}.n = icmp slt i64 {rest}, 0")
        self.lines.append(f"  {rest}.a = select i1 {rest}.n, i64 {b}, i64 0")
        remainder = self._add("add", rest, f"{rest}.a")
        return remainder if sign == "%" else self._add("sdiv", self._add("sub", a, remainder), b)

    def _add(self, operation: str, a: str, b: str) -> str:
        name = f"%size{len(self.lines)}"
        self.lines.append(f"  {name} = {operation} i64 {a}, {b}")
        return name


def name_size_parameter(name: str) -> str:
    """The register of the parameter that holds a symbolic size."""
    return f"%size.{name}"


MAX_COPIED_OPS = 100


class LlvmKernelContext:
    """One tile function under emission.

    A value is in `scalars` (a register), in `memrefs` (refs), in `buffers` (blocks in scratch memory), or is fused:
    computed from its producer in each loop that uses it, as `pending` blocks are, too.
    """

    def __init__(
        self,
        function: Function,
        text: LlvmBuilder,
        library: FunctionLibrary,
        vector_bytes: int,
        grid: Sequence[float] | None,
        aliases: Mapping[tuple[int, int], bool] | None,
        pair_products: bool = False,
        byte_products: int = 1,
    ) -> None:
        self.pair_products, self.byte_products = pair_products, byte_products
        self.function, self.text, self.library, self.vector_bytes = function, text, library, vector_bytes
        self.scratch = ScratchAllocator(text)
        self.plan = BufferisationPlan(function, aliases)
        self.producers: dict[Value, Node] = {}
        self._grid = grid
        self.scalars: dict[Value, str] = {}
        self.memrefs: dict[Value, StridedMemRef] = {}
        self.buffers: dict[Value, StridedMemRef] = {}
        self.pending: dict[Value, None] = {}  # blocks to be stored that no loop has computed yet, in their order
        self.joined: dict[Value, StridedMemRef] = {}  # those that the loops at hand store as they compute them
        self.index_sites: dict[Node, int] = {}  # the sites of checked indices
        self.sizes = LlvmSizeRegisters()
        self._location: Location = function.loc
        self.assumed: dict[Value, tuple[int, int]] = {}  # the intervals of scalars that the branches around have found

    @contextmanager
    def assume(self, intervals: Mapping[Value, tuple[int, int]]) -> Iterator[None]:
        """Within the `with` block these scalars lie in these intervals, too, as a branch has found."""
        before, self.assumed = self.assumed, {**self.assumed, **intervals}
        try:
            with self.ranges.assume(self.assumed):
                yield
        finally:
            self.assumed = before

    @cached_property
    def ranges(self) -> IntervalAnalysis:
        """The intervals of the kernel's scalars."""
        return IntervalAnalysis(self.producers, self._grid)

    @cached_property
    def is_long(self) -> bool:
        """Whether a second copy of the function's loops costs more to compile than it is worth."""
        return sum(1 for _ in self.function.body.walk()) > MAX_COPIED_OPS

    @contextmanager
    def at_node(self, node: Node) -> Iterator[None]:
        """Attach the node's location to the lines and errors of the `with` block."""
        before, self._location = self._location, node.loc
        self.text.set_location(node.loc)
        try:
            yield
        except TesseraError as error:
            raise error.at(node.loc) from None
        finally:
            self._location = before
            self.text.set_location(before)
