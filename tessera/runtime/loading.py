"""Loading of artifacts: reads and checks a built folder, and runs its program without its source."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.codegen.artifact import (
    Artifact,
    SizeBinder,
    bind_plan,
    check_fields,
    has_fields,
    is_count,
    is_list,
    is_table,
    is_text,
    parse_size,
    read_artifact,
)
from tessera.codegen.contract import get_capable_backend, load_runtime
from tessera.codegen.padded_sizes import SIZE_PREFIX, PaddedSizes, parse_padded_sizes
from tessera.codegen.plan_execution import DTYPE_NAMES, check_plan
from tessera.core.errors import (
    ArgumentError,
    ArtifactError,
    DTypeError,
    OutOfBoundsError,
    ShapeError,
    TesseraError,
    user_location,
)
from tessera.core.io import import_safetensors
from tessera.core.pytree import flatten
from tessera.core.shapes import SizeConstraint, bind_shapes
from tessera.core.symbolic_dim import LEAST_SIZE, Size
from tessera.core.types import TensorType, as_dtype
from tessera.frontend.jit.tracing import to_array
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.random import RANDOM_STATE_NAMES, RandomUse
from tessera.runtime.artifacts import WEIGHTS_FILE

MAX_PROGRAMS = 1 << 28  # of one launch of a loaded program, by default
MAX_KNOWN_SHAPES = 1024  # of calls whose variant is known


class SizeLimits:
    """Checks the sizes of calls of a program with symbolic sizes: its constraints, and what it then asks for."""

    def __init__(
        self,
        plan: Mapping[str, Any],
        max_bytes: int,
        max_programs: int,
        lines: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._plan, self._limits = plan, (max_bytes, max_programs)
        self._binder = SizeBinder(plan, lines)
        self._checked: set[tuple[tuple[int, ...], ...]] = set()

    def check(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Check the shapes of a call.

        Raises:
            ShapeError: a shape does not fit, or a size breaks a constraint.
            ResourceError: the program asks for more than a limit.
        """
        key = tuple(shapes)
        if key not in self._checked:
            check_plan(bind_plan(self._plan, self._binder.bind(key)), *self._limits)
            self._checked.add(key)


