"""Layering (design 7): a package imports only from the layers below it; local and type-checking imports count."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "tessera"
LAYERS = (
    *"core ir ops lower interp frontend transforms codegen runtime stdlib state nn optim".split(),
    *"torch onnx stablehlo cuda triton dist train llm pyflame".split(),
    *"compiler research deploy monitoring serving tools".split(),
)
# Public namespaces at the root, by the layer whose names they give. What is not here belongs above all layers.
NAMESPACES = {"errors": "core", "stable": "ops", "tree": "ir"}
# Circles of modules that import each other, local imports counted: each with its reason.
CIRCLES = {
    frozenset(("tessera.frontend.kernel.python_ast.calls", "tessera.frontend.kernel.python_ast.statements")): (
        "a call inlines a function's body, whose statements hold calls"
    ),
    frozenset(("tessera.codegen.grouped.control_flow", "tessera.codegen.grouped.coroutines")): (
        "a branch that waits becomes coroutines, whose bodies hold branches"
    ),
}

# Names that two fields give two things, and whose users know them by no other.
SHARED_CLASS_NAMES = {
    "Module": {"tessera.ir.core", "tessera.nn.module"},  # of MLIR, and of PyTorch and PyFlame
}


def name_module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_module(file): file for file in ROOT.rglob("*.py")}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk(node: ast.AST, typing: bool) -> Iterator[ast.AST]:
    """The statements below one, with those of `if TYPE_CHECKING:` only where asked for."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr) and (typing or not is_type_checking(child)):
            yield child
            yield from walk(child, typing)


class Source(NamedTuple):
    """What a module says: its imports, those that run, its public classes, and what it imports by name."""

    imports: dict[str, int]
    running_imports: dict[str, int]
    classes: list[str]
    late_imports: list[str]


@cache
def read_source(module: str) -> Source:
    """Parse a module once; its syntax tree is not kept."""
    tree = ast.parse(MODULES[module].read_text())
    classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    return Source(find_imports(module, tree, True), find_imports(module, tree, False), classes, find_late_imports(tree))


def imports(module: str, typing: bool = True) -> dict[str, int]:
    """The modules of the package that a module imports, each with a line."""
    source = read_source(module)
    return source.imports if typing else source.running_imports


def find_imports(module: str, tree: ast.Module, typing: bool) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in walk(tree, typing):
        if isinstance(node, ast.Import):
            found.update({a.name: node.lineno for a in node.names})
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{a.name}" for a in node.names]
            submodules = [name for name in inner if name in MODULES]
            if len(submodules) < len(inner):
                found[node.module] = node.lineno
            found.update(dict.fromkeys(submodules, node.lineno))
    return {name: line for name, line in found.items() if name in MODULES and name != module}


