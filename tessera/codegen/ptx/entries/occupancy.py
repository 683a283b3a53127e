"""How many clusters of a kernel a GPU runs at once: its multiprocessors come in groups that clusters stay within."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from tessera.codegen.ptx.host.calls import call

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: of its value, 64 bytes, the sizes of a cluster are the first three words."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


def blocks_in_clusters(text: str, name: str, entry: Mapping[str, Any]) -> int:
    """The blocks of an entry that run at once, all of their clusters whole; its context must be active.

    Raises:
        ExecutionError: the driver refuses.
    """
    size, found = int(entry["cluster"]), ctypes.c_int()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text.encode()))
    try:
        call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
        call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, ctypes.c_int(entry["shared"]))
        attribute = _Attribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(size, 1, 1))
        sizes = [(ctypes.c_uint * 3)(n, 1, 1) for n in (size, entry["threads"])]
        config = _Config(*sizes, entry["shared"], None, ctypes.pointer(attribute), 1)
        call("cuOccupancyMaxActiveClusters", ctypes.byref(found), function, ctypes.byref(config))
    finally:
        call("cuModuleUnload", module)
    return max(found.value, 1) * size
