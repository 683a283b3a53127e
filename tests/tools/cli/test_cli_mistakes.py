"""Mistakes on the command line: options that would change nothing, names that are nearly right, and where they are."""

from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError
from tessera.tools.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"
SOFTMAX, MLP = str(EXAMPLES / "softmax.py"), str(EXAMPLES / "mlp.py")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["runn", SOFTMAX], "did you mean run?"),
        (["run", SOFTMAX, "--levl", "tile"], "unrecognized arguments: --levl tile; did you mean --level?"),
        (["run", SOFTMAX, "--level", "til"], "did you mean tile?"),
        (["build", MLP, "--outptu=x", "-o", "x"], "did you mean --output?"),
        (["run", SOFTMAX, "--zzz"], "unrecognized arguments: --zzz\n"),
    ],
)
def test_names_that_are_nearly_right(arguments, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and text in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", SOFTMAX, "--gpu", "A100"], "ArgumentError: --gpu is the GPU that a report models"),
        (["run", SOFTMAX, "--target", "csl:2"], "received: the target csl:2"),
        (["build", MLP, "--target", "csl", "--grid", "2", "-o", "x"], "received: the target csl:2"),
        (["build", MLP, "--grid", "2x2", "-o", "x"], "ArgumentError: --grid is for a mesh target\n"),
        (["build", MLP, "--target", "csl:2x2", "--grid", "2x2", "-o", "x"], "which has a grid already"),
        (["ptx", "run", "none.ptx", "--entry", "k"], "FileError: none.ptx cannot be read: No such file or directory"),
        *(([c, MLP, "--target", "lvm"], "did you mean llvm?") for c in ("run", "inspect", "profile", "tune", "bisect")),
        (["conformance", "--target", "lvm"], "did you mean llvm?"),
        (["conformance", "--engine", "nosuchprogram"], "FileError: there is no program nosuchprogram"),
        (["run", MLP, "--no-check", "--full-check"], "exclude each other"),
        (["run", MLP, "--picture", "p.txt"], "the ending of p.txt names no picture"),
        (["inspect", MLP, "--no-values"], "--no-values is for a page"),
        (["inspect", MLP, "--max-lines", "5"], "--max-lines is for a page"),
        (["profile", MLP, "--gpu", "A100"], "--gpu is the GPU of the target ptx"),
        (["profile", MLP, "-o", "p.bad"], "the ending of p.bad names no format"),
        (["tune", MLP, "--no-measure", "--keep", "3"], "--keep is for measurements"),
        (["debug", MLP, "more"], "--script with them"),
        (["serve", "none"], "FileError: there is no file or folder none"),
        (["build", MLP, "-o", "x.bundle", "--metadata", "none.json"], "none.json cannot be read: No such file"),
    ],
)  # fmt: skip
def test_errors_of_the_command_line_name_no_other_place(arguments, text, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert text in said and "Errno" not in said and ".py:" not in said


@pytest.mark.parametrize("command", ["run", "check", "inspect", "debug"])
def test_a_file_that_is_no_text(command, tmp_path, capsys):
    (tmp_path / "m.bin").write_bytes(b"\0\1\2")
    assert main([command, str(tmp_path / "m.bin")]) == 2
    assert "m.bin is not Python: it is no text" in capsys.readouterr().err


def test_the_sizes_of_an_artifact(tmp_path, capsys):
    @ts.jit
    @ts.require("B % 4 == 0")
    def f(x: ts.Tensor["B", 4]):
        return x.reshape(-1, 16).sum(0)

    ts.build(f, np.ones((8, 4), np.float32), out=tmp_path / "a", dynamic=True)
    assert main(["run", str(tmp_path / "a"), "--size", "B=12"]) == 0
    assert "x: 12x4xf32" in capsys.readouterr().out
    np.save(tmp_path / "x.npy", np.ones((8, 4), np.float32))
    for more, text in (
        (["--size", "C=12"], "no open size C"),
        (["--size", "B=6"], "B % 4 == 0 does not hold"),
        (["--size", "B=8", "--input", str(tmp_path / "x.npy")], "leave one of them out"),
        (["--gpu", "A100"], "without --gpu"),
    ):
        assert main(["run", str(tmp_path / "a"), *more]) == 2
        assert text in capsys.readouterr().err


def test_a_function_that_returns_nothing(tmp_path):
    @ts.jit
    def forgot(x):
        ts.tanh(x)

    with pytest.raises(ArgumentError, match="forgot returns nothing") as error:
        ts.build(forgot, np.ones(3, np.float32), out=tmp_path / "a")
    assert error.value.location.file == __file__ and not (tmp_path / "a").exists()


def test_the_star_of_a_table_is_explained(tmp_path, capsys):
    assert main(["tune", MLP, "--no-measure", "--cache", str(tmp_path / "c.json")]) == 0
    assert "* is used: the compiler's own, unless another takes at most 90%" in capsys.readouterr().out