def layer_of(module: str) -> int:
    """The number of a module's layer; the root and what commands start are above all."""
    name = module.split(".")[1] if "." in module else ""
    name = NAMESPACES.get(name, name)
    return LAYERS.index(name) if name in LAYERS else len(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_downwards(layer):
    upward = [
        f"{module}:{line} imports {name}"
        for module in MODULES
        if layer_of(module) == LAYERS.index(layer)
        for name, line in imports(module).items()
        if layer_of(name) > LAYERS.index(layer)
    ]
    assert not upward


def test_every_package_is_a_layer_or_a_namespace():
    assert {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(LAYERS)


def test_generators_do_not_import_each_other():
    generators = [
        p.name for p in (ROOT / "codegen").iterdir() if p.is_dir() and p.name not in ("grouped", "__pycache__")
    ]
    assert sorted(generators) == ["csl", "llvm", "ptx"]
    for module in MODULES:
        own = next((g for g in generators if module.startswith(f"tessera.codegen.{g}")), None)
        others = [f"tessera.codegen.{g}" for g in generators if g != own]
        if own or module.startswith("tessera.codegen"):
            assert not [n for n in imports(module) if n.startswith(tuple(others))], module


def test_emulators_know_nothing_of_the_compiler():
    allowed = ("tessera.core.errors", "tessera.errors", "tessera.interp.target")
    for module in MODULES:
        if module.startswith("tessera.interp.target"):
            assert all(name.startswith(allowed) for name in imports(module)), module


def test_nothing_below_codegen_names_a_target():
    below = LAYERS[: LAYERS.index("interp")]
    for module in MODULES:
        if module.split(".")[1:2] in [[b] for b in below]:
            assert not [n for n in imports(module) if ".target." in n or n.startswith("tessera.codegen")], module


def circles() -> list[frozenset[str]]:
    """Strongly connected components of the imports that run (Tarjan 1972); a package and its modules are apart."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for name in imports(module, typing=False):
            if name not in index:
                visit(name)
                low[module] = min(low[module], low[name])
            elif name in stack:
                low[module] = min(low[module], index[name])
        if low[module] == index[module]:
            component = set()
            while module not in component:
                component.add(stack.pop())
            if len(component) > 1:
                found.append(frozenset(component))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    for module in MODULES:
        if module not in index:
            visit(module)
    sys.setrecursionlimit(limit)
    return found


def test_circles_are_stated():
    assert {c for c in circles() if "tessera" not in c} == set(CIRCLES)


# What a program of tensor ops and `ts.jit` alone does not need; each takes milliseconds of every start.
UNWANTED = (
    "tessera.codegen", "tessera.frontend.kernel", "tessera.interp.target", "tessera.ir.rewrite", "tessera.tools",
    "tessera.transforms", "json", "llvmlite", "logging", "rich", "tempfile",
)  # fmt: skip


def test_import_tessera_loads_little():
    program = "import numpy, sys; before = {*sys.modules}; import tessera; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "tessera.core.types" in loaded and not [m for m in loaded if m.startswith(UNWANTED)]


# Classes whose names the reference of PyFlame fixes; each wraps the class of the same name.
PYFLAME_CLASSES = (
    "Adam AdamW BCELoss BCEWithLogitsLoss CSLCodeGenerator CodeGenResult CosineAnnealingLR CrossEntropyLoss DType "
    "ExponentialLR LinearLR Module MultiStepLR NLLLoss Node OneCycleLR PolynomialLR RMSprop ReduceLROnPlateau SGD "
    "Sequential StepLR Tensor"
).split()


def is_pyflame_class(module: str, name: str) -> bool:
    return module.startswith("tessera.pyflame.") and name in PYFLAME_CLASSES


def test_class_names_are_unique():
    """One word, one meaning: a public class has a name of its own in the whole project."""
    homes: dict[str, set[str]] = {}
    for module in MODULES:
        for name in read_source(module).classes:
            if ".site." not in module and not is_pyflame_class(module, name):
                homes.setdefault(name, set()).add(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == SHARED_CLASS_NAMES


def find_late_imports(tree: ast.Module) -> list[str]:
    """The modules that a module imports by name."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    found = [(ast.unparse(n.func), n.args[0]) for n in calls if n.args and isinstance(n.args[0], ast.Constant)]
    return [a.value for name, a in found if name.endswith("import_module") and str(a.value).startswith("tessera")]


@pytest.mark.parametrize("layer", LAYERS)
def test_only_hooks_call_upwards(layer):
    """The root (`tessera.array_api`) is above all layers, and imported by name where NumPy's protocol asks for it."""
    for module in MODULES:
        if module.split(".")[1:2] == [layer]:
            late = read_source(module).late_imports
            assert not [n for n in late if LAYERS.index(layer) < layer_of(n) < len(LAYERS)], module


def test_hooks_name_functions_that_exist():
    from tessera.core import hooks

    found = [h for h in vars(hooks).values() if isinstance(h, hooks.Hook)]
    assert found and all(callable(h.function) for h in found)
