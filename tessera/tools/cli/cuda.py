"""`tessera cuda run`: run a program whose Numba and CuPy kernels execute in the PTX emulator."""

from __future__ import annotations

import argparse

from tessera.tools.cli.scripts import run_script


def main(options: argparse.Namespace) -> int:
    """Run the program; print a report of each launch where one is wanted."""
    from tessera.cuda import interpreted

    with interpreted(options.arch, debug=options.debug, report=options.report) as device:
        try:
            run_script(options.program, options.rest)
        finally:
            for report in device.reports:
                print(report)
    if not device.launches:
        print(f"{options.program} launched no kernel")
    return 0
