"""Bundles: an entry point compiled for several targets and sizes, saved in one file and loaded to run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

import numpy as np

from tessera.codegen.artifact import (
    MANIFEST,
    MANIFEST_FIELDS,
    Artifact,
    SizeBinder,
    bind_plan,
    encode_content,
    hash_content,
    parse_manifest,
)
from tessera.core.device import INTERP, default_device, find_generator_name
from tessera.core.errors import (
    ArgumentError,
    ArtifactError,
    ResourceError,
    ShapeError,
    TesseraError,
    UnknownNameError,
    as_names,
    user_location,
)
from tessera.core.pytree import flatten
from tessera.core.types import TensorType, as_dtype
from tessera.runtime.artifacts import emit_program, select_architecture
from tessera.runtime.bundle_files import BundleFile, read_bundle_file, write_bundle_file
from tessera.runtime.loading import MAX_PROGRAMS, LoadedArtifact, count_memory, get_parameter_shape, load_artifact
from tessera.runtime.storage.memory_pool import as_bytes

BUNDLE_METHOD = "__bundle__"  # of objects that `ts.save` writes as a bundle: it gives the bundle


@dataclass(frozen=True)
class Bundle:
    """An entry point compiled ahead of time: an artifact for each variant, a target with the sizes of the arguments.

    `performance` has what was measured of a variant. `ts.save(bundle, path)` writes it, `ts.load(path)` runs it.
    """

    entry: str
    variants: Mapping[str, Artifact]
    performance: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __bundle__(self) -> Bundle:
        return self

    def join(self, other: Bundle) -> Bundle:
        """The variants of both.

        Raises:
            ArgumentError: they are of other programs, or have a variant of the same name.
        """
        if self.entry != other.entry or self.variants.keys() & other.variants.keys():
            raise ArgumentError(
                "two bundles do not go together", location=user_location(),
                expected=f"{self.entry}, with other variants than {', '.join(self.variants)}",
                received=f"{other.entry}: {', '.join(other.variants)}",
            )  # fmt: skip
        return Bundle(self.entry, {**self.variants, **other.variants}, {**self.performance, **other.performance})

    def save(self, path: str | Path, metadata: Mapping[str, Any] | None = None) -> Path:
        """Write the file, atomically; the same bundle and metadata give the same bytes.

        `metadata` is JSON data of the caller. Its `requirements["memory"]` ("8GB") is checked where the bundle is
        loaded; the memory that the program itself needs is counted, and checked too.

        Raises:
            ArgumentError: the metadata is no object of JSON data, or requires no size of memory.
            FileError: there can be no file at the path.
        """
        described = _check_metadata({} if metadata is None else metadata)
        if not isinstance(described, dict):
            raise ArgumentError("metadata is no object", location=user_location(), received=repr(described)[:80],
                                expected='a dict such as {"version": "1.0"}')  # fmt: skip
        as_bytes(_find_requirements({"metadata": described}).get("memory", 0))
        index = {
            "entry": self.entry,
            "metadata": described,
            "requirements": {"memory": max(map(count_needed_bytes, self.variants.values()), default=0)},
            "variants": {
                name: {"target": a.manifest["target"], "performance": dict(self.performance.get(name, {}))}
                for name, a in self.variants.items()
            },
        }
        files = {
            name: {MANIFEST: a.dump_manifest().encode(), **{n: encode_content(c) for n, c in a.files.items()}}
            for name, a in self.variants.items()
        }
        return write_bundle_file(path, files, index)

    def measure(self, seconds: float = 0.5) -> Bundle:
        """This bundle with the latency of each variant that this machine can run, on arguments of ones.

        Raises:
            ArgumentError: the time is no number.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise ArgumentError("the time to measure is no number", location=user_location(), expected="seconds",
                                received=repr(seconds)[:80])  # fmt: skip
        found = {}
        for name, artifact in self.variants.items():
            loaded = load_artifact(artifact, name)
            arrays = [np.ones(p["shape"], as_dtype(p["dtype"]).numpy) for p in loaded.parameters]
            found[name] = measure_latency(loaded, arrays, seconds)
        return replace(self, performance={**self.performance, **found})


