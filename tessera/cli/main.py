"""The `tessera` command: its arguments, and how errors become exit status 2."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Each command lives in a module of its own, imported only when it runs: `--help` stays quick.
COMMANDS = {
    "run": "run an example, a kernel or an artifact at any level and check it",
    "build": "compile an entry point for a target into an artifact folder",
    "check": "find all shape and dtype errors of a file's functions, with nothing executed",
    "inspect": "print the IR of each level with the source line of each op",
    "conformance": "run the conformance suite against interpreters and generators",
    "ptx": "run a PTX file in the interpreter",
    "doctor": "say what this machine can run, and what to install for the rest",
}
LEVELS = ("graph", "schedule", "tile", "target")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = argparse.ArgumentParser(prog="tessera", description="Tile programs at every level of their compilation.")
    top.add_argument("--traceback", action="store_true", help="show Python's traceback of an error")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        ARGUMENTS[name](command)
    return top


def _entry(command: argparse.ArgumentParser) -> None:
    command.add_argument("entry", help="file.py, file.py:name, or an artifact folder")
    command.add_argument("--seed", type=int, default=0, help="seed of the example's inputs (default 0)")


def _run(command: argparse.ArgumentParser) -> None:
    _entry(command)
    command.add_argument("--level", choices=LEVELS, help="the level whose interpreter runs it")
    command.add_argument("--target", help="the generator whose code runs it, such as llvm")
    command.add_argument(
        "--debug", action="store_true", help="look for races, bad accesses, early reads of copies and NaNs (Tile level)"
    )
    command.add_argument("--input", action="append", default=[], metavar="X.npy", help="an input, in order")
    command.add_argument(
        "--output", action="append", default=[], metavar="OUT.npy", help="where an output goes, in order"
    )


def _build(command: argparse.ArgumentParser) -> None:
    _entry(command)
    command.add_argument("--target", default="llvm", help="the generator (default llvm)")
    command.add_argument("-o", "--output", required=True, metavar="FOLDER", help="the artifact folder to write")


def _check(command: argparse.ArgumentParser) -> None:
    command.add_argument("entry", help="file.py, or file.py:name for one function")
    command.add_argument("--json", action="store_true", help="print a JSON array: one report for each function")


def _inspect(command: argparse.ArgumentParser) -> None:
    _entry(command)
    command.add_argument("--level", choices=LEVELS, help="only this level")
    command.add_argument("--target", default="llvm", help="the target to lower for (default llvm)")
    command.add_argument(
        "--pass-by-pass", action="store_true", help="print the module after every pass that changed it"
    )
    command.add_argument("--json", action="store_true", help="print a JSON object: level or pass to text and hash")
    command.add_argument("--plain", action="store_true", help="print the IR text alone")


def _conformance(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", action="append", default=[], help="a generator to run (default: all installed)")
    command.add_argument("--level", action="append", default=[], choices=LEVELS, help="a level to run (default: all)")
    command.add_argument(
        "-k", dest="select", default="", metavar="EXPR", help="cases whose name matches, as in pytest -k"
    )
    command.add_argument("--report", metavar="FILE", help="write the results as .json or JUnit .xml")


def _ptx(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=["run"], help="what to do")
    command.add_argument("file", metavar="KERNEL.ptx", help="the PTX text")
    command.add_argument("--entry", required=True, help="the entry to launch")
    command.add_argument("--grid", default="1", metavar="X[,Y[,Z]]", help="blocks (default 1)")
    command.add_argument("--block", default="1", metavar="X[,Y[,Z]]", help="threads of a block (default 1)")
    command.add_argument("--arg", action="append", default=[], metavar="X", help="an array (X.npy) or number, in order")
    command.add_argument("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory (default 0)")
    command.add_argument("--output", action="append", default=[], metavar="I=OUT.npy", help="save argument I after it")
    command.add_argument("--debug", action="store_true", help="find registers read before they are written")


ARGUMENTS = {
    "ptx": _ptx,
    "run": _run,
    "build": _build,
    "check": _check,
    "inspect": _inspect,
    "conformance": _conformance,
    "doctor": lambda command: command.add_argument("--json", action="store_true", help="print a JSON object"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 done, 1 something failed its check, 2 an error."""
    options = parser().parse_args(arguments)
    from tessera.errors import TesseraError

    try:
        return importlib.import_module(f"tessera.cli.{options.command}").main(options)
    except TesseraError as error:
        if options.traceback:
            raise
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader (a pager, `head`) has gone: nothing is wrong
        return 0
