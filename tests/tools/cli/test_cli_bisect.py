"""`tessera bisect` and a compiler broken on purpose: the step is named, and the op of the user's line that shows it."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

import tessera.codegen.ptx.pipeline as ptx_pipeline
import tessera.lower.pipeline as pipeline
from tessera.codegen.llvm import generator
from tessera.ir.builder import make_copier, rebuild_function
from tessera.ops.dialects import tile
from tessera.ops.tensor import elementwise
from tessera.tools.cli.main import main

PAGE = (Path(__file__).parents[3] / "docs" / "finding-a-wrong-pass.md").read_text()
MODEL = """
import numpy as np
import tessera as ts

@ts.example(lambda rng: (rng.standard_normal((8, 16), np.float32), rng.standard_normal((16, 4), np.float32)))
@ts.jit
def model(x, w):
    hidden = ts.tanh(x @ w)
    scaled = ts.softmax(hidden * 2.0)
    return scaled - ts.mean(scaled, axis=0)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def with_other(old, new):
    """A rewrite that puts another op in the place of one: what no pass should do."""

    def meaning_of(builder):
        copy = make_copier(builder)

        def meaning(node, args, run):
            return builder.add(new, args, node.attrs, loc=node.loc).results if node.op is old else copy(node, args, run)

        return meaning

    return lambda function: rebuild_function(function, meaning_of)


def crash(function):
    """A pass that cannot take a tanh."""
    assert all(n.op is not elementwise.tanh for n in function.body.nodes), "no rule for tanh"
    return function


def replace_pass(patch, name, change):
    """Replace one pass of the pipeline by what `change` makes of it."""
    changed = tuple((n, change(run) if n == name else run) for n, run in pipeline.PIPELINE)
    patch.setattr(pipeline, "PIPELINE", changed)


def break_simplify(patch):
    wrong = pipeline.rewrite_main(with_other(elementwise.exp, elementwise.exp2))
    replace_pass(patch, "simplify", lambda run: lambda module, plan: wrong(run(module, plan), plan))


def break_schedule(patch):
    wrong = pipeline.rewrite_main(with_other(elementwise.sub, elementwise.add))
    replace_pass(patch, "schedule", lambda run: lambda module, plan: run(wrong(module, plan), plan))


def break_dead_code(patch):
    replace_pass(patch, "dead code", lambda run: pipeline.rewrite_main(crash))


def break_emission(patch):
    emit = generator.emit_module

    def wrong(module, options):
        emission = emit(module, options)
        return dataclasses.replace(emission, text=emission.text.replace("fdiv <", "fmul <"))

    patch.setattr(generator, "emit_module", wrong)


@pytest.mark.parametrize(
    ("broken", "step", "line", "says"),
    [
        (break_simplify, "simplify", "scaled = ts.softmax(hidden * 2.0)", '-    %1 = "ts.exp"'),
        (break_schedule, "schedule", "scaled - ts.mean(scaled, axis=0)", '"ts.add"'),
        (break_dead_code, "dead code", "hidden = ts.tanh(x @ w)", "AssertionError: no rule for tanh"),
        (break_emission, "llvm text", "model.py", "times the bound"),
    ],
)
def test_what_is_broken_is_named(broken, step, line, says, file, monkeypatch, capsys):
    broken(monkeypatch)
    assert main(["bisect", file]) == 1
    out = capsys.readouterr().out
    assert f"{step} is the first step that goes wrong" in out and says in out
    assert "1 op is enough to show it (of " in out and line in out


PRODUCT = """
import numpy as np
import tessera as ts

def inputs(rng):
    return tuple(rng.standard_normal((256, 256), np.float32).astype(ts.bf16.numpy) for _ in range(2))

@ts.example(inputs)
@ts.jit
def model(x, w):
    return ts.tanh(x @ w)
"""


def replace_ptx_pass(patch, name, change):
    """Replace one pass of the ptx pipeline by what `change` makes of it."""
    changed = tuple((n, change(run) if n == name else run) for n, run in ptx_pipeline.FUNCTION_PASSES)
    patch.setattr(ptx_pipeline, "FUNCTION_PASSES", changed)


def without(op):
    """A rewrite that drops every use of an op without results."""

    def meaning_of(builder):
        copy = make_copier(builder)
        return lambda node, args, run: () if node.op is op else copy(node, args, run)

    return lambda function: rebuild_function(function, meaning_of)


