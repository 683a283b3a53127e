"""Broken CSL programs: random changes to programs of the tests, and the outcome of compiling and running one.

    PYTHONPATH=. python tests/interp/target/csl/csl_mutations.py --count 2000 --seed 1

prints every mutant that ends in an error without a type, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import csl_random_programs
import numpy as np
from csl_harness import HEAD, LAYOUT, LOOP, PROGRAMS, sections

from tessera.core.errors import TesseraError
from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.simulation import Simulation

TOKEN = re.compile(r"\s+|//[^\n]*|[A-Za-z_@]\w*|\d[\w.]*|\"[^\"\n]*\"|[^\w\s]")
NUMBERS = ("0", "1", "-1", "2", "3", "7", "31", "255", "32768", "65535", "65536", "4294967296", "0.5", "1e39")
WORDS = ("true", "null", "undefined", "void", "u16", "i8", "f16", "color", "@zeros([4]f32)", ".{}", "comptime", "var")
LIMIT = 30_000  # cycles
Files = dict[str, str]


def programs() -> Iterator[tuple[str, Files]]:
    """The programs of the tests: title, and text of each file."""
    for name in ("lang_values.csl", "lang_faults.csl"):
        for title, text in sections(name):
            named = (
                "export var" in text and "c = @get_color" not in text and "main" in text and name == "lang_values.csl"
            )
            yield title, {"layout.csl": LAYOUT % ("" if named else LOOP), "pe.csl": text if named else HEAD + text}
    for title, text in sections("lang_programs.csl"):
        parts = [part.partition("\n") for part in text.split("//-- ")[1:]]
        yield title, {name: content.split("//! ")[0] for name, _, content in parts}
    for name in ("axpy", "lines"):
        yield name, {path.name: path.read_text() for path in sorted((PROGRAMS / name).glob("*.csl"))}
    layout = csl_random_programs.LAYOUT.replace("WIDTH", "4").replace("HEIGHT", "3")
    for piece in csl_random_programs.PIECES:
        body = piece.format(i=1, n=3, f="0.75") * 6
        yield "grid", {"layout.csl": layout, "pe.csl": csl_random_programs.PE.replace("BODY", body)}
    yield "data", {"layout.csl": layout, "pe.csl": csl_random_programs.DATA}


def mutate(text: str, dice: random.Random) -> str:
    """The text after one random change of a token or a statement."""
    tokens = TOKEN.findall(text)
    places = [i for i, token in enumerate(tokens) if not token.isspace() and not token.startswith("//")]
    if not places:
        return text
    at = dice.choice(places)
    kind = dice.choice(("delete", "number", "number", "name", "name", "repeat", "swap", "word", "statement"))
    similar = [i for i in places if tokens[i][0].isdigit()] if kind == "number" else places
    if kind == "name":
        similar = [i for i in places if tokens[i][0].isalpha() or tokens[i][0] == "@"]
    at = dice.choice(similar) if similar else at
    if kind == "delete":
        tokens[at] = ""
    elif kind == "number":
        tokens[at] = dice.choice(NUMBERS)
    elif kind in ("name", "swap"):
        tokens[at] = tokens[dice.choice(similar or places)]
    elif kind == "word":
        tokens[at] = dice.choice(WORDS)
    elif kind == "repeat":
        tokens.insert(at, tokens[at])
    else:
        ends = [i for i in places if tokens[i] in ";{}"]
        begin = dice.choice(ends) if ends else at
        end = next((i for i in ends if i > begin), begin)
        del tokens[begin + 1 : end + 1]
    return "".join(tokens)


def run_files(folder: Path, files: Files, arch: str, lockstep: bool = True) -> str:
    """Compile and run a program: copies into the exported arrays, a launch of each function, copies out; returns the
    message of its typed error, or "".
    """
    for name, text in files.items():
        (folder / name).write_text(text)
    try:
        layout = compile_program(folder / "layout.csl", arch=arch, fabric_dims=(18, 12), fabric_offsets=(4, 1))
        run = Simulation(layout, limit=LIMIT, lockstep=lockstep)
        run.boot()
        for name in ("a", "w"):
            places = [place for place, pe in run.pes.items() if name in pe.program.exports]
            if places:
                run.wait(run.copy_in(name, {place: np.arange(4, dtype=np.uint32) for place in places}))
        for name, args in (("main", (2,)), ("f", ()), ("main", ())):
            wanted = [pe.program.exports[name].type for pe in run.pes.values() if name in pe.program.exports]
            if wanted and len(getattr(wanted[0], "params", (0, 0, 0))) == len(args):
                run.wait(run.launch(name, *args))
        run.settle()
    except TesseraError as error:
        return f"{error.location}: {error.message}"
    return ""


def attack(count: int, seed: int, seconds: int = 0) -> Iterator[tuple[str, Files, str]]:
    """Mutants that end in an internal error, an untyped one, or not at all: title, files and what happened.

    `seconds`: the time of one mutant, after which SIGALRM is raised; 0: none.
    """
    dice, known = random.Random(seed), list(programs())
    for _ in range(count):
        title, files = dice.choice(known)
        for _ in range(dice.choice((1, 1, 1, 2, 4))):
            name = dice.choice([*files, *["pe.csl"] * (2 * ("pe.csl" in files))])
            files = {**files, name: mutate(files[name], dice)}
        with tempfile.TemporaryDirectory() as folder:
            signal.alarm(seconds)
            try:
                found = run_files(Path(folder), files, dice.choice(("wse2", "wse3")), dice.random() < 0.7)
            except Exception:
                found = "untyped " + traceback.format_exc()
            finally:
                signal.alarm(0)
        if found.startswith("untyped") or "internal error" in found:
            yield title, files, found


def main() -> int:
    """Attack, print, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the files of the mutants that are found")
    options = parser.parse_args()

    def over(*_: object) -> None:
        raise TimeoutError("the run does not end")

    signal.signal(signal.SIGALRM, over)
    number = 0
    for number, (title, files, what) in enumerate(attack(options.count, options.seed, 20), 1):
        print(f"--- {number}: {title}\n{what}", flush=True)
        if options.keep is not None:
            folder = options.keep / f"{options.seed}-{number}"
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
    print(f"{number} of {options.count} mutants end in an error without a type")
    return int(number > 0)


if __name__ == "__main__":
    sys.exit(main())
