"""Site pages: what the documentation site shows beside docs/ (a hook of MkDocs; mkdocs.yml names it).

The start page is README.md, the changelog is CHANGELOG.md. The reference has one page for the names of `tessera` and
one for each layer, whose contents mkdocstrings takes from the docstrings.
"""

from __future__ import annotations

import inspect
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
