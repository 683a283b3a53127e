"""Special registers (PTX ISA 10): the values that each thread reads about itself and the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Extent = tuple[int, int, int]


@dataclass(frozen=True)
class LaunchShape:
    """The shape of a launch: its grid, blocks and clusters, and the bytes of dynamic shared memory.

    All CTAs of a `cooperative` launch are resident at once. In a `replicated` program several threads of a CTA may
    compute the same element, of which one stores it.
    """

    grid: Extent
    block: Extent
    cluster: Extent = (1, 1, 1)
    shared: int = 0
    debug: bool = False
    cooperative: bool = False
    replicated: bool = False

    @property
    def threads(self) -> int:
        """The threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def ctas(self) -> int:
        """The CTAs of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]


def unflatten_index(index: np.ndarray, extent: Extent) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Linear indices as x, y and z.

    >>> [int(p[0]) for p in unflatten_index(np.array([7]), (2, 2, 2))]
    [1, 1, 1]
    """
    return index % extent[0], index // extent[0] % extent[1], index // (extent[0] * extent[1])


def find_cluster_and_rank(launch: LaunchShape) -> tuple[np.ndarray, np.ndarray]:
    """The cluster of each CTA of the grid, and its rank in the cluster."""
    every = np.arange(launch.ctas)
    if launch.cluster == (1, 1, 1):
        return every, np.zeros_like(every)
    place = unflatten_index(every, launch.grid)
    outer = [p // n for p, n in zip(place, launch.cluster, strict=True)]
    inner = [p % n for p, n in zip(place, launch.cluster, strict=True)]
    many = _count_clusters(launch)
    return (
        outer[0] + many[0] * (outer[1] + many[1] * outer[2]),
        inner[0] + launch.cluster[0] * (inner[1] + launch.cluster[1] * inner[2]),
    )


def _count_clusters(launch: LaunchShape) -> Extent:
    x, y, z = (-(-g // n) for g, n in zip(launch.grid, launch.cluster, strict=True))
    return x, y, z


class SpecialRegisters(dict[str, np.ndarray]):
    """Values by name, computed on first use: [1, T] for threads, [C, 1] for CTAs, [1, 1] for the launch."""

    def __init__(
        self, launch: LaunchShape, ctas: np.ndarray, cluster: np.ndarray, rank: np.ndarray, static: int
    ) -> None:
        super().__init__()
        self.launch, self.ctas, self.cluster, self.rank, self.static = launch, ctas, cluster, rank, static

    def __missing__(self, name: str) -> np.ndarray:
        value = SPECIAL[name](self).astype(np.uint32)
        self[name] = value
        return value

    @property
    def thread(self) -> np.ndarray:
        """The thread numbers."""
        return np.arange(self.launch.threads)[None]


SHARED_UNIT = 128  # the granularity of shared memory allocation
# Bytes of shared memory that the system reserves at its start, for programs that ask for their offset; cooperative
# groups keep their barriers in the second part.
RESERVED = 1024
SpecialRegisterRule = Callable[[SpecialRegisters], np.ndarray]
SPECIAL: dict[str, SpecialRegisterRule] = {
    "%laneid": lambda r: r.thread % 32,
    "%warpid": lambda r: r.thread // 32,
    "%nwarpid": lambda r: np.array([[-(-r.launch.threads // 32)]]),
    "%lanemask_eq": lambda r: 1 << r["%laneid"],
    "%lanemask_lt": lambda r: (1 << r["%laneid"]) - 1,
    "%lanemask_le": lambda r: (2 << r["%laneid"].astype(np.int64)) - 1,
    "%lanemask_gt": lambda r: 0xFFFFFFFF ^ ((2 << r["%laneid"].astype(np.int64)) - 1),
    "%lanemask_ge": lambda r: 0xFFFFFFFF ^ ((1 << r["%laneid"]) - 1),
    "%cluster_ctarank": lambda r: r.rank[:, None],
    "%cluster_nctarank": lambda r: np.array([[int(np.prod(r.launch.cluster))]]),
    "%is_explicit_cluster": lambda r: np.array([[int(np.prod(r.launch.cluster)) > 1]]),
    "%dynamic_smem_size": lambda r: np.array([[r.launch.shared]]),
    "%total_smem_size": lambda r: np.array([[-(-(r.static + r.launch.shared) // SHARED_UNIT) * SHARED_UNIT]]),
    "%aggr_smem_size": lambda r: r["%total_smem_size"] + RESERVED,
    "%nsmid": lambda r: np.array([[1]]),
}
# Event counters and registers of the driver are zero.
_ZERO_REGISTERS = ["%smid", "%gridid", "%current_graph_exec", *(f"%envreg{i}" for i in range(32))]
_ZERO_REGISTERS += [f"%pm{i}{wide}" for i in range(8) for wide in ("", "_64")]
SPECIAL |= dict.fromkeys(_ZERO_REGISTERS, lambda r: np.array([[0]]))
_RESERVED = {"begin": 0, "end": RESERVED, "cap": RESERVED, "0": 0, "1": 256}
for _part, _offset in _RESERVED.items():
    SPECIAL[f"%reserved_smem_offset_{_part}"] = lambda r, at=_offset: np.array([[at]])  # type: ignore[misc]
_FAMILIES: dict[str, tuple[str, SpecialRegisterRule, Callable[[LaunchShape], Extent]]] = {
    "%tid": ("%ntid", lambda r: r.thread, lambda launch: launch.block),
    "%ctaid": ("%nctaid", lambda r: r.ctas[:, None], lambda launch: launch.grid),
    "%cluster_ctaid": ("%cluster_nctaid", lambda r: r.rank[:, None], lambda launch: launch.cluster),
    "%clusterid": ("%nclusterid", lambda r: r.cluster[:, None], _count_clusters),
}


def _define_family(
    name: str, size: str, index: SpecialRegisterRule, extent: Callable[[LaunchShape], Extent]
) -> dict[str, SpecialRegisterRule]:
    """The three components of an index, and those of its extent."""
    result: dict[str, SpecialRegisterRule] = {}
    for k, d in enumerate("xyz"):
        result[f"{name}.{d}"] = lambda r, k=k: unflatten_index(index(r), extent(r.launch))[k]  # type: ignore[misc]
        result[f"{size}.{d}"] = lambda r, k=k: np.array([[extent(r.launch)[k]]])  # type: ignore[misc]
    return result


for _name, _row in _FAMILIES.items():
    SPECIAL |= _define_family(_name, *_row)
