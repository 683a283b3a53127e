"""Files that commands read and write: named where they are wrong, before anything runs; nothing half-written."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tessera.core.errors import FileError
from tessera.core.io import read_array, write_array
from tessera.tools.cli.main import main

MODEL = (
    "import numpy as np\nimport tessera as ts\n\n"
    "@ts.example(lambda rng: {'x': np.ones((2, 3), np.float32)})\n"
    "@ts.jit\ndef double(x: ts.Tensor['B', 3]):\n    return x * 2.0\n"
)


@pytest.fixture
def model(tmp_path):
    """A file with a jit function that doubles its input."""
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


def fails(capsys, *command):
    assert main([str(c) for c in command]) == 2
    text = capsys.readouterr()
    assert "Traceback" not in text.err
    return text


def test_an_archive_is_no_array(model, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x=np.ones((2, 3)))
    assert "is not a complete .npy file" in fails(capsys, "run", model, "--input", tmp_path / "x.npz").err


def test_a_folder_is_no_array(model, tmp_path, capsys):
    assert "is a folder" in fails(capsys, "run", model, "--input", tmp_path).err


def test_records_are_no_numbers(model, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((2, 3), [("a", "f4")]))
    assert "is not an element type" in fails(capsys, "run", model, "--input", tmp_path / "x.npy").err


def test_either_byte_order_is_read(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3, dtype=">f4"))
    array = read_array(tmp_path / "x.npy")
    assert array.dtype == np.float32 and array.dtype.isnative and array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("option", ["--output", "--timeline", "--picture"])
def test_places_are_checked_before_the_run(model, tmp_path, option, capsys):
    for place, says in ((tmp_path, "is a folder"), (tmp_path / "no" / "o.npy", "there is no folder")):
        text = fails(capsys, "run", model, option, place)
        assert says in text.err and not text.out


def test_what_the_system_refuses(model, capsys):
    assert "/proc/x.npy cannot be written" in fails(capsys, "run", model, "--output", "/proc/x.npy").err
    assert "/proc/art cannot be written" in fails(capsys, "build", model, "-o", "/proc/art").err


def test_a_file_in_the_way(model, tmp_path, capsys):
    (tmp_path / "file").write_text("keep")
    assert "cannot be written" in fails(capsys, "build", model, "-o", tmp_path / "file" / "art").err
    assert (tmp_path / "file").read_text() == "keep"


def test_pipes_and_links_stay_what_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file.npy")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_array(tmp_path / "pipe", np.ones(3))
    reader.join()
    write_array(tmp_path / "link", np.ones(3))
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert got[0] == (tmp_path / "file.npy").read_bytes()


def test_an_artifact_takes_no_level(model, tmp_path, capsys):
    assert main(["build", str(model), "-o", str(tmp_path / "art")]) == 0
    for options in (["--level", "tile"], ["--target", "llvm"], ["--debug"]):
        assert f"without {options[0]}" in fails(capsys, "run", tmp_path / "art", *options).err
    assert "is an artifact, which holds no source" in fails(capsys, "bisect", tmp_path / "art").err
    for options in (["--level", "tile"], ["--pass-by-pass"], ["--plain"]):
        assert f"without {options[0]}" in fails(capsys, "inspect", tmp_path / "art", *options).err


def test_files_that_are_no_python(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("hello world\n")
    assert "notes.txt is not Python" in fails(capsys, "run", tmp_path / "notes.txt").err
    assert "is a folder without a model.py" in fails(capsys, "run", tmp_path).err
    assert "is not Python" in fails(capsys, "debug", "--script", tmp_path / "notes.txt", "-c", "c").err


def test_reports_are_refused_before_the_suite_runs(tmp_path, capsys):
    for place, says in (("r.txt", "a report is .json, .xml or .html"), ("no/r.json", "there is no folder")):
        assert says in fails(capsys, "conformance", "-k", "nosuchcase", "--report", tmp_path / place).err


def test_a_target_misspelt(model, capsys):
    assert "did you mean ptx?" in fails(capsys, "run", model, "--target", "ptz").err


def test_a_broken_write_leaves_nothing(tmp_path):
    with pytest.raises(FileError, match="is a folder"):
        write_array(tmp_path, np.ones(3))
    assert not list(tmp_path.iterdir())


def test_a_file_of_a_package_finds_it_from_anywhere(tmp_path, monkeypatch, capsys):
    package = tmp_path / "somewhere" / "outer_pkg" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package.parent / "shared.py").write_text("FACTOR = 2.0\n")
    (package / "model.py").write_text("from outer_pkg.shared import FACTOR\n" + MODEL.replace("2.0", "FACTOR"))
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(package)]) == 0


def test_names_with_spaces_and_brackets(tmp_path, capsys):
    folder = tmp_path / "with späce [bold]"
    folder.mkdir()
    (folder / "mödel.py").write_text(MODEL)
    assert main(["build", f"{folder}/mödel.py:double", "-o", str(folder / "ärt")]) == 0
    assert f"tessera run '{folder}/ärt'" in capsys.readouterr().out
    assert main(["run", str(folder / "ärt"), "--output", str(folder / "ö.npy")]) == 0
    assert np.load(folder / "ö.npy").shape == (2, 3)


def test_ascii_terminals():
    command = [sys.executable, "-m", "tessera.tools.cli", "run", "--help"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert done.returncode == 0 and b"csl:4x4 (a grid)" in done.stdout and not done.stderr


@pytest.mark.parametrize("options", [[], ["--plain"]])
def test_a_reader_that_goes_away(options):
    """As `tessera inspect … | head -1`: what is not read is no error."""
    example = Path(__file__).parents[3] / "examples" / "mlp.py"
    command = [sys.executable, "-m", "tessera.tools.cli", "inspect", str(example), *options]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout.readline()
    running.stdout.close()
    assert running.stderr.read() == b"" and running.wait() == 0
    running.stderr.close()


LIBRARY = """import numpy as np
import tessera as ts


@ts.example(lambda rng: (np.ones(4, np.float32),), grid=1)
@ts.kernel
def twice(x: ts.Tensor["N"], *, FACTOR: int = 2):
    x[0] = x[0] * FACTOR


@ts.kernel
def plain(x: ts.Tensor["N"]):
    x[0] = x[0] + 1.0
"""


def test_an_example_wraps_an_imported_kernel(tmp_path, capsys):
    (tmp_path / "kernels_of_others.py").write_text(LIBRARY)
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\nimport tessera as ts\nfrom kernels_of_others import plain, twice\n"
        "mine = ts.example(lambda rng: (np.full(4, 3, np.float32),), lambda x: x + [1, 0, 0, 0], grid=1)(plain)\n"
    )
    assert main(["run", str(file)]) == 0  # `twice` is an entry of its own file alone
    assert "plain" in (out := capsys.readouterr().out) and "largest difference 0" in out
    assert not hasattr(sys.modules["kernels_of_others"].plain, "example")
    assert main(["run", f"{file}:mine"]) == 0
    assert main(["run", f"{file}:twice"]) == 2
    assert "has no entry point twice" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--dynamic", "--dynamic=x:0=N"])
def test_build_with_symbolic_sizes(model, tmp_path, capsys, option):
    assert main(["build", str(model), option, "-o", str(tmp_path / "a")]) == 0
    np.save(tmp_path / "x.npy", np.full((7, 3), 2, np.float32))
    assert (
        main(["run", str(tmp_path / "a"), "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy")]) == 0
    )
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.full((7, 3), 4, np.float32))
    assert "names no axis" in fails(capsys, "build", model, "--dynamic", "x=N", "-o", tmp_path / "b").err
