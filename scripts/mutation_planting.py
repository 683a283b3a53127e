"""Planting a mutant in a process that has imported the package: its functions get the changed code.

That is the same as a new import unless the changed code ran before: then all modules are imported anew.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from mutation_checks import GROUPS, ROOT, Checks, find_engines, list_cases
from mutation_coverage import ChangedFiles

PACKAGES = ("tessera", "conformance")


class LoadedFunctions:
    """The functions of the package that exist in this process, by file."""

    def __init__(self) -> None:
        self.files: dict[str, list[FunctionType]] = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is FunctionType and "/tessera/" in each.__code__.co_filename:
                self.files[each.__code__.co_filename].append(each)

    def plant(self, path: str, tree: ast.Module, ran: bool) -> None:
        """Change a file in this process; `ran` says that the changed code ran since the modules were imported."""
        loaded = [m for n, m in sys.modules.items() if n.partition(".")[0] == PACKAGES[0]]
        if not all(str(m.__file__).startswith(str(ROOT)) for m in loaded):
            raise ImportError("this process has imported another copy of the package")
        code = compile(tree, path, "exec", dont_inherit=True)
        ChangedFiles({path: code}).install()
        known = path in {m.__file__ for m in loaded}
        if known and (ran or not self._replace(path, code)):
            for name in [n for n in sys.modules if n.partition(".")[0] in PACKAGES]:
                del sys.modules[name]
            list_cases.cache_clear()
            find_engines.cache_clear()

    def _replace(self, path: str, code: CodeType) -> bool:
        """Give functions their changed code; False if the change is not inside of functions alone."""
        pairs = list(_pair_code(compile(Path(path).read_text(), path, "exec", dont_inherit=True), code))
        if any(old is None or (not _is_function(old) and _strip(old) != _strip(new)) for old, new in pairs):
            return False
        changed = {old: new for old, new in pairs if old is not None and _is_function(old) and old != new}
        found = [f for f in self.files[path] if f.__code__ in changed]
        try:
            for function in found:
                function.__code__ = changed[function.__code__]
        except ValueError:  # other free variables
            return False
        return bool(found)


def _pair_code(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType | None, CodeType]]:
    """The code before and after the change, also of inner functions; (None, ...) if functions came or went."""
    inner, changed = (([c for c in each.co_consts if isinstance(c, CodeType)]) for each in (old, new))
    yield (old if len(inner) == len(changed) else None), new
    for pair in zip(inner, changed, strict=False):
        yield from _pair_code(*pair)


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _strip(code: CodeType) -> CodeType:
    """The code without that of inner functions."""
    return code.replace(co_consts=tuple(None if isinstance(c, CodeType) else c for c in code.co_consts))


def preload() -> list[str]:
    """Import what checks need, and make the cases; the names of the package's modules."""
    list_cases()
    for group in GROUPS:
        find_engines(group)
    return [n for n in sys.modules if n.partition(".")[0] in PACKAGES]


def list_needed() -> list[str]:
    """The modules that a few cases import, of this process."""
    cases = ("graph/networks/conv3d", "graph/launches/jit/stdlib/product-gelu-f32", "graph/linalg/transposed-operands")
    for group in GROUPS:
        Checks(lambda *said: None).run_cases([(group, c) for c in cases], 60.0)
    return preload()


def import_all(names: list[str]) -> None:
    """Import modules that checks need, in this process."""
    for name in names:
        importlib.import_module(name)
    preload()
