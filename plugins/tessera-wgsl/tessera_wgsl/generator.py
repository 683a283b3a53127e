"""Generator: a Tile module as WGSL shaders, one for each kernel, with a launch plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.codegen.artifact import Artifact, build_manifest, split_parameters
from tessera.codegen.contract import Capabilities, check_element_types, check_resources
from tessera.codegen.grouped.vectoriser import vectorise_groups
from tessera.codegen.host_plan import build_host_plan
from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.ir.core import Module
from tessera.ops.dialects import host
from tessera_wgsl.kernel import GRID_AXES, HEADER_SLOTS, WORKGROUP, Kernel

OPTIONS = ("schedule",)


def emit_program(name: str, capabilities: Capabilities, module: Module, options: Mapping[str, Any]) -> Artifact:
    """The WGSL text of a Tile module, as files `<kernel>.wgsl`.

    Raises:
        UnsupportedOpError: an op has no row, or an element type, policy or integer is not supported.
        ResourceError: a kernel needs more than a shader has.
    """
    unknown = [k for k in options if k not in OPTIONS]
    if unknown:
        raise ArgumentError(f"the target {name} has no option {unknown[0]}", expected=", ".join(OPTIONS))
    check_element_types(module, name, capabilities.dtypes)
    check_resources(module, name, capabilities)
    ready = vectorise_groups(module)
    grids = find_grids(ready)
    sites: list[dict[str, Any]] = []
    kernels = {f.name: Kernel(f, grids.get(f.name), sites) for f in ready.functions[1:]}
    files = {f"{n}.wgsl": k.text() for n, k in kernels.items()}
    plan = {**build_host_plan(ready, {n: 4 * k.arena for n, k in kernels.items()}), "reports": sites}
    plan["workgroup"], plan["header"] = WORKGROUP, HEADER_SLOTS
    text = "".join(files.values())
    manifest = build_manifest(
        name, module, plan, text, split_parameters(plan), {}, options.get("schedule"), ("tessera-wgsl",)
    )
    return Artifact(manifest, files)


def write_web_engine(artifact: Artifact) -> str:
    """A script that opens the program in a browser: the body of a function of `program`.

    Raises:
        UnsupportedOpError: an op is computed by NumPy, which a browser does not have.
    """
    plan = artifact.manifest["plan"]
    if plan.get("calls"):
        op = plan["calls"][0]
        raise UnsupportedOpError(
            f"the target {artifact.manifest['target']} cannot emit {op['op']} for a browser: NumPy computes it "
            f"({op.get('place', '')})",
        )
    shaders = {Path(name).stem: artifact.text(name) for name in artifact.files}
    script = (Path(__file__).parent / "webgpu.mjs").read_text().strip()
    return f"{script}\nreturn openWebGpu(program, {_dump(plan)}, {_dump(shaders)});"


def _dump(data: Any) -> str:
    """JSON data in a script."""
    return json.dumps(data).replace("<", "\\u003c")


def pad_grid(grid: Sequence[Any]) -> tuple[int, ...]:
    """A grid with all axes of the words before a kernel's parameters; those that it lacks have one program."""
    return (*map(int, grid), *[1] * (GRID_AXES - len(grid)))


def find_grids(module: Module) -> dict[str, tuple[int, ...]]:
    """The largest grid that each kernel is launched with.

    Raises:
        UnsupportedOpError: a grid has more axes than the words before a kernel's parameters.
    """
    found: dict[str, tuple[int, ...]] = {}
    for node in module.main.body.walk():
        if node.op is host.launch:
            grid = pad_grid(node.attrs["grid"])
            if len(grid) > GRID_AXES:
                raise UnsupportedOpError(
                    f"the target wgsl cannot launch {node.attrs['kernel']}: its grid has {len(grid)} axes",
                    location=node.loc, expected=f"at most {GRID_AXES}", received=str(grid),
                )  # fmt: skip
            before = found.get(node.attrs["kernel"], grid)
            found[node.attrs["kernel"]] = tuple(map(max, grid, before))
    return found
