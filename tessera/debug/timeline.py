"""The ops of traced kernels as a timeline: Chrome trace JSON, as Perfetto and chrome://tracing open it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.debug.profile import Counts


def events(launches: Sequence[Counts]) -> list[dict[str, Any]]:
    """Each op that ran as a complete event ("X"); times in microseconds, one thread for each launch."""
    found: list[dict[str, Any]] = []
    for number, counts in enumerate(launches):
        name = f"{number}: {counts.started.function.name}{counts.started.grid}"
        found.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}})
        found += [
            {
                "ph": "X", "pid": 0, "tid": number, "name": e.node.op.name, "cat": "op",
                "ts": e.start * 1e6, "dur": e.seconds * 1e6,
                "args": {"line": str(e.node.loc), "instances": e.instances},
            }
            for e in counts.events
        ]  # fmt: skip
    return found


def write(path: Path, launches: Sequence[Counts]) -> Path:
    """Write the timeline of some launches."""
    path.write_text(json.dumps({"traceEvents": events(launches), "displayTimeUnit": "ns"}))
    return path
