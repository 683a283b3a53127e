"""Host tools: replacements for the vendor's `cslc`, `cs_python` and `cerebras.sdk` modules, which use the simulator."""

from __future__ import annotations

from pathlib import Path

HOST_FOLDER = Path(__file__).resolve().parent


def host_tools_folder() -> Path:
    """The folder with the commands `cslc` and `cs_python`. Add it to PATH to run published programs.

    >>> sorted(file.name for file in host_tools_folder().iterdir())
    ['cs_python', 'cslc']
    """
    return HOST_FOLDER / "tools"


def modules_folder() -> Path:
    """The folder with the package `cerebras`, which `cs_python` puts on `sys.path`."""
    return HOST_FOLDER / "site"
