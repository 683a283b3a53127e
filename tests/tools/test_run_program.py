"""`tessera run` of Python programs that define no entry point."""

import pytest

import tessera as ts
from tessera.tools.cli.entry_points import is_program
from tessera.tools.cli.main import main

PROGRAM = 'import tessera as ts\n\nif __name__ == "__main__":\n    print("runs on", ts.default_device())\n'


def test_a_program_runs_with_the_target_as_default_device(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    before = ts.default_device()
    assert main(["run", str(path), "--target", "llvm"]) == 0
    assert capsys.readouterr().out.startswith("runs on llvm") and ts.default_device() == before
    assert main(["run", str(path), "--level", "tile"]) != 0
    assert "without an entry point" in "".join(capsys.readouterr())


@pytest.mark.parametrize(("text", "expected"), [
    (PROGRAM, True),
    ("import tessera as ts\n\n@ts.jit\ndef f(x):\n    return x\n\n" + PROGRAM, False),
    ("import tessera as ts\nf = ts.jit(lambda x: x)\n" + PROGRAM, False),
    ("x = 1\n", False),
    ("def broken(:\n", False),
])  # fmt: skip
def test_what_is_a_program(tmp_path, text, expected):
    path = tmp_path / "file.py"
    path.write_text(text)
    assert is_program(str(path)) is expected
    assert not is_program(str(tmp_path / "none.py"))
