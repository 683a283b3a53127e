"""User passes: classes or functions that rewrite a graph or a schedule, as named passes of the lowering pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.compiler.graph_ir import GraphIR, evaluate_node, has_constant_inputs
from tessera.compiler.schedules import optimize_schedules
from tessera.compiler.verification import checks_values, verify_pass
from tessera.core.errors import ArgumentError, Location, user_location
from tessera.frontend.jit.tracing import Jit, locate_definition
from tessera.ir.core import Function, Module, Node
from tessera.ir.rewrite import has_effect
from tessera.lower.lowering_plan import (
    EXTENSIONS,
    GRAPH,
    HIDDEN,
    INSTALLED,
    SCHEDULE,
    SCOPED,
    LoweringPlan,
    PipelineExtension,
    register_extension,
    use_extensions,
)


class GraphPass:
    """A pass over graphs: override `run(graph)`, which gives the graph back. `@graph_pass` adds it to the pipeline."""

    def run(self, graph: GraphIR) -> GraphIR:
        """The graph after this pass."""
        raise ArgumentError(
            f"{type(self).__name__} has no run", location=user_location(), expected="def run(self, graph)"
        )

    def replace_pattern(self, graph: GraphIR, pattern: Any, replacement: Callable[..., Any]) -> GraphIR:
        """Replace each match of a pattern (op names, or a function of tensors) by `replacement(*operands)`.

        The operands of a chain of names are those of its first op, then what each later op takes besides the chain.
        """
        return graph.replace_pattern(pattern, replacement)

    def all_inputs_constant(self, node: Node) -> bool:
        """Whether a node has operands and none depends on the program's arguments."""
        return has_constant_inputs(self._graph, node)

    def evaluate(self, node: Node) -> np.ndarray:
        """The result of a node with constant operands."""
        return evaluate_node(self._graph, node)

    def find_used_nodes(self, graph: GraphIR) -> list[Node]:
        """The nodes that a result depends on, and those with an effect."""
        live, used = set(graph.outputs), list[Node]()
        for node in reversed(graph.nodes):
            if has_effect(node) or not live.isdisjoint(node.results):
                live |= {*node.args, *(v for r in node.regions for v in r.free)}
                used.append(node)
        return used[::-1]

    _graph: GraphIR = GraphIR.__new__(GraphIR)  # the graph of the run in progress


def _name_pass(source: Any) -> str:
    """The name of a pass in the pipeline: that of its class or function, with a number where another one has it.

    A class or function of a module that is defined again, as by a notebook's cell, takes the place of the old one.
    """
    name = _find_kind(source).__name__.strip("<>")
    number, found = 1, name
    while found in EXTENSIONS and not _redefines(source, EXTENSIONS[found].source):
        number += 1
        found = f"{name} {number}"
    return found


def _redefines(source: Any, held: Any) -> bool:
    if not (inspect.isclass(source) or inspect.isfunction(source)) or type(source) is not type(held):
        return False
    same = (source.__module__, source.__qualname__) == (held.__module__, held.__qualname__)
    return same and "<" not in source.__qualname__  # a class or function inside of a function has many lives


def _find_kind(source: Any) -> Any:
    return source if inspect.isclass(source) or inspect.isfunction(source) else type(source)


def make_extension(source: Any, level: str | None = None, verify: bool | None = None) -> PipelineExtension:
    """The pipeline pass of a class, an instance or a function.

    Raises:
        ArgumentError: it is none, or its class needs arguments.
    """
    for held in EXTENSIONS.values():
        if held.source is source and level in (None, held.level):
            return held
    instance = _instantiate(source)
    level = level or (SCHEDULE if hasattr(instance, "optimize") or hasattr(instance, "generate") else GRAPH)
    name, location = _name_pass(source), _locate(source)
    run = _make_graph_run(name, instance, location, verify) if level == GRAPH else optimize_schedules(name, instance)
    return register_extension(PipelineExtension(name, level, run, source))


def _instantiate(source: Any) -> Any:
    if inspect.isclass(source):
        try:
            source = source()
        except TypeError as error:
            raise ArgumentError(
                f"the pass {source.__name__} cannot be made without arguments: {error}", location=_locate(source),
                suggestion="use an instance: with ts.compiler.passes(MyPass(8)): ...",
            ) from None  # fmt: skip
    methods = ("run", "optimize", "generate")
    if not any(callable(getattr(source, m, None)) for m in methods) and not inspect.isfunction(source):
        raise ArgumentError(
            "this is no compiler pass", location=user_location(), received=repr(source)[:80],
            expected="a class with run(graph), optimize(schedule, kernel) or generate(kernel, target); or a function",
        )  # fmt: skip
    return source


