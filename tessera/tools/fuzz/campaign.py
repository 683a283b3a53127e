"""Fuzzing campaigns: programs until the time is over, a corpus of those that cover something new, and for each kind of
failure one case that is as small as possible."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from conformance.run import Engine
from tessera.core.io import write_text
from tessera.ir.core import Module
from tessera.tools.fuzz.choices import Choices, mutate, shrink
from tessera.tools.fuzz.graph_programs import make_program
from tessera.tools.fuzz.kernel_programs import make_kernel
from tessera.tools.fuzz.oracle import Failure, describe_error, examine, list_fuzz_engines
from tessera.tools.fuzz.programs import RandomProgram, forget_sources

GENERATORS: dict[str, Callable[[Choices, Counter[str] | None], RandomProgram]] = {
    "graph": make_program,
    "tile": make_kernel,
}
SHRINK_SECONDS = 20.0
SEND_EVERY = 20  # programs
CORPUS_FILE = "corpus.jsonl"
NOT_REPEATED = "It did not fail when it was repeated: it depends on the programs before it, on time or on threads."
UNMADE = """def program():
    from tessera.tools.fuzz.campaign import GENERATORS
    from tessera.tools.fuzz.choices import Choices

    return GENERATORS[{kind!r}](Choices({choices}), None).load()()
"""


@dataclass(frozen=True)
class CampaignRequest:
    """What a campaign runs: targets, kinds of programs, its time or number of programs, and where results go."""

    targets: tuple[str, ...]
    kinds: tuple[str, ...] = ("graph", "tile")
    seconds: float = 60.0
    programs: int | None = None
    seed: int = 0
    folder: Path | None = None
    corpus: Path | None = None


@dataclass
class Summary:
    """The counts of a campaign, and its distinct failures with the shrunk programs."""

    programs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    features: set[str] = field(default_factory=set)
    failures: dict[str, tuple[Failure, RandomProgram]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def forget_counts(self) -> None:
        """Start to count again; what is covered and what failed is kept."""
        self.programs, self.outcomes, self.refused, self.files = 0, Counter(), Counter(), []

    def merge(self, other: Summary) -> None:
        """Add the counts of another worker."""
        self.programs += other.programs
        self.seconds = max(self.seconds, other.seconds)
        self.outcomes += other.outcomes
        self.refused += other.refused
        self.features |= other.features
        self.failures = {**other.failures, **self.failures}
        self.files += other.files


def run_campaign(
    request: CampaignRequest, worker: int = 0, first: int = 0, record: Path | None = None,
    send: Callable[[Summary], None] | None = None,
) -> Summary:  # fmt: skip
    """Run the programs of one worker from number `first` on.

    `record` is a file that names the program that is running. `send` is given the counts every few programs and after
    each new failure; the result then has those since the last time.
    """
    engines, summary = list_fuzz_engines(request.targets), Summary()
    kept = _read_corpus(request)
    start = time.perf_counter()
    for number in itertools.count(first):
        if time.perf_counter() - start > request.seconds or number == request.programs:
            break
        random = Random(f"{request.seed}/{worker}/{number}")
        kind = request.kinds[number % len(request.kinds)]
        given = mutate(random.choice(kept[kind]), random) if kept[kind] and random.random() < 0.3 else ()
        choices, seed = Choices(given, random), random.randrange(1 << 30)
        failures = len(summary.failures)
        try:
            program = GENERATORS[kind](choices, summary.refused)
            if record is not None:
                record.write_text(json.dumps({"number": number, "kind": kind, "choices": choices.taken, "seed": seed}))
            _run_one(request, summary, kind, choices, program, engines, seed, kept[kind])
        except Exception as error:  # of the generator or the oracle: a failure, too, and the next program follows
            _note_fault(request, summary, kind, choices, error)
        if send is not None and (number % SEND_EVERY == 0 or len(summary.failures) > failures):
            summary.seconds = time.perf_counter() - start
            send(summary)
            summary.forget_counts()
        if number % 100 == 0:
            forget_sources()
    summary.seconds = time.perf_counter() - start
    if request.corpus is not None:
        _write_corpus(request, worker, kept)
    return summary


def _run_one(
    request: CampaignRequest, summary: Summary, kind: str, choices: Choices, program: RandomProgram,
    engines: Sequence[Engine], seed: int, kept: list[list[int]],
) -> None:  # fmt: skip
    """Run a program, keep it if it covers something new, and report its new failures."""
    verdict = examine(program, engines, seed, request.targets)
    summary.outcomes += verdict.outcomes
    new = list_features(verdict.modules) - summary.features
    if new:
        summary.features |= new
        kept.append(list(choices.taken))
    for failure in verdict.failures:
        if failure.key not in summary.failures:
            small, found = reduce_failure(kind, choices.taken, failure, request.targets, seed)
            report(request, summary, kind, small, found)
    summary.programs += 1


def _note_fault(request: CampaignRequest, summary: Summary, kind: str, choices: Choices, error: Exception) -> None:
    """An exception of fuzzing itself, which is not shrunk: its case makes the program again."""
    summary.programs += 1
    summary.outcomes["fail"] += 1
    failure = Failure("fuzzing", describe_error(error))
    if failure.key not in summary.failures:
        report(request, summary, kind, RandomProgram(UNMADE.format(kind=kind, choices=choices.taken), ()), failure)


def list_features(modules: Sequence[Module]) -> set[str]:
    """What a program covers: at each level, each op with its element type and the op that made its first operand."""
    found = set()
    for module in modules:
        for function in module.functions:
            makers: dict[Any, str] = {}
            for node in function.body.walk():
                first = makers.get(node.args[0], "") if node.args else ""
                dtype = getattr(node.results[0].type, "dtype", "") if node.results else ""
                found.add(f"{module.level}: {first} > {node.op.name} {dtype}")
                makers.update(dict.fromkeys(node.results, node.op.name))
    return found


def report(request: CampaignRequest, summary: Summary, kind: str, program: RandomProgram, failure: Failure) -> None:
    """Note a failure with its smallest program, and write it as a case."""
    summary.failures[failure.key] = (failure, program)
    if request.folder is not None:
        name = hashlib.sha256(failure.key.encode()).hexdigest()[:8]
        path = request.folder / f"fuzz_{kind}_{name}.py"
        request.folder.mkdir(parents=True, exist_ok=True)
        write_text(path, write_case(program, failure, f"fuzz/{kind}-{name}"))
        summary.files.append(str(path))


def reduce_failure(
    kind: str, taken: Sequence[int], failure: Failure, targets: Sequence[str], seed: int
) -> tuple[RandomProgram, Failure]:
    """The smallest program found that fails in the same way, with its failure."""
    engines = list_fuzz_engines(targets)
    # On its engine alone, which is quick; else after the engines before it, on whose work it may depend.
    for chosen in ([e for e in engines if e.name == failure.engine], engines):
        latest: dict[str, tuple[RandomProgram, Failure]] = {}
        replay = partial(_replay, kind, failure, chosen, targets, seed, latest)
        if (first := replay(taken)) is not None:
            return latest[str(shrink(first, replay, SHRINK_SECONDS))]
    return GENERATORS[kind](Choices(taken), None), replace(failure, detail=f"{failure.detail}\n{NOT_REPEATED}")


def _replay(
    kind: str, failure: Failure, engines: Sequence[Engine], targets: Sequence[str], seed: int,
    latest: dict[str, tuple[RandomProgram, Failure]], values: Sequence[int],
) -> Choices | None:  # fmt: skip
    """Run a choice sequence: its choices if it fails in the same way, and `latest` then has its program."""
    choices = Choices(values)
    try:
        program = GENERATORS[kind](choices, None)
        found = examine(program, engines, seed, targets).failures
    except Exception:  # what cannot be made or examined is not this failure
        return None
    for each in found:
        if each.key == failure.key:
            latest[str(choices.taken)] = (program, each)
            return choices
    return None


CASE = '''"""Found by fuzzing: {key}.

