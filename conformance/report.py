"""Reports of the suite: JSON, JUnit XML, and one HTML page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape

from conformance.case import Outcome

STYLE = """body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:2px 8px;text-align:left}
tr:nth-child(even){background:#f4f4f4}.pass{color:#060}.fail{color:#fff;background:#b00}.unsupported{color:#960}
pre{white-space:pre-wrap;margin:0}"""


def make_json(outcomes: Sequence[Outcome]) -> bytes:
    """Every outcome as an object."""
    return json.dumps([vars(o) for o in outcomes], indent=1).encode()


def make_junit(outcomes: Sequence[Outcome]) -> bytes:
    """The outcomes as test cases of JUnit."""
    suite = xml.Element("testsuite", name="tessera conformance", tests=str(len(outcomes)))
    for o in outcomes:
        element = xml.SubElement(suite, "testcase", name=o.case, classname=o.engine)
        if o.status == "fail":
            xml.SubElement(element, "failure", message=o.detail.splitlines()[0] if o.detail else "").text = o.detail
        if o.status == "unsupported":
            xml.SubElement(element, "skipped", message=o.detail.splitlines()[0] if o.detail else "")
    return xml.tostring(suite, encoding="utf-8", xml_declaration=True)


def make_html(outcomes: Sequence[Outcome]) -> bytes:
    """One page without other files: the counts of each engine, the failures, and a table of all cases."""
    engines = list(dict.fromkeys(o.engine for o in outcomes))
    rows: dict[str, dict[str, Outcome]] = {}
    for o in outcomes:
        rows.setdefault(o.case, {})[o.engine] = o
    parts = ["<!doctype html><meta charset=utf-8><title>Tessera conformance</title>", f"<style>{STYLE}</style>",
             "<h1>Tessera conformance</h1>", _list_counts(outcomes, engines), "<h2>Failures</h2>",
             *(_show_failure(o) for o in outcomes if o.status == "fail"), "<h2>Cases</h2><table><tr><th>case</th>",
             *(f"<th>{escape(e)}</th>" for e in engines), "</tr>"]  # fmt: skip
    for case, row in rows.items():
        parts.append(f"<tr><td>{escape(case)}</td>{''.join(_show_cell(row.get(e)) for e in engines)}</tr>")
    return "\n".join([*parts, "</table>"]).encode()


def _list_counts(outcomes: Sequence[Outcome], engines: Sequence[str]) -> str:
    lines = [
        "<table><tr><th>engine</th><th>pass</th><th>fail</th><th>unsupported</th><th>worst share of a bound</th></tr>"
    ]
    for engine in engines:
        own = [o for o in outcomes if o.engine == engine]
        counts = Counter(o.status for o in own)
        worst = max((o.share for o in own if o.status == "pass"), default=0.0)
        numbers = "".join(f"<td>{counts[s]}</td>" for s in ("pass", "fail", "unsupported"))
        lines.append(f"<tr><td>{escape(engine)}</td>{numbers}<td>{worst:.0%}</td></tr>")
    return "\n".join([*lines, "</table>"])


def _show_failure(o: Outcome) -> str:
    return f"<p><b>{escape(o.case)}</b> on {escape(o.engine)}</p><pre>{escape(o.detail)}</pre>"


def _show_cell(o: Outcome | None) -> str:
    if o is None:
        return "<td>–</td>"
    share = f" {o.share:.0%}" if o.status == "pass" and o.share else ""
    return f'<td class="{o.status}" title="{escape(o.detail[:300], quote=True)}">{o.status}{share}</td>'


FORMATS: dict[str, Callable[[Sequence[Outcome]], bytes]] = {
    ".json": make_json, ".xml": make_junit, ".html": make_html,
}  # fmt: skip
