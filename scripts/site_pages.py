"""Site pages: what the documentation site shows beside docs/ (a hook of MkDocs; mkdocs.yml names it).

The start page is README.md, the changelog is CHANGELOG.md. The reference has one page for the names of `tessera` and
one for each layer, whose contents mkdocstrings takes from the docstrings. Pages and modules that a page names become
links.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tessera"
LAYERS = ("core", "ir", "ops", "lower", "interp", "frontend", "transforms", "codegen", "runtime", "stdlib", "tools")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {"index.md": read_page("README.md"), "changelog.md": read_page("CHANGELOG.md")}
    pages["reference/names.md"] = list_public_names()
    pages |= {f"reference/{layer}.md": list_modules(layer) for layer in LAYERS}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Link the pages and modules that a page names, outside its code blocks."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else link_names(part, page.file.src_uri) for part in parts)


def link_names(text: str, source: str) -> str:
    """A text with links: "docs/numerics.md" to the page, a module by name or by file to its entry in the reference."""

    def link_page(match: re.Match[str]) -> str:
        exists = (ROOT / "docs" / match[1]).is_file()
        return f"[`docs/{match[1]}`]({posixpath.relpath(match[1], posixpath.dirname(source))})" if exists else match[0]

    def link_module(match: re.Match[str]) -> str:
        module = match[1].removesuffix(".py").replace("/", ".")
        return f"[`{match[1]}`][{module}]" if is_module(module) else match[0]

    text = re.sub(r"(?<!\[)`docs/([\w/-]+\.md)`", link_page, text)
    return re.sub(r"(?<!\[)`(tessera[./][\w./]+)`", link_module, text)


def is_module(name: str) -> bool:
    """Whether the reference has an entry for a module: it is a file of a layer."""
    parts = name.split(".")
    return len(parts) > 2 and parts[1] in LAYERS and (ROOT / Path(*parts)).with_suffix(".py").is_file()


def read_page(name: str) -> str:
    """A page of the project's root."""
    return (ROOT / name).read_text(encoding="utf-8")


def list_public_names() -> str:
    """A table of the names of `tessera`: each with its module and the first line of its docstring."""
    import tessera

    rows = ["# Names of tessera", "", "| name | module | meaning |", "|---|---|---|"]
    for name in sorted(tessera.__all__, key=str.lower):
        value = getattr(tessera, name)
        doc = (inspect.getdoc(value) or "").partition("\n")[0].replace("|", "\\|")
        home = getattr(value, "__module__", None) or getattr(value, "__name__", "tessera")
        rows.append(f"| `ts.{name}` | `{home}` | {doc} |")
    return "\n".join(rows) + "\n"


def list_modules(layer: str) -> str:
    """The page of a layer: every public module of it, for mkdocstrings to fill."""
    parts = [f"# {layer}", ""]
    for file in sorted((PACKAGE / layer).rglob("*.py")):
        names = file.relative_to(ROOT).with_suffix("").parts
        if any(name.startswith("_") and name != "__init__" for name in names) or is_empty(file):
            continue
        parts.append(f"::: {'.'.join(names[:-1] if names[-1] == '__init__' else names)}\n")
    return "\n".join(parts)


def is_empty(file: Path) -> bool:
    """Whether a module is a package's docstring alone."""
    return file.name == "__init__.py" and file.read_text(encoding="utf-8").count("\n") <= 2
