"""The inspector's page in headless Chromium: hover, search, keys, differences, timelines, and a hostile program."""

import shutil

import pytest

from tessera.tools.cli.entry_points import find_entry_point, make_inputs, prepare_program
from tessera.tools.inspector import make_page

webdriver = pytest.importorskip("selenium.webdriver", reason="the browser is driven by selenium (pip install selenium)")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no chromium and chromedriver on PATH (Debian: apt install chromium chromium-driver)",
)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --window-size=1600,950""".split()
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
MODEL = f"""
import numpy as np
import tessera as ts

@ts.example(lambda rng: (rng.standard_normal((8, 16), np.float32), rng.standard_normal((16, 4), np.float32)))
@ts.jit
def model(x, w):
    hidden = ts.log(x @ w)  # {HOSTILE}
    note = {HOSTILE!r}
    return ts.softmax(hidden + 1.0) * 2.0
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser with a new profile."""
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of one program for two targets, by the name of the target."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "prog.py").write_text(MODEL)
    entry = find_entry_point(str(folder / "prog.py"), None)
    for target in ("ptx", "csl:2x2"):
        page = make_page(prepare_program(entry, make_inputs(entry, 0), target, True), target, {})
        (folder / f"{target[:3]}.html").write_text(page.html)
    return folder


@pytest.fixture
def page(browser, pages):
    """A browser that shows the page for ptx; nothing may have failed in it."""
    browser.get((pages / "ptx.html").as_uri())
    yield Shown(browser)
    assert not [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]


class Shown:
    """A page that is shown, with what a test asks of it."""

    def __init__(self, browser):
        self.browser, self.run = browser, browser.execute_script

    def find(self, selector):
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector):
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def line(self, pane, text):
        """The first row of a pane with a text."""
        return next(e for e in self.find(f'[data-pane="{pane}"] .row') if text in e.text)

    def point(self, row, text=None):
        """Move the pointer over a row, at a text in it."""
        place = self.run(
            """const [row, text] = arguments, range = new Range();
            const walk = document.createTreeWalker(row, NodeFilter.SHOW_TEXT);
            const all = row.textContent, at = text ? all.indexOf(text) : 8; let seen = 0, node;
            while ((node = walk.nextNode())) { if (seen + node.length > at) break; seen += node.length; }
            range.setStart(node, at - seen); range.setEnd(node, at - seen + 1);
            const b = range.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]""", row, text,
        )  # fmt: skip
        webdriver.ActionChains(self.browser).move_by_offset(0, 0).perform()
        pointer = webdriver.common.actions.action_builder.ActionBuilder(self.browser)
        pointer.pointer_action.move_to_location(*map(int, place))
        pointer.perform()

    def press(self, *keys):
        webdriver.ActionChains(self.browser).send_keys(*keys).perform()


def test_nothing_is_loaded_and_nothing_of_the_program_is_run(page):
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.browser.title == "model · tessera inspect"
    assert not page.find("img") and len(page.find("script")) == 2
    assert any(HOSTILE in text for text in page.texts('[data-pane="source"] .row'))


def test_pointing_at_an_expression_marks_its_lines_at_every_level(page):
    page.point(page.line("source", "hidden = ts.log"), "x @ w")
    assert any('"ts.dot"' in t for t in page.texts('[data-pane="level0"] .row.link'))
    assert not any('"ts.log"' in t for t in page.texts('[data-pane="level0"] .row.link'))
    assert any('"ts.log"' in t for t in page.texts('[data-pane="level0"] .row.same'))
    assert all(page.find(f'[data-pane="{pane}"] .rail i') for pane in ("level1", "level2", "target"))
    wide = page.run("return document.querySelector('[data-pane=source] .under').style.width")
    assert wide == "5ch"  # "x @ w"
    page.line("source", "hidden = ts.log").click()
    assert any(".loc" in t for t in page.texts('[data-pane="target"] .row.pin'))  # it scrolled there


def test_pointing_at_a_value_marks_its_definition_and_uses(page):
    page.point(page.line("level0", '"ts.log"'), "%2")
    lines = page.run("return [...document.querySelectorAll('.use')].map((e) => e.closest('.row').dataset.line)")
    assert page.texts(".use") == ["%2"] * len(lines) and len(set(lines)) == 2


def test_a_kept_line_shows_its_values_and_the_origin_of_its_nan(page):
    page.line("level0", '"ts.softmax"').click()
    rows = page.texts("footer tr[data-value]")
    assert any("graph" in r and "8x4xf32" in r for r in rows)
    assert "ts.log makes it of finite operands" in page.texts("footer .chain")[0]
    page.find("footer .chain button")[-1].click()
    assert '"ts.log"' in page.texts('[data-pane="level0"] .row.pin')[0]
    page.press("\ue00c")
    assert not page.find(".row.pin")


def test_search_counts_marks_and_steps(page):
    page.press("/", "TS.LOG")
    assert page.texts("#hits")[0].startswith("1 / ") and page.texts(".row.hit mark") == ["ts.log"]
    where = (
        "const hit = document.querySelector('.row.hit'); return hit.closest('.pane').dataset.pane + hit.dataset.line"
    )
    first = page.run(where)
    page.press("\ue007")
    assert page.texts("#hits")[0].startswith("2 / ")
    assert page.run(where) != first
    page.press("\ue00c")
    assert page.texts("#hits") == [""] and not page.find("mark")
    page.press("/", "nowhere at all")
    assert page.texts("#hits") == ["none"]


def test_keys_move_the_line_and_the_pane_and_change_the_theme(page):
    page.press("l", "j", "j", "j")
    assert page.run("return document.querySelector('.pane.active').dataset.pane") == "level0"
    assert page.run("return document.querySelector('.row.cursor').dataset.line") == "3"
    before = page.run("return document.documentElement.dataset.theme")
    page.press("t")
    assert {before, page.run("return document.documentElement.dataset.theme")} == {"light", "dark"}
    page.press("2")
    assert "closed" in page.find('[data-pane="level0"]')[0].get_attribute("class")
    page.press("2", "?")
    assert page.run("return document.getElementById('keys').open")
    page.press("?", "o")
    assert "holds NaN" in page.run("return document.querySelector('.pane.active .row.cursor .dot').title")


def test_passes_show_their_difference(page):
    page.press("]")
    page.press("]")
    names = page.texts(".list button span:first-child")
    assert names[0] == "trace" and "expand" in names
    page.find(f'.list button[data-pass="{names.index("expand")}"]')[0].click()
    added, removed = (
        page.texts('.list [aria-current="true"] .ch b')[0],
        page.texts('.list [aria-current="true"] .ch i')[0],
    )
    assert any('"ts.softmax"' in t for t in page.texts(".row.del"))
    assert [f"+{len(page.find('.row.add'))}", f"−{len(page.find('.row.del'))}"] == [added, removed]
    page.press("]")
    assert page.run("return document.querySelector('.list [aria-current=true]').dataset.pass") == str(
        names.index("expand") + 1
    )


def test_folded_lines_open(page):
    page.press("v")
    for number in range(len(page.find(".list button"))):
        page.find(".list button")[number].click()
        if folds := page.find(".row.fold"):
            count = len(page.find('[data-pane="diff"] .row'))
            folds[0].click()
            assert len(page.find('[data-pane="diff"] .row')) > count
            return
    pytest.fail("no pass has equal lines")


def test_the_gpu_view_draws_each_kernel(page):
    page.find('[data-view="gpu"]')[0].click()
    assert page.find("[data-kernel]") and page.find(".occ .barx.now")
    painted = """const c = document.querySelector('.time canvas');
        return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"""
    assert page.run(painted) > 20


def test_the_mesh_view_goes_through_time(page, pages):
    page.browser.get((pages / "csl.html").as_uri())
    page.find('[data-view="mesh"]')[0].click()
    start = page.texts(".play output")[0]
    page.press("\ue014", "\ue014")
    assert page.texts(".play output")[0] != start and len(page.find(".charts svg")) == 2
    assert page.run("return mesh.frame") == 2


def test_a_long_text_has_few_rows_in_the_document(page):
    page.run(
        """const pane = state.panes[1];
        pane.fill(Array.from({ length: 20000 }, (_, i) => ({ text: '%' + i, place: -1, scope: 0 })), 'cut')"""
    )
    assert len(page.find('[data-pane="level0"] .row')) < 120
    page.press("l", "G")
    assert page.run("return document.querySelector('.row.cursor').dataset.line") == "19999"
    assert len(page.find('[data-pane="level0"] .row')) < 120 and page.texts(".row.more") == ["cut"]
