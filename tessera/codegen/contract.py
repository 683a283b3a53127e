"""The contract between compiler and code generator: the registry of generators, and legality: the static shapes and
element types of blocks that a generator accepts.

A generator is an object of the entry point group `tessera.codegen` that emits an artifact from a Tile module.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.core.device import GENERATORS_OF_THIS_PACKAGE, INTERP, find_generator_name
from tessera.core.device_array import DeviceMemory
from tessera.core.errors import (
    UNKNOWN,
    ArgumentError,
    DeviceUnavailable,
    Location,
    ResourceError,
    TesseraError,
    UnknownNameError,
    UnsupportedOpError,
    is_package_file,
    traceback_location,
    user_location,
)
from tessera.core.progress import track
from tessera.core.shapes import SizeConstraint, use_size_constraints
from tessera.core.types import SHARED, DType, Policy, TensorType, Type
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ir.rewrite import VERIFY_VARIABLE
from tessera.ir.verify import verify
from tessera.ops.dialects import tile

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# The contract between the compiler and a code generator.


@dataclass(frozen=True)
class Capabilities:
    """The limits of a target, by which the lowering chooses tiles.

    `shared_bytes` limits the shared memory of a group, `block_bytes` the blocks of one tile; None: no limit.
    `meeting` is the number of groups that run at once, so that a grid barrier works; 0: none.
    `lockstep` is the number of tiles of a group that run in lockstep (a warp); a group should be a multiple of it.
    `symbolic`: sizes may be arguments of the launch plan, so that one program serves all of them; `prefers_static`: its
    fastest kernels need the sizes, so that jit makes such programs only where `dynamic=True` asks for them.
    `donation`: a program's plan may put results into the memory of arguments (`tessera.codegen.donation`).
    `plan` holds the tile sizes that suit the target (a `tessera.lower.lowering_plan.LoweringPlan`), or is None, or a
    function of nothing that gives it, where the machine decides;
    `plan_choices` other values of its fields that tuning may try, in groups of fields that depend on each other
    (`tessera.runtime.planning`).
    """

    vector_bytes: int
    dtypes: tuple[DType, ...]
    max_grid_rank: int = 3
    max_group: int = 1024
    shared_bytes: int | None = None
    block_bytes: int | None = None
    meeting: int = 0
    lockstep: int = 1
    plan: Any = None
    symbolic: bool = False
    prefers_static: bool = False
    donation: bool = False
    plan_choices: tuple[Mapping[str, tuple[Any, ...]], ...] = ()


@dataclass(frozen=True)
class CompilerPass:
    """A named step of a generator's pipeline: `run` takes a module and gives a new one, which verifies and prints.

    The name is the field's term, as in "software pipelining".
    """

    name: str
    run: Callable[[Module], Module]


def run_passes(passes: Sequence[CompilerPass], module: Module) -> Module:
    """The module after all of these passes, in order; each is verified if the variable TESSERA_VERIFY is set."""
    for each in track(passes, "compiler passes"):
        module = each.run(module)
        if os.environ.get(VERIFY_VARIABLE):
            verify(module)
    return module


@runtime_checkable
class Runtime(Protocol):
    """An artifact that is loaded and ready to run."""

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Run the program; returns its outputs. Arrays that it writes in place are changed."""
        ...


@runtime_checkable
class TimedRuntime(Runtime, Protocol):
    """A runtime whose device has a clock of its own, which profiles take."""

    def measure(self, arrays: Sequence[Any]) -> float:
        """The seconds of one run on the device, without copies; the arrays are not written."""
        ...

    def describe_kernels(self) -> Sequence[Mapping[str, Any]]:
        """What each launch takes of the device, as plain data."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A code generator, found through the entry point group `tessera.codegen`.

    `runtime` and `interpreter` are optional (`get_capable_backend`), as are `passes` (`PassPipeline`) and
    `standalone(artifact, name, stored, machine)`, which gives the files of a program that runs without Python, emitted
    with `standalone_options(machine)`, `web_engine(artifact)`, which gives the name and the script of an engine in a
    page (`ts.export_web`), and
    `precompile(artifact)`, which gives machine code as files that travel in an artifact folder. A generator
    whose device has a memory of its own has `memory()`, which gives it (a `DeviceMemory`); its runtimes have a method
    `call(arrays, constants)`, which takes and gives arrays of the device.
    """

    name: str

    @property
    def capabilities(self) -> Capabilities:
        """The limits of the target."""
        ...

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The target text and launch plan of a Tile module.

        Raises:
            UnsupportedOpError: an op has neither a row nor a lowering; it names the op, the target and the line.
        """
        ...

    def runtime(self, artifact: Artifact) -> Runtime:
        """Load the artifact for the device."""
        ...

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """A function that runs the artifact's text in an emulator, without the device."""
        ...