def measure_latency(loaded: Any, arrays: Sequence[Any], seconds: float = 0.5) -> dict[str, Any]:
    """The median time of a warm call of `loaded.run`, of at least 3 and of what fits into the time: JSON data."""
    loaded.run(list(arrays))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        loaded.run(list(arrays))
        times.append(time.perf_counter() - start)
    where = getattr(loaded.runtime, "where", None)
    return {
        "median_ms": float(f"{median(times) * 1e3:.4g}"),
        "calls": len(times),
        "device": str(where) if where is not None else os.uname().machine if hasattr(os, "uname") else "unknown",
    }


def _check_metadata(data: Any, place: str = "metadata") -> Any:
    """A copy of JSON data: objects with names, lists, texts, finite numbers.

    Raises:
        ArgumentError: it is something else.
    """
    if data is None or isinstance(data, (str, bool, int)) or (isinstance(data, float) and math.isfinite(data)):
        return data
    if isinstance(data, Mapping) and all(isinstance(k, str) for k in data):
        return {k: _check_metadata(v, f"{place}.{k}") for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_check_metadata(v, f"{place}.{i}") for i, v in enumerate(data)]
    raise ArgumentError(
        f"{place} is not JSON data", location=user_location(), received=f"{type(data).__name__} {data!r:.80}",
        expected="objects, lists, strings and finite numbers",
    )  # fmt: skip


def count_needed_bytes(artifact: Artifact) -> int:
    """The bytes of a program's arguments, results and workspace; symbolic sizes are those of its example."""
    plan, parameters = artifact.manifest.get("plan", {}), artifact.manifest["interface"]["parameters"]
    given = sum(_count_bytes(p) for p in parameters)
    if "workspace" not in plan or "params" not in plan:
        return given
    if "sizes" in plan:
        plan = bind_plan(plan, SizeBinder(plan).bind([tuple(p["shape"]) for p in parameters]))
    results = sum(_count_bytes(p) for p in plan["params"] if p["role"] == "output")
    return int(given + results + plan["workspace"])


def _count_bytes(parameter: Mapping[str, Any]) -> int:
    return math.prod(parameter["shape"]) * as_dtype(parameter["dtype"]).numpy.itemsize


# Making bundles.


