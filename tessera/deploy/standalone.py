"""Standalone programs: a folder with a C library of a compiled program, which links and runs without Python."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.codegen.artifact import encode_content
from tessera.codegen.c_plan import DESCRIPTION_FILE, MACHINE, OBJECT_FILE, make_c_name
from tessera.codegen.contract import emit_artifact, get_capable_backend
from tessera.core.device import find_generator_name
from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError, as_text, user_location
from tessera.core.io import as_path, write_file
from tessera.deploy.optimisation import OptimisedModel
from tessera.deploy.webassembly import link_module
from tessera.runtime.artifacts import describe_interface, find_stored_parameters
from tessera.runtime.program import CallArguments, PreparedProgram, prepare

CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-gcc", "x86": "x86_64-linux-gnu-gcc"}
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function")


@dataclass(frozen=True)
class StandaloneProgram:
    """A folder that was written: the name of its C function, and its shared library, if one was linked."""

    folder: Path
    name: str
    library: Path | None = None


def standalone(
    entry: Any,
    *args: Any,
    out: str | Path,
    target: str = "llvm",
    machine: str | None = None,
    weights: Sequence[str] = (),
    name: str | None = None,
    link: bool = True,
    threads: bool = False,
    grid: Any = None,
    group: int | None = None,
    dynamic: Any = None,
    **named: Any,
) -> StandaloneProgram:
    """Write a program as a folder that needs no Python: a header, C text, machine code, an example, a Makefile.

    `entry` and its arguments are as for `ts.build`; a model that `ts.optimize` compiled needs no arguments. `machine`
    names the processor ("x86-64", "x86-64-v3", "x86-64-v4", "aarch64", "native") or, for ptx, the architecture
    ("sm_80"). With `link` the shared library is linked by the C compiler (the variable CC, else cc); `threads` links it
    with OpenMP. `dynamic` makes sizes arguments of the C function.

    Raises:
        UnsupportedOpError: the program needs Python, as for ops that NumPy computes.
        DeviceUnavailable: there is no C compiler to link with. FileError: the folder cannot be written.
    """
    where, folder = find_generator_name(target), as_path(out)
    machine = None if machine is None else as_text(machine, "the machine")
    if threads and machine == MACHINE:
        raise ArgumentError(
            f"a module for {MACHINE} runs on one thread", location=user_location(), expected="threads=False"
        )
    generator: Any = get_capable_backend(where, "standalone")
    options = generator.standalone_options(machine)
    program = _prepare(entry, CallArguments(args, named), where, grid, group, options, dynamic)
    optimised = isinstance(entry, OptimisedModel)
    stored = entry.find_stored_parameters() if optimised else find_stored_parameters(program, weights)
    artifact = emit_artifact(generator, program.levels["tile"], options)
    own = make_c_name(program.name if name is None else as_text(name, "the name"))
    interface = describe_interface(program, stored)
    described = {**artifact.manifest, "interface": interface}
    held = {program.names[i]: np.ascontiguousarray(program.arrays[i]).tobytes() for i in stored}
    files: Mapping[str, bytes | str] = generator.standalone(
        type(artifact)(described, artifact.files), own, held, machine
    )
    folder = write_folder(folder, files)
    if DESCRIPTION_FILE in files:
        library = _link_web_module(folder, own) if link else None
    else:
        library = _link(folder, own, machine, threads) if link and "kernels.o" in files else None
    return StandaloneProgram(folder, own, library)


def _prepare(
    entry: Any, call: CallArguments, target: str, grid: Any, group: int | None, options: Mapping[str, Any], dynamic: Any
) -> PreparedProgram:
    if not isinstance(entry, OptimisedModel):
        return prepare(entry, call, target, grid, group, False, options, dynamic=dynamic)
    if call.args or call.named:
        entry.compile(*call.args, **call.named)
    return entry.prepare_program(target)


def write_folder(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    """Write files into a folder, each atomically; other files there stay."""
    try:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = encode_content(content)
            write_file(path, lambda handle, data=data: handle.write(data))
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise FileError(f"{folder} cannot be written", received=str(error), suggestion="use another path") from None
    return folder


# Linking.


def find_c_compiler(machine: str | None) -> list[str]:
    """The command of a C compiler for a machine.

    Raises:
        DeviceUnavailable: there is none.
    """
    if os.environ.get("CC"):
        return os.environ["CC"].split()
    family = "aarch64" if machine == "aarch64" else "x86" if machine and machine.startswith("x86") else ""
    own = "aarch64" if platform.machine() in ("aarch64", "arm64") else "x86"
    wanted = [CROSS_COMPILERS[family]] if family and family != own else ["cc", "gcc", "clang"]
    found = next((name for name in wanted if shutil.which(name)), None)
    if found is None:
        raise DeviceUnavailable(
            f"there is no C compiler {wanted[0]} to link with", location=user_location(),
            suggestion="install one, set CC, or give link=False and link it elsewhere: the folder has a Makefile",
        )  # fmt: skip
    return [found]


def _link_web_module(folder: Path, name: str) -> Path:
    """Link the WebAssembly module of an object file, which knows how much memory it needs."""
    needed = json.loads((folder / DESCRIPTION_FILE).read_text())["bytes"]
    code = link_module((folder / OBJECT_FILE).read_bytes(), needed)
    return write_folder(folder, {f"{name}.wasm": code}) / f"{name}.wasm"


def _link(folder: Path, name: str, machine: str | None, threads: bool) -> Path:
    """Link the shared library, which exports its two functions alone.

    Raises:
        ArgumentError: the compiler refuses.
    """
    library = f"lib{name}.so"
    command = [*find_c_compiler(machine), *FLAGS, *(("-fopenmp",) if threads else ()), "-shared", "-Wl,-z,defs"]
    command += [f"-Wl,-soname,{library}", f"-Wl,--version-script=lib{name}.map", f"{name}.c", "kernels.o"]
    command += ["-o", library, "-lm", "-lpthread"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ArgumentError(
            f"the C compiler {command[0]} did not link {library}", location=user_location(),
            received=done.stderr.strip()[-800:], suggestion="set CC to another compiler, or give link=False",
        )  # fmt: skip
    return folder / library
