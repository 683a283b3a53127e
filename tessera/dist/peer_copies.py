"""Peer copies: permutations of compiled programs by copy engines, into the memory of another process of this host.

A collective of NCCL occupies multiprocessors. A copy engine occupies none, and is given addresses, not a rank: the
sender must know where the receiver's result lies. Both ends therefore agree on a channel when a program is called
first. Results in the program's workspace lie at the same address in each call, whether a CUDA graph holds the call or
not, so that each rank may record its graphs whenever it likes.

An exchange is a handshake of two words, which are 0 between exchanges: a graph that is replayed finds them as it did
the first time.

    receiver: `free` = 1 at the sender: the memory of its result is not used any more
    sender:   waits for `free` = 1, sets it to 0, copies, and sets `filled` = 1 at the receiver
    receiver: waits for `filled` = 1, and sets it to 0

A rank grants its own memory before it waits for another's: no rank waits for one that waits for it. The sender writes
only where a call of the receiver waits for it: memory that the receiver has freed since is never written.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.device_array import DeviceArray, DeviceMemory, Rows
from tessera.core.errors import CollectiveError, DeadlockError, TesseraError

if TYPE_CHECKING:
    from tessera.dist.nccl import NcclWorld

Members = tuple[int, ...]
SWITCH = "TESSERA_PEER_COPIES"  # "0": NCCL makes all permutations
LEAST_BYTES = 1 << 16  # the handshake of a copy takes as long as NCCL takes for fewer
FLAG_BYTES, FLAGS_OF_PAGE = 64, 1 << 15  # 2 MiB: smaller allocations share theirs with others


@dataclass(frozen=True)
class WantedChannel:
    """A permutation of a program: its result has an address that is the same in each call, or none."""

    pairs: tuple[tuple[int, int], ...]
    members: Members
    address: int | None
    bytes: int

    def describe(self) -> str:
        """The permutation as all members must have it."""
        inside = [pair for pair in self.pairs if set(pair) <= set(self.members)]
        return f"collective_permute of {self.bytes} bytes, pairs {inside}"


Place = tuple[bytes, int]  # of memory: the handle of its allocation, and the offset in it


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others of a permutation: where its result and its two flags lie; none if it refuses."""

    call: str
    result: Place | None
    flags: Place | None


@dataclass(frozen=True)
class Channel:
    """A permutation of a program as this rank makes it: its ends, and the addresses that it writes and waits for.

    `target` is the result of the receiver, whose flag `filled_there` says that it is written; `free_here` is what the
    receiver sets before. `free_there` and `filled_here` are those of what this rank receives.
    """

    result: int
    bytes: int
    target: int | None = None
    free_here: int = 0
    filled_there: int = 0
    source: int | None = None
    free_there: int = 0
    filled_here: int = 0

    def exchange(self, memory: DeviceMemory, x: DeviceArray, out: DeviceArray, stream: int) -> None:
        """Queue the exchange on a stream."""
        assert out.address == self.result and x.nbytes == out.nbytes == self.bytes, "a channel of another call"
        if self.source is not None:
            memory.write_word(self.free_there, 1, stream)
        if self.target is not None:
            memory.wait_for_word(self.free_here, 1, stream)
            memory.write_word(self.free_here, 0, stream)
            rows = Rows(self.target, self.bytes), Rows(x.address, self.bytes)
            memory.copy_rows(*rows, self.bytes, 1, stream)
            memory.write_word(self.filled_there, 1, stream)
        if self.source is None:
            memory.clear(out, stream)
        else:
            memory.wait_for_word(self.filled_here, 1, stream)
            memory.write_word(self.filled_here, 0, stream)