@runtime_checkable
class PassPipeline(Protocol):
    """A generator that names its passes: `emit` runs them in order, then writes the text of what the last one gave.

    `tessera inspect --pass-by-pass` prints the module after each of them; `tessera bisect` verifies it and runs it in
    the Tile interpreter. A module after the last pass may be given to `emit` itself.
    """

    def passes(self, module: Module, options: Mapping[str, Any]) -> Sequence[CompilerPass]:
        """The passes for a Tile module and these options, in order; none for a module that has been through them."""
        ...


# The registry of generators.


ENTRY_POINT_GROUP = "tessera.codegen"


class BuiltInGenerator(NamedTuple):
    """An address of a generator of this package, as an entry point has it."""

    name: str
    value: str

    def load(self) -> Backend:
        """The generator, imported."""
        module, _, attribute = self.value.partition(":")
        return getattr(import_module(module), attribute)  # type: ignore[no-any-return]


# They are found without a search of the installed packages, which takes longer than to load a program.
BUILT_IN = {name: BuiltInGenerator(name, f"tessera.codegen.{name}:BACKEND") for name in GENERATORS_OF_THIS_PACKAGE}


def entry_points(group: str) -> Sequence[EntryPoint]:
    """The installed entry points of a group."""
    from importlib import metadata  # loads the parsers of mail and archives

    return tuple(metadata.entry_points(group=group))


def list_backends() -> dict[str, EntryPoint | BuiltInGenerator]:
    """All generators by name, none of them imported."""
    return {**{point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}, **BUILT_IN}


@cache
def get_backend(name: str) -> Backend:
    """The generator of this name; what follows a colon configures it, as in "csl:4x4".

    Raises:
        UnknownNameError: no generator has this name; the message lists the names.
        DeviceUnavailable: its package cannot be imported.
        ArgumentError: it is no generator (a method that is missing or takes other arguments); it takes no
            configuration, or not this one.
    """
    name, colon, options = name.partition(":")
    found = BUILT_IN.get(name) or list_backends().get(name)
    if found is None:
        import difflib  # seldom needed

        close = difflib.get_close_matches(name, list_backends(), 1)
        raise UnknownNameError(
            f'"{name}" is not a code generator', location=user_location(), expected=", ".join(sorted(list_backends())),
            suggestion=f"did you mean {close[0]}?" if close else None,
        )  # fmt: skip
    generator = _load_backend(found)
    check_backend(name, generator)
    if not colon:
        return generator
    if not hasattr(generator, "configured"):
        raise ArgumentError(f"the target {name} takes nothing after a colon", received=options)
    return generator.configured(options)


def _load_backend(point: EntryPoint | BuiltInGenerator) -> Backend:
    try:
        return point.load()
    except Exception as error:  # a package may raise anything while it is imported
        reason = str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"
        missing = isinstance(error, ImportError) and error.name == point.value.partition(":")[0]
        raise DeviceUnavailable(
            f"the generator {point.name} does not load: {reason}", location=_locate_failure(error),
            expected=point.value,
            suggestion="install the package that has it again" if missing else "mend or uninstall its package",
        ) from error  # fmt: skip


def _locate_failure(error: Exception) -> Location:
    """The line of a package that failed while it was imported."""
    if isinstance(error, SyntaxError) and error.filename:
        return Location(error.filename, error.lineno or 0, error.offset or 0)
    step, found = error.__traceback__, UNKNOWN
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not is_package_file(file) and not file.startswith("<") and "importlib" not in file:
            found = traceback_location(step)
        step = step.tb_next
    return found


# The methods of a generator, with what they are called with: those that each has, then the optional ones.
REQUIRED_METHODS = {"emit": ("module", "options")}
OPTIONAL_METHODS = {
    "runtime": ("artifact",),
    "interpreter": ("artifact",),
    "passes": ("module", "options"),
    "precompile": ("artifact",),
    "configured": ("text",),
    "where": (),
    "memory": (),
    "web_engine": ("artifact",),
    "standalone_options": ("machine",),
    "standalone": ("artifact", "name", "stored", "machine"),
}


