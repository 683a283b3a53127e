"""`tessera triton run`: run a program whose Triton kernels execute in the PTX emulator."""

from __future__ import annotations

import argparse

from tessera.tools.cli.scripts import run_emulated


def main(options: argparse.Namespace) -> int:
    """Run the program; print a report of each launch where one is wanted."""
    from tessera.triton import interpreted

    session = interpreted(
        options.arch,
        debug=options.debug,
        report=options.report,
        tune=options.tune,
        benchmarks=options.benchmarks,
    )
    run_emulated(session, options.program, options.rest)
    return 0
