"""Messages between GPUs: buffered sends with tags, over a communicator of NCCL for each pair and direction.

NCCL matches the messages of a pair by their order and waits for the other side. A thread for each receiver therefore
queues the sends, each behind a header with its tag and type; a receiver keeps messages that it has not asked for.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, CollectiveError
from tessera.core.types import as_dtype
from tessera.dist.simulation import describe_call

if TYPE_CHECKING:
    from tessera.dist.nccl import NcclWorld

BYTES = 1  # ncclUint8
NAME_WORDS, MAX_RANK = 2, 12
HEADER_WORDS = 2 + NAME_WORDS + MAX_RANK  # the tag, the name of the element type, the number of axes and their sizes


def pack_header(x: DeviceArray, tag: int) -> np.ndarray:
    """The words that say what a message is.

    Raises:
        ArgumentError: the array has too many axes.
    """
    if len(x.shape) > MAX_RANK:
        raise ArgumentError(f"a message has at most {MAX_RANK} axes", received=str(x.shape))
    words = np.zeros(HEADER_WORDS, np.int64)
    name = str(as_dtype(x.dtype)).removeprefix("ts.").encode().ljust(8 * NAME_WORDS, b"\0")
    words[0], words[1 : 1 + NAME_WORDS] = tag, np.frombuffer(name, np.int64)
    words[1 + NAME_WORDS], words[2 + NAME_WORDS : 2 + NAME_WORDS + len(x.shape)] = len(x.shape), x.shape
    return words


def unpack_header(words: np.ndarray) -> tuple[int, np.dtype, tuple[int, ...]]:
    """The tag, the element type and the shape of a message."""
    name = words[1 : 1 + NAME_WORDS].tobytes().rstrip(b"\0").decode()
    sizes = words[2 + NAME_WORDS : 2 + NAME_WORDS + int(words[1 + NAME_WORDS])]
    return int(words[0]), as_dtype(name).numpy, tuple(int(n) for n in sizes)


class Mailbox:
    """The messages of this rank to and from the others."""

    def __init__(self, world: NcclWorld) -> None:
        self.world = world
        self._senders: dict[int, _Sender] = {}
        self._sources: dict[int, tuple[Any, int]] = {}
        self._kept: dict[tuple[int, int], deque[DeviceArray]] = defaultdict(deque)

    def send(self, x: Any, to: int, tag: int) -> None:
        """Queue a message, of the GPU or of the host, and go on."""
        if to not in self._senders:
            self._senders[to] = _Sender(self.world, to)
        memory = self.world.memory
        stream = memory.find_stream()
        given = x if isinstance(x, DeviceArray) else memory.copy_in(np.ascontiguousarray(x), stream)
        self._senders[to].post(pack_header(given, tag), memory.mark(given.stream), given)

    def receive(self, like: Any, source: int, tag: int, site: str) -> Any:
        """Wait for the next message with a tag; its result is on the device of `like`.

        Raises:
            CollectiveError: it is of another type.
        """
        kept = self._kept[source, tag]
        while not kept:
            number, found = self._receive_next(source)
            self._kept[source, number].append(found)
        found = kept.popleft()
        if found.shape != tuple(like.shape) or found.dtype != like.dtype:
            rank = self.world.rank
            call = describe_call("receive", like, {"source": source, "tag": tag})
            raise CollectiveError(
                f"rank {rank} receives another type than rank {source} sends",
                expected=f"rank {rank}: {call} at {site}",
                received=f"rank {source}: {describe_call('send', found, {'to': rank, 'tag': tag})}",  # type: ignore[arg-type]
            )
        return found if isinstance(like, DeviceArray) else found.numpy()

    def _receive_next(self, source: int) -> tuple[int, DeviceArray]:
        world, memory = self.world, self.world.memory
        if source not in self._sources:
            self._sources[source] = world.find_comm((source, world.rank), "message"), memory.make_stream()
        comm, stream = self._sources[source]
        words = memory.empty((HEADER_WORDS,), np.dtype(np.int64), stream)
        with world.errors(comm, "in receive"):
            world.library.recv(words.address, words.nbytes, BYTES, 0, comm, stream)
            tag, dtype, shape = unpack_header(words.numpy())
            out = memory.empty(shape, dtype, stream)
            if out.nbytes:
                world.library.recv(out.address, out.nbytes, BYTES, 0, comm, stream)
        return tag, out  # its stream is that of the messages: what uses it waits

    def close(self) -> None:
        """Queue what is left, and end the threads."""
        for sender in self._senders.values():
            sender.close()


class _Sender(threading.Thread):
    """The thread that queues the messages to one rank."""

    def __init__(self, world: NcclWorld, to: int) -> None:
        super().__init__(name=f"messages to rank {to}", daemon=True)
        self._world, self._to, self._error = world, to, None  # type: BaseException | None
        self._posted: SimpleQueue[Any] = SimpleQueue()
        self.start()

    def post(self, header: np.ndarray, mark: Any, x: DeviceArray) -> None:
        """Queue a message behind a mark."""
        if self._error is not None:
            raise self._error
        self._posted.put((header, mark, x))

    def close(self) -> None:
        """Queue what is left, and end."""
        self._posted.put(None)
        self.join()

    def run(self) -> None:
        """Queue the messages as they come; an error is raised by the next send."""
        try:
            self._queue_all()
        except BaseException as error:
            self._error = error
        gpu = getattr(self._world.memory, "gpu", None)
        if gpu is not None:
            gpu.leave_thread()

    def _queue_all(self) -> None:
        world, memory = self._world, self._world.memory
        comm, stream = world.find_comm((world.rank, self._to), "message"), memory.make_stream()
        while (posted := self._posted.get()) is not None:
            header, mark, x = posted
            words = memory.copy_in(header, stream)
            memory.wait(stream, mark)
            with world.errors(comm, "in send"):
                world.library.send(words.address, words.nbytes, BYTES, 1, comm, stream)
                if x.nbytes:
                    world.library.send(x.address, x.nbytes, BYTES, 1, comm, stream)
            if x.free is not None:
                x.others = {*(x.others or ()), stream}
            else:
                memory.keep_until_done([x], stream)
            del posted, x, words
