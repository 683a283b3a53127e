"""Every kernel of the specification, under the name of its chapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.inputs import tensor
from conformance.tile.spec import goals, guide, model

ZERO = np.zeros


def cases() -> Iterator[Case]:
    """The programming guide, chapters 4, 8 and 9 of the programming model, and the goals."""
    yield from _make_guide()
    yield from _make_chapter_8()
    yield from _make_chapter_9()
    yield from _make_goals()


def _make_guide() -> Iterator[Case]:
    yield _case("guide-tile-example", guide.tile_example, (tensor("g1", (300,)),), (300,))
    yield _case("guide-process-chunks", guide.process_chunks, (tensor("g2", (300,)), ZERO(300, "f4")))
    yield _case("guide-cooperative-reduction", guide.cooperative_reduction, (tensor("g3", (500,)),), (1,), 128)
    yield _case(
        "guide-memory-hierarchy", guide.memory_hierarchy_example, (tensor("g4", (128, 64)), ZERO((128, 64), "f4")),
        (2, 1),
    )  # fmt: skip
    bf16 = tensor("g5", (256, 8), "bf16")
    yield _case("guide-memory-access", guide.optimized_memory_access, (bf16, np.zeros_like(bf16)), (2,))
    a, b = tensor("g6", (64, 80), "bf16"), tensor("g7", (80, 48), "bf16")
    yield _case("guide-double-buffering", guide.double_buffered_gemm, (a, b, ZERO((64, 48), "f4")))


def _make_chapter_8() -> Iterator[Case]:
    x = tensor("m0", (128,))
    yield _case("4.2-memory-hierarchies", model.efficient_compute, (x, np.zeros_like(x)))
    a, b = tensor("m1", (64, 64), "bf16"), tensor("m2", (64, 48), "bf16")
    yield _case("8.1-tile-matmul", model.tile_matmul, (a, b, ZERO((64, 48), "f4")), (2, 3))
    yield _case("8.1-hierarchical", model.hierarchical_kernel, (tensor("m3", (2, 30, 96)),))
    x = tensor("m4", (64, 64))
    yield _case("8.2-memory-hierarchy", model.memory_hierarchy_kernel, (x, np.zeros_like(x)))
    data, indices = tensor("m5", (4, 8)), np.array([3, 1])
    yield _case("8.2-access-patterns", model.coalesced_access, (data, indices, ZERO((10, 8), "f4")))
    yield _case("8.2-bank-conflicts", model.avoid_bank_conflicts, (tensor("m6", (32, 32)), ZERO((32, 32), "f4")))
    whole = tensor("m7", (64,), "int64", -1, 3).astype("f4")
    yield _case("8.3-warp", model.warp_primitives, (whole, ZERO((4, 64), "f4"), ZERO((3, 64), "i8")), (1,), 64)
    yield _case("8.3-block", model.block_primitives, (tensor("m8", (128,)), ZERO((3, 128), "f4")), (1,), 128)
    a, b = tensor("m9", (16, 16), "bf16"), tensor("m10", (16, 16), "bf16")
    yield _case("8.4-tensor-core", model.tensor_core_kernel, (a, b, ZERO((16, 16), "f4")))
    a, b = tensor("m11", (16, 32), "fp8_e4m3"), tensor("m12", (32, 24), "fp8_e5m2")
    yield _case("8.4-mixed-precision", model.mixed_precision_mma, (a, b, ZERO((16, 24), "f4")))


def _make_chapter_9() -> Iterator[Case]:
    a, b, c = tensor("m13", (12, 8)), tensor("m14", (8, 20)), tensor("m15", (12, 20))
    yield _case("9.1-schedule", model.scheduled_kernel, (a, b, c))
    for name in ("autotuned_kernel", "complex_kernel", "evolutionary_tuned"):
        yield _case(f"9.2-{name.replace('_', '-')}", getattr(model, name), (a, b, ZERO((12, 20), "f4")), (3, 5))


def _make_goals() -> Iterator[Case]:
    q, k, v = (tensor(f"goal{n}", (3, 64, 8)) for n in "qkv")
    for name, causal, dropout in (("", False, 0.0), ("-causal", True, 0.0), ("-dropout", False, 0.25)):
        given = {"q": q, "k": k, "v": v, "causal": causal, "dropout": dropout}
        yield _case(f"goals-flash-attention{name}", goals.flash_attention, given, (3, 4))
    yield _case("goals-attention-score", goals.attention_score, (q[0], k[0], 8.0))
    for name in ("small_attention", "memory_limited_attention"):
        given = (tensor("goalsq", (100, 16)), tensor("goalsk", (70, 16)), ZERO((100, 70), "f4"))
        yield _case(f"goals-{name.replace('_', '-')}", getattr(goals, name), given, (2, 2))


def _case(name: str, entry: Any, given: Any, grid: tuple[int, ...] = (1,), group: int | None = None) -> Case:
    return Case(f"tile/spec/{name}", lambda: (entry, given), grid=grid, group=group)
