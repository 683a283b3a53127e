"""Messages between the processes of the NCCL engine: buffered sends with tags, through the memory of the host.

A send of NCCL is a kernel that occupies the GPU until the receiver comes. Two ranks that both send first, or load a
kernel meanwhile, would wait for ever. What is sent therefore leaves the GPU, over files or MPI.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, CollectiveError
from tessera.core.types import as_dtype
from tessera.dist.simulation import describe_call

if TYPE_CHECKING:
    from tessera.dist.nccl import NcclWorld

NAME_WORDS, MAX_RANK = 2, 12
HEADER_WORDS = 2 + NAME_WORDS + MAX_RANK  # the tag, the name of the element type, the number of axes and their sizes


def pack_message(x: np.ndarray, tag: int) -> bytes:
    """A message: the words that say what it is, and the elements.

    Raises:
        ArgumentError: the array has too many axes.
    """
    if x.ndim > MAX_RANK:
        raise ArgumentError(f"a message has at most {MAX_RANK} axes", received=str(x.shape))
    words = np.zeros(HEADER_WORDS, np.int64)
    name = str(as_dtype(x.dtype)).removeprefix("ts.").encode().ljust(8 * NAME_WORDS, b"\0")
    words[0], words[1 : 1 + NAME_WORDS] = tag, np.frombuffer(name, np.int64)
    words[1 + NAME_WORDS], words[2 + NAME_WORDS : 2 + NAME_WORDS + x.ndim] = x.ndim, x.shape
    return words.tobytes() + np.ascontiguousarray(x).tobytes()


def unpack_message(data: bytes) -> tuple[int, np.ndarray]:
    """The tag and the array of a message.

    >>> unpack_message(pack_message(np.ones((1, 2), np.int32), 7))
    (7, array([[1, 1]], dtype=int32))
    """
    words = np.frombuffer(data, np.int64, HEADER_WORDS)
    name = words[1 : 1 + NAME_WORDS].tobytes().rstrip(b"\0").decode()
    sizes = words[2 + NAME_WORDS : 2 + NAME_WORDS + int(words[1 + NAME_WORDS])]
    elements = np.frombuffer(data, np.uint8, offset=8 * HEADER_WORDS)
    return int(words[0]), elements.copy().view(as_dtype(name).numpy).reshape([int(n) for n in sizes])


class Mailbox:
    """The messages of this rank to and from the others."""

    def __init__(self, world: NcclWorld) -> None:
        self.world = world
        self._kept: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)

    def send(self, x: Any, to: int, tag: int) -> None:
        """Send a message, of the GPU or of the host, and go on."""
        self.world.rendezvous.send(to, pack_message(x.numpy() if isinstance(x, DeviceArray) else np.asarray(x), tag))

    def receive(self, like: Any, source: int, tag: int, site: str) -> Any:
        """Wait for the next message with a tag; its result is on the device of `like`.

        Raises:
            CollectiveError: it is of another type.
            DeadlockError: it does not come.
        """
        kept = self._kept[source, tag]
        while not kept:
            number, found = unpack_message(self.world.rendezvous.receive(source))
            self._kept[source, number].append(found)
        found = kept.popleft()
        if found.shape != tuple(like.shape) or found.dtype != like.dtype:
            rank = self.world.rank
            call = describe_call("receive", like, {"source": source, "tag": tag})
            raise CollectiveError(
                f"rank {rank} receives another type than rank {source} sends",
                expected=f"rank {rank}: {call} at {site}",
                received=f"rank {source}: {describe_call('send', found, {'to': rank, 'tag': tag})}",
            )
        memory = self.world.memory
        return memory.copy_in(found, memory.find_stream()) if isinstance(like, DeviceArray) else found
