"""Simulated engine: all ranks of a mesh side by side in one process, one at a time, with every exchange checked.

Each rank is a thread, but only one runs: a rank runs until it must wait for another, and then the next one in order
continues. A run is therefore deterministic, and what the ranks of a program do wrong together is found where it
happens: other collectives or shapes in one group, a rank that never arrives, messages that nobody sends or receives.
"""

from __future__ import annotations

import contextvars
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.core.device import THREAD_ENDINGS
from tessera.core.errors import CollectiveError, DeadlockError, TesseraError
from tessera.core.types import as_dtype
from tessera.dist.exchange import combine


class _Stopped(BaseException):
    """Ends a rank after another one failed."""


@dataclass(eq=False)
class Request:
    """What one rank passes to a collective, or waits for, and the result when it is known."""

    rank: int
    kind: str
    array: np.ndarray
    attrs: Mapping[str, Any]
    members: tuple[int, ...]
    site: str
    world: SimulatedWorld = field(repr=False)
    result: np.ndarray | None = None

    def wait(self) -> np.ndarray:
        """The result of the collective; other ranks run until it is known."""
        while self.result is None:
            self.world.suspend(self.rank, self)
        return self.result

    def describe(self) -> str:
        """The call as a user wrote it: kind, type and place."""
        return f"{describe_call(self.kind, self.array, self.attrs)} at {self.site or 'an unknown line'}"

    def key(self) -> tuple[Any, ...]:
        """What must be equal on all ranks of the group."""
        return self.kind, self.array.shape, self.array.dtype, tuple(sorted(self.attrs.items()))


def describe_call(kind: str, array: np.ndarray, attrs: Mapping[str, Any]) -> str:
    """A collective with its attributes and the type of its operand.

    >>> describe_call("all_reduce", np.zeros((2, 3), np.float32), {"kind": "sum"})
    'all_reduce(2x3xf32, kind=sum)'
    """
    type = "x".join([*map(str, array.shape), str(as_dtype(array.dtype)).removeprefix("ts.")])
    return f"{kind}({', '.join([type, *(f'{k}={v}' for k, v in attrs.items())])})"


@dataclass
class _Rank:
    """The state of a rank: its turn, what it waits for, and how it ended."""

    turn: threading.Semaphore
    waiting: Request | None = None
    last: str = ""
    ended: bool = False
    result: Any = None


