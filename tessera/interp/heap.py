"""The C heap, told once to keep the pages that interpreters free and take again all the time."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

# The largest size that glibc's allocator learns from (DEFAULT_MMAP_THRESHOLD_MAX), less its header.
LEARNED = (1 << 25) - (1 << 16)


@lru_cache(maxsize=1)
def keep_pages() -> None:
    """Free one large block, so that later ones of up to its size come from the heap and stay there.

    glibc maps blocks beyond a threshold anew each time, and every page of them then faults: three to four
    times the cost of the arithmetic. The threshold follows the largest block freed so far. The block is never
    touched, so it takes no memory; other allocators do nothing of the kind and lose nothing.
    """
    np.empty(LEARNED, np.uint8)
