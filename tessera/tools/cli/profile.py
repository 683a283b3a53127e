"""`tessera profile`: the time of each kernel of an entry point, its share of the roofline, bottleneck and advice."""

from __future__ import annotations

import argparse
import json

from tessera.core.device import find_generator_name
from tessera.core.errors import ArgumentError
from tessera.core.io import check_writable
from tessera.tools.cli.entry_points import describe_configuration, find_entry_point, make_inputs, prepare_program
from tessera.tools.profile import profile_program
from tessera.tools.profile.report import find_format


def main(options: argparse.Namespace) -> int:
    """Profile an entry point on a target; write what was asked for."""
    target = find_generator_name(options.target)
    if options.gpu and target.partition(":")[0] != "ptx":
        raise ArgumentError(
            "--gpu is the GPU of the target ptx", expected="--target ptx", received=f"--target {target}"
        )
    for path in options.output:
        find_format(path)
        check_writable(path)
    entry = find_entry_point(options.entry, options.size)
    program = prepare_program(entry, make_inputs(entry, options.seed, options.input), target, options.tune)
    report = profile_program(program, target, options.level, options.gpu)
    if tuned := describe_configuration(entry, program):
        report.notes.append(f"configuration: {tuned}")
    if options.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        report.render()
    for path in options.output:
        report.save(path)
    return 0
