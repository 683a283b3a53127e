"""Emitted text depends on the program alone: not on hash seeds, nor on the addresses of objects."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Values hash by address, so that garbage made before the program shifts the order of every set of values.
SCRIPT = """
import hashlib, random, sys
garbage = [bytearray(random.randrange(1, 4096)) for _ in range(int(sys.argv[1]))]
del garbage[::3]
from conformance.case import AREAS, read_area
from tessera.codegen.contract import get_backend
from tessera.runtime.program import prepare
for name in sys.argv[3:]:
    (case,) = (c for c in read_area(".".join(name.split("/")[:2])) if c.name == name)
    entry, arguments = case.entry()
    for target in sys.argv[2].split():
        program = prepare(entry, arguments, target, case.grid, case.group)
        module = program.lower_for_target(target)["tile"]
        files = get_backend(target).emit(module, {}).files
        encoded = {n: t if isinstance(t, bytes) else t.encode() for n, t in sorted(files.items())}
        print(case.name, target, {n: hashlib.sha256(t).hexdigest() for n, t in encoded.items()})
"""
TARGETS = ("csl:2x2", "ptx", "llvm")
CASES = ("tile/groups/odd-and-even", "tile/stdlib/cross-entropy-f32")


def emit_in_new_process(seed):
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", SCRIPT, str(seed * 1000), " ".join(TARGETS), *CASES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.splitlines()


def test_emission_does_not_depend_on_addresses():
    first, *others = (emit_in_new_process(seed) for seed in (1, 23))
    assert len(first) == len(CASES) * len(TARGETS)
    assert all(other == first for other in others)