def _locate(source: Any) -> Location:
    kind = _find_kind(source)
    if inspect.isfunction(kind):
        return locate_definition(kind)
    method = next((m for n in ("run", "optimize", "generate") if (m := vars(kind).get(n)) is not None), None)
    return locate_definition(method) if method is not None else Location()


def _make_graph_run(
    name: str, instance: Any, location: Location, verify: bool | None
) -> Callable[[Module, LoweringPlan], Module]:
    call = instance.run if hasattr(instance, "run") else instance

    def run(module: Module, plan: LoweringPlan) -> Module:
        before = module.main
        after = _run_pass(name, instance, call, before, location)
        verify_pass(name, before, after, location, checks_values(verify))
        return module if after == before else module.replace(after, *module.functions[1:])

    return run


def _run_pass(name: str, instance: Any, call: Callable[..., Any], before: Function, location: Location) -> Function:
    graph = GraphIR(before)
    if isinstance(instance, GraphPass):
        instance._graph = graph
    made = call(graph)
    if not isinstance(made, GraphIR):
        raise ArgumentError(
            f"the compiler pass {name} gives no graph", location=location, expected="the graph that it took, edited",
            received=repr(made)[:80], suggestion="end run with: return graph",
        )  # fmt: skip
    return replace(made.function, attrs=before.attrs, name=before.name)


# Decorators.


def graph_pass(source: Any = None, *, install: bool = True, verify: bool | None = None) -> Any:
    """Add a pass over graphs to the pipeline of every program that is compiled from now on.

    The source is a class with `run(graph)`, or a function of a graph; it is given back. Passes run in the order of
    their definition, before all others. After each of them the program must have the same type, effects and, in the
    interpreter on arrays of its own, the same results within their error bounds: `verify=False`, or Python's `-O`,
    leaves the results out. With `install=False` only `ts.compiler.passes` uses the pass.

    Raises:
        ArgumentError: it is no pass.

    >>> @graph_pass(install=False)
    ... class Nothing(GraphPass):
    ...     def run(self, graph):
    ...         return graph
    """
    return _add_pass(source, GRAPH, install, verify)


def schedule_pass(source: Any = None, *, install: bool = True) -> Any:
    """Add a pass over schedules to the pipeline: a class with `optimize(schedule, kernel)`, or a generator.

    A generator has `generate(kernel, target)`. The pass is asked for each kernel of a program, and gives the tile sizes
    that the kernel shall have.

    Raises:
        ArgumentError: it is no pass.
    """
    return _add_pass(source, SCHEDULE, install, None)


def _add_pass(source: Any, level: str, install: bool, verify: bool | None) -> Any:
    if source is None:
        return lambda given: _add_pass(given, level, install, verify)
    extension = make_extension(source, level, verify)
    if install and extension.name not in INSTALLED:
        INSTALLED.append(extension.name)
    return source


def uninstall(source: Any) -> None:
    """Take an installed pass out of the pipeline again.

    Raises:
        ArgumentError: it is not installed.
    """
    held = next((e for e in EXTENSIONS.values() if e.source is source), None)
    if held is None or held.name not in INSTALLED:
        raise ArgumentError(f"{source!r} is not installed", location=user_location(), expected=", ".join(INSTALLED))
    INSTALLED.remove(held.name)


def installed_passes() -> tuple[str, ...]:
    """The names of the passes that every program has."""
    return tuple(INSTALLED)


class passes(ContextDecorator):  # noqa: N801  # a context manager, used as a function
    """Programs called in this context, or the decorated jit function, have these passes besides the installed ones.

    >>> with passes(lambda graph: graph):
    ...     pass
    """

    def __init__(self, *sources: Any) -> None:
        self.names = tuple(make_extension(s).name for s in sources)
        self._open: list[Any] = []

    def __enter__(self) -> passes:
        context = use_extensions(self.names)
        context.__enter__()
        self._open.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)

    def __call__(self, function: Callable[..., Any]) -> Any:
        """A jit function that has these passes wherever it is called, inspected or built."""
        if not isinstance(function, Jit):
            return super().__call__(function)
        function.passes = (*function.passes, *self.names)
        return function


@contextmanager
def only(*sources: Any) -> Iterator[None]:
    """Only these passes of users in this context, and those installed in it, which are taken out at its end."""
    before = frozenset(INSTALLED)
    token, scoped = HIDDEN.set(before), SCOPED.set(())
    try:
        with use_extensions(tuple(make_extension(s).name for s in sources)):
            yield
    finally:
        SCOPED.reset(scoped)
        HIDDEN.reset(token)
        INSTALLED[:] = [n for n in INSTALLED if n in before]


def run_passes(function: Function, sources: Sequence[Any]) -> Function:
    """A Graph function after some passes, verified after each."""
    module = Module("graph", (function,))
    for source in sources:
        module = make_extension(source).run(module, LoweringPlan())
    return module.main
