"""Compilation units: the text of a program as pieces that become object code, and are kept, one by one.

A unit is a kernel with its range and its task and what is inlined in them, or a function that is never inlined, as a
microkernel: programs have many of these in common. Its text has all that its machine code depends on, and nothing else:
no line numbers, and of the functions of other units the declaration that LLVM derived from their definition.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

# The functions of a kernel: itself, a range of its programs, and the task that the runtime calls.
RANGE_SUFFIX, TASK_SUFFIX = ".range", ".task"
_DEFINE = re.compile(r'define (?P<internal>internal )?[^"@]*@(?P<name>[\w.$-]+)\(')
_NAME = re.compile(r"@([\w.$-]+)")
_VARIABLE = re.compile(r"(@([\w.$-]+) = )(global \w+) .*")
_LINE_NUMBERS = re.compile(r", !dbg !\d+"), re.compile(r" !dbg !\d+")  # of instructions, and then of functions
_HEAD = ("declare ", "attributes ", "!", ";", "source_filename ")  # what else is outside of functions


@dataclass(frozen=True)
class Unit:
    """A text to compile, with the functions of other units that it calls; `shared` is the function that others call."""

    text: str
    calls: tuple[str, ...] = ()
    shared: str | None = None


def divide_text(text: str) -> list[Unit]:
    """The units of a text, callees first; one that does not divide is a single unit."""
    head, functions = _take_functions(text)
    has_kernels = any(name.endswith(TASK_SUFFIX) for name in functions.texts)
    if sys.platform != "linux" or not has_kernels or not all(_is_known(line) for line in head):
        return [Unit(text)]  # units are linked by the symbols of ELF files
    order = _sort_callees_first(functions)
    if order is None:
        return [Unit(text)]
    variables = [line for line in head if line.startswith("@")]
    units = [Unit("\n".join([*variables, ""]))] if variables else []
    rest = [line for line in head if line.startswith(("declare ", "attributes "))]
    head = [*(_VARIABLE.sub(r"\1external \3", line) for line in variables), *rest]
    units += [_make_unit(head, functions, [name], name) for name in order]
    return units + [_make_unit(head, functions, names) for names in _group_kernels(functions)]


def _is_known(line: str) -> bool:
    return not line or line.startswith(_HEAD) or _VARIABLE.fullmatch(line) is not None


class _Functions:
    """The functions of a text by name, which of them are internal, and which of these are never inlined."""

    def __init__(self, texts: Mapping[str, str], internal: Set[str]) -> None:
        self.texts, self.internal = texts, internal
        self.apart = {name for name in internal if " noinline " in texts[name].partition("\n")[0]}
        self.uses = {name: {*_NAME.findall(text)} for name, text in texts.items()}
        self._called = {name: [n for n in uses if n in texts] for name, uses in self.uses.items()}

    def find_called(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Functions and those that they call, directly or not, and the functions of other units that these call."""
        pending = [*names]
        found, others = {*pending}, set()
        while pending:
            for name in self._called[pending.pop()]:
                if name in self.apart and name not in found:
                    others.add(name)
                elif name not in found:
                    found.add(name)
                    pending.append(name)
        return [n for n in self.texts if n in found], [n for n in self.texts if n in others]


def _take_functions(text: str) -> tuple[list[str], _Functions]:
    """The lines of a text outside of functions, and its functions; no functions where they cannot be told apart."""
    head: list[str] = []
    texts: dict[str, str] = {}
    internal: set[str] = set()
    *pieces, rest = f"{text}\n".split("\n}\n")
    for piece in pieces:
        before, _, function = f"\n{piece}".partition("\ndefine ")
        body = f"define {function}\n}}"
        found = _DEFINE.match(body)
        if found is None:
            return [], _Functions({}, set())
        head += before.splitlines()
        texts[found["name"]] = body
        internal |= {found["name"]} if found["internal"] else set()
    return head + rest.splitlines(), _Functions(texts, internal)


def _sort_callees_first(functions: _Functions) -> list[str] | None:
    """The functions that are never inlined, each behind those that it calls; None where they call each other."""
    waiting = {name: functions.find_called([name])[1] for name in functions.texts if name in functions.apart}
    order: list[str] = []
    while waiting:
        ready = [name for name, called in waiting.items() if not any(n in waiting for n in called)]
        if not ready:
            return None
        order += ready
        for name in ready:
            del waiting[name]
    return order


def _group_kernels(functions: _Functions) -> list[list[str]]:
    """The functions that are not internal, in groups that do not call each other."""
    groups: list[set[str]] = []
    for name in functions.texts:
        if name not in functions.internal:
            reached = {n for n in functions.find_called([name])[0] if n not in functions.internal}
            reached = reached.union(*(group for group in groups if not group.isdisjoint(reached)))
            groups = [group for group in groups if group.isdisjoint(reached)] + [reached]
    places = {name: place for place, name in enumerate(functions.texts)}
    return sorted((sorted(group, key=places.__getitem__) for group in groups), key=lambda names: places[names[0]])


def _make_unit(head: Sequence[str], functions: _Functions, names: Sequence[str], shared: str | None = None) -> Unit:
    """The unit of some functions: they and what is inlined in them, and of the head what these use."""
    own, others = functions.find_called(names)
    body = "\n".join(functions.texts[name] for name in own)
    for pattern in _LINE_NUMBERS:
        body = pattern.sub("", body)
    if shared is not None:
        start = functions.texts[shared].partition("(")[0]
        body = body.replace(start, start.replace(" internal", ""), 1)
    used = set().union(*(functions.uses[name] for name in own))
    needed = [line for line in head if line.startswith("attributes ") or _NAME.findall(line)[0] in used]
    return Unit("\n".join([*needed, body, ""]), tuple(others), shared)
