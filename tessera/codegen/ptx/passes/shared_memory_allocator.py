"""Shared memory allocator: offsets of shared and local buffers, and the exchange buffer after them."""

from __future__ import annotations

from collections.abc import Iterator

from tessera.codegen.ptx.text.thread_team import ThreadTeam
from tessera.core.symbolic_dim import round_up

EXCHANGE_ALIGN = 128
SHARED_SYMBOL = "tessera_shared"
LOCAL_SYMBOL = "tessera_local"


class SharedMemoryAllocator:
    """Bump allocator for shared and local memory; one exchange buffer for layout conversions follows all else."""

    def __init__(self, team: ThreadTeam) -> None:
        self._team = team
        self._shared = self._local = self._exchange = 0
        self._base = self._start = ""

    def allocate_shared(self, size: int, alignment: int) -> int:
        """Allocate shared memory; its offset."""
        place = round_up(self._shared, max(alignment, 16))
        self._shared = place + size
        return place

    def allocate_local(self, size: int) -> int:
        """Allocate local memory of each thread; its offset."""
        place = round_up(self._local, 16)
        self._local = place + size
        return place

    def reserve_exchange(self, size: int) -> str:
        """The address of the exchange buffer, of at least `size` bytes: a 32-bit register (shared memory), or a 64-bit
        one (local memory) for a team of one thread."""
        self._exchange = max(self._exchange, size)
        if not self._base:
            self._base = self._team.text.new("b64" if self.exchange_is_local else "b32")
            self._start = self._team.text.new("b32") if self._team.teams > 1 else ""
        return self._base

    @property
    def exchange_is_local(self) -> bool:
        """Whether the exchange buffer is in local memory."""
        return self._team.threads == 1

    @property
    def shared_bytes(self) -> int:
        """The bytes of dynamic shared memory that a block needs."""
        exchange = round_up(self._exchange, EXCHANGE_ALIGN) * (self._team.teams - 1) + self._exchange
        return round_up(self._shared, EXCHANGE_ALIGN) + (exchange if self._base and not self.exchange_is_local else 0)

    def format_prologue(self) -> Iterator[str]:
        """The first lines of the entry: the local memory, and the address of the exchange buffer."""
        start = round_up(self._local, 16)
        total = start + (self._exchange if self._base and self.exchange_is_local else 0)
        if total:
            yield f"\t.local .align 16 .b8 {LOCAL_SYMBOL}[{total}];"
        if self._base and self.exchange_is_local:
            yield f"\tmov.u64 {self._base}, {LOCAL_SYMBOL};"
            yield f"\tadd.s64 {self._base}, {self._base}, {start};"
        elif self._base:
            yield f"\tmov.u32 {self._base}, {SHARED_SYMBOL};"
            yield f"\tadd.s32 {self._base}, {self._base}, {round_up(self._shared, EXCHANGE_ALIGN)};"
            if self._start:  # each team has its own
                yield f"\tmov.u32 {self._start}, %tid.x;"
                yield f"\tdiv.u32 {self._start}, {self._start}, {self._team.threads};"
                stride = round_up(self._exchange, EXCHANGE_ALIGN)
                yield f"\tmad.lo.s32 {self._base}, {self._start}, {stride}, {self._base};"
