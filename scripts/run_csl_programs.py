"""Survey of CSL programs: runs the programs of given checkouts on the CSL simulator, and writes the list.

    python scripts/run_csl_programs.py CHECKOUTS --json survey.json --page docs/csl-programs.md

CHECKOUTS is a folder with one folder `owner+name` for each repository. The script fetches nothing. It runs every script
`commands*.sh` of a checkout in a copy of it, and the programs of `csl_programs.json`, which names the command lines of
repositories without such scripts, and smaller sizes where a script asks for a whole wafer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix("").parent / "csl_programs.json"
TOOLS = ROOT / "tessera" / "interp" / "target" / "csl" / "host" / "tools"
ERROR_LINE = re.compile(r"^(?!\s)(?:\S*(?:Error|Exception)\b.*|\S+\.csl:\d+.*|PE \(.*|error: .*|.*: error: .*)$")
CHECK_WORDS = re.compile(r"assert|allclose|array_equal|testing\.|SUCCESS|PASS|sys\.exit|raise ", re.IGNORECASE)


@dataclass
class Program:
    """One program: where it is, how it runs, and whether its host part checks the result."""

    repository: str
    folder: str
    command: str
    size: str = ""
    checks: bool = True
    expect: str = ""  # a text that a passing run prints
    fault: str = ""  # why the program cannot pass its own check, if it cannot
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """The result of one program."""

    repository: str
    program: str
    size: str
    outcome: str  # passes, runs, differs, refused, faults, internal, time, own fault
    reason: str
    seconds: float


def list_programs(checkouts: Path, table: dict[str, Any]) -> Iterator[Program]:
    """The programs of the checkouts: those of the table, and every `commands*.sh` that the table does not name."""
    named = {(row["repository"], row.get("replaces", "")) for row in table["programs"]}
    for row in table["programs"]:
        fields = {key: value for key, value in row.items() if key != "replaces"}
        if (checkouts / row["repository"].replace("/", "+")).is_dir():
            environment = {**_choose_language(row["repository"], table), **row.get("environment", {})}
            yield Program(**{**fields, "environment": environment})
    for folder in sorted(checkouts.iterdir()):
        repository = folder.name.replace("+", "/", 1)
        if repository in table["whole"] or not any(folder.rglob("*.csl")):
            continue
        for script in sorted(folder.rglob("commands*.sh")):
            path = str(script.relative_to(folder))
            if (repository, path) not in named and not _is_duplicate(script):
                yield Program(
                    repository, str(Path(path).parent), f"bash {script.name}", checks=_has_check(script),
                    environment=_choose_language(repository, table),
                )  # fmt: skip


def _choose_language(repository: str, table: dict[str, Any]) -> dict[str, str]:
    """The environment that selects the SDK whose language a repository is written in, if it is not the default."""
    return {"TESSERA_CSL_SDK": table["sdk"][repository]} if repository in table["sdk"] else {}


def _is_duplicate(script: Path) -> bool:
    """Whether `commands.sh` stands beside scripts for each architecture."""
    return script.name == "commands.sh" and any(script.parent.glob("commands_wse?.sh"))


def _has_check(script: Path) -> bool:
    """Whether a host part beside a script compares results."""
    return any(CHECK_WORDS.search(path.read_text(errors="replace")) for path in script.parent.glob("*.py"))


def run_program(program: Program, checkouts: Path, limit: float) -> Outcome:
    """Run one program in a copy of its checkout."""
    name = f"{program.folder}: {program.command}" if program.folder != "." else program.command
    with tempfile.TemporaryDirectory(prefix="csl_survey_") as temporary:
        copy = Path(temporary) / "checkout"
        shutil.copytree(
            checkouts / program.repository.replace("/", "+"), copy, symlinks=True, ignore=shutil.ignore_patterns(".git")
        )
        began = time.perf_counter()
        status, text = _execute(program, copy / program.folder, limit)
        seconds = time.perf_counter() - began
    outcome, reason = _judge(program, status, text)
    if program.fault and outcome not in ("passes", "runs", "internal"):
        outcome, reason = "own fault", program.fault
    return Outcome(program.repository, name, program.size, outcome, reason.replace(str(copy), ""), round(seconds, 1))


def _execute(program: Program, folder: Path, limit: float) -> tuple[int | None, str]:
    """The exit status (None: the time is over) and the output of a program's command."""
    environment = {
        **os.environ,
        "PATH": f"{TOOLS}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CSLC": "cslc",
        "CS_PYTHON": "cs_python",
        "TESSERA_PYTHON": sys.executable,
        "MPLBACKEND": "Agg",
        **program.environment,
    }
    process = subprocess.Popen(
        ["bash", "-c", program.command], cwd=folder, env=environment, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=limit)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        return None, text


