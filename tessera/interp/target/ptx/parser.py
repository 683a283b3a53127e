"""PTX text to syntax: modules, functions and variables."""

from __future__ import annotations

from tessera.errors import ParseError
from tessera.interp.target.ptx.body_grammar import body, operand
from tessera.interp.target.ptx.constants import expression
from tessera.interp.target.ptx.lexer import Cursor
from tessera.interp.target.ptx.syntax import Function, ModuleText, Operand, Variable
from tessera.interp.target.ptx.types import TYPES

SPACES = {".reg", ".param", ".shared", ".global", ".const", ".local"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_LIMITS = (".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".reqnctapercluster")
_FLAGS = {".noreturn", ".explicitcluster", ".blocksareclusters"}


class Parser:
    """One walk over a module's text."""

    def __init__(self, text: str, file: str) -> None:
        self.cursor = Cursor(text, file)
        self.version = ""
        self.target: tuple[str, ...] = ()
        self.variables: list[Variable] = []
        self.functions: list[Function] = []
        texts = self.cursor.texts
        # Compilers put the files behind the code that names them.
        self.files = {
            int(texts[i + 1]): texts[i + 2].strip('"')
            for i, t in enumerate(texts[:-2])
            if t == ".file" and self.cursor.kinds[i + 1] == "number"
        }

    def module(self) -> ModuleText:
        """The whole module."""
        while self.cursor.here_kind != "end":
            self._item()
        if not self.version:
            raise ParseError("no .version directive", location=self.cursor.place())
        return ModuleText(self.version, self.target, tuple(self.variables), tuple(self.functions))

    def _item(self) -> None:
        cursor = self.cursor
        if cursor.accept(";"):
            return
        if cursor.here_kind != "directive":
            cursor.fail("expected a directive")
        linkage = set()
        while cursor.at(*_LINKAGE):
            linkage.add(cursor.take())
        if cursor.at(".entry", ".func"):
            self.functions.append(self._function())
        elif cursor.at(*SPACES):
            self.variables.extend(variables(cursor, ".extern" in linkage))
            cursor.expect(";")
        else:
            self._directive()

    def _directive(self) -> None:
        cursor = self.cursor
        name = cursor.take()
        if name == ".version":
            self.version = cursor.take()
        elif name == ".target":
            words = [cursor.kind("word")]
            while cursor.accept(","):
                words.append(cursor.kind("word"))
            self.target = tuple(words)
        elif name == ".address_size":
            if cursor.integer() != 64:
                cursor.fail("only 64-bit addresses are supported")
        elif name == ".file":
            self._file()
        elif name == ".section":
            cursor.take()
            cursor.skip_group()
        elif name == ".pragma":
            cursor.kind("string")
            cursor.expect(";")
        else:
            cursor.index -= 1
            cursor.fail("unknown directive")

    def _file(self) -> None:
        self.cursor.integer()
        self.cursor.kind("string")
        while self.cursor.accept(","):
            self.cursor.integer()

    def _function(self) -> Function:
        cursor = self.cursor
        place = cursor.place()
        entry = cursor.take() == ".entry"
        results = self._params() if cursor.at("(") else ()
        name = cursor.kind("word")
        params = self._params() if cursor.at("(") else ()
        limits = []
        while cursor.here_kind == "directive" and cursor.at(*_LIMITS, *_FLAGS, ".pragma"):
            limits.append(self._limit())
        if cursor.accept(";"):
            return Function(name, entry, results, params, None, tuple(limits), place)
        return Function(name, entry, results, params, body(cursor, self.files), tuple(limits), place)

    def _limit(self) -> tuple[str, tuple[int, ...]]:
        cursor = self.cursor
        name, numbers = cursor.take(), []
        if name == ".pragma":
            cursor.kind("string")
            cursor.expect(";")
        if name in _LIMITS:
            numbers.append(cursor.integer())
            while cursor.accept(","):
                numbers.append(cursor.integer())
        return name, tuple(numbers)

    def _params(self) -> tuple[Variable, ...]:
        cursor = self.cursor
        cursor.expect("(")
        found: list[Variable] = []
        while not cursor.at(")"):
            found.extend(variables(cursor))
            if not cursor.accept(","):
                break
        cursor.expect(")")
        return tuple(found)


def variables(cursor: Cursor, extern: bool = False) -> list[Variable]:
    """One declaration; only registers may be several in one, as parameters are divided by commas too."""
    place = cursor.place()
    space = cursor.take()[1:]
    align, type, vector = 0, "", 1
    while cursor.here_kind == "directive":
        word = cursor.take()[1:]
        if word == "align":
            align = cursor.integer()
        elif word in TYPES:
            type = word
        elif word in ("v2", "v4", "v8"):
            vector = int(word[1])
        elif word not in ("ptr", "global", "shared", "const", "local", "attribute"):
            cursor.index -= 1
            cursor.fail("unknown type or attribute")
    if not type:
        cursor.fail("expected a type")
    found = []
    while True:
        name = cursor.kind("word")
        many, count, initial = _extent(cursor)
        size = TYPES[type].bits // 8 * vector
        found.append(Variable(name, space, type, max(align, size, 1), count, many, vector, initial, extern, place))
        if space == "param" or not cursor.accept(","):
            return found


def _extent(cursor: Cursor) -> tuple[int, int, tuple[Operand, ...]]:
    many, count = 0, 1
    if cursor.accept("<"):
        many = cursor.integer()
        cursor.expect(">")
    while cursor.accept("["):
        count *= 0 if cursor.at("]") else expression(cursor)
        cursor.expect("]")
    return many, count, _initial(cursor) if cursor.accept("=") else ()


def _initial(cursor: Cursor) -> tuple[Operand, ...]:
    if cursor.accept("generic"):
        cursor.expect("(")
        inside = operand(cursor)
        cursor.expect(")")
        return (inside,)
    if not cursor.accept("{"):
        return (operand(cursor),)
    found: list[Operand] = []
    while not cursor.accept("}"):
        found.extend(_initial(cursor))
        cursor.accept(",")
    return tuple(found)


def parse(text: str, file: str = "<ptx>") -> ModuleText:
    """A module's syntax; ParseError says where the text breaks the grammar.

    >>> parse(".version 8.0 .target sm_80 .address_size 64 .visible .entry k() { ret; }").functions[0].name
    'k'
    """
    return Parser(text, file).module()
