"""The `tessera` command: its arguments, and how errors become exit status 2."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

# Each command has its own module, imported only when it runs: `--help` stays fast.
COMMANDS = {
    "run": "run an example, a kernel or an artifact at any level and check it",
    "build": "compile an entry point for a target into an artifact folder",
    "check": "find all shape and dtype errors of a file's functions and kernels from their annotations",
    "debug": "step through an entry point or a program, line by line or op by op, backwards too",
    "inspect": "print the IR of each level with the source line of each op",
    "profile": "time or count each kernel of an entry point: share of the roofline, bottleneck, advice, flame graph",
    "tune": "rank and measure the schedules of a function for a target, and keep the fastest",
    "bisect": "find the first pass whose results exceed their error bound, and the fewest ops that reproduce it",
    "conformance": "run the conformance suite against interpreters and generators",
    "fuzz": "run random programs at every level and on targets, and write a small case for each kind of failure",
    "ptx": "run a PTX file in the emulator",
    "cuda": "run a program whose Numba or CuPy kernels execute in the PTX emulator, without a GPU",
    "triton": "run a program whose Triton kernels execute in the PTX emulator, without a GPU",
    "launch": "start a program as ranks: of MPI, or on GPUs",
    "csl": "run or check a CSL program in the simulator, or name the folder of its host tools",
    "serve": "serve artifacts and language models over HTTP: inference protocol v2, OpenAI-compatible completions",
    "completion": "print a script that completes commands and options in bash, zsh or fish",
    "doctor": "say what this machine can run, and what to install for the rest",
}
SDK_VERSIONS = ("0.6", "0.7", "0.8", "0.9", "1.0", "1.1", "1.2", "1.3", "1.4", "2.10")  # of the CSL simulator
LEVELS = ("graph", "schedule", "tile", "target")
ARCH_HELP = "the architecture, for a target that has several: sm_80, sm_90a (ptx), wse2, wse3 (csl)"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """End with an error; one about a choice names the nearest."""
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        choices = re.findall(r"[\w.-]+", found[2]) if found else []
        super().error(message + suggest_name(found[1] if found else "", choices))


def suggest_name(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: "; did you mean run?", or nothing where none is near.

    >>> suggest_name("runn", ["run", "build"]), suggest_name("x", ["run"])
    ('; did you mean run?', '')
    """
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line."""
    top = _Parser(prog="tessera", description="Tile programs at every level of their compilation.")
    top.add_argument("--traceback", action="store_true", help="show Python's traceback of an error")
    top.add_argument("--version", action=_Version, help="print the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        ARGUMENTS[name](command)
    return top


class _Version(argparse.Action):
    """Reads the version lazily: importing the package takes longer than `--help`."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help, default=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the version and end."""
        print(f"tessera {importlib.import_module('tessera').__version__}")
        parser.exit()


def _entry(command: argparse.ArgumentParser, also: str = "") -> None:
    command.add_argument("entry", help="file.py or file.py:name, or model.onnx" + also)
    command.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="the size of an open axis, of a model or artifact"
    )
    command.add_argument("--seed", type=_seed, default=0, help="seed of the example's inputs (default 0)")


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 on")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def _tuning(command: argparse.ArgumentParser) -> None:
    text = "use the first configuration of an autotuned kernel: nothing is measured, no cache is read"
    command.add_argument("--no-tune", dest="tune", action="store_false", help=text)


