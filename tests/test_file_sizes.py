"""File sizes: a module is a subject of at most 600 lines. What is longer is stated here with its reason."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 600
# Longer modules, each with its most lines and the reason; a new one is split by subject instead.
LONG = {
    "tessera/codegen/ptx/passes/layout_inference.py": (680, "layouts of values and of loads, inferred in turns"),
    "tessera/codegen/ptx/runtime/gpu_program.py": (640, "a program on a GPU: its launches, its graph and its errors"),
    "tessera/core/symbolic_dim.py": (680, "polynomials and the proofs about them, which call each other"),
    "tessera/frontend/jit/tracing.py": (746, "the state of a traced function, its calls and its programs: one class"),
    "tessera/frontend/kernel/kernel_function.py": (640, "a kernel, its launches and its decorators"),
    "tessera/lower/graph_to_schedule/fusion.py": (
        680,
        "a kernel under construction, and each rule of what it takes in",
    ),
    "tessera/lower/graph_to_schedule/kernel_body.py": (705, "a rule for each op, and what its indices say of the dims"),
    "tessera/lower/graph_to_schedule/tile_sizes.py": (720, "a search for tiles, and its rules for each kind of kernel"),
    "tessera/nn/module.py": (680, "a module: its parts, its state, and its pytree"),
    "tessera/ops/tensor/shape.py": (660, "each op with all its rules"),
    "tessera/stablehlo/parser.py": (660, "one recursive-descent parser"),
}


def count_lines(file: Path) -> int:
    return file.read_text(encoding="utf-8").count("\n")


def test_modules_are_short():
    sizes = {str(file.relative_to(ROOT)): count_lines(file) for file in (ROOT / "tessera").rglob("*.py")}
    long = {name: size for name, size in sizes.items() if size > LONG.get(name, (MAX_LINES, ""))[0]}
    assert len(sizes) > 100 and not long


def test_stated_modules_are_long():
    """A module that is short again loses its line above."""
    assert not [name for name in LONG if count_lines(ROOT / name) <= MAX_LINES]