class SimulatedWorld:
    """The ranks of one run of a program.

    >>> world = SimulatedWorld(2)
    >>> world.run([lambda: 10, lambda: 11])
    [10, 11]
    """

    check, on_device = True, False
    direct_arrays: type | None = None  # each call is compared with those of the other ranks

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks = [_Rank(threading.Semaphore(0)) for _ in range(size)]
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._failed = -1
        self._counts: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self._open: dict[tuple[tuple[int, ...], int], dict[int, Request]] = defaultdict(dict)
        self._mail: dict[tuple[int, int, int], deque[tuple[np.ndarray, str]]] = defaultdict(deque)

    # Running the ranks in turn.

    def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of the ranks' programs; the first error of a rank ends them all.

        Raises:
            CollectiveError: ranks disagree on a collective, or a message was never received.
            DeadlockError: ranks wait, and no rank is left that could go on.
        """
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._run_rank, r, p), name=f"rank {r}", daemon=True
            )
            for r, p in enumerate(programs)
        ]
        for thread in threads:
            thread.start()
        self._ranks[0].turn.release()
        self._ended.wait()
        for thread in threads:
            thread.join()
        if self._error is not None:
            if not isinstance(self._error, TesseraError) and hasattr(self._error, "add_note"):
                self._error.add_note(f"(in rank {self._failed} of {self.size})")
            raise self._error
        self._check_mail()
        return [r.result for r in self._ranks]

    def _run_rank(self, rank: int, program: Callable[[], Any]) -> None:
        own = self._ranks[rank]
        own.turn.acquire()
        try:
            if self._error is None:
                own.result = program()
        except _Stopped:
            pass
        except BaseException as error:
            if self._error is None:
                self._error, self._failed = error, rank
        for leave in THREAD_ENDINGS:
            leave()
        own.ended = True
        self._pass_turn(rank)

    def _pass_turn(self, rank: int) -> None:
        """Let the next rank run: one that waits for nothing, or after an error any that has not ended."""
        order = [(rank + i) % self.size for i in range(1, self.size + 1)]
        left = [r for r in order if not self._ranks[r].ended]
        ready = [r for r in left if self._error is not None or self._ranks[r].waiting is None]
        if not left:
            self._ended.set()
        elif ready:
            self._ranks[ready[0]].turn.release()
        else:
            self._error = self._find_deadlock()
            self._ranks[left[0]].turn.release()

    def suspend(self, rank: int, request: Request) -> None:
        """Let other ranks run until a request has its result.

        Raises:
            _Stopped: another rank failed.
        """
        own = self._ranks[rank]
        own.waiting = request
        self._pass_turn(rank)
        own.turn.acquire()
        if self._error is not None:
            raise _Stopped
        assert request.result is not None

    def _complete(self, request: Request, result: np.ndarray) -> None:
        request.result = result
        if self._ranks[request.rank].waiting is request:
            self._ranks[request.rank].waiting = None

    # Collectives: the n-th of each rank in a group is the n-th of all of them.

    def start(
        self, rank: int, kind: str, x: np.ndarray, members: tuple[int, ...], attrs: Mapping[str, Any], site: str,
        blocking: bool = False,
    ) -> Request:  # fmt: skip
        """Start a collective of a group.

        Raises:
            CollectiveError: another rank of the group started another collective, or one of another type.
        """
        request = Request(rank, kind, np.array(x), attrs, members, site, self)
        self._ranks[rank].last = request.describe()
        number = self._counts[members, rank]
        self._counts[members, rank] += 1
        posted = self._open[members, number]
        for other in posted.values():
            if other.key() != request.key():
                raise _make_mismatch(other, request)
        posted[rank] = request
        if len(posted) == len(members):
            del self._open[members, number]
            results = combine(kind, [posted[m].array for m in members], members, attrs)
            for member, result in zip(members, results, strict=True):
                self._complete(posted[member], result)
        return request

    # Messages: buffered, in order for each pair of ranks and tag.

    def send(self, rank: int, x: np.ndarray, to: int, tag: int, site: str) -> None:
        """Send a message, which is buffered."""
        self._ranks[rank].last = f"{describe_call('send', x, {'to': to, 'tag': tag})} at {site}"
        waiting = self._ranks[to].waiting
        if waiting is not None and waiting.kind == "receive" and _matches(waiting, rank, tag):
            self._deliver(waiting, np.array(x), site)
        else:
            self._mail[rank, to, tag].append((np.array(x), site))

    def receive(self, rank: int, like: np.ndarray, source: int, tag: int, site: str) -> np.ndarray:
        """Wait for a message of this type.

        Raises:
            CollectiveError: the message has another shape or element type.
        """
        request = Request(rank, "receive", like, {"source": source, "tag": tag}, (source, rank), site, self)
        self._ranks[rank].last = request.describe()
        mail = self._mail[source, rank, tag]
        if mail:
            self._deliver(request, *mail.popleft())
        return request.wait()

    def _deliver(self, request: Request, array: np.ndarray, site: str) -> None:
        if (array.shape, array.dtype) != (request.array.shape, request.array.dtype):
            source, tag = request.attrs["source"], request.attrs["tag"]
            raise CollectiveError(
                f"rank {request.rank} receives another type than rank {source} sends",
                expected=f"rank {request.rank}: {request.describe()}",
                received=f"rank {source}: {describe_call('send', array, {'to': request.rank, 'tag': tag})} at {site}",
            )
        self._complete(request, array)

    def _check_mail(self) -> None:
        for (source, to, tag), messages in self._mail.items():
            if messages:
                array, site = messages[0]
                raise CollectiveError(
                    f"rank {to} never receives what rank {source} sends",
                    expected=f"rank {to}: receive(source={source}, tag={tag}); its last call was "
                    f"{self._ranks[to].last or 'none'}",
                    received=f"rank {source}: {describe_call('send', array, {'to': to, 'tag': tag})} at {site}",
                )

    def _find_deadlock(self) -> DeadlockError:
        """The error that says which rank waits for which, and where both are."""
        stuck = [r.waiting for r in self._ranks if r.waiting is not None and not r.ended]
        found = [(w, self._find_absent(w)) for w in stuck]
        # A wait for a rank that has ended says more than a wait for one that waits itself.
        first, absent = min(found, key=lambda pair: not self._ranks[pair[1]].ended)
        other = self._ranks[absent]
        state = "has ended" if other.ended else "waits"
        at = other.waiting.describe() if other.waiting is not None and not other.ended else other.last
        return DeadlockError(
            f"rank {first.rank} waits for rank {absent}, which {state}",
            expected=f"rank {first.rank}: {first.describe()}",
            received=f"rank {absent}: {at or 'no communication at all'}{' was its last call' if other.ended else ''}",
            suggestion="every rank of a group calls the same collectives in the same order",
        )

    def _find_absent(self, request: Request) -> int:
        """A rank that a request waits for."""
        if request.kind == "receive":
            return int(request.attrs["source"])
        posted = next(p for p in self._open.values() if p.get(request.rank) is request)
        missing = [m for m in request.members if m not in posted]
        return next((m for m in missing if self._ranks[m].ended), missing[0])


def _matches(request: Request, source: int, tag: int) -> bool:
    return bool(request.attrs["source"] == source and request.attrs["tag"] == tag)


def _make_mismatch(first: Request, second: Request) -> CollectiveError:
    what = (
        "another collective than" if first.kind != second.kind else "the collective with another type or argument than"
    )
    return CollectiveError(
        f"rank {second.rank} calls {what} rank {first.rank}",
        expected=f"rank {first.rank}: {first.describe()}",
        received=f"rank {second.rank}: {second.describe()}",
        suggestion="every rank of a group calls the same collectives in the same order, with equal types",
    )
