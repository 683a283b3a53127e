"""`tessera csl run|check|tools`."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tessera.interp.target.csl import host_tools_folder
from tessera.tools.cli.main import main

AXPY = Path(__file__).parents[2] / "interp" / "target" / "csl" / "programs" / "axpy"


def test_tools(capsys):
    assert main(["csl", "tools"]) == 0
    assert capsys.readouterr().out == f"{host_tools_folder()}\n"


def test_check(capsys):
    words = ["csl", "check", str(AXPY / "layout.csl"), "--param", "width:4", "--param", "n:16"]
    assert main(words) == 0
    assert "4 x 1 PEs, 1 programs, up to 1" in capsys.readouterr().out
    assert main(words[:-1] + ["n:7000"]) == 2
    assert "PE memory exceeded: 560" in capsys.readouterr().err


def test_check_takes_a_folder(capsys):
    assert main(["csl", "check", str(AXPY), "--param", "width:4", "--param", "n:16"]) == 0
    assert f"{AXPY}: 4 x 1 PEs" in capsys.readouterr().out


def test_check_refuses_a_search_path_that_is_not_there(capsys, tmp_path):
    words = ["csl", "check", str(AXPY / "layout.csl"), "--param", "width:4", "--param", "n:16", "--import-path"]
    assert main([*words, str(tmp_path)]) == 0
    assert main([*words, str(tmp_path / "none")]) == 2
    assert f"no such folder on the import path: {tmp_path / 'none'}" in capsys.readouterr().err


def test_check_prints_what_the_program_prints(capsys, tmp_path):
    (tmp_path / "layout.csl").write_text('layout { @comptime_print("width", 3); @set_rectangle(3, 1); }')
    assert main(["csl", "check", str(tmp_path / "layout.csl")]) == 0
    assert "layout.csl:1:10: width 3" in capsys.readouterr().out


def test_the_version_of_the_language(tmp_path, capfd):
    (tmp_path / "layout.csl").write_text("param a: comptime_struct = .{}; layout { @set_rectangle(1, 1); _ = a; }")
    (tmp_path / "commands_wse2.sh").write_text("cslc layout.csl")
    for words in (["run", str(tmp_path)], ["check", str(tmp_path / "layout.csl")]):
        assert main(["csl", *words]) == 0
        assert main(["csl", *words, "--sdk", "2.10"]) != 0
        assert "use of undeclared identifier 'comptime_struct'" in capfd.readouterr().err


def test_run(tmp_path, capfd):
    shutil.copytree(AXPY, tmp_path / "axpy")
    trace = tmp_path / "trace.json"
    assert main(["csl", "run", str(tmp_path / "axpy"), "--arch", "wse3", "--seed", "4", "--trace", str(trace)]) == 0
    assert capfd.readouterr().out == "SUCCESS!\n"
    assert json.loads(trace.read_text())["otherData"]["launches"][0]["name"] == "axpy"


@pytest.mark.parametrize("words, message", [(["csl", "run"], "needs a folder"), (["csl", "run", "."], "has no")])
def test_errors(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_run_prints_the_range_of_cycles(capsys, tmp_path):
    folder = shutil.copytree(AXPY, tmp_path / "axpy")
    assert main(["csl", "run", str(folder), "--range"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    name, cycles, low, high = re.fullmatch(r"(\w+): (\d+) cycles \((\d+) to (\d+)\)", line).groups()
    assert name == "axpy" and int(low) < int(cycles) < int(high)
