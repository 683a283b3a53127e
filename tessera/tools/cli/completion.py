"""`tessera completion`: a script that completes commands, options and their choices in bash, zsh or fish."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

BASH = """\
_tessera() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$word")); return; fi
  case "$command $before" in
{choices}
  esac
  case "$command" in
{options}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _tessera tessera
"""


def main(options: argparse.Namespace) -> int:
    """Print the script for a shell."""
    from tessera.tools.cli.main import parser  # the parser lists this command, too

    commands = find_commands(parser())
    print(SCRIPTS[options.shell](commands), end="")
    return 0


Commands = dict[str, argparse.ArgumentParser]


def find_commands(top: argparse.ArgumentParser) -> Commands:
    """The commands of a parser by name."""
    (found,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def list_options(command: argparse.ArgumentParser) -> list[str]:
    """The options of a command, without those that help leaves out."""
    return [s for a in command._actions if a.help != argparse.SUPPRESS for s in a.option_strings]


def _format_bash(commands: Commands) -> str:
    choices = []
    for name, command in commands.items():
        for action in command._actions:
            if action.choices and action.option_strings:
                places = "|".join(f'"{name} {s}"' for s in action.option_strings)
                words = " ".join(map(str, action.choices))
                choices.append(f'    {places}) COMPREPLY=($(compgen -W "{words}" -- "$word")); return ;;')
    options = [f'    {name}) local options="{" ".join(list_options(c))}" ;;' for name, c in commands.items()]
    return BASH.format(commands=" ".join(commands), choices="\n".join(choices), options="\n".join(options))


def _format_zsh(commands: Commands) -> str:
    return "#compdef tessera\nautoload -U +X bashcompinit && bashcompinit\n" + _format_bash(commands)


def _format_fish(commands: Commands) -> str:
    return "\n".join([*_list_fish_lines(commands), ""])


def _list_fish_lines(commands: Commands) -> Iterator[str]:
    for name, command in commands.items():
        text = _quote(command.description or "")
        yield f"complete -c tessera -n __fish_use_subcommand -f -a {name} -d {text}"
        for action in command._actions:
            if action.help == argparse.SUPPRESS or not action.option_strings:
                continue
            names = [f"-l {s[2:]}" if s.startswith("--") else f"-s {s[1:]}" for s in action.option_strings]
            values = f" -x -a {_quote(' '.join(map(str, action.choices)))}" if action.choices else ""
            told = _quote((action.help or "").split("\n")[0])
            yield f"complete -c tessera -n '__fish_seen_subcommand_from {name}' {' '.join(names)}{values} -d {told}"


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS = {"bash": _format_bash, "zsh": _format_zsh, "fish": _format_fish}