def bundle(
    entry: Any,
    *args: Any,
    targets: Sequence[str] = ("llvm",),
    batch_sizes: Sequence[int] = (),
    weights: Sequence[str] = (),
    grid: Any = None,
    group: int | None = None,
    arch: str | None = None,
    tune: bool = True,
    dynamic: Any = None,
    **named: Any,
) -> Bundle:
    """Compile a jit function or kernel for each target, and for each batch size: what `ts.save` writes into one file.

    The arguments are examples, as for `ts.build`. With `batch_sizes`, the first axis of each argument that is not among
    the `weights`, and has the size of the first such argument's, takes each of them. `dynamic` names symbolic sizes
    instead: one program then serves all of them.

    >>> from tessera.frontend.jit.tracing import jit
    >>> made = bundle(jit(lambda x: x * 2.0), np.ones((1, 3), np.float32), batch_sizes=(1, 8))
    >>> list(made.variants)
    ['llvm-b1', 'llvm-b8']

    Raises:
        ArgumentError: a batch size is no positive number, or there is no argument with an axis for it.
        UnsupportedOpError: a target cannot emit an op; it names the op, the target and the line.
    """
    from tessera.runtime.program import CallArguments, prepare  # loads the compiler: a loader needs none

    if isinstance(targets, str) or not (chosen := as_names(targets, "targets")):
        raise ArgumentError("targets is a list of names", location=user_location(), received=repr(targets))
    weights = as_names(weights, "weights")
    made: Bundle | None = None
    for target in dict.fromkeys(map(find_generator_name, chosen)):
        options = {"arch": arch} if arch else {}
        for label, given in _list_calls(entry, args, named, batch_sizes, weights, dynamic):
            lowered_for = select_architecture(target, arch)
            program = prepare(entry, CallArguments(*given), lowered_for, grid, group, tune, options, dynamic=dynamic)
            name = "-".join(filter(None, (target.replace(":", "-"), label)))
            one = Bundle(program.name, {name: emit_program(program, target, weights, options)})
            made = one if made is None else made.join(one)
    assert made is not None
    return made


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _list_calls(
    entry: Any, args: tuple[Any, ...], named: dict[str, Any], batches: Sequence[int], weights: Sequence[str],
    dynamic: Any,
) -> list[tuple[str, Call]]:  # fmt: skip
    """The labels and arguments of the variants of a target."""
    batches = () if batches is None else batches
    if isinstance(batches, (str, bytes)) or not isinstance(batches, Iterable):
        raise ArgumentError("batch_sizes is no list of numbers", location=user_location(), received=repr(batches)[:80])
    batches = list(batches)
    if not batches:
        return [("dynamic" if dynamic else "", (args, named))]
    if dynamic:
        raise ArgumentError(
            "batch_sizes and dynamic= exclude each other", location=user_location(),
            suggestion="leave out batch_sizes: one program of symbolic sizes serves all of them",
        )  # fmt: skip
    signature = getattr(entry, "signature", None)
    if signature is None:
        raise ArgumentError("batch_sizes are for a function under @ts.jit", location=user_location())
    call = signature.bind(*args, **named).arguments
    return [(f"b{n}", ((), resize_call(call, n, weights))) for n in dict.fromkeys(map(check_batch_size, batches))]


def check_batch_size(size: Any) -> int:
    """A batch size.

    Raises:
        ArgumentError: it is no positive integer.
    """
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
        raise ArgumentError("a batch size is no positive integer", location=user_location(), received=repr(size))
    return int(size)


