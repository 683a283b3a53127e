"""Variants of a random program that must not change its results (metamorphic relations).

Of a function: its passes in a random selection and order, other tile sizes, a batch of it, symbolic sizes, calls
through `ts.jit` with donated arguments, inputs in other forms, and its derivatives (`derivative_relations.py`). Of a
kernel: other blocks, swizzles, paddings and pipeline stages, launches on streams. Of both: arrays laid out in memory in
another order, other machines of a target (vectors, architectures, meshes), artifacts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np

from tessera.codegen.contract import get_backend, get_capable_backend, load_interpreter
from tessera.codegen.padded_sizes import PaddedSizes
from tessera.core.errors import ResourceError, TesseraError, UnsupportedOpError
from tessera.core.pytree import flatten
from tessera.core.schedule import Schedule
from tessera.core.shapes import use_size_constraints
from tessera.core.symbolic_dim import Dim, find_size_limit
from tessera.frontend.jit.tracing import Jit
from tessera.interp.bound import compare_with_bound
from tessera.interp.graph import bind_sizes
from tessera.interp.tile import interpreter as tile_interpreter
from tessera.ir.core import Module
from tessera.ir.rewrite import eliminate_common_subexpressions, eliminate_dead_code
from tessera.ir.tensor import Tensor
from tessera.ir.verify import verify
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes.canonicalisation import canonicalise, sink_widening
from tessera.lower.passes.size_padding import pad_sizes
from tessera.lower.pipeline import list_steps
from tessera.runtime import driver
from tessera.runtime.program import ExecutableProgram, PreparedProgram, prepare
from tessera.tools.fuzz.derivative_relations import (
    RELATIONS,
    NotComparableError,
    RelationError,
    compare_derivatives,
)
from tessera.tools.fuzz.launch_variants import run_artifact, run_queued
from tessera.tools.fuzz.programs import TESSERA, RandomProgram

# Passes that may be left out, repeated and reordered before the lowering to Schedule.
OPTIONAL = (canonicalise, eliminate_common_subexpressions, eliminate_dead_code, sink_widening)
Variant = tuple[str, Callable[[], list[np.ndarray]]]
COMPILED = ("artifact", "other machine")  # variants on a target alone
QUEUED = ("llvm",)  # targets whose launches a stream queues on any machine


# For each target the options of other machines, and the fields of their lowering plan.
MACHINES: dict[str, tuple[Mapping[str, Sequence[Any]], Mapping[str, Sequence[Any]]]] = {
    "llvm": ({"vector_bytes": (16, 32, 64), "pair_products": (False,), "byte_products": (1,)}, {}),
    "ptx": ({"arch": ("sm_80", "sm_90a")}, {}),
    "csl": (
        {"arch": ("wse2", "wse3"), "optimize": (False, True)},
        {"mesh": ((1, 1), (1, 3), (2, 2), (3, 1), (2, 5)), "mesh_product": ("summa", "cannon")},
    ),
}


def list_variants(
    program: RandomProgram, prepared: PreparedProgram, random: Random, targets: Sequence[str] = ()
) -> list[Variant]:
    """Variants of a program whose results must be those of the program: of a function, one drawn at random."""
    machines = [t for t in targets if t in MACHINES]
    machine = random.choice(machines) if machines else ""
    place = random.randrange(1 << 30)
    if program.is_kernel:
        others: list[Variant] = [("other layouts", lambda: _run_other_layouts(prepared, Random(place)))]
        queue = random.choice(("interp", *(t for t in targets if t in QUEUED)))
        others.append(("queued launches", lambda: run_queued(program, prepared, queue, Random(place))))
        if machine:
            others.append(("other machine", lambda: _run_on_other_machine(prepared, machine, Random(place))))
            others.append(("other stages", lambda: _run_other_stages(program, machine, Random(place))))
            others.append(("artifact", lambda: run_artifact(program, prepared, machine, Random(place))))
        constants = [("other constants", partial(_run_other_constants, program, c)) for c in program.variants]
        return [*constants, random.choice(others)]
    name = random.choice([n for n in FUNCTION_VARIANTS if machine or n not in COMPILED])
    target = machine if name in COMPILED else random.choice(("interp", *targets))
    return [(name, lambda: FUNCTION_VARIANTS[name](program, prepared, target, Random(place)))]


def relay(x: np.ndarray, random: Random) -> np.ndarray:
    """A copy of an array, laid out in memory in another order: columns first, reversed, a part of a larger array."""
    order = random.sample(range(x.ndim), x.ndim)
    wide = np.zeros([2 * x.shape[a] + 1 for a in order], x.dtype)
    for place, n in enumerate(x.shape[a] for a in order):
        first, step = random.choice(((1, 2), (n, -1)))
        wide = np.moveaxis(np.moveaxis(wide, place, 0)[first::step][:n], 0, place)
    part = wide.transpose(np.argsort(order))
    part[...] = x
    return part


def _run_other_layouts(prepared: PreparedProgram, random: Random) -> list[np.ndarray]:
    """The program on arrays whose elements lie in another order: at a level, or with error bounds."""
    arrays = [relay(x, random) for x in prepared.arrays]
    level = random.choice([*prepared.levels, "bounds"])
    if level == "bounds":
        return [b.value for b in replace(prepared, arrays=tuple(arrays)).bounds()]
    results = prepared.compile(level).function(arrays)
    return [*results, *(arrays[i] for i in prepared.written)]


def _run_random_passes(program: Any, prepared: PreparedProgram, target: str, random: Random) -> list[np.ndarray]:
    # The lowering relies on `canonicalise` to fold reductions of empty axes: it is always one of them.
    passes = [*(random.choice(OPTIONAL) for _ in range(random.randint(0, 4))), canonicalise]
    return _run_with_passes(prepared.levels["graph"], passes, random.random() < 0.5, list(prepared.arrays))


def _run_other_tiles(program: Any, prepared: PreparedProgram, target: str, random: Random) -> list[np.ndarray]:
    return _run_with_plan(prepared.levels["graph"], _draw_plan(random), list(prepared.arrays))


def _draw_plan(random: Random) -> LoweringPlan:
    return LoweringPlan(
        m=random.choice((1, 8, 128)), n=random.choice((2, 16, 128)), k=random.choice((3, 32, 512)),
        whole_k=random.choice((4, 64, 512)), multiple=random.choice((1, 4, 16)), rows=random.choice((1, 64, 8192)),
        row_limit=random.choice((4, 64, 8192)), pointwise=random.choice((4, 64, 8192)), lanes=random.choice((1, 8, 64)),
        result_lanes=random.choice((None, 4, 256)), collapse=random.random() < 0.5, peel=random.random() < 0.5,
        stack_views=random.random() < 0.5, vector_products=random.choice((0, 1, 4)), own_row=random.choice((0, 4096)),
        serial_scans=random.random() < 0.5, parallel=random.choice((None, 528)),
    )  # fmt: skip


def _run_with_passes(module: Module, passes: Sequence[Any], plan_memory: bool, arrays: list[Any]) -> list[np.ndarray]:
    """Lower with other passes of the Graph level, and without the memory plan if `plan_memory` is false."""
    own = {"simplify", "common subexpressions", "dead code", "sink casts", *(() if plan_memory else ("memory plan",))}
    for name, step in list_steps(LoweringPlan()):
        if name == "simplify":
            for rewrite in passes:
                module = verify(module.replace(rewrite(module.main), *module.functions[1:]))
        if name not in own:
            module = verify(step(module))
    return tile_interpreter.run(module, arrays)


def _run_with_plan(module: Module, plan: LoweringPlan, arrays: list[Any]) -> list[np.ndarray]:
    for _, step in list_steps(plan):
        module = verify(step(module))
    return tile_interpreter.run(module, arrays)


def _run_on_other_machine(prepared: PreparedProgram, target: str, random: Random) -> list[np.ndarray]:
    """The program for a machine of a target that is not the default one: checked, or in the emulator of its text."""
    options, fields = ({name: random.choice(values) for name, values in each.items()} for each in MACHINES[target])
    graph = prepared.levels.get("graph")
    levels = driver.lower(graph.main, target, fields) if graph else prepared.lower_for_target(target)
    artifact = prepared.emit(target, options, levels["tile"])
    generator = get_backend(target)
    guarded = getattr(generator, "guarded", None)
    function = guarded(artifact) if guarded else load_interpreter(get_capable_backend(target, "interpreter"), artifact)
    return ExecutableProgram(prepared, function)()


def _run_other_stages(program: RandomProgram, target: str, random: Random) -> list[np.ndarray]:
    """A kernel with another number of pipeline stages and warps."""
    schedule = Schedule(stages=random.choice((1, 2, 3, 4)), warps=random.choice((1, 2, 4, 8)))
    entry = program.load().with_schedule(schedule)
    made = prepare(entry, program.arguments(), "interp", program.grid, program.group)
    return _run_on_other_machine(made, target, random)


def _run_batch(program: RandomProgram) -> list[np.ndarray]:
    """The program under vmap on two lanes of different values: the results of the second."""
    entry = Jit(TESSERA.vmap(program.load().function))
    arguments = {i.name: np.stack([replace(i, seed=i.seed + 1).make(), i.make()]) for i in program.inputs}
    return [r[1] for r in prepare(entry, arguments).run("graph")]


# Other forms of an input, by name: its elements in another array, and the ops that give them back.
Form = Callable[[np.ndarray, Random], tuple[np.ndarray, Callable[[Any], Any]]]


def _turn(x: np.ndarray, random: Random) -> tuple[np.ndarray, Callable[[Any], Any]]:
    """Two neighbouring axes, in most cases, or all of them in another order."""
    axes = list(range(x.ndim))
    if x.ndim > 1 and random.random() < 0.7:
        first = random.randrange(x.ndim - 1)
        axes[first : first + 2] = axes[first + 1], axes[first]
    else:
        random.shuffle(axes)
    back = tuple(int(a) for a in np.argsort(axes))
    return np.array(x.transpose(axes), order="C"), lambda t: TESSERA.permute(t, back)


def _enclose(x: np.ndarray, random: Random) -> tuple[np.ndarray, Callable[[Any], Any]]:
    """A part of a larger array."""
    low = [random.randrange(3) for _ in x.shape]
    wide = np.zeros([first + n + random.randrange(3) for first, n in zip(low, x.shape, strict=True)], x.dtype)
    inside = tuple(slice(first, first + n) for first, n in zip(low, x.shape, strict=True))
    wide[inside] = x
    return wide, lambda t: t[inside] if inside else t


FORMS: dict[str, Form] = {
    "turned": _turn,
    "enclosed": _enclose,
    "flat": lambda x, random: (x.reshape(-1), lambda t: TESSERA.reshape(t, shape=x.shape)),
    "stacked": lambda x, random: (np.stack([np.zeros_like(x), x]), lambda t: t[1]),
    "flipped": lambda x, random: (np.flip(x).copy(), lambda t: TESSERA.flip(t) if x.ndim else t),
}


def _run_with_other_forms(program: Any, target: str, random: Random) -> list[np.ndarray]:
    """The program on arrays of other forms, from which it makes its inputs first: rewrites see other operands."""
    forms = [random.choice([*FORMS.values(), _turn, None]) for _ in program.inputs]
    inputs = program.arguments().values()
    made = [(x, lambda t: t) if f is None else f(x, random) for f, x in zip(forms, inputs, strict=True)]
    function = program.load().function

    def changed(*arrays: Any) -> Any:
        return function(*(back(t) for t, (_, back) in zip(arrays, made, strict=True)))

    entry = prepare(Jit(changed), [x for x, _ in made], target)
    return entry.run("tile" if target == "interp" else "device", target)


def _run_with_symbolic_sizes(program: RandomProgram, target: str, random: Random) -> list[np.ndarray]:
    """The program with names for a random selection of its inputs' sizes; equal sizes have one name or several.

    Raises:
        NotComparableError: an op needs a size as a number.
    """
    dynamic = _name_sizes(program, random)
    try:
        made = prepare(program.load(), program.arguments(), target, dynamic=dynamic)
    except TesseraError as error:
        raise NotComparableError from error
    return made.run("tile" if target == "interp" else "device", target)


def _name_sizes(program: RandomProgram, random: Random) -> dict[str, dict[int, str]]:
    """Names for some sizes of a program's inputs.

    Raises:
        NotComparableError: none has a name.
    """
    # Mostly equal sizes have one name, and all have one: other programs compare sizes that may differ, and are refused.
    shared, every = random.random() < 0.75, random.random() < 0.6
    named = {
        i.name: {
            axis: f"N{size}" if shared else f"{i.name}_{axis}"
            for axis, size in enumerate(i.shape) if size > 1 and (every or random.random() < 0.6)
        }
        for i in program.inputs
    }  # fmt: skip
    named = {name: axes for name, axes in named.items() if axes}
    if not named:
        raise NotComparableError
    return named


def _run_padded(program: RandomProgram, random: Random) -> list[np.ndarray]:
    """The program of upper bounds of its sizes, as for a target of known sizes, on padded arrays.

    Raises:
        NotComparableError: an op needs a size as a number, or has no rule for padding.
    """
    try:
        traced = program.load().trace_dynamic((), program.arguments(), _name_sizes(program, random))
        function, constraints = traced.function, (*traced.rules.constraints, *traced.rules.guards)
        arrays = [*program.arguments().values(), *traced.captures]
        sizes = bind_sizes(function, arrays)
        with use_size_constraints(constraints):
            limits = {name: find_size_limit(Dim.of(name)) for name in sizes}
        upper = {name: int(min(size + random.choice((0, 1, 3, 6)), limits[name])) for name, size in sizes.items()}
        padded = pad_sizes(function, upper)
        graph = driver.lower(padded.function, "interp")
    except TesseraError as error:
        raise NotComparableError from error
    patterns = tuple(tuple(p.type.shape) for p in function.params)
    names = tuple(p.hint for p in function.params)
    padding = PaddedSizes({n: upper[n] for n in padded.names}, names, patterns, padded.results, constraints)
    return padding.cut(tile_interpreter.run(graph["tile"], padding.pad(arrays, sizes)), sizes)


def _run_at_later_sizes(program: RandomProgram, target: str, random: Random) -> list[np.ndarray]:
    """Calls with other sizes: the function is compiled with symbols for the second, which serves the third.

    Raises:
        NotComparableError: the program does not exist at these sizes.
        RelationError: its results there are not those of a program of these sizes, or it refuses them.
    """
    function = Jit(program.load().function, target=target)
    first = _list_arrays(function(**program.arguments()))
    for _ in range(2):
        other = {
            n: random.choice((n + 1, n + 2, 2 * n, n - 1, n - 1)) for i in program.inputs for n in i.shape if n > 1
        }
        inputs = tuple(replace(i, shape=tuple(other.get(n, n) for n in i.shape)) for i in program.inputs)
        changed = replace(program, inputs=inputs)
        try:
            bounds = prepare(changed.load(), changed.arguments(), lower=False).bounds()
        except TesseraError as error:  # a size is written in the program
            raise NotComparableError from error
        for number, (result, bound) in enumerate(zip(_call_later(function, changed), bounds, strict=True)):
            agreement = compare_with_bound(result, bound)
            if not agreement.ok:
                raise RelationError(f"of {[i.shape for i in inputs]} output {number} {agreement}")
    return first


def _call_later(function: Jit, changed: RandomProgram) -> list[np.ndarray]:
    try:
        return _list_arrays(function(**changed.arguments()))
    except (UnsupportedOpError, ResourceError):
        raise
    except TesseraError as error:
        raise RelationError(f"{[i.shape for i in changed.inputs]} are refused: {error}") from error


def _run_donated(program: RandomProgram, target: str) -> list[np.ndarray]:
    """Calls through `ts.jit`: with arguments that are kept, which must not change, and then with donated ones.

    Raises:
        RelationError: a call changed an argument, or its results change with the arguments.
    """
    function, arguments = program.load().function, program.arguments()
    kept = {name: x.copy() for name, x in arguments.items()}
    first = _list_arrays(Jit(function, target=target)(**arguments))
    changed = [name for name, x in kept.items() if x.tobytes() != arguments[name].tobytes()]
    if changed:
        raise RelationError(f"the call changes its argument {changed[0]}")
    before = [x.tobytes() for x in first]
    for x in arguments.values():
        x[...] = np.zeros((), x.dtype)
    if [x.tobytes() for x in first] != before:
        raise RelationError("a result shares the memory of an argument")
    donating = Jit(function, target=target, donate=tuple(kept))
    for _ in range(2):  # compiled, and known
        found = donating(**{name: Tensor(x.copy()) for name, x in kept.items()})
    return _list_arrays(found)


def _list_arrays(results: Any) -> list[np.ndarray]:
    return [r.numpy() for _, r in flatten(results)[0]]


def _run_other_constants(program: RandomProgram, changed: Any) -> list[np.ndarray]:
    grid, constants = changed
    other = replace(program, grid=grid, constants={**program.constants, **constants})
    return prepare(other.load(), other.arguments(), "interp", other.grid, other.group).run("tile")


FunctionVariant = Callable[[Any, PreparedProgram, str, Random], list[np.ndarray]]


def _make_derivative_variant(name: str) -> FunctionVariant:
    return lambda program, prepared, target, random: compare_derivatives(name, program, random)


# The variants of a function: run(program, prepared, target, random) gives the results, which are those of the program.
# A program has `load()`, `arguments()` and `inputs`, which can be replaced.
FUNCTION_VARIANTS: dict[str, FunctionVariant] = {
    "random passes": _run_random_passes,
    "other tiles": _run_other_tiles,
    "other layouts": lambda program, prepared, target, random: _run_other_layouts(prepared, random),
    "batch": lambda program, prepared, target, random: _run_batch(program),
    "other forms": lambda program, prepared, target, random: _run_with_other_forms(program, target, random),
    "symbolic sizes": lambda program, prepared, target, random: _run_with_symbolic_sizes(program, target, random),
    "padded sizes": lambda program, prepared, target, random: _run_padded(program, random),
    "later sizes": lambda program, prepared, target, random: _run_at_later_sizes(program, target, random),
    "donated arguments": lambda program, prepared, target, random: _run_donated(program, target),
    **{name: _make_derivative_variant(name) for name in RELATIONS},
    "artifact": run_artifact,
    "other machine": lambda program, prepared, target, random: _run_on_other_machine(prepared, target, random),
}
