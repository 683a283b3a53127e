"""The memory of GPUs of one host whose processes map each other's: ranks are threads, streams run in order at once.

What is queued while a rank records runs when it replays, as with a CUDA graph.
"""

import ctypes
import time

import numpy as np

from tessera.codegen.ptx.runtime.device_memory import EmulatedMemory
from tessera.core.errors import ExecutionError

MAPPED = 1 << 56  # what is added to addresses of another process
SECONDS = 20


class PeerMemory(EmulatedMemory):
    """The memory of one rank; `refuses` names a call of the driver that fails here.

    With `pauses` its streams rest for a random time, of so many seconds on average, before each thing that they do.
    """

    def __init__(self, rank, refuses="", pauses=0.0):
        self.rank, self.refuses, self.pauses, self.rng = rank, refuses, pauses, np.random.default_rng(rank)
        self.held, self.mapped, self.log, self.queue = {}, {}, [], None

    def empty(self, shape, dtype, stream):
        made = super().empty(shape, dtype, stream)
        self.held[made.address] = made
        return made

    def _refuse(self, name):
        if self.refuses == name:
            raise ExecutionError(f"the driver call {name} failed: CUDA_ERROR_NOT_SUPPORTED")

    def share(self, address):
        self._refuse("cuIpcGetMemHandle")
        base = next(a for a, made in self.held.items() if a <= address < a + max(made.nbytes, 1))
        return f"{self.rank} {base}".encode().ljust(64, b"\0"), address - base

    def map_shared(self, handle):
        self._refuse("cuIpcOpenMemHandle_v2")
        owner, base = map(int, handle.rstrip(b"\0").split())
        assert owner != self.rank and handle not in self.mapped, "a handle is opened once, by another process"
        self.mapped[handle] = base + MAPPED
        return base + MAPPED

    def unmap_shared(self, addresses):
        assert sorted(addresses) == sorted(self.mapped.values())
        self.mapped.clear()

    def _find(self, address):
        """A mapped address in the memory of its owner."""
        if address < MAPPED:
            return address
        assert self.mapped, "the memory of another process was given up"
        return address - MAPPED

    def _do(self, run):
        if self.queue is None:
            run()
        else:
            self.queue.append(run)

    def replay(self, queue):
        for run in queue:
            if self.pauses:
                time.sleep(self.rng.exponential(self.pauses))
            run()

    def mark(self, stream):
        return "the end of what is queued"

    def write_word(self, address, value, stream):
        def run():
            ctypes.c_uint32.from_address(self._find(address)).value = value
            self.log.append(("grant" if address >= MAPPED else "reset", value))

        self._do(run)

    def wait_for_word(self, address, value, stream):
        assert address < MAPPED, "a stream polls the memory of its own GPU"
        word = ctypes.c_uint32.from_address(address)

        def run():
            end = time.monotonic() + SECONDS
            while word.value != value:
                assert time.monotonic() < end, "a stream waits for ever"
                time.sleep(1e-5)
            self.log.append(("wait", value))

        self._do(run)

    def copy_rows(self, target, source, width, count, stream):
        def run():
            places = [place._replace(address=self._find(place.address)) for place in (target, source)]
            super(PeerMemory, self).copy_rows(*places, width, count, stream)
            self.log.append(("copy", width))

        self._do(run)

    def clear(self, array, stream):
        self._do(lambda: super(PeerMemory, self).clear(array, stream))


def fill(array, values):
    """Write the elements of an emulated array, in place."""
    ctypes.memmove(array.address, np.ascontiguousarray(values).ctypes.data, array.nbytes)
