"""Cache folder: a read-only folder slows programs down but does not fail them; several processes share it."""

import errno
import hashlib
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from tessera.codegen.llvm.runtime import jit, object_files
from tessera.core.errors import FileError
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
    assert entry.read_bytes().endswith(code)


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


def test_the_code_of_another_entry_is_refused(tmp_path, monkeypatch):
    """A seal binds code to its key: an entry that holds another entry's code would run it for the wrong program."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    code = jit.get_object_code(TEXT)
    (entry,) = tmp_path.iterdir()
    other = jit.get_object_code(TEXT.replace("42", "43").replace("answer", "other"))
    (stranger,) = set(tmp_path.iterdir()) - {entry}
    entry.write_bytes(stranger.read_bytes())
    assert jit.get_object_code(TEXT) == code != other


def test_entries_of_an_earlier_format_are_refused(tmp_path, monkeypatch):
    """Earlier versions sealed the code alone, and did not check that its functions exist."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    code = jit.get_object_code(TEXT)
    (entry,) = tmp_path.iterdir()
    wrong = b"not object code"
    entry.write_bytes(hashlib.sha256(wrong).digest() + wrong)
    assert jit.get_object_code(TEXT) == code


@pytest.mark.skipif(os.name != "posix", reason="owners and modes of POSIX")
@pytest.mark.parametrize("what", ["folder", "entry"])
def test_what_another_user_may_write_is_not_used(tmp_path, monkeypatch, what):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TESSERA_CACHE", str(folder))
    jit.get_object_code(TEXT)
    assert folder.stat().st_mode & 0o777 == 0o700
    (entry,) = folder.iterdir()
    entry.write_bytes(object_files.seal_object(entry.stem, b"\0\x7fELF, but no code"))
    assert jit.get_object_code(TEXT) == b"\x7fELF, but no code"  # a seal is no signature: who may write there matters
    (folder if what == "folder" else entry).chmod(0o777)
    object_files._warn_of_folder.cache_clear()
    with pytest.warns(RuntimeWarning, match="another user may write there"):
        assert jit.get_object_code(TEXT).startswith(b"\x7fELF\x02")


def test_the_oldest_entries_are_removed(tmp_path, monkeypatch):
    """Down to three quarters of what is allowed; other files stay, as do entries where there is room."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    other = tmp_path / "autotune.json"
    other.write_bytes(bytes(1000))
    entries = [tmp_path / f"{n}.o" for n in range(8)]
    for n, entry in enumerate(entries):
        entry.write_bytes(bytes(100))
        os.utime(entry, (n, n))
    object_files.remove_oldest(tmp_path, 800)
    assert all(entry.exists() for entry in entries)
    monkeypatch.setattr(object_files, "MOST_BYTES", 799)
    monkeypatch.setattr(object_files, "WRITES_PER_CHECK", 2)
    monkeypatch.setattr(object_files, "_writes", itertools.count(1))
    object_files.write_entry("new", b"")
    assert all(entry.exists() for entry in entries)
    object_files.write_entry("new", b"")
    assert [entry.exists() for entry in entries] == [False] * 3 + [True] * 5
    assert other.exists() and (tmp_path / "new.o").exists()


def test_a_full_disk_while_tuning_is_a_warning(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdopen", fail)
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(No space left on device\)"):
        TuningCache(tmp_path / "tuned.json").put("key", {"config": {}, "latency_ms": 1.0})


WRONG_ENTRIES = [
    "[]", '"text"', '{"a": 1}', '{"a": {"latency_ms": "fast"}}', '{"a": {"latency_ms": 1, "config": []}}',
    '{"a": {"latency_ms": 1, "trials": [{"config": {}, "spent": 1}]}}', "9" * 5000, "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("entries", WRONG_ENTRIES)
def test_a_tuning_file_that_holds_something_else(tmp_path, entries):
    """Every use of the file says what is wrong with it, and where."""
    file = tmp_path / "tuned.json"
    file.write_text(f'{{"schema": 1, "entries": {entries}}}')
    cache = TuningCache(file)
    merged = TuningCache(tmp_path / "other.json")
    for use in (lambda: cache.get("a"), lambda: cache.put("b", {"latency_ms": 1.0}), lambda: merged.merge(file)):
        with pytest.raises(FileError, match=r"tuned\.json"), warnings.catch_warnings():
            warnings.simplefilter("error")
            use()
