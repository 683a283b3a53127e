"""`tessera completion`: what shells complete."""

import argparse
import shutil
import subprocess

import pytest

from tessera.tools.cli import completion
from tessera.tools.cli.main import COMMANDS, main, parser


def complete(script, *words):
    """The words that bash offers for the last one."""
    line = " ".join(f'"{w}"' for w in words)
    asked = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _tessera; printf "%s\\n" "${{COMPREPLY[@]}}"'
    return subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_choices(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert sorted(complete(script, "tessera", "")) == sorted(COMMANDS)
    assert complete(script, "tessera", "bui") == ["build"]
    assert complete(script, "tessera", "build", "--st") == ["--standalone"]
    assert complete(script, "tessera", "run", "--level", "ti") == ["tile"]
    assert "--traceback" not in complete(script, "tessera", "run", "--")


def test_zsh_and_fish_have_every_option(capsys):
    commands = completion.find_commands(parser())
    assert set(commands) == set(COMMANDS)
    for shell, prefix in (("zsh", "--"), ("fish", "-l ")):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        for command in commands.values():
            for option in completion.list_options(command):
                assert prefix + option[2:] in script or not option.startswith("--")


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_reads_the_script(capsys):
    main(["completion", "fish"])
    subprocess.run(["fish", "-n"], input=capsys.readouterr().out, text=True, check=True)


def test_options_of_help_alone():
    command = argparse.ArgumentParser()
    command.add_argument("--shown")
    command.add_argument("--hidden", help=argparse.SUPPRESS)
    assert completion.list_options(command) == ["-h", "--help", "--shown"]
