"""Options and results of compiling a graph to a folder of CSL."""

import json

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.csl import CodeGenOptions, CSLCodeGenerator, compile_to_csl
from tessera.codegen.csl.text.program_files import map_source_lines


def graph(rows=8):
    x = np.ones((rows, rows), np.float32)
    return ts.jit(lambda x: ts.relu(x @ x)).trace(x).function


def test_files_are_written(tmp_path):
    result = compile_to_csl(graph(), CodeGenOptions(output_dir=str(tmp_path / "out"), fabric_width=2, fabric_height=1))
    assert result.success and not result.error_message
    assert {"layout.csl", "pe_program.csl", "run.py"} <= {f.name for f in (tmp_path / "out").iterdir()}
    assert "@set_rectangle(2, 1);" in result.sources["layout.csl"]


def test_the_smallest_grid_that_holds_the_program_is_selected(tmp_path):
    result = compile_to_csl(graph(120), CodeGenOptions(output_dir=str(tmp_path / "out")))
    assert "@set_rectangle(2, 2);" not in result.sources["layout.csl"] and result.success


WRONG = [
    ({"target": "wse9"}, "no architecture wse9"),
    ({"fabric_width": 1, "fabric_height": 1}, "KB of arrays needed, 40 KB available"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_errors_become_messages(tmp_path, change, message):
    options = CodeGenOptions(output_dir=str(tmp_path / "out"), **change)
    result = CSLCodeGenerator().generate(graph(120), options)
    assert not result.success and message in result.error_message and not (tmp_path / "out").exists()


def test_comments_are_optional(tmp_path):
    result = compile_to_csl(graph(), CodeGenOptions(output_dir=str(tmp_path / "out"), emit_comments=False))
    assert "//" not in result.sources["pe_program.csl"]


def generated(tmp_path, **options):
    made = compile_to_csl(
        graph(), CodeGenOptions(output_dir=str(tmp_path / "out"), fabric_width=1, fabric_height=1, **options)
    )
    assert made.success, made.error_message
    return made


def test_all_files_are_listed(tmp_path):
    result = generated(tmp_path)
    assert sorted(result.generated_files) == sorted(str(f) for f in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("comments", [True, False])
def test_debug_info_names_the_source_of_lines(tmp_path, comments):
    sources = generated(tmp_path, generate_debug_info=True, emit_comments=comments).sources
    lines = sources["pe_program.csl"].split("\n")
    places = {lines[int(n) - 1].strip(): place for n, place in json.loads(sources["lines.json"]).items()}
    assert "test_csl_compile.py" in places["sys_mod.unblock_cmd_stream();"]
    assert any("@fadds" in line for line in places) and "mesh.read" in sources["mesh.tess"]


def test_unoptimized_text_is_not_fused(tmp_path):
    fast, slow = (generated(tmp_path, optimize=o).sources["pe_program.csl"] for o in (True, False))
    assert "@fmacs" in slow and "@fmacs" not in fast


def test_commands_contain_the_address_of_a_machine(tmp_path):
    sources = generated(tmp_path, runtime_address="10.0.0.1:9000", target="wse3").sources
    assert "cs_python run.py --name out --cmaddr 10.0.0.1:9000" in sources["commands_wse3.sh"]


def test_lines_of_tasks_have_the_source_above_them():
    """Only statements inside of a task or of the program have one; without comments lines are numbered anew."""
    text = "// a.py:1\nvar x: f32;\nfn compute() void {\n  // a.py:7\n  x = 1.0;\n  x = 2.0;\n}\nvar y: f32;"
    assert map_source_lines(text, comments=True) == {str(n): ("a.py:1" if n == 3 else "a.py:7") for n in (3, 4, 5, 6)}
    assert map_source_lines(text, comments=False) == {"2": "a.py:1", "3": "a.py:7", "4": "a.py:7"}