{detail}
"""

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import edge_values
from tessera import tile
from tessera.core.types import as_dtype


{source}

ARGUMENTS = {{{arguments}}}


def cases():
    """The program, as a case of the conformance suite."""
    entry = program if {kernel} else ts.jit(program)
    yield Case("{name}", lambda: (entry, ARGUMENTS), grid={grid}, group={group}, unknown=True)
'''


def write_case(program: RandomProgram, failure: Failure, name: str) -> str:
    """The source of a file with the program as a case, which `tessera conformance --cases FILE` runs."""
    detail = failure.detail.replace("\\", "/").replace('"""', "'''")
    listed = [f"{i.name!r}: {i.text}" for i in program.inputs] + [f"{k!r}: {v!r}" for k, v in program.constants.items()]
    return CASE.format(
        key=failure.key.replace("\\", "/"), detail=detail, source=program.source,
        arguments=", ".join(listed), kernel=program.is_kernel, name=name, grid=program.grid, group=program.group,
    )  # fmt: skip


def _read_corpus(request: CampaignRequest) -> dict[str, list[list[int]]]:
    """The choice sequences kept by campaigns before."""
    kept: dict[str, list[list[int]]] = {kind: [] for kind in request.kinds}
    for path in sorted(request.corpus.glob(f"*{CORPUS_FILE}")) if request.corpus is not None else ():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["kind"] in kept:
                kept[entry["kind"]].append(entry["choices"])
    return kept


def _write_corpus(request: CampaignRequest, worker: int, kept: dict[str, list[list[int]]]) -> None:
    assert request.corpus is not None
    request.corpus.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"kind": kind, "choices": values}) for kind in kept for values in kept[kind]]
    write_text(request.corpus / f"{worker}-{CORPUS_FILE}", "".join(f"{line}\n" for line in lines))