def check_backend(name: str, generator: Any) -> None:
    """Check that an object is a generator: its methods take the arguments that they will get.

    Raises:
        ArgumentError: it is not; the error names the method and its line.
    """
    for method, arguments in {**REQUIRED_METHODS, **OPTIONAL_METHODS}.items():
        hook = getattr(generator, method, None)
        if hook is None and method in OPTIONAL_METHODS:
            continue
        wanted = f"{method}({', '.join(arguments)})"
        if not callable(hook):
            raise ArgumentError(
                f"the generator {name} has no method `{method}`", expected=wanted, received=repr(generator)[:80],
                suggestion="the entry point names an instance: my_package:BACKEND",
            )  # fmt: skip
        try:
            signature = inspect.signature(hook)
            signature.bind(*arguments)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"the method `{method}` of the generator {name} cannot be called: {error}", expected=wanted,
                received=f"{method}{signature}", location=_locate_definition(hook),
            ) from None  # fmt: skip
    if not isinstance(found := getattr(generator, "capabilities", None), Capabilities):
        raise ArgumentError(
            f"the generator {name} has no capabilities", expected="a tessera.codegen.contract.Capabilities",
            received=repr(found)[:80],
        )  # fmt: skip


def _locate_definition(hook: Any) -> Location:
    code = getattr(inspect.unwrap(hook), "__code__", None)
    return Location(code.co_filename, code.co_firstlineno) if code else UNKNOWN


def emit_artifact(generator: Backend, module: Module, options: Mapping[str, Any]) -> Artifact:
    """What a generator emits for a Tile module.

    Raises:
        ArgumentError: it gives something else than an artifact.
        UnsupportedOpError: the module has symbolic sizes, and the target needs their values.
    """
    names = module.main.attrs.get("sizes", ())
    if names and not generator.capabilities.symbolic:
        raise UnsupportedOpError(
            f"the target {generator.name} needs the value of each size", location=module.main.loc,
            received=", ".join(names), suggestion="give the sizes, or build for llvm",
        )  # fmt: skip
    with use_size_constraints(SizeConstraint(text) for text in module.main.attrs.get("constraints", ())):
        return _require(generator, "emit", generator.emit(module, options), Artifact, "an Artifact")


def load_runtime(generator: Backend, artifact: Artifact) -> Runtime:
    """The artifact, loaded by a generator for its device.

    Raises:
        ArgumentError: the generator gives something without a method `run`.
    """
    return _require(generator, "runtime", generator.runtime(artifact), Runtime, "an object with a method run(arrays)")


