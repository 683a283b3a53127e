"""Fuzzing: right engines pass, wrong ones are found and their programs shrunk, and what is written runs again."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from conformance import run as conformance_run
from conformance.case import read_cases
from conformance.run import Engine, run_case
from tessera.core.errors import ArgumentError
from tessera.runtime.program import PreparedProgram
from tessera.tools.cli.main import main
from tessera.tools.fuzz import campaign, oracle, workers
from tessera.tools.fuzz.campaign import CampaignRequest, run_campaign
from tessera.tools.fuzz.programs import Input, RandomProgram
from tessera.tools.fuzz.workers import run_workers

# Other tests of this process may have loaded JAX, which warns of forks; the workers of a campaign do not use it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
SMALL = CampaignRequest(("interp",), programs=20, seconds=60.0)


@pytest.fixture(scope="module")
def summary():
    """What a campaign without a planted fault finds."""
    return run_campaign(replace(SMALL, seed=11))


@pytest.fixture
def wrong_engine(monkeypatch):
    """A target whose programs lose a NaN."""

    class Wrong(Engine):
        def run(self, program):
            return [np.nan_to_num(r) if r.dtype.kind == "f" else r for r in super().run(program)]

    engines = [Wrong("wrong", "tile", "interp")]
    monkeypatch.setattr(oracle, "list_engines", lambda *_: engines)


def test_programs_agree_at_all_levels(summary):
    assert summary.programs == 20 and not summary.failures and len(summary.features) > 200
    assert sum(n for k, n in summary.outcomes.items() if k.endswith("pass")) > 50


def test_the_same_seed_runs_the_same_programs(summary):
    assert run_campaign(replace(SMALL, seed=11)).outcomes == summary.outcomes


def test_a_lost_nan_is_found_shrunk_and_written(wrong_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "SHRINK_SECONDS", 2.0)
    summary = run_campaign(replace(SMALL, kinds=("graph",), programs=40, folder=tmp_path))
    ((key, (failure, program)),) = [x for x in summary.failures.items() if x[0].startswith("wrong")]
    assert key == "wrong: wrong values" and "nan" in failure.detail.lower()
    assert program.source.count("\n") <= 5
    (path,) = tmp_path.glob("*.py")
    (case,) = read_cases(str(path))
    assert {o.status for o in run_case(case, [Engine("tile", "tile", "interp")])} == {"pass"}


@pytest.mark.parametrize("error", [RuntimeError("x"), ts.TesseraError("x")])
def test_a_reference_that_fails_is_counted(error, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(oracle, "prepare", fails)
    monkeypatch.setattr(campaign, "SHRINK_SECONDS", 0.0)
    summary = run_campaign(replace(SMALL, programs=3))
    assert summary.outcomes == {"fail": 3} and list(summary.failures) == [f"reference: {type(error).__name__}: x"]


@pytest.mark.parametrize("part", ["generator", "oracle"])
def test_an_exception_of_fuzzing_itself_is_a_failure_and_the_campaign_goes_on(part, monkeypatch, tmp_path):
    def fails(*_):
        raise SyntaxError(f"at 0x7f{len(calls):04x}")

    calls = []
    real = campaign.GENERATORS["graph"]
    monkeypatch.setitem(campaign.GENERATORS, "graph", lambda *a: (calls.append(a), real(*a))[1])
    if part == "generator":
        monkeypatch.setitem(campaign.GENERATORS, "graph", lambda *a: (calls.append(a), fails())[1])
    else:
        monkeypatch.setattr(campaign, "list_features", fails)
    summary = run_campaign(replace(SMALL, kinds=("graph",), programs=3, folder=tmp_path))
    assert summary.programs == len(calls) == 3
    assert list(summary.failures) == ["fuzzing: SyntaxError: at "]
    assert len(list(read_cases(summary.files[0]))) == 1


class Flaky(Engine):
    """An engine whose results are wrong when the program ran on another before, or the first `left` times."""

    left, before = 0, ""

    def run(self, program):
        wrong = Flaky.left > 0 or Flaky.before == "tile"
        Flaky.left, Flaky.before = Flaky.left - 1, self.name
        return [r + 1 if wrong and self.name == "flaky" else r for r in super().run(program)]


@pytest.mark.parametrize("left", [0, 1, 2, 5])
def test_a_failure_that_is_not_repeated_is_reported(left, monkeypatch):
    """It needs the engine before it, or does not come again: also in the middle of shrinking."""
    program = RandomProgram("def program(x):\n    return x * 2.0\n", (Input("x", (3,), "f32"),))
    monkeypatch.setitem(campaign.GENERATORS, "graph", lambda choices, _: (choices.draw(9), program)[1])
    names = ("flaky",) if left else ("tile", "flaky")
    monkeypatch.setattr(oracle, "list_engines", lambda *_: [Flaky(n, "tile", "interp") for n in names])
    monkeypatch.setattr(campaign, "SHRINK_SECONDS", 0.5)
    monkeypatch.setattr(Flaky, "left", left)
    monkeypatch.setattr(Flaky, "before", "")
    summary = run_campaign(replace(SMALL, kinds=("graph",), programs=1))
    ((failure, _),) = summary.failures.values()
    assert failure.key == "flaky: wrong values"
    assert (campaign.NOT_REPEATED in failure.detail) == (left == 1)


def test_a_process_that_ends_is_a_failure_and_the_campaign_goes_on(tmp_path, monkeypatch):
    real = oracle.examine

    def dies(program, engines, seed=0, targets=()):
        if "exp" in program.source:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(program, engines, seed, targets)

    monkeypatch.setattr(campaign, "examine", dies)
    monkeypatch.setattr(workers, "examine", dies)
    monkeypatch.setattr(workers, "CRASH_SECONDS", 1.0)
    summary = run_workers(CampaignRequest(("interp",), ("graph",), programs=30, folder=tmp_path), 1)
    (failure,) = [f for f, _ in summary.failures.values()]
    assert failure.detail == "the process ended with SIGKILL"
    assert "exp" in next(tmp_path.glob("*.py")).read_text() and summary.programs > 10


def test_a_program_that_hangs_is_a_failure_and_the_campaign_goes_on(monkeypatch):
    """The record of the program before must not end the next process."""
    real = oracle.examine

    def hangs(program, engines, seed=0, targets=()):
        while "exp" in program.source:
            pass
        return real(program, engines, seed, targets)

    monkeypatch.setattr(campaign, "examine", hangs)
    monkeypatch.setattr(workers, "HANG_SECONDS", 0.5)
    summary = run_workers(CampaignRequest(("interp",), ("graph",), programs=30), 1)
    assert [f.key for f, _ in summary.failures.values()] == ["process: hangs"]
    assert 5 <= summary.programs <= 30  # the counts that a process had not yet sent are lost


def test_a_corpus_is_kept_and_read(tmp_path):
    run_campaign(replace(SMALL, programs=10, corpus=tmp_path))
    lines = (tmp_path / "0-corpus.jsonl").read_text().splitlines()
    assert lines and set(json.loads(lines[0])) == {"kind", "choices"}
    assert run_campaign(replace(SMALL, programs=10, corpus=tmp_path)).programs == 10


def test_the_command(tmp_path, capsys, monkeypatch):
    folder = str(tmp_path / "out")
    assert main(["fuzz", "--programs", "4", "--jobs", "1", "--kind", "tile", "-o", folder]) == 0
    assert "4 programs in" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert main(["fuzz", "--target", "nothing", "-o", folder]) == 2
    with pytest.raises(ArgumentError, match="has no cases"):
        (tmp_path / "empty.py").write_text("x = 1\n")
        read_cases(str(tmp_path / "empty.py"))


def test_guard_bytes_find_a_write_past_the_end(monkeypatch):
    """A store of one element too many, planted in the text."""
    engine = conformance_run.find_guarded_engine("llvm")
    program = conformance_run.prepare(ts.jit(lambda x: x * 2.0), (np.ones(16, np.float32),))
    assert engine.run(program)[0].tolist() == [2.0] * 16
    real = PreparedProgram.emit

    def emit(*args):
        artifact = real(*args)
        text = artifact.files["kernels.ll"].replace("ret void", "store i8 1, ptr %past\n  ret void", 1)
        entry = "entry:\n  %past = getelementptr i8, ptr %a1, i64 64\n"
        return replace(artifact, files={**artifact.files, "kernels.ll": text.replace("entry:\n", entry, 1)})

    monkeypatch.setattr(PreparedProgram, "emit", emit)
    with pytest.raises(ts.TesseraError, match="wrote outside the argument 1") as caught:
        engine.run(program)
    assert "the first 0 bytes after its end" in str(caught.value)
