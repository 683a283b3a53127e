"""`tessera triton run`: run a program whose Triton kernels execute in the PTX emulator."""

from __future__ import annotations

import argparse

from tessera.tools.cli.scripts import run_script


def main(options: argparse.Namespace) -> int:
    """Run the program; print a report of each launch where one is wanted."""
    from tessera.triton import interpreted

    with interpreted(
        options.arch,
        debug=options.debug,
        report=options.report,
        tune=options.tune,
        benchmarks=options.benchmarks,
    ) as session:
        try:
            run_script(options.program, options.rest)
        finally:
            for report in session.reports:
                print(report)
    if not session.launches:
        print(f"{options.program} launched no kernel")
    return 0