def _judge(program: Program, status: int | None, text: str) -> tuple[str, str]:
    """The outcome of a run, and the first line of its reason."""
    if status is None:
        return "time", "the time limit"
    trace = text.rsplit("Traceback", 1)[1] if "Traceback" in text else ""
    frames = re.findall(r'^  File "([^"]+)"', trace, re.MULTILINE)
    internal = bool(frames) and "/tessera/interp/target/csl/" in frames[-1] or "internal error" in text
    if status == 0 and (not program.expect or program.expect in text) and not internal:
        return ("passes" if program.checks else "runs"), ""
    lines = [line for line in text.splitlines() if ERROR_LINE.match(line)]
    reason = next(
        iter(lines if not internal else reversed(lines)), text.strip().splitlines()[-1] if text.strip() else ""
    )
    if internal:
        return "internal", reason
    if "AssertionError" in text or "Mismatched" in text:
        return "differs", reason
    return ("faults" if "PE (" in text or "stall" in text else "refused"), reason


def name_own_faults(rows: list[dict[str, Any]], table: dict[str, Any]) -> list[Outcome]:
    """The outcomes of an earlier survey, with the faults of programs that the table names now."""
    faults = {(row["repository"], row["folder"], row["size"]): row.get("fault", "") for row in table["programs"]}
    outcomes = []
    for row in rows:
        outcome = Outcome(**row)
        folder = outcome.program.partition(": ")[0] if ": " in outcome.program else "."
        fault = faults.get((outcome.repository, folder, outcome.size), "")
        if fault and outcome.outcome not in ("passes", "runs", "internal"):
            outcome.outcome, outcome.reason = "own fault", fault
        outcomes.append(outcome)
    return outcomes


def write_page(outcomes: list[Outcome], path: Path) -> None:
    """The page with the list."""
    judged = [o for o in outcomes if o.outcome not in ("runs", "own fault")]
    passed = sum(o.outcome == "passes" for o in judged)
    lines = [
        "# Public CSL programs on the simulator",
        "",
        "Public CSL programs, each run with its own host part and its own check. The command",
        "`python scripts/run_csl_programs.py CHECKOUTS --page docs/csl-programs.md` writes this page from checkouts.",
        "The project contains none of the programs.",
        "",
        f"{passed} of {len(judged)} programs whose own check can pass do. A program without a check is listed as",
        "*runs*; *own fault* marks a program that cannot pass, with the reason. Seconds are of a busy machine.",
        "",
    ]
    for repository in sorted({o.repository for o in outcomes}):
        rows = [o for o in outcomes if o.repository == repository]
        lines += [f"## {repository}", "", "| program | sizes | outcome | seconds | why not |", "|---|---|---|---|---|"]
        lines += [
            f"| `{_cell(o.program)}` | {o.size} | {o.outcome} | {o.seconds:g} | {_cell(o.reason)} |" for o in rows
        ]
        lines.append("")
    path.write_text("\n".join([*lines, *_list_open(outcomes)]))


def _list_open(outcomes: list[Outcome]) -> list[str]:
    """The section of the programs that fail without a fault of their own, with what is known of each."""
    known = json.loads(TABLE.read_text())["open"]
    failed = [o for o in outcomes if o.outcome not in ("passes", "runs", "own fault")]
    lines = ["## Programs that do not pass", ""]
    for o in failed:
        reason = next(
            (text for start, text in known.items() if f"{o.repository}/{o.program}".startswith(start)), o.reason
        )
        lines.append(f"- {o.repository}, `{_cell(o.program.split(':')[0])}`: {reason}")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:200]


def main() -> int:
    """Run the survey; the status is 1 if an internal error of the simulator appeared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", default="", help="a part of the repository or the program")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each program")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--read", type=Path, help="write the page from the JSON file of an earlier survey")
    options = parser.parse_args()
    table = json.loads(TABLE.read_text())
    if options.read is not None:
        write_page(name_own_faults(json.loads(options.read.read_text()), table), options.page)
        return 0
    outcomes = []
    for program in list_programs(options.checkouts, table):
        if options.only not in f"{program.repository} {program.folder} {program.command}":
            continue
        outcomes.append(run_program(program, options.checkouts, options.limit))
        print(*asdict(outcomes[-1]).values(), sep=" | ", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    if options.page is not None:
        write_page(outcomes, options.page)
    return int(any(o.outcome == "internal" for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
