"""Triton programs without a GPU: kernels compiled by Triton run in the PTX emulator, with checks.

>>> import tessera as ts
>>> with ts.triton.interpreted(arch="sm_90a", debug=True):  # doctest: +SKIP
...     add_kernel[grid](x, y, out, n, BLOCK=1024)
"""

from tessera.core.errors import DeviceUnavailable

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise DeviceUnavailable("Triton is not installed", suggestion="pip install tessera[triton]") from error

from tessera.triton.session import TritonSession, interpreted

__all__ = ["TritonSession", "interpreted"]
