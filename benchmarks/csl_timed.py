"""Runs a host script as `cs_python` does, and writes the seconds of the simulation alone.

    python -m benchmarks.csl_timed RESULT.json run.py …

The seconds are processor time within the simulator's event loop: without the start of Python, the compilation, the
construction of the elements, and the host's own work. The cycles are those of the whole run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tessera.interp.target.csl.host import launch

launch.prepare_process()  # as the tool does

from tessera.interp.target.csl.host import cs_python  # noqa: E402
from tessera.interp.target.csl.pe.pe_state import EventQueue  # noqa: E402


class TimedRuns:
    """The processor time of all calls of `EventQueue.run`, and the last cycle."""

    def __init__(self) -> None:
        self.seconds, self.cycles = 0.0, 0
        self.run = EventQueue.run

    def __call__(self, events: EventQueue, *args: Any, **options: Any) -> None:
        start = time.process_time()
        try:
            self.run(events, *args, **options)
        finally:
            self.seconds += time.process_time() - start
            self.cycles = max(self.cycles, events.now)


def main() -> int:
    """Run the script, and write the result."""
    result, *script = sys.argv[1:]
    timed = TimedRuns()
    EventQueue.run = lambda events, *args, **options: timed(events, *args, **options)  # type: ignore[method-assign]
    status = cs_python.main(script)
    Path(result).write_text(json.dumps({"simulation": timed.seconds, "cycles": timed.cycles}))
    return status


if __name__ == "__main__":
    sys.exit(main())