def _run(command: argparse.ArgumentParser) -> None:
    _entry(command, ", or an artifact folder, or a bundle")
    _tuning(command)
    command.add_argument("--level", choices=LEVELS, help="the level whose interpreter runs it")
    command.add_argument("--target", help="the generator whose code runs it: llvm, ptx, csl, csl:4x4 (a grid), …")
    command.add_argument(
        "--debug",
        action="store_true",
        help="find races, bad accesses, reads before a copy completes, and NaNs (Tile level)",
    )
    command.add_argument("--as-target", metavar="TARGET", help="interpret kernels (Tile level) with a target's numbers")
    command.add_argument("--lint", action="store_true", help="as --debug, with advice on banks, coalescing and masks")
    command.add_argument("--report", action="store_true", help="count what kernels do: operations, bytes, conflicts")
    command.add_argument("--gpu", help="the GPU that --report models (default H100)")
    command.add_argument("--timeline", metavar="T.json", help="as --report, and write the ops as they ran (Perfetto)")
    command.add_argument(
        "--picture",
        metavar="P.png",
        help="draw which program touches what, with a report; with --target csl, the run on the grid",
    )
    command.add_argument("--repeat", type=_count, metavar="N", help="call it N times more: the least and median time")
    command.add_argument("--no-check", dest="check", action="store_false", help="do not check the results")
    command.add_argument("--full-check", action="store_true", help="check all programs, where a sample is the default")
    command.add_argument("--arch", help=ARCH_HELP)
    command.add_argument("--input", action="append", default=[], metavar="X.npy", help="an input, in order")
    command.add_argument(
        "--output", action="append", default=[], metavar="OUT.npy", help="where an output goes, in order"
    )


def _build(command: argparse.ArgumentParser) -> None:
    _entry(command)
    _tuning(command)
    command.add_argument("--target", action="append", help="the generator (default llvm); several for a bundle")
    command.add_argument("--arch", help=ARCH_HELP)
    command.add_argument("--grid", metavar="RxC", help="rows x columns of PEs, for a mesh target (csl)")
    command.add_argument(
        "-o", "--output", required=True, metavar="PATH", help="the artifact folder, or X.bundle, to write"
    )
    command.add_argument(
        "--batch-size",
        action="append",
        type=_count,
        default=[],
        metavar="N",
        help="of a bundle: a first axis of inputs",
    )
    command.add_argument("--standalone", action="store_true", help="write a C library that needs no Python")
    command.add_argument("--machine", help="of a standalone program: x86-64, x86-64-v3, aarch64, native; sm_80 (ptx)")
    command.add_argument("--metadata", metavar="X.json", help="of a bundle: a JSON object to store")
    command.add_argument(
        "--measure", action="store_true", help="of a bundle: measure and store the time of each variant"
    )
    command.add_argument(
        "--dynamic", action="append", nargs="?", const="", default=[], metavar="NAME:AXIS=SIZE",
        help="a size that may differ in each call, as x:0=B; without a value, the sizes that annotations name",
    )  # fmt: skip
    command.add_argument(
        "--variant", action="append", default=[], metavar="CONSTRAINT",
        help="with --dynamic: one more copy of the program, for sizes such as \"S %% 64 == 0\" or \"B == 1\"",
    )  # fmt: skip


def _check(command: argparse.ArgumentParser) -> None:
    command.add_argument("entry", help="file.py, or file.py:name for one function")
    command.add_argument("--json", action="store_true", help="print a JSON array: one report for each function")


def _debug(command: argparse.ArgumentParser) -> None:
    _entry(command)
    command.add_argument("--input", action="append", default=[], metavar="X.npy", help="an input, in order")
    command.add_argument(
        "-c", dest="command_text", action="append", default=[], metavar="COMMANDS", help="debugger commands, between ;"
    )
    command.add_argument("--commands", metavar="FILE", help="a file of debugger commands, one a line")
    command.add_argument("--checked", action="store_true", help="in debug mode: stop at the first finding")
    command.add_argument(
        "--level", choices=("graph", "tile"), help="of a jit function: its whole tensors (default), or its kernels"
    )
    command.add_argument("--script", action="store_true", help="run the whole file as a program")
    command.add_argument("rest", nargs="*", metavar="ARGUMENT", help="with --script: the program's arguments")


