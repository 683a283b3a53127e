"""`tessera cuda run`: run a program whose Numba and CuPy kernels execute in the PTX emulator."""

from __future__ import annotations

import argparse

from tessera.tools.cli.scripts import run_emulated


def main(options: argparse.Namespace) -> int:
    """Run the program; print a report of each launch where one is wanted."""
    from tessera.cuda import interpreted

    run_emulated(interpreted(options.arch, debug=options.debug, report=options.report), options.program, options.rest)
    return 0