@dataclasses.dataclass(frozen=True)
class LoadedArtifact:
    """An artifact that is ready to run: it is called with its parameters' arrays."""

    artifact: Artifact
    runtime: Any
    stored: Mapping[str, np.ndarray]
    sizes: SizeLimits | None = None
    variants: tuple[LoadedVariant, ...] = ()
    padding: PaddedSizes | None = None
    _chosen: dict[tuple[tuple[int, ...], ...], LoadedArtifact] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def interface(self) -> Mapping[str, Any]:
        """The parameters in order, and which of them the program writes."""
        return self.artifact.manifest["interface"]

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """The parameters that a caller passes: those that are neither stored nor the state of the default generator."""
        hidden = RANDOM_STATE_NAMES if "random" in self.interface else ()
        listed = [p for p in self.interface["parameters"] if not p["stored"] and p["name"] not in hidden]
        return [p for p in listed if self.padding is None or not p["name"].startswith(SIZE_PREFIX)]

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Run the program and return its results; arrays that it writes are updated in place and returned too.

        Raises:
            ShapeError: an array has another shape than the artifact was built for.
        """
        if self.variants and (chosen := self.choose([np.shape(a) for a in arrays])) is not self:
            return chosen.run(arrays)
        random = self.interface.get("random")
        state = () if random is None else RandomUse(**random).reserve()
        given = iter([*self._check_arguments(arrays), *state])
        listed = self.interface["parameters"]
        if self.padding is not None:
            listed = listed[: len(self.padding.patterns)]
        full = [self.stored[p["name"]] if p["stored"] else next(given) for p in listed]
        if self.padding is not None:
            return self._run_padded(self.padding, full)
        if self.sizes is not None:
            self.sizes.check([np.shape(a) for a in full])
        with _manifest_errors(self.artifact.manifest["target"]):
            results = self.runtime.run(full)
        return [*results, *(full[i] for i in self.interface["written"])]

    def _run_padded(self, padding: PaddedSizes, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Run a program of upper bounds on arrays of other sizes."""
        sizes = padding.bind(arrays)
        with _manifest_errors(self.artifact.manifest["target"]):
            return padding.cut(self.runtime.run(padding.pad(arrays, sizes)), sizes)

    def choose(self, shapes: Sequence[tuple[int, ...]]) -> LoadedArtifact:
        """The program for arguments of these shapes: the first variant whose conditions hold, else this one."""
        key = tuple(shapes)
        found = self._chosen.get(key)
        if found is None:
            patterns = [get_parameter_shape(p) for p in self.parameters]
            sizes: dict[str, Any] = {}
            fits = len(patterns) == len(key) and bind_shapes(list(zip(patterns, key, strict=True)), sizes) is None
            fits = fits and all(value >= LEAST_SIZE for value in sizes.values())
            found = next((v.program for v in self.variants if fits and v.serves(sizes)), self)
            if len(self._chosen) >= MAX_KNOWN_SHAPES:
                self._chosen.clear()
            self._chosen[key] = found
        return found

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The result as a Tensor, or a tuple of them.

        Arguments are given as to the function it was built of: dicts, lists and tuples are taken apart, and names may
        be used. Those stored in the artifact are left out.
        """
        try:
            tensors = [Tensor(a) for a in self.run([to_array(a) for a in self.order_arguments(args, named)])]
        except TesseraError as error:
            raise error.at(user_location()) from None
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def __repr__(self) -> str:
        taken = ", ".join(
            f"{p['name']}: {TensorType(get_parameter_shape(p), as_dtype(p['dtype']))}" for p in self.parameters
        )
        return f"<{self.interface['entry']} for {self.artifact.manifest['target']}: {taken}>"

    def order_arguments(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of a call's arguments in the order of the parameters."""
        names = [p["name"] for p in self.parameters]
        found = dict(flatten(named)[0])
        if unknown := [n for n in found if n not in names]:
            raise ArgumentError(f"{self.interface['entry']} has no argument {unknown[0]}", expected=", ".join(names))
        placed = [leaf for _, leaf in flatten(list(args))[0]]
        rest = [n for n in names if n not in found]
        if len(placed) == len(rest):
            return [{**found, **dict(zip(rest, placed, strict=True))}[n] for n in names]
        if listed := next((a for a in args if isinstance(a, (list, tuple)) and _holds_numbers(a)), None):
            raise ArgumentError(
                f"{self.interface['entry']} takes arrays, and a {type(listed).__name__} is taken apart",
                expected=", ".join(names), received=f"{type(listed).__name__} {listed!r:.60}",
                suggestion="pass np.asarray(...) of it",
            )  # fmt: skip
        return [*placed, *found.values()]  # `run` says how many there should be

    def _check_arguments(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        wanted = self.parameters
        if len(arrays) != len(wanted):
            noun = "array" if len(wanted) == 1 else "arrays"
            raise ArgumentError(
                f"{self.interface['entry']} takes {len(wanted)} {noun}, received {len(arrays)}",
                expected=", ".join(p["name"] for p in wanted),
            )
        return [_check_argument(p, np.asarray(a)) for p, a in zip(wanted, arrays, strict=True)]


@dataclasses.dataclass(frozen=True)
class LoadedVariant:
    """A program of an artifact for some of its symbolic sizes: those for which all conditions hold."""

    when: tuple[SizeConstraint, ...]
    program: LoadedArtifact

    def serves(self, sizes: Mapping[str, Any]) -> bool:
        """Whether the program is for these sizes."""
        return all(c.holds(sizes) is not False for c in self.when)


def _holds_numbers(value: Any) -> bool:
    """Whether a list, or one in it, starts with a number."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (int, float))


def get_parameter_shape(parameter: Mapping[str, Any]) -> tuple[Size, ...]:
    """The shape of a parameter of an artifact; sizes may be symbolic. `shape` is that of the example."""
    return tuple(parse_size(n) for n in parameter.get("sizes", parameter["shape"]))


def _check_argument(parameter: Mapping[str, Any], array: np.ndarray) -> np.ndarray:
    name, shape, dtype = parameter["name"], tuple(parameter["shape"]), as_dtype(parameter["dtype"])
    if array.shape != shape and "sizes" not in parameter:  # symbolic sizes are bound for all arguments together
        raise ShapeError(
            f"argument {name} has another shape than the artifact was built for", expected=shape, received=array.shape,
            suggestion="build again with examples of this shape, or a jit function with dynamic= for every size",
        )  # fmt: skip
    if array.dtype != dtype.numpy:
        raise DTypeError(
            f"argument {name} has another element type", expected=dtype, received=as_dtype(array.dtype),
            suggestion=f"convert it to {dtype}, or build again with an example argument of this type",
        )  # fmt: skip
    return array


def load(folder: str | Path, max_bytes: int | None = None, max_programs: int = MAX_PROGRAMS) -> LoadedArtifact:
    """Load an artifact folder that `build` wrote.

    Load only artifacts that you trust as you trust a program: the code of a target runs with your rights. A program
    that asks for more than `max_bytes` of memory (by default the memory of this machine) for its workspace and results,
    or for more than `max_programs` programs in one launch, is refused before anything is allocated.

    Raises:
        ArtifactError: the folder is missing, corrupt, or of a newer schema than this version reads.
        ResourceError: it exceeds a limit.
    """
    try:
        if not isinstance(folder, (str, os.PathLike)):
            raise ArgumentError(
                "load takes the folder of an artifact", expected="a path", received=type(folder).__name__,
                suggestion="in a kernel, tile.load(place) reads memory",
            )  # fmt: skip
        return load_artifact(read_artifact(folder), str(folder), max_bytes, max_programs)
    except TesseraError as error:
        raise error.at(user_location()) from None


def load_artifact(
    artifact: Artifact, where: str, max_bytes: int | None = None, max_programs: int = MAX_PROGRAMS
) -> LoadedArtifact:
    """Check an artifact that was read from `where`, and load its program.

    Raises:
        ArtifactError, ResourceError: as `load`.
    """
    arrays = _load_weights(artifact)
    loaded = _load_program(artifact, where, (max_bytes or count_memory(), max_programs), arrays)
    variants = [
        _load_variant(loaded, v, f"{where}/{v['place']}", (max_bytes or count_memory(), max_programs), arrays)
        for v in artifact.manifest.get("variants", [])
    ]
    return dataclasses.replace(loaded, variants=tuple(variants)) if variants else loaded


def _load_program(
    artifact: Artifact, where: str, limits: tuple[int, int], arrays: Mapping[str, np.ndarray],
    keys: Mapping[str, str] = MappingProxyType({}),
) -> LoadedArtifact:  # fmt: skip
    """Check and load one program; `keys` names its stored parameters among the arrays."""
    own = {k: check for k, check in _GENERATOR_FIELDS.items() if k in artifact.manifest}
    check_fields(artifact.manifest, _PROGRAM_FIELDS | own, f"the manifest of {where}")
    _check_interface(artifact.manifest)
    sizes = _check_plan(artifact.manifest, *limits)
    target = artifact.manifest["target"]
    generator = get_capable_backend(target, "runtime")
    with _manifest_errors(target):
        runtime = load_runtime(generator, artifact)
    interface, padding = artifact.manifest["interface"], None
    if "padding" in interface:
        padding = parse_padded_sizes(interface["padding"], interface["parameters"], interface.get("lines", {}))
    stored = _find_stored(artifact, where, arrays, keys)
    return LoadedArtifact(artifact, runtime, stored, sizes, padding=padding)


def _load_variant(
    general: LoadedArtifact, listed: Mapping[str, Any], where: str, limits: tuple[int, int],
    arrays: Mapping[str, np.ndarray],
) -> LoadedVariant:  # fmt: skip
    """Check and load one of several programs, whose files are in a folder of the artifact's.

    Raises:
        ArtifactError: a condition is no constraint, it takes other arguments, or as `load_artifact`.
    """
    artifact, place = general.artifact, listed["place"]
    files = {name[len(place) + 1 :]: c for name, c in artifact.files.items() if name.startswith(f"{place}/")}
    folder = artifact.folder / place if artifact.folder else None
    one = dataclasses.replace(artifact, manifest=listed["manifest"], files=files, folder=folder)
    program = _load_program(one, where, limits, arrays, listed["weights"])
    try:
        when = tuple(SizeConstraint(text) for text in listed["when"])
    except ShapeError as error:
        raise ArtifactError(f"the conditions of {where} are not valid", received=error.message) from None
    if [p["name"] for p in program.parameters] != [p["name"] for p in general.parameters]:
        raise ArtifactError(f"{where} takes other arguments", suggestion="build the artifact again")
    return LoadedVariant(when, program)


def _check_plan(manifest: Mapping[str, Any], max_bytes: int, max_programs: int) -> SizeLimits | None:
    """Check the plan of an artifact; one of symbolic sizes as it is for the example's sizes."""
    plan = manifest.get("plan", {})
    if "sizes" in plan:
        with _manifest_errors(manifest["target"]):
            limits = SizeLimits(plan, max_bytes, max_programs, manifest["interface"].get("lines", {}))
            try:
                limits.check([tuple(p["shape"]) for p in manifest["interface"]["parameters"]])
            except (ArgumentError, ShapeError) as error:
                raise ArtifactError(
                    "the interface does not fit the plan", received=error.message, suggestion="build the artifact again"
                ) from None
        return limits
    if "launches" in plan:
        check_plan(plan, max_bytes, max_programs)
    return None


_GENERATOR_FIELDS = {  # which need not be there
    "options": has_fields(),
    "plan": has_fields(),
    "signature": has_fields(
        outputs=is_list(has_fields(name=is_text, dtype=is_text, shape=lambda value: isinstance(value, list)))
    ),
    "variants": is_list(
        has_fields(when=is_list(is_text), place=is_text, weights=is_table(is_text), manifest=has_fields())
    ),
}
_OWN_FIELDS = {"lines": is_table(is_text)}  # of the interface
_PROGRAM_FIELDS = {
    "target": is_text,
    "interface": has_fields(
        entry=is_text,
        written=is_list(is_count),
        parameters=is_list(
            has_fields(
                name=is_text, shape=is_list(is_count), dtype=is_text, stored=lambda value: isinstance(value, bool)
            )
        ),
    ),
}


def _check_interface(manifest: Mapping[str, Any]) -> None:
    parameters, written = manifest["interface"]["parameters"], manifest["interface"]["written"]
    own = {k: check for k, check in _OWN_FIELDS.items() if k in manifest["interface"]}
    check_fields(manifest["interface"], own, "the interface in the manifest")
    wrong = [p["dtype"] for p in parameters if p["dtype"] not in DTYPE_NAMES]
    wrong += [i for i in written if i >= len(parameters)]
    memory = count_memory()
    for parameter in parameters:
        get_parameter_shape(parameter)
    wrong += [p["shape"] for p in parameters if math.prod(p["shape"]) > memory]  # an element takes a byte or more
    if "random" in manifest["interface"] and not _is_random_use(manifest["interface"]["random"], parameters):
        wrong.append(manifest["interface"]["random"])
    if wrong:
        raise ArtifactError(
            "the interface in the manifest is not valid", received=repr(wrong[0]), suggestion="build the artifact again"
        )


def _is_random_use(value: Any, parameters: Sequence[Mapping[str, Any]]) -> bool:
    """Whether JSON data describes a `RandomUse`, and the generator's state is among the parameters if it is drawn."""
    fields = {"count": is_count, "seed": lambda v: v is None or type(v) is int, "drawn": lambda v: isinstance(v, bool)}
    if not has_fields(**fields)(value) or value.keys() != fields.keys():
        return False
    state = [p["name"] for p in parameters if p["name"] in RANDOM_STATE_NAMES]
    return state == list(RANDOM_STATE_NAMES if value["drawn"] else ())


@contextmanager
def _manifest_errors(target: str) -> Iterator[None]:
    """Report a manifest that does not fit its program's text as an ArtifactError.

    No code of the user runs in the body, and the arguments of a call were checked: what else fails is the manifest,
    except for an index that the program itself checks.
    """
    try:
        yield
    except OutOfBoundsError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError) as error:
        raise ArtifactError(
            f"the manifest does not describe a program of the target {target}",
            received=f"{type(error).__name__}: {error}", suggestion="build the artifact again",
        ) from error  # fmt: skip


