"""The inspector's page: one file, the same bytes each time, whose data and texts no name of a program can break."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from tessera.core.symbolic_dim import Dim
from tessera.ir.core import Attrs
from tessera.tools.cli.entry_points import find_entry_point, make_inputs, prepare_program
from tessera.tools.cli.main import main
from tessera.tools.inspector import make_page
from tessera.tools.inspector.page import write_json
from tessera.tools.inspector.sections import describe_schedule, list_pass_sections

MODEL = """
import numpy as np
import tessera as ts

@ts.example(lambda rng: (rng.standard_normal((4, 8), np.float32), rng.standard_normal((8, 2), np.float32)))
@ts.jit
def model(x, w):
    hidden = ts.tanh(x @ w)
    return ts.softmax(hidden * 2.0)
"""


class Elements(HTMLParser):
    """The start tags of a page with their attributes, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def inspect(tmp_path, source=MODEL, target="llvm", **options):
    file = tmp_path / "prog.py"
    file.write_text(source)
    entry = find_entry_point(str(file), None)
    return make_page(prepare_program(entry, make_inputs(entry, 0), target, True), target, {}, **options)


def texts(data, section):
    return [data["texts"][t] for t in data["sections"][section]["lines"]]


def test_the_page_loads_nothing_and_its_policy_admits_its_own_script(tmp_path):
    page = Elements(inspect(tmp_path).html)
    assert not [a for _, a in page.tags if {"src", "href"} & set(a)]
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy
    assert "innerHTML" not in page.scripts[1] and "http" not in page.scripts[1].replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_the_same_program_gives_the_same_bytes(tmp_path):
    assert inspect(tmp_path).html == inspect(tmp_path).html


def test_levels_passes_and_values_are_those_of_the_program(tmp_path):
    data = inspect(tmp_path).data
    levels = [data["sections"][n]["level"] for n in data["levels"]]
    assert levels == ["graph", "schedule", "tile", "target"] and data["passes"][0]["diff"][0][0] == "="
    dot = next(v for v in data["values"] if v["section"] == 0 and '"ts.tanh"' in texts(data, 0)[v["line"]])
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 8), np.float32), rng.standard_normal((8, 2), np.float32)
    want = np.tanh(x.astype(np.float64) @ w)
    assert dot["high"] == pytest.approx(want.max(), abs=1e-6) and dot["low"] == pytest.approx(want.min(), abs=1e-6)
    assert dot["mean"] == pytest.approx(want.mean(), abs=1e-6) and 0 < dot["bound"] < 1e-5
    assert dot["first"] == pytest.approx(want.reshape(-1)[:8], abs=1e-6)


def test_every_target_links_its_lines_to_the_source(tmp_path):
    for target in ("llvm", "ptx", "csl:2x2"):
        data = inspect(tmp_path, target=target, values=False).data
        for number in data["levels"]:
            linked = {data["places"][p][1] for p in data["sections"][number]["places"] if p >= 0}
            name = data["sections"][number]["name"]
            if name in ("graph", "tile", "kernels.ll", "kernels.ptx", "pe_program.csl"):
                assert {8, 9} <= linked, name
        source = data["files"][0]
        assert data["texts"][source["lines"][7]] == "    hidden = ts.tanh(x @ w)"


HOSTILE = "</script><script>document.title='owned'</script><!--<img src=x onerror=alert(1)>&lt;\u2028"


def test_hostile_names_stay_text(tmp_path):
    source = MODEL.replace("    return", f"    note = {ascii(HOSTILE)}  # {HOSTILE[:-1]}\n    return")
    page = inspect(tmp_path, source)
    found = Elements(page.html)
    assert len(found.scripts) == 2 and not [t for t, _ in found.tags if t == "img"]
    assert json.loads(found.scripts[0]) == json.loads(json.dumps(page.data))
    assert any(HOSTILE[:-1] in text for text in page.data["texts"])


def test_json_has_no_character_that_ends_a_script():
    text = write_json({"a": HOSTILE, "b": ["<!--", "]]>", "&"]})
    assert not set("<>&") & set(text) and text.isascii() and json.loads(text)["a"] == HOSTILE


def test_the_title_is_escaped(tmp_path):
    from tessera.tools.inspector.page import write_html

    found = Elements(write_html("</title><b>", {"{{script}}": "{{data}}"}))
    assert not [t for t, _ in found.tags if t == "b"] and json.loads(found.scripts[0]) == {"{{script}}": "{{data}}"}


def test_long_texts_are_cut_and_the_page_says_so(tmp_path, capsys):
    page = inspect(tmp_path, most_lines=5)
    for section in page.data["sections"]:
        assert len(section["lines"]) <= 5
    cut = next(s for s in page.data["sections"] if s["name"] == "kernels.ll")
    assert cut["omitted"] > 50 and any("kernels.ll: the first 5 of" in n for n in page.notes)
    file = tmp_path / "prog.py"
    assert main(["inspect", str(file), "--html", str(tmp_path / "o.html"), "--max-lines", "5"]) == 0
    assert "kernels.ll: the first 5 of" in capsys.readouterr().err