def _inspect(command: argparse.ArgumentParser) -> None:
    _entry(command, ", or an artifact folder or a bundle, whose contents are listed")
    _tuning(command)
    command.add_argument("--level", choices=LEVELS, help="only this level")
    command.add_argument("--target", default="llvm", help="the target to lower for (default llvm)")
    command.add_argument("--arch", help=ARCH_HELP)
    command.add_argument(
        "--pass-by-pass", action="store_true", help="print the module after every pass that changed it"
    )
    command.add_argument("--json", action="store_true", help="print a JSON object: level or pass to text and hash")
    command.add_argument("--plain", action="store_true", help="print the IR text alone")
    command.add_argument(
        "--html", metavar="FILE", help="write a page with all levels and passes, their values and their timeline"
    )
    command.add_argument("--no-values", action="store_true", help="of --html: do not run the program")
    command.add_argument("--max-lines", type=int, metavar="N", help="of --html: lines of a text (default 20,000)")
    command.add_argument("--input", action="append", default=[], metavar="X.npy", help="an input, in order")


def _profile(command: argparse.ArgumentParser) -> None:
    _entry(command)
    _tuning(command)
    command.add_argument(
        "--target",
        default="llvm",
        help="llvm (times), ptx (times by CUDA events; counts without a GPU), csl:4x4 (cycles)",
    )
    command.add_argument("--level", choices=("summary", "detailed"), default="summary", help="detailed: count accesses")
    command.add_argument("--gpu", help="the GPU whose data sheet bounds ptx (default: this machine's, else H100)")
    command.add_argument("--input", action="append", default=[], metavar="X.npy", help="an input, in order")
    command.add_argument("--json", action="store_true", help="print a JSON object")
    command.add_argument(
        "-o", "--output", action="append", default=[], metavar="FILE",
        help="write *.folded, *.speedscope.json, *.trace.json (Chrome, Perfetto), *.json or *.txt",
    )  # fmt: skip


def _tune(command: argparse.ArgumentParser) -> None:
    _entry(command)
    command.add_argument("--target", default="llvm", help="the target to tune for (default llvm)")
    command.add_argument("--keep", type=_count, metavar="N", help="schedules to measure (default 8)")
    command.add_argument("--samples", type=_count, metavar="N", help="least samples of each (default 5)")
    command.add_argument("--no-measure", dest="measure", action="store_false", help="take the model's first")
    command.add_argument("--cache", metavar="X.json", help="the file of results (default: the user's own)")
    command.add_argument("--input", action="append", default=[], metavar="X.npy", help="an input, in order")
    command.add_argument("--json", action="store_true", help="print a JSON object")


def _bisect(command: argparse.ArgumentParser) -> None:
    _entry(command)
    _tuning(command)
    command.add_argument("--target", default="llvm", help="the target to lower for and to run on (default llvm)")
    command.add_argument("--arch", help=ARCH_HELP)
    command.add_argument("--input", action="append", default=[], metavar="X.npy", help="an input, in order")
    command.add_argument("--json", action="store_true", help="print a JSON object: steps, the first bad one, ops")
    command.add_argument(
        "-o", "--output", metavar="FOLDER", help="write the IR before and after the bad step, and the ops' inputs"
    )


