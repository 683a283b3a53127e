"""Sessions: programs of Numba and CuPy run in the PTX emulator while a session is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tessera.cuda.cupy_programs import redirect_cupy
from tessera.cuda.device import EmulatedDevice
from tessera.cuda.numba_programs import redirect_numba


@contextlib.contextmanager
def interpreted(arch: str = "sm_90a", *, debug: bool = False, report: bool = False) -> Iterator[EmulatedDevice]:
    """Run CUDA programs in Python without a GPU: kernels of `numba.cuda.jit`, and CuPy's `RawKernel`.

    The kernels are compiled for `arch` by NVVM or NVRTC, and run in the PTX emulator on NumPy arrays. `debug` finds
    races, uninitialised reads and missed waits; `report` counts what each launch executes. Import `cupy` inside.

    Raises:
        TesseraError: a finding, with the line of the source, the block and the thread.
    """
    device = EmulatedDevice(arch, debug, report)
    with redirect_numba(device), redirect_cupy(device):
        yield device
