"""docs/debugging.md: the session it shows is what happens, its commands are all there are, its names exist."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import tessera as ts
from tessera.tools.cli.main import main
from tessera.tools.debug.console import HELP

PAGE = (Path(__file__).parents[3] / "docs" / "debugging.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def kept(text):
    """What every Python shows: those before 3.11 keep no columns, so that nothing is underlined."""
    lines = text.splitlines()
    return lines if sys.version_info >= (3, 11) else [line for line in lines if not re.fullmatch(r"[ |]*\^+", line)]


@pytest.mark.parametrize(("number", "file"), [(0, "scale.py"), (1, "model.py")])
def test_the_sessions(number, file, tmp_path, monkeypatch, capsys):
    (tmp_path / file).write_text(blocks("python")[number])
    command, _, shown = blocks("console")[number].removeprefix("$ ").partition("\n")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert kept(capsys.readouterr().out) == kept(shown)


def test_every_command_is_told():
    told = re.findall(r"^\| `(.*)` \| (.*) \|$", PAGE.partition("| command | |")[2], re.MULTILINE)
    assert told == [(usage.replace("|", "\\|"), text) for usage, text in HELP]


def test_every_name_exists():
    names = set(re.findall(r"ts\.debug\.(\w+)", PAGE))
    assert len(names) >= 10 and all(hasattr(ts.debug, name) for name in names)


def test_every_public_name_is_told():
    assert not [name for name in ts.debug.__all__ if name[0].islower() and f"ts.debug.{name}" not in PAGE]


def test_the_options_exist():
    from tessera.tools.cli.main import parser

    text = parser().format_help() + str(parser()._subparsers._group_actions[0].choices["run"].format_help())
    text += parser()._subparsers._group_actions[0].choices["debug"].format_help()
    assert all(option in text for option in set(re.findall(r"--[a-z][a-z-]+", PAGE)))
