"""Entry point of the commands in `tools/`: finds Tessera, installed or not, and runs the named tool."""

import gc
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

YOUNG_OBJECTS = 20_000  # between two walks of the garbage collector: a tool's objects live until its end


class PackageOnDemand(ModuleType):
    """The package `tessera`, whose own file is executed when a program first uses a name of it.

    The tools need only the simulator's modules; the operators and transforms take most of the time of the import.
    """

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def register_package() -> None:
    """Register the package `tessera` without executing it."""
    spec = find_spec("tessera")
    assert spec is not None
    package = module_from_spec(spec)
    package.__class__ = PackageOnDemand
    sys.modules["tessera"] = package


def prepare_process() -> None:
    """Prepare this process to run a tool."""
    gc.set_threshold(YOUNG_OBJECTS)
    register_package()


def main() -> int:
    """Run `cslc` or `cs_python` with the rest of the command line."""
    sys.path[0] = str(Path(__file__).resolve().parents[5])  # a program must not import from this script's folder
    prepare_process()
    from tessera.interp.target.csl.host import cs_python, cslc

    tools = {"cslc": cslc.main, "cs_python": cs_python.main}
    try:
        return tools[sys.argv[1]](sys.argv[2:])
    finally:
        gc.freeze()  # Python would walk through all objects at its end


if __name__ == "__main__":
    sys.exit(main())
