"""Cache folder: a read-only folder slows programs down but does not fail them; several processes share it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tessera.codegen.llvm.runtime import jit
from tessera.core.io import find_cache_folder
from tessera.runtime.launch.tuner import TuningCache

TEXT = "define i32 @answer() {\n  ret i32 42\n}\n"


def test_where_it_is(monkeypatch):
    monkeypatch.delenv("TESSERA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert find_cache_folder() == Path("/somewhere/tessera")
    monkeypatch.setenv("TESSERA_CACHE", "/elsewhere")
    assert find_cache_folder() == Path("/elsewhere")


def test_an_unwritable_cache(monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", "/proc/nowhere")
    assert len(jit.get_object_code(TEXT)) > 0
    with pytest.warns(RuntimeWarning, match="autotune.json cannot be written"):
        TuningCache().put("key", {"config": {}, "latency_ms": 1.0})


def test_damaged_entries_are_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    code = jit.get_object_code(TEXT)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-7])
    assert jit.get_object_code(TEXT) == code and len(list(tmp_path.iterdir())) == 1
    assert entry.read_bytes()[jit.HASH_BYTES :] == code


def test_processes_share_it(tmp_path):
    """Three processes compile the same function at once: each gets it right, and nothing half-written stays."""
    script = (
        "import numpy as np, tessera as ts\nprint(ts.jit(lambda x: x * 2.0, target='cpu')(np.ones(8, 'f4')).numpy())"
    )
    command = [sys.executable, "-c", script]
    env = {**os.environ, "TESSERA_CACHE": str(tmp_path / "cache")}
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate()[0] for process in running}
    assert said == {f"{np.full(8, 2.0, np.float32)}\n"}
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".o"}


def test_processes_that_tune_at_once_lose_nothing(tmp_path):
    script = (
        "import sys\nfrom tessera.runtime.launch.tuner import TuningCache\ncache = TuningCache(sys.argv[1])\n"
        "for n in range(20):\n    cache.put(sys.argv[2] + str(n), {'latency_ms': 1.0})"
    )
    path = str(tmp_path / "tuned.json")
    started = [subprocess.Popen([sys.executable, "-c", script, path, name]) for name in ("a", "b")]
    assert [process.wait() for process in started] == [0, 0]
    assert all(TuningCache(path).get(f"{name}{n}") for name in ("a", "b") for n in range(20))