def load_interpreter(generator: Backend, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function that runs the artifact's text in the generator's emulator.

    Raises:
        ArgumentError: the generator gives no function.
    """
    return _require(generator, "interpreter", generator.interpreter(artifact), Callable, "a function of arrays")


def _require(generator: Backend, method: str, found: Any, kind: Any, expected: str) -> Any:
    if isinstance(found, kind):
        return found
    name = getattr(generator, "name", type(generator).__name__)
    raise ArgumentError(
        f"the method `{method}` of the generator {name} gives something else", expected=expected,
        received=repr(found)[:80], location=_locate_definition(getattr(generator, method)),
    )  # fmt: skip


def find_device_memory(device: str) -> DeviceMemory | None:
    """The memory of a device, or None of one whose programs use that of the host.

    Raises:
        DeviceUnavailable, UnknownNameError: nothing installed serves the device.
    """
    name = find_generator_name(device)
    generator: Any = None if name == INTERP else get_backend(name)
    return generator.memory() if hasattr(generator, "memory") else None


def find_broken_backends() -> dict[str, TesseraError]:
    """The installed generators that cannot be used, by name, each with its error."""
    broken: dict[str, TesseraError] = {}
    for name in list_backends():
        try:
            get_backend(name)
        except TesseraError as error:
            broken[name] = error
    return broken


def list_target_passes(name: str, module: Module, options: Mapping[str, Any]) -> Sequence[CompilerPass]:
    """The passes of a generator between a Tile module and its text; none where it does not tell them apart."""
    generator = get_backend(name)
    return generator.passes(module, options) if isinstance(generator, PassPipeline) else ()


def get_capable_backend(name: str, method: str) -> Backend:
    """The generator of this name, which has the optional `method`: "runtime" or "interpreter".

    Raises:
        ArgumentError: it does not.
    """
    generator = get_backend(name)
    if not hasattr(generator, method):
        raise ArgumentError(
            f"the target {name} has no {method} for its text", expected=f"a generator with `{method}`",
            suggestion="run it at another level, or on another target",
        )  # fmt: skip
    return generator


# Block types: static shapes and element types of the values of a tile function.


def static_shape(type: Type) -> tuple[int, ...]:
    """The shape of a block or of memory, which has no symbolic sizes."""
    return tuple(int(n) for n in type.shape)  # type: ignore[arg-type]


def get_tensor_type(v: Value) -> TensorType:
    """The type of a block or scalar."""
    assert isinstance(v.type, TensorType)
    return v.type


def check_element_types(module: Module, target: str, dtypes: Sequence[DType]) -> None:
    """Refuse a Tile module with element types that a target does not support.

    Raises:
        UnsupportedOpError: names the first op of a tile function with such an operand or result.
    """
    for function in module.functions[1:]:
        for node in function.body.walk():
            missing = [t.dtype for t in (*node.result_types, *node.types) if t.dtype not in dtypes]
            if missing:
                raise _make_element_type_error(node, missing[0], target, dtypes)


def _make_element_type_error(node: Node, dtype: DType, target: str, dtypes: Sequence[DType]) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{node.op.name} on {dtype} cannot be emitted: the target {target} has no element type {dtype}",
        location=node.loc,
        expected=", ".join(map(str, dtypes)),
        received=str(dtype),
        suggestion="cast to one of these first, or run in the interpreter",
    )


DEFAULT_POLICY = {"rounding": "nearest", "saturate": False, "denormals": "preserve"}


def is_special_policy(policy: Policy | None) -> bool:
    """Whether a policy has other rounding, saturation or denormal handling than the default."""
    return policy is not None and any(getattr(policy, k) != known for k, known in DEFAULT_POLICY.items())


def make_policy_error(target: str, text: str, location: Location) -> UnsupportedOpError:
    """The error for a policy that a target does not support."""
    return UnsupportedOpError(
        f"the target {target} does not round by the policy {text}", location=location,
        expected="nearest-even, denormals preserved", suggestion="run this in the interpreter, or remove the clause",
    )  # fmt: skip


def check_default_policy(node: Node, target: str) -> None:
    """Refuse an op whose result has a storage policy other than the default.

    Raises:
        UnsupportedOpError: a result's policy asks for another rounding, saturation or flushed denormals.
    """
    for v in node.results:
        policy = getattr(v.type, "policy", None)
        unsupported = [
            f"{k}={getattr(policy, k)}" for k, known in DEFAULT_POLICY.items() if policy and getattr(policy, k) != known
        ]
        if unsupported:
            raise make_policy_error(target, ", ".join(unsupported), node.loc)


@dataclass(frozen=True)
class ResourceUsage:
    """The resources of one group of a kernel: tiles, bytes of shared memory, and peak bytes of a tile's live blocks.

    `peak_location` is where the peak is. A value is live from its definition to its last use; scalars and register
    buffers count too.
    """

    group: int
    shared_bytes: int
    block_bytes: int
    peak_location: Location


def measure_resources(function: Function) -> ResourceUsage:
    """The resources of a tile function, computed from its ops."""
    buffers = [n for n in function.body.walk() if n.op is tile.alloc]
    shared = sum(count_allocation_bytes(n) for n in buffers if n.attrs["space"] == SHARED)
    own = sum(count_allocation_bytes(n) for n in buffers if n.attrs["space"] != SHARED)
    peak, node = _find_peak(function.body)
    return ResourceUsage(int(function.attrs.get("group", 1)), shared, own + peak, node.loc if node else function.loc)


def count_allocation_bytes(node: Node) -> int:
    """The bytes of an allocation, with the padding of its rows."""
    shape = [int(n) for n in node.out.type.shape]
    rows = [*shape[:-1], shape[-1] + node.attrs["padding"]] if shape else []
    return math.ceil(math.prod(rows) * node.out.type.dtype.bits / 8)


def check_resources(module: Module, target: str, capabilities: Capabilities) -> None:
    """Refuse a Tile module whose kernels need more resources than a target has.

    Raises:
        ResourceError: names the kernel, the resource, the amount needed and the limit.
    """
    for function in module.functions:
        if function is not module.main:
            _check_limits(function, target, capabilities)
            _check_grid_barrier(function, target, capabilities)


def _check_limits(function: Function, target: str, capabilities: Capabilities) -> None:
    need = measure_resources(function)
    limits = (
        ("tiles in a group", need.group, capabilities.max_group, "a smaller group, or fewer warps", function.loc),
        ("bytes of shared memory", need.shared_bytes, capabilities.shared_bytes, "smaller tiles, or fewer stages",
         function.loc),
        ("bytes of blocks in registers", need.block_bytes, capabilities.block_bytes, "smaller tiles",
         need.peak_location),
    )  # fmt: skip
    for what, amount, limit, remedy, location in limits:
        if limit is not None and amount > limit:
            raise ResourceError(
                f"{function.name} needs {amount:,} {what}", location=location,
                expected=f"at most {limit:,} on {target}",
                received=f"{amount:,}", suggestion=remedy,
            )  # fmt: skip


def _check_grid_barrier(function: Function, target: str, capabilities: Capabilities) -> None:
    """All programs of a grid with a grid barrier must be resident at once."""
    barrier = next((n for n in function.body.walk() if n.op is tile.grid_barrier), None)
    if barrier is None:
        return
    if not capabilities.meeting:
        raise UnsupportedOpError(
            f"the target {target} has no grid barrier", location=barrier.loc,
            suggestion="order the accesses by two launches, one after the other",
        )  # fmt: skip
    programs = math.prod(int(n) for n in function.attrs.get("grid", ()))
    if programs > capabilities.meeting:
        raise ResourceError(
            f"{function.name} has {programs:,} programs that synchronise at a grid barrier", location=barrier.loc,
            expected=f"at most {capabilities.meeting:,} on {target}: all must be resident at once",
            received=f"{programs:,}",
            suggestion="launch fewer programs that loop: for i in tile.range(tile.group_id(), n, programs)",
        )  # fmt: skip


def _find_peak(block: Block) -> tuple[int, Node | None]:
    """The peak bytes of live values in a block, and the node where it is."""
    last = _find_last_uses(block)
    ending: dict[int, list[Value]] = {}
    for value, index in last.items():
        ending.setdefault(index, []).append(value)
    alive = {v: _count_value_bytes(v.type) for v in block.params}
    total = peak = sum(alive.values())
    peak_node, unused = None, list(block.params)
    for index, node in enumerate(block.nodes):
        after = {v: n for v, n in alive.items() if last.get(v, -1) > index} if node.regions else {}
        deepest, at = _find_peak_in_regions(node, after)
        made = {v: _count_value_bytes(v.type) for v in node.results}
        alive |= made
        total += sum(made.values())
        peak_here = deepest if node.regions else total
        if peak_here > peak:
            peak, peak_node = peak_here, at or node
        ended = [*ending.get(index, ()), *(v for v in (*unused, *node.results) if v not in last)]
        total -= sum(alive.pop(v, 0) for v in ended)
        unused = []
    return peak, peak_node


def _find_peak_in_regions(node: Node, after: dict[Value, int]) -> tuple[int, Node | None]:
    """The peak in the regions of a node: values live after it, values that they use from outside, and their own."""
    peak_point: tuple[int, Node | None] = (0, None)
    for region in node.regions:
        outer = after | {v: _count_value_bytes(v.type) for v in region.free}
        peak, at = _find_peak(region)
        peak_point = max(peak_point, (sum(outer.values()) + peak, at), key=lambda each: each[0])
    return peak_point


def _find_last_uses(block: Block) -> dict[Value, int]:
    """The index of the last node that uses each value, itself or in its regions; results are used at the end."""
    last: dict[Value, int] = {}
    for index, node in enumerate(block.nodes):
        last |= dict.fromkeys((*node.args, *(v for region in node.regions for v in region.free)), index)
    return last | dict.fromkeys(block.results, len(block.nodes))


def _count_value_bytes(type: Type) -> int:
    """The bytes of a value; 0 for a ref, whose memory is counted at its allocation."""
    return _count_tensor_bytes(type) if isinstance(type, TensorType) else 0


def _count_tensor_bytes(type: Any) -> int:
    return math.ceil(math.prod(map(int, type.shape)) * type.dtype.bits / 8)
