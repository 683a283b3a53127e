"""Emitted text depends on the program alone: not on hash seeds, nor on the addresses of objects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Values hash by address, so that garbage made before the program shifts the order of every set of values.
SCRIPT = """
import hashlib, random, sys
garbage = [bytearray(random.randrange(1, 4096)) for _ in range(int(sys.argv[1]))]
del garbage[::3]
from conformance.case import all_cases
from tessera.codegen.contract import get_backend
from tessera.runtime.program import prepare
names, target = sys.argv[3:], sys.argv[2]
for case in (c for c in all_cases() if c.name in names):
    entry, arguments = case.entry()
    program = prepare(entry, arguments, target, case.grid, case.group)
    module = program.lower_for_target(target)["tile"]
    files = get_backend(target).emit(module, {}).files
    encoded = {n: t if isinstance(t, bytes) else t.encode() for n, t in sorted(files.items())}
    print(case.name, {n: hashlib.sha256(t).hexdigest() for n, t in encoded.items()})
"""
CASES = ("tile/groups/odd-and-even", "tile/stdlib/cross-entropy-f32")


def emit_in_new_process(seed, target):
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", SCRIPT, str(seed * 1000), target, *CASES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


@pytest.mark.parametrize("target", ["csl:2x2", "ptx", "llvm"])
def test_emission_does_not_depend_on_addresses(target):
    first, *others = (emit_in_new_process(seed, target) for seed in (1, 7, 23))
    assert first.count("\n") == len(CASES)
    assert all(other == first for other in others)
