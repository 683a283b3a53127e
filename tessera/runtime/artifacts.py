"""Artifacts: builds an entry point ahead of time into a folder, which `tessera.runtime.loading` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.codegen.artifact import (
    Artifact,
    describe_size,
)
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.core.device import find_generator_name
from tessera.core.errors import (
    ArgumentError,
    as_names,
    user_location,
)
from tessera.core.io import import_safetensors
from tessera.core.symbolic_dim import Size, evaluate_shape, symbol_names
from tessera.core.types import as_dtype

if TYPE_CHECKING:
    from tessera.frontend.jit.dynamic_shapes import SizeVariant
    from tessera.runtime.program import PreparedProgram


WEIGHTS_FILE = "weights.safetensors"


def build(
    entry: Any,
    *args: Any,
    out: str | Path,
    target: str = "llvm",
    weights: Sequence[str] = (),
    grid: Any = None,
    group: int | None = None,
    arch: str | None = None,
    tune: bool = True,
    dynamic: Any = None,
    variants: Sequence[str] = (),
    **named: Any,
) -> Path:
    """Compile a jit function or kernel for `target` into the folder `out`, whole or not at all.

    A kernel's launch is `grid` and `group`, or that of the entry `kernel[grid, group]`. The arguments, by position or
    by name as in a call, are examples of what the program is called with: the artifact keeps their shapes and types.
    Those named in `weights`, and arrays the function closes over, are stored and not asked for again. `arch` is for
    targets with several architectures, such as ptx ("sm_80", "sm_90a"). An autotuned kernel is tuned for the target, or
    taken from the cache; with tune=False in its first configuration.

    `dynamic` makes sizes arguments of the program: True for those that annotations name (`Tensor["B", 768]`), or
    `{"x": {0: "B"}}`, with a name or an expression for each axis. The artifact then takes any sizes from 1 on that
    fulfil the constraints (`ts.require`) of the function or kernel; tiles of a function are chosen for the example's
    sizes, and the grid of a kernel is a function of its arguments, or of its constants and sizes.

    `variants` are constraints such as "S % 64 == 0", "B <= 4" or "B == 1": for each the artifact has a copy of the
    program that uses it, which a call whose sizes fulfil it runs; the first one that does is taken. Where the code
    compares sizes, the sizes of other answers have variants, too (tessera/runtime/size_variants.py).

    Raises:
        UnsupportedOpError: the target cannot emit an op; it names the op, the target and the line.
        UnknownSizeError: an op needs the value of a symbolic size.
        ArgumentError: no sizes fulfil a variant.
    """
    from tessera.runtime.program import CallArguments, prepare  # loads the compiler: a loader needs none

    name = find_generator_name(target)
    options = {"arch": arch} if arch else {}

    def make(variant: Any = None) -> PreparedProgram:
        given = CallArguments(args, named)
        lowered_for = select_architecture(name, arch)
        return prepare(entry, given, lowered_for, grid, group, tune, options, dynamic=dynamic, variant=variant)

    if not dynamic and not variants:
        return build_program(make(), out, name, weights, options)
    from tessera.runtime.size_variants import prepare_variants

    program, others = prepare_variants(make, variants)
    return build_program(program, out, name, weights, options, others)


def select_architecture(name: str, arch: str | None) -> str:
    """The name of a generator whose tiles are for an architecture, where it has tiles for each; else the name.

    >>> select_architecture("ptx", "sm_90a"), select_architecture("llvm", None)
    ('ptx:sm_90a', 'llvm')
    """
    return f"{name}:{arch}" if arch and ":" not in name and hasattr(get_backend(name), "arch") else name


def build_program(
    program: PreparedProgram,
    out: str | Path,
    target: str,
    weights: Sequence[str] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
    variants: Sequence[PreparedProgram] = (),
) -> Path:
    """Write a prepared program as an artifact folder; `options` are the generator's."""
    return emit_program(program, target, weights, options, variants).save(out)


