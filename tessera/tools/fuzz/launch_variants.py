"""Variants of how a random program is launched: by calls that streams queue, and from an artifact folder.

Arguments of queued launches are copied beside the program; launches that events order agree, and debug mode reports
those that nothing orders.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tessera.runtime.program import PreparedProgram
from tessera.tools.debug import checked
from tessera.tools.fuzz.derivative_relations import RelationError
from tessera.tools.fuzz.programs import TESSERA, RandomProgram


def run_queued(program: RandomProgram, prepared: PreparedProgram, target: str, random: Random) -> list[np.ndarray]:
    """A kernel on two streams, which share what they read: what the first wrote, and the second the same.

    Raises:
        RelationError: the launches differ, or debug mode does not report two that write the same memory.
    """
    launch = _find_launch(program, target)
    written = [list(program.arguments())[i] for i in prepared.written]
    streams = TESSERA.Stream(), TESSERA.Stream()
    arguments = [_copy_beside(program.arguments(), random) for _ in streams]
    shared = {n: x for n, x in arguments[0].items() if n not in written}
    with ExitStack() as modes:
        if target == "interp":
            modes.enter_context(checked())
        with streams[0]:
            first = launch(**arguments[0])
            ready = streams[0].record()
        streams[1].wait(ready)
        with streams[1]:
            second = launch(**{**arguments[1], **shared})
        if random.random() < 0.5:
            second.wait()
        TESSERA.synchronize()
    if not (first.done() and second.done() and ready.done()):
        raise RelationError("a launch is not at its end after synchronize()")
    for name in written:
        if arguments[0][name].tobytes() != arguments[1][name].tobytes():
            raise RelationError(f"two launches write other elements of {name}")
    results = [np.array(arguments[0][n]) for n in written]
    if target == "interp" and any(np.size(arguments[0][n]) for n in written):
        _check_unordered(launch, arguments[0])
    return results


def _find_launch(program: RandomProgram, target: str) -> Any:
    kernel = TESSERA.kernel(target=target)(program.load().kernel_function)
    grid = program.grid
    return kernel[grid] if program.group is None else kernel[grid, program.group]


def _copy_beside(arguments: dict[str, Any], random: Random) -> dict[str, Any]:
    """The arguments, of which some arrays are copies that were made beside the program."""
    copies = {n: TESSERA.memory.async_copy(x, np.empty_like(x)) for n, x in arguments.items() if _is_drawn(x, random)}
    return {n: copies[n].wait() if n in copies else x for n, x in arguments.items()}


def _is_drawn(x: Any, random: Random) -> bool:
    return isinstance(x, np.ndarray) and random.random() < 0.5


def _check_unordered(launch: Any, arguments: dict[str, Any]) -> None:
    """Two launches that write the same memory and that nothing orders."""
    with checked(collect=True) as report:
        for stream in (TESSERA.Stream(), TESSERA.Stream()):
            with stream:
                launch(**arguments)
        TESSERA.synchronize()
    if not any(f.kind == "stream race" for f in report):
        raise RelationError("debug mode does not report two launches that write the same memory")


def run_artifact(program: Any, prepared: PreparedProgram, target: str, random: Random) -> list[np.ndarray]:
    """The program from an artifact folder; a second build has the same bytes.

    Raises:
        RelationError: two builds differ.
    """
    entry, arguments = program.load(), program.arguments()
    with tempfile.TemporaryDirectory() as folder:
        built = [Path(folder) / name for name in ("one", "two")]
        launch = {} if prepared.top == "graph" else {"grid": program.grid, "group": program.group}
        for path in built:
            TESSERA.build(entry, *arguments.values(), out=path, target=target, **launch)
        one, two = ({p.name: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()} for path in built)
        if one != two:
            raise RelationError(f"two builds differ in {[n for n in one if one[n] != two.get(n)]}")
        arrays = [x for x in arguments.values() if isinstance(x, np.ndarray)]
        found = TESSERA.load(built[0])(*arrays)
    if prepared.top == "graph":
        return [r.numpy() for r in TESSERA.tree.leaves(found)]
    return [arrays[i] for i in prepared.written]
