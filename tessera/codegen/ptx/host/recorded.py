"""Launches that the driver has recorded as a CUDA graph: one call queues all of them again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.host.calls import call

if TYPE_CHECKING:
    from tessera.codegen.ptx.host.gpu import GPU

THREAD_LOCAL = 1  # what other threads do meanwhile is not recorded, and may be anything


class Recorded:
    """What `record` queues on the stream it is given; the arguments of those launches stay as they were.

    Raises:
        ExecutionError: the driver refuses to record, as it does where something is waited for.
    """

    def __init__(self, device: GPU, record: Callable[[Any], None]) -> None:
        self._graph = ctypes.c_void_p()
        stream = device.driver.Stream()
        template = ctypes.c_void_p()
        call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream.handle), THREAD_LOCAL)
        try:
            record(stream)
        finally:  # the stream is of no use while it records
            call("cuStreamEndCapture", ctypes.c_void_p(stream.handle), ctypes.byref(template))
        try:
            call("cuGraphInstantiateWithFlags", ctypes.byref(self._graph), template, ctypes.c_uint64(0))
        finally:
            call("cuGraphDestroy", template)
        device.keep(self)

    def launch(self, stream: Any = None) -> None:
        """Queue the launches again."""
        call("cuGraphLaunch", self._graph, ctypes.c_void_p(stream.handle if stream is not None else 0))

    def free(self) -> None:
        """Give back what the driver holds of it."""
        if self._graph:
            graph, self._graph = self._graph, ctypes.c_void_p()
            call("cuGraphExecDestroy", graph)

    def __del__(self) -> None:
        self.free()