def resize_call(call: Mapping[str, Any], size: int, weights: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call with another batch size: rows of the example, repeated."""
    leaves, tree = flatten(dict(call))

    def has_batch(name: str, leaf: Any) -> bool:
        stored = any(name == w or name.startswith(f"{w}.") for w in weights)
        return not stored and hasattr(leaf, "shape") and len(leaf.shape) > 0 and leaf.shape[0] > 0

    ordered = [pair for name, value in call.items() for pair in flatten(value, name)[0]]  # as the call has them
    sizes = [leaf.shape[0] for name, leaf in ordered if has_batch(name, leaf)]
    if not sizes:
        raise ArgumentError(
            "no argument has an axis for the batch size", location=user_location(),
            expected="an example with at least one row, which is not among the weights",
        )  # fmt: skip
    moved = [
        resize_batch(leaf, size) if has_batch(name, leaf) and leaf.shape[0] == sizes[0] else leaf
        for name, leaf in leaves
    ]
    return dict(tree.build(iter(moved)))


def resize_batch(array: Any, size: int) -> np.ndarray:
    """The first `size` rows of an array, repeated from the start where it has fewer.

    >>> resize_batch(np.array([[1], [2]]), 3).tolist()
    [[1], [2], [1]]
    """
    array = np.asarray(array)
    return np.asarray(array[np.arange(size) % len(array)])


# Loading bundles.


class LoadedBundle:
    """A bundle that is ready to run on one target: a call takes the variant for the shapes of its arguments."""

    def __init__(self, path: str | Path, target: str, read: BundleFile, max_bytes: int | None, programs: int) -> None:
        self.target, self.path = target, Path(path)
        self._index, self._limits = read.index, (max_bytes, programs)
        self._lock = Lock()
        self._loaded: dict[str, LoadedArtifact] = {}
        self._artifacts = {n: _read_variant(read, n) for n in _list_variants(read.index, target)}

    @property
    def entry(self) -> str:
        """The name of the function or kernel."""
        return str(self._index["entry"])

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the bundle was saved with."""
        return self._index["metadata"]  # type: ignore[no-any-return]

    @property
    def requirements(self) -> Mapping[str, Any]:
        """The memory in bytes that the program needs, and what the metadata requires besides."""
        return {**self._index["requirements"], **_find_requirements(self._index)}

    @property
    def performance(self) -> Mapping[str, Mapping[str, Any]]:
        """What was measured of each variant before it was saved."""
        return {n: v["performance"] for n, v in self._index["variants"].items() if v["performance"]}

    @property
    def variants(self) -> Mapping[str, str]:
        """The target of each variant in the file, those for other targets too."""
        return {name: v["target"] for name, v in self._index["variants"].items()}

    @property
    def first(self) -> str:
        """The name of the first variant for the target."""
        return next(iter(self._artifacts))

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """The parameters that a caller passes, with the shapes of the first variant."""
        return list_caller_parameters(self._artifacts[self.first])

    def load_variant(self, name: str) -> LoadedArtifact:
        """A variant for this target, its program loaded on first use.

        Raises:
            UnknownNameError: there is none of this name.
            ArtifactError: it is corrupt. ResourceError: it exceeds a limit.
        """
        if name not in self._artifacts:
            raise UnknownNameError(
                f"{self.path} has no variant {name} for {self.target}", expected=", ".join(self._artifacts)
            )
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = load_artifact(self._artifacts[name], f"{self.path}:{name}", *self._limits)
            return self._loaded[name]

    def find_variant(self, arrays: Sequence[Any]) -> str:
        """The name of the variant for these arrays: of their shapes, else of symbolic sizes.

        Raises:
            ShapeError: there is none.
        """
        shapes = [tuple(np.shape(a)) for a in arrays]
        fits = []
        for name, artifact in self._artifacts.items():
            parameters = list_caller_parameters(artifact)
            if [tuple(p["shape"]) for p in parameters] == shapes:
                return name
            fits += [name] * _matches(parameters, shapes)
        if fits:
            return fits[0]
        taken = "; ".join(f"{n}: {_describe(list_caller_parameters(a))}" for n, a in self._artifacts.items())
        raise ShapeError(
            f"{self.entry} was not built for arguments of these shapes", expected=taken,
            received=", ".join(map(str, shapes)), suggestion="build it with this batch size, or with dynamic=",
        )  # fmt: skip

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Run the variant for these arrays and return its results; arrays that it writes are updated in place.

        Raises:
            ShapeError: there is no variant for their shapes. DTypeError: an array has another element type.
        """
        return self.load_variant(self.find_variant(arrays)).run(arrays)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The result as a Tensor, or a tuple of them; the arguments are given as to the function it was built of."""
        leaves = [leaf for _, leaf in (*flatten(list(args))[0], *flatten(named)[0])]
        first, known = self.first, len(leaves) == len(self.parameters)
        try:
            # names have their places only in the order of the parameters
            ordered = self.load_variant(first).order_arguments(args, named) if known else leaves
            name = self.find_variant(ordered) if known else first
        except TesseraError as error:
            raise error.at(user_location()) from None
        return self.load_variant(name)(*args, **named)

    def __repr__(self) -> str:
        return f"<bundle of {self.entry} for {self.target}: {', '.join(self._artifacts)}>"


def _describe(parameters: Sequence[Mapping[str, Any]]) -> str:
    kinds = (TensorType(get_parameter_shape(p), as_dtype(p["dtype"])) for p in parameters)
    return ", ".join(map(str, kinds))


def list_caller_parameters(artifact: Artifact) -> list[dict[str, Any]]:
    """The parameters that a caller of an artifact passes."""
    return LoadedArtifact(artifact, None, {}).parameters


def _matches(parameters: Sequence[Mapping[str, Any]], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a program with symbolic sizes may take these shapes; its constraints are checked by the call."""
    patterns = [get_parameter_shape(p) for p in parameters]
    return len(patterns) == len(shapes) and all(
        len(p) == len(s) and all(not isinstance(a, int) or a == b for a, b in zip(p, s, strict=True))
        for p, s in zip(patterns, shapes, strict=True)
    )


def _list_variants(index: Mapping[str, Any], target: str) -> list[str]:
    return [n for n, v in sorted(index["variants"].items()) if v["target"] == target]


def _read_variant(read: BundleFile, name: str) -> Artifact:
    """The artifact of a variant, whose manifest agrees with the index and with the files."""
    files = read.take_files(name)
    manifest = parse_manifest(files.pop(MANIFEST), f"{MANIFEST} of {name}", MANIFEST_FIELDS)
    hashes = {n: hash_content(c) for n, c in files.items()}
    if manifest["files"] != hashes or manifest.get("target") != read.index["variants"][name]["target"]:
        raise ArtifactError(
            f"the manifest of the variant {name} is not that of its files", suggestion="save the bundle again"
        )
    interface = manifest.get("interface")
    if not isinstance(interface, dict) or not isinstance(interface.get("parameters"), list):
        raise ArtifactError(f"the manifest of the variant {name} has no interface", suggestion="save the bundle again")
    return Artifact(manifest, files, owned=read.owned)


def _choose_target(index: Mapping[str, Any], target: str | None, path: Any) -> str:
    """The target whose variants run: the given one, that of the default device, the processor, or the first."""
    held = sorted({v["target"] for v in index["variants"].values()})
    if not held:
        raise ArtifactError(f"{path} has no variants", suggestion="save it again")
    if target is not None:
        name = find_generator_name(target)
        if name not in held:
            raise ArtifactError(
                f"{path} has no variant for the target {name}", location=user_location(), expected=", ".join(held),
                suggestion=f"build it with {name} among the targets",
            )  # fmt: skip
        return name
    wanted = [default_device() if default_device() != INTERP else "llvm", "llvm", *held]
    return next(name for name in wanted if name in held)


def _find_requirements(index: Mapping[str, Any]) -> Mapping[str, Any]:
    found = index["metadata"].get("requirements", {})
    return found if isinstance(found, dict) else {}


def _check_requirements(index: Mapping[str, Any], path: Any, max_bytes: int | None) -> None:
    asked = _find_requirements(index).get("memory", 0)
    needed = max(as_bytes(asked), index["requirements"]["memory"])
    held = max_bytes or count_memory()
    if needed > held:
        raise ResourceError(
            f"{path} requires {needed:,} bytes of memory", expected=f"at most {held:,}",
            suggestion="run it on a larger machine",
        )  # fmt: skip


def load_bundle(
    path: str | Path, target: str | None = None, max_bytes: int | None = None, max_programs: int = MAX_PROGRAMS
) -> LoadedBundle:
    """Load the variants of a bundle for one target: by default that of the default device, or the processor.

    The file is read as a whole, every member checked against its hash, and closed. Nothing in it is executed but the
    code for this target, when a variant is called for the first time. Load only bundles that you trust as you trust a
    program: that code runs with your rights.

    Raises:
        FileError: there is no such file.
        ArtifactError: it is damaged, changed, of a newer schema or version, or without a variant for the target.
        ResourceError: it needs more memory than this machine (or `max_bytes`) has.
    """
    chosen: list[str] = []

    def choose(index: Mapping[str, Any]) -> Collection[str]:
        chosen.append(_choose_target(index, target, path))
        _check_requirements(index, path, max_bytes)
        return _list_variants(index, chosen[0])

    try:
        read = read_bundle_file(path, choose)
        return LoadedBundle(path, chosen[0], read, max_bytes, max_programs)
    except TesseraError as error:
        raise error.at(user_location()) from None
