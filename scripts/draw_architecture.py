"""Architecture picture: draws docs/architecture.svg from the import graph of the package.

    python scripts/draw_architecture.py [OUTPUT]

A row is a layer, a box is a package, and the number in a box is its count of modules. An arrow goes from the package
that imports to the package that it imports from. Its number counts the imports: one for each `import` statement of a
module, with imports inside functions and under TYPE_CHECKING included. Every package imports from the three lowest
layers, so the boxes there state how often they are imported and have no arrows. The picture shows the strongest arrows
of each other box. An import from a later layer is always shown, in red. The same source gives the same bytes.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tessera"
# The layers from the bottom of the import order to its top. A package imports only from those that come before it.
LAYERS = {
    "core": "errors, types, shapes, effects, devices, files",
    "ir": "values, functions, levels, text form, verifier, numerics",
    "ops": "operations with their rules; dialects; the array API",
    "lower": "Graph to Schedule to Tile; meshes; passes",
    "interp": "interpreters, sanitiser, emulators of target text",
    "frontend": "tracing of functions, kernels from Python source",
    "transforms": "derivatives, batching, control flow, policies",
    "codegen": "generators: LLVM IR, PTX, CSL",
    "runtime": "programs, artifacts, storage, launches, tuning",
    "stdlib": "routines in the kernel language",
    "state": "state objects: caches, ring buffers",
    "nn": "modules, layers, losses, state dicts",
    "optim": "optimizers and schedules as functions",
    "torch": "PyTorch: op table, import, compile backend",
    "onnx": "ONNX models: reading, operators, export",
    "stablehlo": "StableHLO: parser, op table, export",
    "cuda": "the emulated GPU for programs of others",
    "triton": "Triton programs on the emulated GPU",
    "dist": "meshes, collectives, SPMD functions",
    "train": "training loops, data, checkpoints",
    "llm": "language models: weights, generation",
    "pyflame": "lazy tensors; CSL from lazy graphs",
    "deploy": "optimised models, standalone programs",
    "tools": "commands, debugger, bisection, checker",
}
FOUNDATION = ("core", "ir", "ops")  # every package imports from these
ARROWS_PER_BOX = 3
WIDTH, MARGIN, LABEL, ROW, BOX_HEIGHT, GAP = 1400, 24, 300, 104, 44, 18

Place = tuple[float, float, float]  # the left edge, top edge and width of a box
Edge = tuple[str, str]
STYLE = """
    text { font: 14px "Helvetica Neue", Arial, sans-serif; fill: #1f2933; }
    .layer { font-weight: bold; font-size: 16px; } .note, .count { font-size: 11px; fill: #52606d; }
    .weight { font-size: 11px; fill: #334e68; } .halo { font-size: 11px; stroke: #ffffff; stroke-width: 4px; }
    .row { fill: #f5f7fa; } .odd { fill: #eaeef3; } .box { fill: #ffffff; stroke: #486581; stroke-width: 1.3; }
    .arrow { fill: none; stroke: #829ab1; opacity: 0.75; }
    .upward { stroke: #c0392b; stroke-dasharray: 6 4; opacity: 1; }
"""


def list_modules() -> dict[str, Path]:
    """Each module of the package by its dotted name."""
    names = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def find_box(module: str, packages: set[str]) -> str:
    """The box of a module: its package of two parts ("lower.mesh"), or its layer ("core")."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if ".".join(["tessera", *parts[:2]]) in packages else parts[0] if parts else ""


def list_imports(file: Path) -> list[str]:
    """The modules of the package that a file imports, once for each statement."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
    return [name for name in found if name.split(".")[0] == "tessera"]


def count_imports() -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """The modules of each box, and the imports between each two boxes of different layers."""
    modules = list_modules()
    packages = {name for name, file in modules.items() if file.name == "__init__.py" and name.count(".") <= 2}
    sizes: Counter[str] = Counter()
    edges: Counter[tuple[str, str]] = Counter()
    for name, file in modules.items():
        box = find_box(name, packages)
        if box.split(".")[0] not in LAYERS:
            continue
        sizes[box] += 1
        for imported in list_imports(file):
            other = find_box(imported, packages)
            if other.split(".")[0] in LAYERS and other.split(".")[0] != box.split(".")[0]:
                edges[box, other] += 1
    used = {box for edge in edges for box in edge}
    return Counter({box: n for box, n in sizes.items() if n > 1 or box in used}), edges


def is_upward(source: str, target: str) -> bool:
    """Whether an import goes against the order of layers."""
    order = list(LAYERS)
    return order.index(target.split(".")[0]) > order.index(source.split(".")[0])


def choose_arrows(edges: Counter[Edge]) -> list[Edge]:
    """The strongest arrows of each box to layers above the foundation, and every upward one."""
    chosen = {edge for edge in edges if is_upward(*edge)}
    for source in {s for s, _ in edges}:
        own = [e for e in edges if e[0] == source and e[1].split(".")[0] not in FOUNDATION]
        chosen.update(sorted(own, key=lambda e: (-edges[e], e))[:ARROWS_PER_BOX])
    return sorted(chosen)


def place_boxes(sizes: Counter[str]) -> dict[str, Place]:
    """The place of each box; the top layer is the first row."""
    places = {}
    for row, layer in enumerate(reversed(LAYERS)):
        boxes = sorted(box for box in sizes if box.split(".")[0] == layer)
        space = WIDTH - LABEL - MARGIN
        width = min((space - GAP * (len(boxes) - 1)) / len(boxes), 190)
        left = LABEL + (space - width * len(boxes) - GAP * (len(boxes) - 1)) / 2
        for column, box in enumerate(boxes):
            places[box] = (left + column * (width + GAP), MARGIN + row * ROW + (ROW - BOX_HEIGHT) / 2, width)
    return places


def place_ends(arrows: list[Edge], places: dict[str, Place], end: int) -> dict[Edge, float]:
    """The horizontal position of one end of each arrow: spread over its box, in the order of the other ends."""
    found = {}
    for box in {arrow[end] for arrow in arrows}:
        own = sorted((a for a in arrows if a[end] == box), key=lambda a: (places[a[1 - end]][0], a))
        left, _, width = places[box]
        for number, arrow in enumerate(own, 1):
            found[arrow] = left + width * number / (len(own) + 1)
    return found


def draw_arrow(x0: float, y0: float, x1: float, y1: float, weight: int, upward: bool) -> str:
    """A curve between two points, with its weight before its head."""
    bend = (y1 - y0) * 0.45
    near = y1 - 16 if y1 > y0 else y1 + 24
    path = f"M{x0:.1f} {y0:.1f} C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"
    kind = "arrow upward" if upward else "arrow"
    where = f'x="{x1 + 0.02 * (x0 - x1):.1f}" y="{near:.1f}" text-anchor="middle"'
    return (
        f'  <path class="{kind}" d="{path}" stroke-width="{1 + min(weight, 60) / 15:.2f}" marker-end="url(#head)"/>\n'
        f'  <text class="halo" {where}>{weight}</text><text class="weight" {where}>{weight}</text>'
    )


def draw_arrows(edges: Counter[Edge], places: dict[str, Place]) -> list[str]:
    """The chosen arrows."""
    arrows = choose_arrows(edges)
    starts, ends = place_ends(arrows, places, 0), place_ends(arrows, places, 1)
    drawn = []
    for arrow in arrows:
        source, target = (places[box] for box in arrow)
        down = target[1] > source[1]
        y0, y1 = source[1] + (BOX_HEIGHT if down else 0), target[1] + (0 if down else BOX_HEIGHT)
        drawn.append(draw_arrow(starts[arrow], y0, ends[arrow], y1, edges[arrow], is_upward(*arrow)))
    return drawn


def draw_layer(row: int, layer: str) -> str:
    """The band of a layer with its name and its contents."""
    top = MARGIN + row * ROW
    kind = "row odd" if row % 2 else "row"
    return (
        f'  <rect class="{kind}" x="0" y="{top}" width="{WIDTH}" height="{ROW}"/>\n'
        f'  <text class="layer" x="{MARGIN}" y="{top + ROW / 2 - 4:.0f}">{layer}</text>\n'
        f'  <text class="note" x="{MARGIN}" y="{top + ROW / 2 + 14:.0f}">{escape(LAYERS[layer])}</text>'
    )


def draw_box(box: str, place: Place, note: str) -> str:
    """A package with a note."""
    left, top, width = place
    middle, name = left + width / 2, box.partition(".")[2] or box
    return (
        f'  <rect class="box" data-package="{box}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{BOX_HEIGHT}" rx="6"/>\n'
        f'  <text x="{middle:.1f}" y="{top + 19:.1f}" text-anchor="middle">{escape(name)}</text>\n'
        f'  <text class="count" x="{middle:.1f}" y="{top + 35:.1f}" text-anchor="middle">{note}</text>'
    )


def describe_box(box: str, sizes: Counter[str], edges: Counter[Edge]) -> str:
    """The number of modules and, in the foundation, of imports from other layers."""
    count = f"{sizes[box]} module{'s' * (sizes[box] != 1)}"
    used = sum(weight for (_, target), weight in edges.items() if target == box)
    return f"{count}, imported {used} time{'s' * (used != 1)}" if box.split(".")[0] in FOUNDATION else count


def draw() -> str:
    """The whole picture as SVG text."""
    sizes, edges = count_imports()
    places = place_boxes(sizes)
    height = 2 * MARGIN + ROW * len(LAYERS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "  <title>The layers of Tessera, its packages, and the imports between them</title>",
        f"  <style>{STYLE}  </style>",
        '  <defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#627d98"/></marker></defs>',
        f'  <rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *(draw_layer(row, layer) for row, layer in enumerate(reversed(LAYERS))),
        *draw_arrows(edges, places),
        *(draw_box(box, places[box], describe_box(box, sizes, edges)) for box in sorted(places)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "architecture.svg"
    output.write_text(draw(), encoding="utf-8")