def test_the_origin_of_a_nan_is_the_op_that_made_it(tmp_path):
    source = MODEL.replace("ts.tanh(x @ w)", "ts.log(x @ w)").replace("hidden * 2.0", "hidden + 1.0")
    data = inspect(tmp_path, source).data
    bad = [v for v in data["values"] if v["nans"] and data["sections"][v["section"]]["level"] == "graph"]
    assert bad and '"ts.log"' in texts(data, 0)[bad[0]["line"]]
    assert bad[0]["origin"] == "ts.log makes it of finite operands"
    step = bad[-1]
    while isinstance(step["origin"], int):
        step = data["values"][step["origin"]]
    assert step is bad[0]


def test_a_nan_of_an_input_came_in_with_it(tmp_path):
    source = MODEL.replace("(rng.standard_normal((4, 8), np.float32)", "(np.full((4, 8), np.nan, np.float32)")
    data = inspect(tmp_path, source).data
    dot = next(v for v in data["values"] if v["nans"] and '"ts.dot"' in texts(data, v["section"])[v["line"]])
    assert data["values"][dot["origin"]]["origin"] == "it came in with x"


def test_without_values_the_program_does_not_run(tmp_path):
    data = inspect(tmp_path, values=False).data
    assert not data["values"] and not data["recorded"] and data["gpu"] is None


@pytest.mark.parametrize("option", ["--plain", "--json", "--pass-by-pass", "--level=tile"])
def test_options_of_the_text_are_refused_with_html(tmp_path, option, capsys):
    (tmp_path / "prog.py").write_text(MODEL)
    assert main(["inspect", str(tmp_path / "prog.py"), "--html", str(tmp_path / "o.html"), option]) == 2
    assert option.partition("=")[0] in capsys.readouterr().err and not (tmp_path / "o.html").exists()


def test_a_folder_that_is_missing_is_refused_before_the_run(tmp_path, capsys):
    (tmp_path / "prog.py").write_text(MODEL)
    assert main(["inspect", str(tmp_path / "prog.py"), "--html", str(tmp_path / "no" / "o.html")]) == 2
    assert re.search("there is no folder", capsys.readouterr().err)


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_a_kernel_has_its_schedule_in_lines_of_its_own(tmp_path, target):
    k = 512 if target == "ptx" else 4096  # a longer product of few blocks is a launch of its own there
    (tmp_path / "m.py").write_text(MODEL.replace("(4, 8)", f"(64, {k})").replace("(8, 2)", f"({k}, 32)"))
    entry = find_entry_point(str(tmp_path / "m.py"))
    program = prepare_program(entry, make_inputs(entry, 0, []), target, False)
    sections = list_pass_sections(program, target, {})
    scheduled = next(s for s in sections if s.name == "schedule")
    lines = [line for line in scheduled.lines if line.text.lstrip().startswith("// ")]
    heads = [line.text.strip() for line in lines if " operations on " in line.text]
    assert [h.split(":")[0] for h in heads] == ["// contract_tanh_mul", "// reduce_sub_exp_div"]
    assert f"{2 * 64 * k * 32 + 2 * 64 * 32:,} operations on {4 * (64 * k + k * 32 + 64 * 32):,} bytes" in heads[0]
    launches = [n for n in program.lower_for_target(target)["tile"].main.body.walk() if n.op.name == "host.launch"]
    found = [int(re.search(r"; ([\d,]+) programs?", h)[1].replace(",", "")) for h in heads]
    assert found == [np.prod(n.attrs["grid"]) for n in launches]
    assert {line.location.line for line in lines} <= {9, 10} and all(line.owner is None for line in lines)
    dims = [line.text.strip() for line in lines if " reduce" in line.text and " = " in line.text]
    kernel = next(n for n in scheduled.module.main.body.walk() if n.op.name == "schedule.kernel")
    step = kernel.attrs["schedule"]["tile"][2]
    assert dims == [f"//   r0 = {k} reduce, in {-(-k // step):,} steps of a loop of {step}"]


def test_the_schedule_of_an_open_size_names_it(tmp_path):
    (tmp_path / "m.py").write_text(MODEL)
    entry = find_entry_point(str(tmp_path / "m.py"))
    program = prepare_program(entry, make_inputs(entry, 0, []), "llvm", False)
    kernel = next(
        n for s in list_pass_sections(program, "llvm", {}) if s.level == "schedule"
        for n in s.module.main.body.walk() if n.op.name == "schedule.kernel"
    )  # fmt: skip
    dims = (("i0", Dim.of("n"), "parallel"), ("i1", 2, "parallel"), ("r0", 8, "reduce"))
    changed = replace(kernel, attrs=Attrs({**kernel.attrs, "dims": dims, "schedule": {"tile": (8, 2, 8), "loop": ()}}))
    head, first, second, last = describe_schedule(changed)
    assert (
        "program" not in head and first == "  i0 = n parallel, in tiles of 8" and second == "  i1 = 2 parallel, whole"
    )
    assert last == "  r0 = 8 reduce, whole"
    unscheduled = Attrs({k: v for k, v in kernel.attrs.items() if k != "schedule"})
    assert describe_schedule(replace(kernel, attrs=unscheduled))[0].endswith("; no tiles yet")
