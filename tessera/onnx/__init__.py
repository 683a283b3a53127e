"""ONNX bridge (extra `onnx`): load, run, compile and export ONNX models.

>>> import tessera as ts                                          # doctest: +SKIP
>>> model = ts.onnx.load("model.onnx")                            # doctest: +SKIP
>>> model.run({"x": x}, target="llvm")                            # doctest: +SKIP
"""

from tessera.core.errors import DeviceUnavailable

try:
    import onnx as _onnx  # noqa: F401
    import onnx_ir as _onnx_ir  # noqa: F401
except ImportError as error:
    raise DeviceUnavailable(
        f"ONNX models need the package {error.name}", suggestion="pip install 'tessera[onnx]'"
    ) from None

from tessera.onnx.export import export
from tessera.onnx.model import OnnxModel, load

__all__ = ["OnnxModel", "export", "load"]