@pytest.mark.parametrize(
    ("step", "wrong", "says"),
    [
        ("accumulator fusion", with_other(elementwise.tanh, elementwise.exp), "times the bound"),
        ("multistage pipelining", without(tile.async_wait), "fails"),  # debug mode: values are right
        ("load hoisting", with_other(elementwise.tanh, elementwise.exp), "times the bound"),
        ("layout assignment", with_other(elementwise.tanh, elementwise.exp), "times the bound"),
    ],
)
def test_a_wrong_pass_of_a_generator_is_named(step, wrong, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.py").write_text(PRODUCT)
    replace_ptx_pass(monkeypatch, step, lambda run: lambda function: wrong(run(function)))
    assert main(["bisect", str(tmp_path / "model.py"), "--target", "ptx"]) == 1
    out = capsys.readouterr().out
    assert f"{step} is the first step that goes wrong" in out and says in out
    assert "to show it (of " in out


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_generator_s_passes_are_steps(arch, tmp_path, capsys):
    (tmp_path / "model.py").write_text(PRODUCT)
    assert main(["bisect", str(tmp_path / "model.py"), "--target", "ptx", "--arch", arch, "--json"]) == 0
    steps = [s for s in json.loads(capsys.readouterr().out)["steps"] if s["level"] == "ptx"]
    assert len(steps) >= 10 and {s["status"] for s in steps} == {"within", "unchanged"}
    changed = [s["step"] for s in steps if s["status"] == "within"]
    assert {"launch analysis", "accumulator fusion", "kernel selection", "layout assignment"} <= set(changed)


def test_the_page(tmp_path, monkeypatch, capsys):
    """docs/finding-a-wrong-pass.md shows what happens."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (session,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "model.py").write_text(program)
    command, _, shown = session.removeprefix("$ ").partition("\n")
    break_simplify(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command.split()[1:]) == 1
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


def test_nothing_is_broken(file, capsys):
    assert main(["bisect", file, "--target", "ptx"]) == 0
    out = capsys.readouterr().out
    assert "every step of model keeps its results within the bound" in out and "ptx text" in out


def test_as_data(file, tmp_path, monkeypatch, capsys):
    break_simplify(monkeypatch)
    assert main(["bisect", file, "--json", "-o", str(tmp_path / "out")]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["first"] == "simplify" and ["model.py:9" in line for line in told["lines"]] == [True]
    assert [s["status"] for s in told["steps"]][-2:] == ["unchanged", "outside"]
    assert np.load(tmp_path / "out" / "input0.npy").shape == (8, 4)
    assert '"ts.exp"' in (tmp_path / "out" / "before.mlir").read_text()
    assert '"ts.exp2"' in (tmp_path / "out" / "after.mlir").read_text()


def test_a_kernel(tmp_path, monkeypatch, capsys):
    """It begins at the Tile level and is not taken apart."""
    (tmp_path / "k.py").write_text(
        "import numpy as np\nimport tessera as ts\n\n"
        "@ts.example(lambda rng: (np.arange(1, 9, dtype=np.float32), np.zeros(8, np.float32)), grid=(2,))\n"
        "@ts.kernel\ndef k(x, y):\n    i = ts.tile.program_id(0) * 4\n    y[i : i + 4] = 3.0 / x[i : i + 4]\n"
    )
    break_emission(monkeypatch)
    assert main(["bisect", str(tmp_path / "k.py")]) == 1
    out = capsys.readouterr().out
    assert "llvm text is the first step that goes wrong" in out and "output 0 at [7]: 24, and it should be 0.375" in out


def test_a_folder_that_cannot_be(file, tmp_path, monkeypatch, capsys):
    break_simplify(monkeypatch)
    (tmp_path / "taken").write_text("")
    assert main(["bisect", file, "-o", str(tmp_path / "taken")]) == 2
    assert "FileError" in capsys.readouterr().err


def test_a_program_without_a_bound(tmp_path, capsys):
    (tmp_path / "m.py").write_text(
        "import numpy as np\nimport tessera as ts\n\n"
        "@ts.example(lambda rng: (np.eye(3, dtype=np.float32),))\n@ts.jit\ndef f(x):\n    return ts.linalg.inv(x)\n"
    )
    assert main(["bisect", str(tmp_path / "m.py")]) == 2
    text = capsys.readouterr().err
    assert re.search(r"m\.py:7(:12)?: UnsupportedOpError", text) and "bisect a part without this op" in text