class PeerCopies:
    """The memory of other ranks that this process has mapped, and what all members of a group agreed on.

    A mapping stays to the end: the same allocation has the same handle.
    """

    def __init__(self, world: NcclWorld) -> None:
        self.world = world
        self.reasons: dict[Members, str] = {}  # by group: why copy engines do not serve it; empty where they do
        self._mapped: dict[tuple[int, bytes], int] = {}
        self._rounds: dict[Members, int] = {}
        self._page: DeviceArray | None = None
        self._pages: list[DeviceArray] = []  # flags of channels live as long as the world
        self._taken = FLAGS_OF_PAGE

    def serve(self, members: Members) -> bool:
        """Whether copy engines reach the memory of all members of a group; the members agree on it once."""
        if len(members) < 2:
            return False
        if members not in self.reasons:
            offers = self._gather(members, self._introduce())
            found = self._gather(members, self._try_others(members, offers))
            self.reasons[members] = "; ".join(dict.fromkeys(each for each in found if each))
        return not self.reasons[members]

    def open(self, requests: Sequence[WantedChannel]) -> list[Channel | None]:
        """The channels of a program's permutations; none where NCCL makes them, at all ranks of the group alike.

        The members of a group call this at the same time, with the same permutations.

        Raises:
            CollectiveError: another rank's program has another permutation here.
            DeadlockError: another rank's program has none.
        """
        channels: list[Channel | None] = [None] * len(requests)
        for members in dict.fromkeys(request.members for request in requests):
            if self.serve(members):
                places = [i for i, request in enumerate(requests) if request.members == members]
                opened = self._open_in_group(members, [requests[i] for i in places])
                for i, channel in zip(places, opened, strict=True):
                    channels[i] = channel
        return channels

    def _open_in_group(self, members: Members, requests: Sequence[WantedChannel]) -> list[Channel | None]:
        own = [self._offer(request) for request in requests]
        by_rank = dict(zip(members, self._gather(members, [offer for offer, _ in own]), strict=True))
        self._compare(by_rank)
        channels = []
        for i, (request, (_, flags)) in enumerate(zip(requests, own, strict=True)):
            offers = {member: each[i] for member, each in by_rank.items()}
            channels.append(self._connect(request, offers, flags))
        agreed = self._gather(members, [channel is not None for channel in channels])
        return [c if all(each[i] for each in agreed) else None for i, c in enumerate(channels)]

    def _offer(self, request: WantedChannel) -> tuple[Offer, int]:
        """What this rank offers, and the address of its flags."""
        refused = Offer(request.describe(), None, None), 0
        if request.address is None or request.bytes < LEAST_BYTES:
            return refused
        share = self.world.memory.share
        try:
            flags = self._take_flags()
            return Offer(request.describe(), share(request.address), share(flags)), flags
        except TesseraError:
            return refused

    def _connect(self, request: WantedChannel, offers: dict[int, Offer], flags: int) -> Channel | None:
        """This rank's channel, if it reaches the memory of both its partners."""
        rank = self.world.rank
        if any(offer.result is None for offer in offers.values()):
            return None
        to = next((there for here, there in request.pairs if here == rank and there in offers), None)
        source = next((here for here, there in request.pairs if there == rank and here in offers), None)
        ends: dict[str, Any] = {}
        try:
            if to is not None:
                there = self._locate(to, offers[to].flags)
                ends |= {"target": self._locate(to, offers[to].result), "filled_there": there + FLAG_BYTES}
                ends["free_here"] = flags
            if source is not None:
                ends |= {"source": source, "free_there": self._locate(source, offers[source].flags)}
                ends["filled_here"] = flags + FLAG_BYTES
        except TesseraError:
            return None
        assert request.address is not None
        return Channel(request.address, request.bytes, **ends)

    def _compare(self, offers: dict[int, list[Offer]]) -> None:
        rank = self.world.rank
        own = [offer.call for offer in offers[rank]]
        for member, others in offers.items():
            if [offer.call for offer in others] != own:
                raise CollectiveError(
                    f"the programs of rank {rank} and rank {member} have other permutations",
                    expected=f"rank {member}: {[offer.call for offer in others]}", received=f"rank {rank}: {own}",
                    suggestion="let all ranks call the same function with arrays of the same types",
                )  # fmt: skip

    # What ranks tell each other: through files or MPI, so that nothing waits for a GPU.

    def _gather(self, members: Members, value: Any) -> list[Any]:
        """The values of all members, in their order."""
        world, number = self.world, self._rounds.get(members, 0)
        self._rounds[members] = number + 1
        group, data, found = "-".join(map(str, members)), pickle.dumps(value), []
        for member in members:
            order = (member, *(other for other in members if other != member))
            name = f"{world.name}-copies-{group}-{number}-{member}"
            try:
                found.append(pickle.loads(world.rendezvous.share(name, order, lambda: data)))
            except DeadlockError as error:
                raise DeadlockError(
                    f"rank {world.rank} agrees on copies with rank {member}, which does not come",
                    expected=f"ranks {members} run the same compiled programs in the same order",
                    received=error.received, suggestion=f"{SWITCH}=0 in all ranks leaves permutations to NCCL",
                ) from None  # fmt: skip
        return found

    def _introduce(self) -> tuple[str, Place | None, str]:
        """The host of this process, a place of its memory, and why it shares none."""
        if os.environ.get(SWITCH) == "0":
            return "", None, f"rank {self.world.rank} has {SWITCH}=0"
        try:
            return _name_host(), self.world.memory.share(self._take_flags()), ""
        except TesseraError as error:
            return "", None, f"rank {self.world.rank}: {error.message}"

    def _try_others(self, members: Members, offers: Sequence[tuple[str, Place | None, str]]) -> str:
        """Why this rank does not reach the memory of all members."""
        rank, host = self.world.rank, offers[members.index(self.world.rank)][0]
        for member, (other, place, reason) in zip(members, offers, strict=True):
            if reason:
                return reason
            if other != host:
                return f"ranks {rank} and {member} are on different hosts"
            try:
                if member != rank:
                    self._locate(member, place)
            except TesseraError as error:
                return f"rank {rank} cannot map the memory of rank {member}: {error.message}"
        return ""

    # Memory.

    def _locate(self, rank: int, place: Place | None) -> int:
        """The address in this process of a place in the memory of a rank."""
        assert place is not None
        handle, offset = place
        if rank == self.world.rank:
            raise CollectiveError(f"rank {rank} sends to itself, and maps no memory of its own")
        if (rank, handle) not in self._mapped:
            self._mapped[rank, handle] = self.world.memory.map_shared(handle)
        return self._mapped[rank, handle] + offset

    def _take_flags(self) -> int:
        """The address of two new flags, which are 0."""
        if self._page is None or self._taken + 2 > FLAGS_OF_PAGE:
            memory = self.world.memory
            stream = memory.find_stream()
            self._page, self._taken = memory.empty((FLAGS_OF_PAGE * FLAG_BYTES,), np.dtype(np.uint8), stream), 0
            self._pages.append(self._page)
            memory.clear(self._page, stream)
            memory.copy_out(self._page)  # it is clear before another rank hears of it
        found = self._page.address + self._taken * FLAG_BYTES
        self._taken += 2
        return found

    def close(self) -> None:
        """Give up the memory of other ranks; each frees its own when all have left their communicators."""
        if self._mapped:
            self.world.memory.unmap_shared(list(self._mapped.values()))
            self._mapped.clear()


def _name_host() -> str:
    """What tells this host from others, also where they have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")