def _conformance(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", action="append", default=[], help="a generator to run (default: all installed)")
    command.add_argument("--level", action="append", default=[], choices=LEVELS, help="a level to run (default: all)")
    command.add_argument(
        "-k", dest="select", default="", metavar="EXPR", help="cases whose name matches, as in pytest -k"
    )
    command.add_argument("--report", metavar="FILE", help="write the results as .json, JUnit .xml or .html")
    command.add_argument(
        "--profile", metavar="NAME", help="core, kernels, tensor-cores, low-precision, autodiff, collectives, all …"
    )
    command.add_argument("--checked", action="store_true", help="also with guard bytes (llvm), in debug mode (ptx)")
    command.add_argument(
        "--pass-by-pass",
        action="store_true",
        help="run the module after every pass: the first that changes a value fails",
    )
    command.add_argument(
        "--variants",
        action="store_true",
        help="run what must not change a result: other passes and tiles, batches, sizes, donation, forward mode",
    )
    command.add_argument("--engine", action="append", default=[], metavar="CMD", help="a foreign engine: a command")
    command.add_argument("--list", action="store_true", help="print the names of the selected cases, and run none")
    command.add_argument(
        "--manifest", metavar="FILE", help="write the selected cases as JSON: profiles, comparison, ranks; run none"
    )
    command.add_argument("--cases", metavar="FILE", help="run the cases of a Python file, as `tessera fuzz` writes")


def _fuzz(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", action="append", default=[], help="a generator (default: interp, the levels)")
    command.add_argument("--kind", action="append", default=[], choices=("graph", "tile"), help="functions or kernels")
    command.add_argument("--seconds", type=_count, default=60, metavar="N", help="how long (default 60)")
    command.add_argument("--programs", type=_count, metavar="N", help="at most this number for each process")
    command.add_argument("--seed", type=_seed, default=0, metavar="S", help="the same seed makes the same programs")
    command.add_argument("--jobs", type=_count, default=2, metavar="N", help="processes (default 2)")
    command.add_argument("--corpus", metavar="FOLDER", help="read and keep programs that cover something new")
    command.add_argument("-o", "--output", metavar="FOLDER", default="fuzz-cases", help="where cases are written")


def _ptx(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=["run"], help="what to do")
    command.add_argument("file", metavar="KERNEL.ptx", help="the PTX text")
    command.add_argument("--entry", required=True, help="the entry to launch")
    command.add_argument("--grid", default="1", metavar="X[,Y[,Z]]", help="blocks (default 1)")
    command.add_argument("--block", default="1", metavar="X[,Y[,Z]]", help="threads of a block (default 1)")
    command.add_argument("--cluster", default="1", metavar="X[,Y[,Z]]", help="blocks of a cluster (default 1)")
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="X",
        help="in order: X.npy, X.npy:bf16, X.npy@64x64/128 (tensor map: box and swizzle), zeros:8x16:f32, or a number",
    )
    command.add_argument("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory (default 0)")
    command.add_argument("--output", action="append", default=[], metavar="I=OUT.npy", help="save argument I after it")
    command.add_argument("--debug", action="store_true", help="find races, uninitialised reads and missed waits")
    command.add_argument("--cooperative", action="store_true", help="run all blocks at once: needed for grid barriers")


def _triton(command: argparse.ArgumentParser) -> None:
    _add_emulated_program(command)
    command.add_argument(
        "--tune", choices=("first", "all"), default="first", help="configurations of an autotuned kernel to try"
    )
    command.add_argument("--benchmarks", action="store_true", help="run what triton.testing.perf_report marks")


def _add_emulated_program(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=["run"], help="what to do")
    command.add_argument("program", metavar="PROGRAM.py", help="the Python program, run as the main program")
    command.add_argument("rest", nargs="*", metavar="ARGUMENT", help="the program's arguments")
    command.add_argument("--arch", default="sm_90a", help="the architecture: sm_80, sm_86, sm_89, sm_90a (default)")
    command.add_argument("--debug", action="store_true", help="find races, uninitialised reads and missed waits")
    command.add_argument("--report", action="store_true", help="count what each launch executes")


def _csl(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=["run", "check", "tools"], help="what to do")
    command.add_argument("path", nargs="?", help="run: a program's folder; check: that, or its layout file")
    command.add_argument("--arch", choices=("wse2", "wse3"), help="the machine (default: the first the folder is for)")
    command.add_argument("--sdk", choices=SDK_VERSIONS, help="the version of the language (default 1.4)")
    command.add_argument("--param", action="append", default=[], metavar="NAME:VALUE", help="check: a parameter")
    command.add_argument("--import-path", action="append", default=[], metavar="FOLDER", help="check: more modules")
    command.add_argument("--seed", type=int, help="run: shuffle events and link delays, to expose races")
    command.add_argument(
        "--range", action="store_true", help="run: the cycles of each launch at both ends of the cost model"
    )
    command.add_argument("--orders", type=int, metavar="N", help="run: compare N shuffled orders with the default one")
    command.add_argument("--plain", action="store_true", help="run: execute each PE and each step on its own (slower)")
    command.add_argument("--limit", type=int, help="run: stop after LIMIT cycles (default 1e9)")
    command.add_argument("--picture", metavar="FILE", help="run: draw memory, traffic and tasks into a .png or .svg")
    command.add_argument("--trace", metavar="FILE", help="run: write the tasks as a Chrome trace (JSON)")


def _launch(command: argparse.ArgumentParser) -> None:
    command.add_argument("-n", type=_count, required=True, metavar="RANKS", help="the number of processes")
    command.add_argument(
        "--engine", choices=("mpi", "nccl"), default="mpi", help="processes of MPI (default), or one for each GPU"
    )
    command.add_argument("program", metavar="PROGRAM.py", help="the Python program, run by each of them")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's arguments")


def _serve(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "path", nargs="+", metavar="[NAME=]PATH", help="an artifact, a bundle, a GGUF file, or a folder of safetensors"
    )
    command.add_argument("--host", default="127.0.0.1", help="the address to listen on (default 127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, help="the port; 0 is any free one (default 8000)")
    command.add_argument("--api-key-file", metavar="FILE", help="API keys, one a line (or one in TESSERA_API_KEY)")
    command.add_argument("--max-queue", type=_count, default=256, metavar="N", help="requests in work at most")
    command.add_argument("--max-body", type=_count, default=64, metavar="MIB", help="the longest body (default 64 MiB)")
    command.add_argument("--drain-timeout", type=float, default=30.0, metavar="S", help="seconds for open requests")
    command.add_argument("--max-batch", type=_count, default=1, metavar="N", help="rows that run together (default 1)")
    command.add_argument("--batch-timeout", type=float, default=2.0, metavar="MS", help="wait for a batch (default 2)")
    command.add_argument("--padding", choices=("left", "right"), help="pad sequences of different lengths to batch")
    command.add_argument("--cache", type=int, default=0, metavar="N", help="responses that are kept (default 0)")
    command.add_argument("--replicas", type=_count, default=1, metavar="N", help="copies of each artifact (default 1)")
    command.add_argument("--processes", action="store_true", help="each replica is a process of its own")
    command.add_argument("--slots", type=_count, default=8, metavar="N", help="texts generated together (default 8)")
    command.add_argument("--longest", type=_count, metavar="N", help="tokens of a text with its prompt (default 2048)")
    command.add_argument("--pages", type=_count, metavar="N", help="pages of the cache of keys and values")


ARGUMENTS = {
    "serve": _serve,
    "launch": _launch,
    "csl": _csl,
    "ptx": _ptx,
    "cuda": _add_emulated_program,
    "triton": _triton,
    "run": _run,
    "build": _build,
    "check": _check,
    "debug": _debug,
    "inspect": _inspect,
    "tune": _tune,
    "bisect": _bisect,
    "profile": _profile,
    "conformance": _conformance,
    "fuzz": _fuzz,
    "completion": lambda command: command.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell"),
    "doctor": lambda command: command.add_argument("--json", action="store_true", help="print a JSON object"),
}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; arguments that its command does not take are errors of that command."""
    top = parser()
    options, unknown = top.parse_known_args(arguments)
    if unknown:
        completion = importlib.import_module("tessera.tools.cli.completion")
        command = completion.find_commands(top)[options.command]
        named = next((u.partition("=")[0] for u in unknown if u.startswith("-")), "")
        command.error(f"unrecognized arguments: {' '.join(unknown)}"
                      f"{suggest_name(named, completion.list_options(command))}")  # fmt: skip
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 success, 1 a failed check, 2 an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without "…" prints "?" instead of an error
    options = _parse(arguments)
    from tessera.core.errors import TRACEBACK_VARIABLE, TesseraError

    if options.traceback:
        os.environ[TRACEBACK_VARIABLE] = "full"
    try:
        command = importlib.import_module(f"tessera.tools.cli.{options.command}")
        with importlib.import_module("tessera.tools.cli.progress").progress_on_terminal(options.command):
            return command.main(options)
    except KeyboardInterrupt:
        return 130
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich's form of BrokenPipeError
            return 0
        raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (a pager, `head`) has gone:
        return 0  # nothing is wrong, and what is still buffered goes nowhere
    except Exception as error:
        if options.traceback:
            raise
        failures = importlib.import_module("tessera.tools.cli.entry_points")
        print(error if isinstance(error, TesseraError) else failures.describe_exception(error), file=sys.stderr)
        return 2
