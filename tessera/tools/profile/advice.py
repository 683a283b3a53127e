"""Advice of a profile: each rule reads what was measured or counted, and says what it read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tessera.core.errors import TesseraError
from tessera.tools.debug.kernel_tracing import KernelReport
from tessera.tools.profile.replay import SECONDS

if TYPE_CHECKING:
    from tessera.tools.profile.report import KernelRow, ProfileReport

NOTABLE = 0.1  # share of the cost from which a kernel is worth advice
MOST = 6  # lines of advice
STRIDED = "strided"
ENOUGH = 0.6  # of the memory's speed
FEW_THREADS = 512  # of a multiprocessor's 2,048: too few to hide the latency of memory
FULL_WAVES = 0.75  # of the time in which all multiprocessors have work
WASTEFUL = 4  # times the bytes of a kernel's arrays


def find_advice(report: ProfileReport) -> list[str]:
    """The advice of all rules, the kernels that cost the most first."""
    found: list[str] = []
    for row in sorted(report.rows, key=lambda r: -r.share):
        if row.share >= NOTABLE:
            found += [line for rule in _RULES for line in rule(report, row)]
    return list(dict.fromkeys(found))[:MOST]


def _advise_attention(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    """A softmax between two products: flash attention keeps the scores out of memory."""
    place = report.rows.index(row)
    if not 0 < place < len(report.rows) - 1 or not _is_softmax(row):
        return
    before, after = report.rows[place - 1], report.rows[place + 1]
    linked = set(before.measured.writes) & set(row.measured.reads) and set(row.measured.writes) & set(
        after.measured.reads
    )
    if linked and before.measured.matrix and after.measured.matrix:
        yield (
            f"{row.measured.name} is a softmax between two products: ts.scaled_dot_product_attention does not write "
            f"the scores ({row.measured.bytes:,} bytes are moved for them here)"
        )


def _is_softmax(row: KernelRow) -> bool:
    return "softmax" in row.measured.ops or {"exp", "sum"} <= set(row.measured.ops)


def _advise_fusion(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    """A memory-bound kernel that reads what the kernel before it wrote."""
    place = report.rows.index(row)
    if place == 0 or row.bound != "memory":
        return
    before = report.rows[place - 1].measured
    if set(before.writes) & set(row.measured.reads) and not row.measured.matrix:
        yield (
            f"{row.measured.name} reads what {before.name} has written: if they were one kernel, up to "
            f"{min(row.measured.bytes, before.bytes) // 2:,} of its {row.measured.bytes:,} bytes would not be moved"
        )


def _advise_precision(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    if row.measured.matrix and not row.measured.narrow and row.bound == "compute" and report.target.startswith("ptx"):
        yield f"{row.measured.name} is bound by arithmetic: 16-bit operands use the matrix units"
    elif row.bound == "memory" and row.roofline is not None and row.roofline > 0.5:
        yield (
            f"{row.measured.name} runs at {row.roofline:.0%} of the memory's speed: only fewer bytes make it faster, "
            "such as 16-bit elements (half the bytes)"
        )


def _advise_access(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    if row.measured.pattern == STRIDED and not row.measured.matrix and row.bound == "memory":
        yield f"{row.measured.name} reads an array across its rows: store it transposed, or reduce along its last axis"


def _advise_traffic(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    moved, least = row.measured.moved, row.measured.bytes
    if moved is not None and least and moved > WASTEFUL * least:
        yield (
            f"{row.measured.name} moves {moved:,} bytes of global memory, where each of its arrays once is {least:,}: "
            "larger tiles read less twice"
        )


def _advise_parallelism(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    if report.device is not None and 0 < row.measured.programs < report.device.processors:
        yield (
            f"{row.measured.name} has {row.measured.programs} programs for {report.device.processors} processors of "
            f"{report.device.name}: smaller tiles make more"
        )


def _advise_registers(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    """Registers that the driver's assembler has spilled."""
    for each in row.measured.resources:
        if each["local"]:
            yield (
                f"{each['kernel']} keeps {each['local']:,} bytes a thread in local memory, because {each['registers']} "
                "registers do not suffice: smaller tiles, or more warps, need none"
            )


def _advise_occupancy(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    """Few threads on a multiprocessor, in a kernel that waits for memory and does not reach its speed."""
    if row.bound != "memory" or row.roofline is None or row.roofline > ENOUGH:
        return
    for each in row.measured.resources:
        if 0 < each["resident"] * each["threads"] < FEW_THREADS:
            yield (
                f"{each['kernel']} reaches {row.roofline:.0%} of the memory's speed with {each['resident']} blocks of "
                f"{each['threads']} threads on a multiprocessor ({each['registers']} registers a thread, "
                f"{each['shared']:,} bytes of shared memory a block): smaller tiles let more blocks wait at once"
            )


def _advise_waves(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    """A last wave of blocks that leaves most multiprocessors idle."""
    for each in row.measured.resources:
        at_once = max(each["resident"] * each["processors"], 1)
        waves = each["blocks"] / at_once
        if waves > 1 and waves / math.ceil(waves) < FULL_WAVES:
            yield (
                f"{each['kernel']} has {each['blocks']:,} blocks, where {at_once:,} run at once: {waves:.2f} waves, "
                "whose last leaves the GPU partly idle"
            )


def _advise_overhead(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    if row.bound == "overhead" and report.unit == SECONDS:
        yield f"{row.measured.name} is so short that its launch costs more than its work: take larger batches"


def _advise_counts(report: ProfileReport, row: KernelRow) -> Iterator[str]:
    """What the interpreter has counted of the accesses, on a GPU."""
    if row.measured.counts is None or not report.target.startswith("ptx") or report.device is None:
        return
    try:
        for line in KernelReport(row.measured.counts, report.device.name).suggestions():
            yield f"{row.measured.name}: {line}"
    except (TesseraError, KeyError):
        return


_RULES: tuple[Callable[..., Iterator[str]], ...] = (
    _advise_attention,
    _advise_fusion,
    _advise_access,
    _advise_traffic,
    _advise_parallelism,
    _advise_registers,
    _advise_occupancy,
    _advise_waves,
    _advise_overhead,
    _advise_precision,
    _advise_counts,
)