def emit_program(
    program: PreparedProgram,
    target: str,
    weights: Sequence[str] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
    variants: Sequence[PreparedProgram] = (),
) -> Artifact:
    """A prepared program as an artifact in memory, with its machine code, its weights, and its variants."""
    emitted, arrays = _emit_one(program, target, weights, options)
    files, listed = dict(emitted.files), []
    for number, variant in enumerate(variants, 1):
        one, own = _emit_one(variant, target, weights, options)
        place = f"variant{number}"
        keys = {n: n if n in arrays and _are_same(arrays[n], a) else f"{place}.{n}" for n, a in own.items()}
        arrays |= {keys[n]: a for n, a in own.items()}
        files |= {f"{place}/{name}": content for name, content in one.files.items()}
        when = [c.text for c in variant.conditions]
        listed.append({"when": when, "place": place, "weights": keys, "manifest": one.manifest})
    if arrays:
        files[WEIGHTS_FILE] = import_safetensors().numpy.save({k: _to_storable(a) for k, a in arrays.items()})
    manifest = {**emitted.manifest, "variants": listed} if listed else emitted.manifest
    return dataclasses.replace(emitted, manifest=manifest, files=files)


def _are_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays hold the same bytes in the same shape."""
    return one is other or (one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


def _emit_one(
    program: PreparedProgram, target: str, weights: Sequence[str], options: Mapping[str, Any]
) -> tuple[Artifact, dict[str, np.ndarray]]:
    """A program as an artifact without its weights, and these by name."""
    from tessera.ir.printer import print_module  # a loader prints nothing

    stored = find_stored_parameters(program, weights)
    generator = get_backend(target)
    emitted = emit_artifact(generator, program.levels["tile"], dict(options))
    files = {**emitted.files, **{f"{level}.mlir": print_module(m) for level, m in program.levels.items()}}
    if hasattr(generator, "precompile"):
        files |= generator.precompile(emitted)
    interface = describe_interface(program, stored)
    made = dataclasses.replace(emitted, manifest={**emitted.manifest, "interface": interface}, files=files)
    return made, {program.names[i]: program.arrays[i] for i in stored}


def describe_interface(program: PreparedProgram, stored: Sequence[int]) -> dict[str, Any]:
    """The entry's parameters as JSON data; `stored` are the places of those that travel with the program."""
    shapes = [p.type.shape for p in program.levels["tile"].main.params]
    if program.padding is not None:
        shapes[: len(program.padding.patterns)] = program.padding.patterns
    rules = (*program.rules.constraints, *program.rules.guards)
    lines = {rule.text: rule.place for rule in rules if rule.place}  # that state them, for errors
    return {
        "entry": program.name,
        "parameters": [
            _describe_parameter(n, a, shape, i in stored, program.variant)
            for i, (n, a, shape) in enumerate(zip(program.names, program.arrays, shapes, strict=False))
        ],
        "written": list(program.written),
        **({} if program.random is None else {"random": dataclasses.asdict(program.random)}),
        **({"lines": lines} if lines else {}),
        **({} if program.padding is None else {"padding": program.padding.describe()}),
    }


def find_stored_parameters(program: PreparedProgram, weights: Sequence[str]) -> list[int]:
    """The places of the parameters that travel with a program: those in `weights`, and what it closes over.

    Raises:
        ArgumentError: a name in `weights` is of no argument.
    """
    names, weights = program.names, as_names(weights, "weights")
    unknown = [w for w in weights if not any(n == w or n.startswith(f"{w}.") for n in names)]
    if unknown:
        raise ArgumentError(
            f"{program.name} has no argument {unknown[0]}", location=user_location(), expected=", ".join(names[:8])
        )
    return [
        i
        for i, n in enumerate(names)
        if n.startswith("capture") or any(n == w or n.startswith(f"{w}.") for w in weights)
    ]


def _describe_parameter(
    name: str, array: np.ndarray, shape: Sequence[Size], stored: bool, variant: SizeVariant | None = None
) -> dict[str, Any]:
    example = array.shape if variant is None or stored else evaluate_shape(shape, variant.sizes)
    found = {"name": name, "shape": list(example), "dtype": as_dtype(array.dtype).name, "stored": stored}
    return {**found, "sizes": [describe_size(n) for n in shape]} if symbol_names(shape) else found


def _to_storable(array: np.ndarray) -> np.ndarray:
    """An array in a type that safetensors stores: bf16 and fp8, which NumPy lacks, become their bytes."""
    flat = np.ascontiguousarray(array)
    return flat if flat.dtype.isbuiltin == 1 else flat.view(np.uint8)
