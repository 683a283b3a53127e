"""Occupancy model: thread groups resident on a multiprocessor of named GPUs.

The limits are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.core.errors import ArgumentError

KIB = 1024
_WARP = 32


@dataclass(frozen=True)
class GpuLimits:
    """A GPU of so many multiprocessors, and one of them: threads, groups, registers, bytes of shared memory.

    Each group takes `reserved` bytes more.
    """

    name: str
    processors: int
    threads: int
    groups: int
    shared: int
    group_shared: int
    reserved: int = KIB
    registers: int = 64 * KIB
    thread_registers: int = 255


GPUS = {
    g.name: g
    for g in (
        GpuLimits("V100", 80, 2048, 32, 96 * KIB, 96 * KIB, 0),
        GpuLimits("T4", 40, 1024, 16, 64 * KIB, 64 * KIB, 0),
        GpuLimits("A100", 108, 2048, 32, 164 * KIB, 163 * KIB),
        GpuLimits("A10", 72, 1536, 16, 100 * KIB, 99 * KIB),
        GpuLimits("RTX3090", 82, 1536, 16, 100 * KIB, 99 * KIB),
        GpuLimits("L4", 58, 1536, 24, 100 * KIB, 99 * KIB),
        GpuLimits("RTX4090", 128, 1536, 24, 100 * KIB, 99 * KIB),
        GpuLimits("H100", 132, 2048, 32, 228 * KIB, 227 * KIB),
        GpuLimits("H200", 132, 2048, 32, 228 * KIB, 227 * KIB),
        GpuLimits("B200", 148, 2048, 32, 228 * KIB, 227 * KIB),
    )
}


@dataclass(frozen=True)
class Occupancy:
    """How many groups a multiprocessor holds at once, the share of its threads that these are, and what limits them."""

    gpu: str
    groups: int
    share: float
    limit: str


def estimate_occupancy(name: str, threads: int, shared: int, registers: int) -> Occupancy:
    """How many groups of `threads` threads fit, each of `shared` bytes and `registers` registers a thread.

    Raises:
        ArgumentError: no GPU of this name is known.

    >>> estimate_occupancy("A100", 256, 48 * 1024, 32)
    Occupancy(gpu='A100', groups=3, share=0.375, limit='shared memory')
    """
    if name not in GPUS:
        raise ArgumentError(f"no GPU {name} is known", expected=", ".join(GPUS))
    gpu = GPUS[name]
    warps = -(-threads // _WARP)
    held = min(gpu.thread_registers, -(-registers // 8) * 8) * _WARP  # of a warp, in steps of 256
    fitting = {
        "threads": gpu.threads // (warps * _WARP),
        "groups": gpu.groups,
        "shared memory": gpu.shared // (shared + gpu.reserved) if shared else gpu.groups,
        "registers": gpu.registers // (held * warps),
    }
    if shared > gpu.group_shared:
        fitting["shared memory"] = 0
    limit = min(fitting, key=lambda k: fitting[k])
    return Occupancy(name, fitting[limit], fitting[limit] * warps * _WARP / gpu.threads, limit)
