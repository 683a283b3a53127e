"""Programs for CUDA without a GPU: the PTX that other compilers emit runs in the emulator, with checks.

>>> import tessera as ts
>>> with ts.cuda.interpreted(arch="sm_90a", debug=True):  # doctest: +SKIP
...     kernel[blocks, threads](x, y)
"""

from tessera.cuda.device import EmulatedDevice
from tessera.cuda.session import interpreted

__all__ = ["EmulatedDevice", "interpreted"]
