"""Processes: programs in forked and spawned children, builders of one folder, and commands that a signal ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tessera as ts

posix = pytest.mark.skipif(os.name != "posix", reason="needs the signals and processes of POSIX")
POOL = """
import multiprocessing, sys
import numpy as np, tessera as ts

x = np.arange(250_000, dtype=np.float32).reshape(500, 500) / 250_000
known = ts.jit(lambda x: ts.tanh(x @ x), target="llvm")

def work(number):
    new = ts.jit(lambda x: ts.tanh(x @ x) * number, target="llvm")
    return float(np.asarray(known(x)).sum()), float(np.asarray(new(x)).sum()) / number

if __name__ == "__main__":
    wanted = work(1.0)
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        found = pool.map_async(work, [2.0, 4.0]).get(100)
    assert found == [wanted, wanted], (found, wanted)
"""
BUILDER = """
import sys
import numpy as np, tessera as ts
for _ in range(6):
    ts.build(ts.jit(lambda x: x * float(sys.argv[2])), np.ones(4, np.float32), target="llvm", out=sys.argv[1])
"""


FORKED = """
import os, sys, faulthandler
import numpy as np, tessera as ts

faulthandler.dump_traceback_later(60, exit=True)
stream, x = ts.Stream(), np.zeros(4, np.float32)

def work():
    made = ts.memory.async_copy(x, np.empty_like(x)).wait()
    stream.run(x.__iadd__, 1.0)
    stream.synchronize()
    return made

work()
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(work(), np.ones(4)) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@posix
def test_a_forked_process_has_threads_for_copies_and_streams_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@posix
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_run_programs_that_their_parent_has_used(method, tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    command = [sys.executable, str(tmp_path / "pool.py"), method]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "TESSERA_THREADS": "4"}
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_several_builders_of_one_folder(tmp_path):
    """A reader finds the whole artifact of one of them at every moment."""
    folder = tmp_path / "artifact"
    ts.build(ts.jit(lambda x: x * 1.0), np.ones(4, np.float32), target="llvm", out=folder)
    commands = [[sys.executable, "-c", BUILDER, str(folder), str(factor)] for factor in (2, 3)]
    builders = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    seen = set()
    while any(b.poll() is None for b in builders):
        seen.add(float(np.asarray(ts.load(folder)(np.ones(4, np.float32)))[3]))
        time.sleep(0.02)
    assert all(b.returncode == 0 for b in builders), [b.stderr.read()[-500:] for b in builders]
    assert seen <= {1.0, 2.0, 3.0} and [p.name for p in tmp_path.iterdir()] == ["artifact"]
    for builder in builders:
        builder.stderr.close()


def wait_until_it_works(process, at_most):
    """Until a command has had a child for a second, where the system tells; else so many seconds."""
    children, end = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + at_most
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.1)
        if children.is_file() and children.read_text().strip():
            time.sleep(1.0)
            return


@posix
@pytest.mark.parametrize(
    ("arguments", "number", "status"),
    [
        (["fuzz", "--seconds", "200", "--jobs", "2"], signal.SIGINT, 130),
        (["fuzz", "--seconds", "200", "--jobs", "2"], signal.SIGTERM, 143),
        (["fuzz", "--seconds", "200", "--jobs", "1"], signal.SIGKILL, -signal.SIGKILL),
        (["conformance", "-k", "graph"], signal.SIGINT, 130),
    ],
    ids=["fuzz-int", "fuzz-term", "fuzz-kill", "conformance-int"],
)
def test_a_signal_ends_a_command_and_its_processes(arguments, number, status, tmp_path):
    """Within seconds, without a traceback, and no process of it goes on."""
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends children with their parent")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of `nohup` and its children ignore it
    process = subprocess.Popen(
        [sys.executable, "-m", "tessera.tools.cli", *arguments], cwd=tmp_path, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        wait_until_it_works(process, at_most=6.0)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)  # the pipes are closed when the last process has ended
        assert process.returncode == status and "Traceback" not in said
        assert number == signal.SIGKILL or not [p.name for p in tmp_path.iterdir() if p.name.startswith("tmp")]
    finally:
        signal.signal(signal.SIGINT, before)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
