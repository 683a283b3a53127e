"""The CSL generator: programs on a mesh to CSL text, run in the simulator."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact, sha256
from tessera.codegen.backend import Capabilities, Runtime
from tessera.codegen.csl import exchange, host, text
from tessera.codegen.csl.blocks import statements
from tessera.codegen.csl.element import Element
from tessera.codegen.csl.views import BYTES, SPELLING
from tessera.codegen.element_types import check_element_types
from tessera.errors import ArgumentError, UnsupportedOpError
from tessera.ir.core import Function, Module, Value, structural_hash
from tessera.lower.mesh.pieces import CANNON, SUMMA
from tessera.lower.plan import Plan
from tessera.types import RefType, bf16, f16, int64

assert exchange  # fills the table of rows

ARCHITECTURES = ("wse2", "wse3")
OPTIONS = ("arch", "schedule")
GRID = (2, 2)


@dataclass(frozen=True)
class Csl:
    """The generator for a grid of processing elements.

    `configured("4x8")` is that for another grid, `configured("4x4,cannon")` one whose products go round in rings.
    """

    grid: tuple[int, int] = GRID
    product: str = SUMMA
    name: str = "csl"

    @property
    def capabilities(self) -> Capabilities:
        """What elements can do."""
        return Capabilities(4, tuple(SPELLING), plan=Plan(mesh=self.grid, mesh_product=self.product, flash=False))

    @property
    def has_device(self) -> bool:
        """Whether a machine is at hand: it is not, the simulator stands in for one."""
        return False

    def configured(self, options: str) -> Csl:
        """The generator for a grid, as "ROWSxCOLUMNS", and a way to multiply, "summa" or "cannon".

        Raises:
            ArgumentError: the text does not read.
        """
        text_, _, product = options.partition(",")
        sizes = text_.split("x")
        if len(sizes) != 2 or not all(s.isdigit() and 0 < int(s) for s in sizes):
            raise ArgumentError(f'"{options}" is not a grid', expected="ROWSxCOLUMNS, as in csl:4x4")
        if product not in ("", SUMMA, CANNON):
            raise ArgumentError(f'"{product}" is not a way to multiply', expected=f"{SUMMA} or {CANNON}")
        return Csl((int(sizes[0]), int(sizes[1])), product or SUMMA)

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The CSL files of a program on a mesh.

        Options: `arch` ("wse2", the default, or "wse3").

        Raises:
            UnsupportedOpError: an op has no row, or the program is a kernel that addresses memory of its own accord.
            ResourceError: an element's memory is too small.
        """
        arch = str(options.get("arch") or ARCHITECTURES[0])
        unknown = [k for k in options if k not in OPTIONS]
        if unknown or arch not in ARCHITECTURES:
            raise ArgumentError(
                f"the target csl has no {f'option {unknown[0]}' if unknown else f'architecture {arch}'}",
                expected=", ".join(OPTIONS if unknown else ARCHITECTURES),
            )
        function = _program(module)
        check_element_types(module, self.name, self.capabilities.dtypes)
        element = Element(tuple(function.attrs["mesh"]))
        statements(element, function.body)
        text.check_room(element, function.loc)
        text.check_channels(element, function.loc)
        plan = _plan(module, function, element)
        files = {
            "layout.csl": text.layout(module.main.name, element),
            "pe_program.csl": text.program(module.main.name, element),
            "plan.json": json.dumps(plan, indent=1) + "\n",
            "run.py": inspect.getsource(host),
            f"commands_{arch}.sh": text.commands(arch, element.grid, _bfloat(function)),
        }
        return Artifact(self._manifest(module, plan, files, arch, _bfloat(function)), files)

    def _manifest(self, module: Module, plan: Any, files: Mapping[str, str], arch: str, bfloat: bool) -> dict[str, Any]:
        fields = ("name", "shape", "dtype")
        return {
            "kind": "program",
            "target": self.name,
            "signature": {side: [{k: p[k] for k in fields} for p in plan[side]] for side in ("inputs", "outputs")},
            "plan": plan,
            "hashes": {"module": structural_hash(module), "text": sha256("".join(files.values()))},
            "schedule": {"mesh": list(plan["grid"])},
            "options": {"arch": arch, "bfloat": bfloat},
            "tools": {},
        }

    def runtime(self, artifact: Artifact) -> Runtime:
        """The program in the simulator: no machine is at hand."""
        from tessera.codegen.csl.runtime import Simulated  # the simulator is large, and not needed to emit

        return Simulated(artifact)

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """What runs the text in the simulator."""
        return self.runtime(artifact).run


def _program(module: Module) -> Function:
    """The program of the elements."""
    for function in module.functions[1:]:
        if "mesh" not in function.attrs:
            node = next((n for n in function.body.walk() if n.op.name.startswith("tile.")), None)
            raise UnsupportedOpError(
                f"{node.op.name if node else function.name} cannot be emitted for csl: a kernel addresses one memory "
                "by its program's id, and elements of a mesh have each their own",
                location=node.loc if node else function.loc,
                suggestion="write it as a function of whole tensors under @ts.jit, or run it on another target",
            )
    return module.functions[1]


def _plan(module: Module, function: Function, element: Element) -> dict[str, Any]:
    """What the host must know: how each tensor is cut, and under which symbol its pieces lie."""
    outputs = int(module.main.attrs.get("outputs", 0))
    params = function.params
    entries = {n.args[0]: n for n in function.body.nodes if n.op.name in ("mesh.read", "mesh.write")}
    unread = [p for p in params if p not in entries]
    inputs = [p for p in params[: len(params) - outputs] if p not in unread]
    return {
        "grid": list(element.grid),
        "inputs": [_entry(element, p, entries[p]) for p in inputs],
        "outputs": [_entry(element, p, entries[p]) for p in params[len(params) - outputs :]],
        "given": [i for i, p in enumerate(params[: len(params) - outputs]) if p in inputs],
    }


def _entry(element: Element, ref: Value, node: Any) -> dict[str, Any]:
    type = ref.type
    assert isinstance(type, RefType)
    if type.dtype == int64:
        raise UnsupportedOpError(
            "a tensor of int64 cannot be copied to elements of 32 bits", location=node.loc, suggestion="use ts.int32"
        )
    piece = node.attrs["shape"] if node.op.name == "mesh.read" else node.args[1].type.shape
    return {
        "name": ref.hint,
        "symbol": element.exported[ref],
        "shape": [int(n) for n in type.shape],
        "dtype": type.dtype.numpy.name,
        "bytes": BYTES[element.symbols[ref].type],
        "split": list(node.attrs["split"]),
        "piece": [int(n) for n in piece],
    }


def _bfloat(function: Function) -> bool:
    """Whether 16-bit floats are bf16; one program has one kind."""
    found = {t.dtype for n in function.body.walk() for t in (*n.types, *n.result_types)} & {f16, bf16}
    if len(found) > 1:
        raise UnsupportedOpError(
            "a CSL program has one 16-bit float type", location=function.loc, received="f16 and bf16"
        )
    return bf16 in found
