"""Plan: the tile sizes and limits that a target wants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What a target asks of the lowering; the defaults suit a CPU with a few threads.

    `rows` and `pointwise` count the elements that one program holds in a row kernel and in an elementwise
    one; a row longer than `row_limit` is walked by a loop, and so is a contraction longer than `whole_k`.
    """

    m: int = 128
    n: int = 128
    k: int = 512
    busy_n: int | None = None  # like n, for products whose results go through functions at once; None: n
    whole_k: int = 512
    multiple: int = 16
    rows: int = 8192
    row_limit: int = 8192
    pointwise: int = 8192
    lanes: int = 64
    programs: int = 8
    # Longer axes than this are sorted by the host; None: never, the lowering compares all pairs.
    host_sort: int | None = None
    flash: bool = True
    flash_m: int = 32
    flash_n: int = 64
    flash_deep: int | None = None  # rows and columns instead of both for heads of 64 or 128 features; None: the same
    mesh: tuple[int, int] | None = None  # rows and columns of elements, each with its own memory
    mesh_product: str = "summa"  # or "cannon": how pieces of matrices that must meet are multiplied there