def count_memory() -> int:
    """The bytes of this machine's memory; 1 TiB where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 40


def _load_weights(artifact: Artifact) -> dict[str, np.ndarray]:
    """The arrays that are stored with a program, as their bytes; {} where there are none."""
    content = artifact.files.get(WEIGHTS_FILE)
    if content is None:
        return {}
    safetensors = import_safetensors()
    try:
        return safetensors.numpy.load(content)  # type: ignore[no-any-return]
    except (KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise _make_weights_error(artifact, error) from None


def _find_stored(
    artifact: Artifact, where: str, arrays: Mapping[str, np.ndarray], keys: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """The stored parameters of a program.

    Raises:
        ArtifactError: one is missing, or has another size.
    """
    stored = _list_stored(artifact)
    if stored and not arrays:
        raise ArtifactError(f"{where} lacks {WEIGHTS_FILE}", suggestion="build it again")
    try:
        held = {p["name"]: arrays[keys.get(p["name"], p["name"])] for p in stored}
        return {p["name"]: held[p["name"]].view(as_dtype(p["dtype"]).numpy).reshape(p["shape"]) for p in stored}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _make_weights_error(artifact, error) from None


def _list_stored(artifact: Artifact) -> list[dict[str, Any]]:
    return [p for p in artifact.manifest["interface"]["parameters"] if p["stored"]]


def _make_weights_error(artifact: Artifact, error: Exception) -> ArtifactError:
    names = ", ".join(p["name"] for p in _list_stored(artifact))
    return ArtifactError(
        f"{WEIGHTS_FILE} does not hold the stored parameters", expected=names,
        received=f"{type(error).__name__}: {error}", suggestion="build the artifact again",
    )  # fmt: skip
