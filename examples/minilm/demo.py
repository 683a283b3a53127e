"""Semantic search over a few hundred sentences: in the interpreter, and compiled for this processor."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tessera as ts
from examples.minilm.model import encode, parameters
from examples.minilm.text import encode as tokenize
from examples.minilm.text import lines

LENGTH = 64
BATCH = 32


def embed(function: Any, params: Any, sentences: list[str], title: str) -> np.ndarray:
    """The embeddings of sentences, in batches of one size so that one program serves all."""
    ids, mask = tokenize(sentences, LENGTH)
    rows = -(-len(ids) // BATCH) * BATCH
    ids, mask = (np.pad(a, ((0, rows - len(a)), (0, 0)), mode="edge") for a in (ids, mask))
    starts = track(range(0, rows, BATCH), description=title, transient=True)
    parts = [function(params, ids[i : i + BATCH], mask[i : i + BATCH]).numpy() for i in starts]
    return np.concatenate(parts)[: len(sentences)]


def main() -> int:
    """Embed, search, and compare both ways of running; status 1 where they disagree."""
    console = Console()
    params, corpus, queries = parameters(), lines("sentences.txt"), lines("queries.txt")
    found = {}
    for title, target in (("interpreter", "interp"), ("LLVM", "llvm")):
        function = ts.jit(encode.function, target=target)
        start = time.perf_counter()
        embed(function, params, corpus[:BATCH], f"{title}: first batch")
        first = time.perf_counter() - start
        start = time.perf_counter()
        vectors = embed(function, params, corpus + queries, f"{title}: {len(corpus)} sentences")
        found[title] = (vectors, first, time.perf_counter() - start)
    _show(console, corpus, queries, found)
    (a, _, _), (b, _, _) = found.values()
    worst = float(1 - np.min(np.sum(a * b, axis=1)))
    same = _answers(a, len(corpus)) == _answers(b, len(corpus))
    console.print(
        f"both agree: {'[green]yes[/]' if same and worst < 1e-4 else '[red]NO[/]'} (largest 1 - cosine {worst:.1e})"
    )
    return 0 if same and worst < 1e-4 else 1


def _answers(vectors: np.ndarray, count: int) -> list[int]:
    return [int(i) for i in np.argmax(vectors[count:] @ vectors[:count].T, axis=1)]


def _show(console: Console, corpus: list[str], queries: list[str], found: dict[str, Any]) -> None:
    table = Table(
        "query",
        *(f"answer ({title})" for title in found),
        "cosine",
        title="semantic search with MiniLM",
        show_lines=True,
    )
    answers = {title: _answers(vectors, len(corpus)) for title, (vectors, _, _) in found.items()}
    vectors = next(iter(found.values()))[0]
    for row, query in enumerate(queries):
        best = [answers[title][row] for title in found]
        score = float(vectors[len(corpus) + row] @ vectors[best[0]])
        table.add_row(query, *(corpus[i] for i in best), f"{score:.3f}")
    console.print(table)
    count = f"{len(corpus)} sentences and {len(queries)} queries"
    for title, (_, first, seconds) in found.items():
        rate = len(corpus + queries) / seconds
        console.print(f"{title:>12}: {seconds:6.2f} s for {count} ({rate:.0f}/s), first batch {first:.2f} s")


if __name__ == "__main__":
    raise SystemExit(main())
