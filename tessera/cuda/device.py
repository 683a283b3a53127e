"""Emulated GPU: launches of other compilers' PTX in the emulator, with findings at the lines of their sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tessera.core.errors import ArgumentError, Location, OutOfBoundsError, TesseraError
from tessera.cuda.counters import LaunchCounters, LaunchReport
from tessera.interp.target.ptx import DevicePointer, PtxFaultSite, PtxModule
from tessera.runtime.occupancy import GPUS, GpuLimits, estimate_occupancy

# The GPU that stands for an architecture, in figures of multiprocessors and of occupancy.
GPU_OF_ARCH = {"sm_80": "A100", "sm_86": "A10", "sm_89": "L4", "sm_90": "H100", "sm_90a": "H100"}


@dataclass(frozen=True)
class EmulatedLaunch:
    """A launch: the entry of a module, its shape and arguments; `registers` (a thread's) where they are known."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: Sequence[Any]
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False
    reachable: Sequence[DevicePointer] = ()
    registers: int | None = None
    title: str = ""  # the kernel's name in its source, if the entry's is another


@dataclass
class EmulatedDevice:
    """A GPU of an architecture: `debug` runs the sanitizer, `report` counts what each launch executes.

    `block_word` is the word for a thread block in findings: a program, in Triton. Programs are `replicated` where the
    compiler gives several threads copies of an element.
    """

    arch: str = "sm_90a"
    debug: bool = False
    report: bool = False
    block_word: str = "block"
    replicated: bool = False
    reports: list[LaunchReport] = field(default_factory=list)
    launches: int = 0

    def __post_init__(self) -> None:
        if self.arch not in GPU_OF_ARCH:
            raise ArgumentError(
                f"the emulator has no architecture {self.arch}",
                expected=", ".join(GPU_OF_ARCH),
                suggestion="compile for sm_90a, or sm_80; instructions of GPUs after sm_90 (tcgen05) are not emulated",
            )

    @property
    def limits(self) -> GpuLimits:
        """The GPU that stands for the architecture."""
        return GPUS[GPU_OF_ARCH[self.arch]]

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability.

        >>> EmulatedDevice("sm_90a").capability
        (9, 0)
        """
        number = int("".join(c for c in self.arch if c.isdigit()))
        return number // 10, number % 10

    def launch(self, module: PtxModule, launch: EmulatedLaunch) -> None:
        """Run a launch.

        Raises:
            TesseraError: as `PtxModule.launch`, with the location in the source of the PTX text.
        """
        counters = LaunchCounters() if self.report else None
        self.launches += 1
        try:
            module.launch(
                launch.entry,
                launch.grid,
                launch.block,
                launch.args,
                launch.shared,
                self.debug,
                launch.cluster,
                launch.cooperative,
                launch.reachable,
                counters,
                self.replicated,
            )
        except TesseraError as error:
            raise self._move_to_source(error, launch.title or launch.entry) from None
        if counters is not None:
            self.reports.append(self._make_report(module, launch, counters))

    def _make_report(self, module: PtxModule, launch: EmulatedLaunch, counters: LaunchCounters) -> LaunchReport:
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        shared = launch.shared + module.count_static_shared_bytes()
        occupancy = None
        if launch.registers:
            occupancy = estimate_occupancy(self.limits.name, threads, shared, launch.registers)
        title = launch.title or launch.entry
        return LaunchReport(title, launch.grid, threads, shared, launch.registers, occupancy, counters, self.block_word)

    def _move_to_source(self, error: TesseraError, entry: str) -> TesseraError:
        """The error at the line of the source that the PTX text was compiled from."""
        site = error.site
        if not isinstance(site, PtxFaultSite) or not (site.instruction.source and site.instruction.source.line):
            return error
        message = f"{self._describe(site)} (kernel {entry}, {site.instruction.name} at {error.location})"
        moved = type(error)(
            message, location=find_source(site.instruction.source), suggestion=_SUGGESTIONS.get(type(error))
        )
        moved.site, moved.instance = site, site.block or None
        return moved

    def _describe(self, site: PtxFaultSite) -> str:
        what = site.what.replace("block (", f"{self.block_word} (")
        if not site.thread:
            return what
        thread = site.thread[0] if not any(site.thread[1:]) else site.thread
        return f"{what}: {self.block_word} {site.block}, thread {thread}"


_SUGGESTIONS: dict[type[TesseraError], str] = {
    OutOfBoundsError: "mask the access, or check the strides and the grid",
}


def find_source(place: Location) -> Location:
    """A source location without the column where the compiler gives none: NVVM writes 1 for each."""
    return replace(place, column=0) if place.column <= 1 else place
