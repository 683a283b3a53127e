"""PyTorch bridge: programs of PyTorch as functions of Tessera values, a backend of torch.compile, and custom ops."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tessera.core.errors import TesseraError, user_location

if TYPE_CHECKING:
    from tessera.torch.compile_backend import backend, report, reset_report
    from tessera.torch.custom_op import op
    from tessera.torch.program import ImportedProgram, import_program
    from tessera.torch.tensors import from_torch, to_torch

# The public names, by the module that has them; each is imported on first use.
_HOMES = {
    "backend": "compile_backend",
    "from_torch": "tensors",
    "ImportedProgram": "program",
    "import_program": "program",
    "op": "custom_op",
    "report": "compile_backend",
    "reset_report": "compile_backend",
    "to_torch": "tensors",
}
__all__ = ["ImportedProgram", "backend", "from_torch", "import_program", "op", "report", "reset_report", "to_torch"]


class MissingExtraError(TesseraError, ImportError):
    """A package that a bridge needs is not installed."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tessera.torch' has no attribute {name!r}", name=name)
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"ts.torch.{name} needs PyTorch", location=user_location(), expected="the package torch",
            suggestion="pip install 'tessera[torch]'",
        ) from None  # fmt: skip
    found = getattr(import_module(f"tessera.torch.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
