"""PTX lexer and recursive-descent parser: modules, functions, variables, bodies, operands and constant expressions."""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from tessera.core.errors import Location, ParseError
from tessera.interp.target.ptx.text.lexer import PtxTokenCursor
from tessera.interp.target.ptx.text.syntax import (
    TYPES,
    AddressOperand,
    BodyItem,
    BranchTargetList,
    ImmediateOperand,
    NameOperand,
    PtxFunction,
    PtxInstruction,
    PtxLabel,
    PtxModuleSyntax,
    PtxOperand,
    PtxScope,
    PtxVariable,
    VectorOperand,
    name_body_variable,
)
from tessera.interp.target.tokens import deep_nesting

# PTX parser (recursive descent): modules, functions, variables, bodies, operands and constant expressions.
#
# Grammar: PTX ISA, sections 4 (Syntax) and 5 (State Spaces, Types, and Variables).


# Constant expressions of integers, such as `(2 * 4) << 3`.


_CONSTANT_BITS = 64
_ALL_ONES = (1 << _CONSTANT_BITS) - 1  # remainders are unsigned, as in ptxas
# Binary operators by precedence, lowest first, as in C.
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a) or bool(b))},
    {"&&": lambda a, b: int(bool(a) and bool(b))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda a, b: a << (b & _CONSTANT_BITS - 1), ">>": lambda a, b: a >> (b & _CONSTANT_BITS - 1)},
    {"+": operator.add, "-": operator.sub},
    {
        "*": operator.mul,
        "/": lambda a, b: _divide_toward_zero(a, b),
        "%": lambda a, b: (a & _ALL_ONES) % (b & _ALL_ONES),
    },
)
_UNARY: dict[str, Callable[[int], int]] = {
    "+": operator.pos, "-": operator.neg, "~": operator.invert, "!": lambda a: int(not a),
}  # fmt: skip
_CASTS = (".s64", ".u64")


def parse_constant_expression(cursor: PtxTokenCursor) -> int:
    """The value of an expression: 64 bits, signed, or unsigned after a `U` suffix or a cast."""
    value = _parse_binary_expression(cursor, 0)
    if not cursor.accept("?"):
        return value
    chosen = parse_constant_expression(cursor)
    cursor.expect(":")
    other = parse_constant_expression(cursor)
    return chosen if value else other


def _parse_binary_expression(cursor: PtxTokenCursor, level: int) -> int:
    if level == len(_LEVELS):
        return _parse_unary_expression(cursor)
    value, operators = _parse_binary_expression(cursor, level + 1), _LEVELS[level]
    while cursor.at(*operators):
        location, text = cursor.index, cursor.take()
        other = _parse_binary_expression(cursor, level + 1)
        if text in ("/", "%") and not other:
            cursor.index = location
            cursor.fail("division by zero")
        # The result wraps to 64 bits.
        value = _wrap_to_64_bits(int(operators[text](value, other)))
    return value


def _parse_unary_expression(cursor: PtxTokenCursor) -> int:
    if cursor.at(*_UNARY):
        return _wrap_to_64_bits(_UNARY[cursor.take()](_parse_unary_expression(cursor)))
    if not cursor.accept("("):
        if cursor.here_kind != "number":
            cursor.fail("expected an operand")
        return cursor.integer()
    if cursor.accept(*_CASTS):
        cursor.expect(")")
        return _parse_unary_expression(cursor)
    value = parse_constant_expression(cursor)
    cursor.expect(")")
    return value


def _divide_toward_zero(a: int, b: int) -> int:
    """The quotient, rounded toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _wrap_to_64_bits(value: int) -> int:
    """A value wrapped to 64 bits; one that fits unsigned is unchanged."""
    half = 1 << _CONSTANT_BITS - 1
    if -half <= value < 2 * half:
        return value
    return (value + half) % (2 * half) - half


# Bodies, instructions and operands.


_DECLARATION_DIRECTIVES = {".reg", ".param", ".shared", ".global", ".const", ".local"}


def parse_body(cursor: PtxTokenCursor, files: dict[int, str], library: tuple[str, ...] = ()) -> PtxScope:
    """A function body in braces; code inlined from files of the `library` has the source location of its call."""
    return _BodyParser(cursor, files, library).parse_scope()


class _BodyParser:
    """Parses the items of a function; a `.loc` applies up to the next one."""

    def __init__(self, cursor: PtxTokenCursor, files: dict[int, str], library: tuple[str, ...]) -> None:
        self.cursor, self.files, self.library = cursor, files, library
        self.source: Location | None = None
        self.callers: dict[Location, Location] = {}  # of the library's code: the last call from outside

    def parse_scope(self) -> PtxScope:
        cursor = self.cursor
        cursor.expect("{")
        items: list[BodyItem] = []
        while not cursor.accept("}"):
            if cursor.here_kind == "end":
                cursor.fail("expected '}'")
            self._parse_item(items)
        return PtxScope(tuple(items))

    def _parse_item(self, items: list[BodyItem]) -> None:

        cursor = self.cursor
        kind = cursor.here_kind
        if kind == "word":
            if cursor.after_text == ":":
                self._parse_label(items)
            else:
                items.append(self._parse_instruction())
        elif cursor.accept(";"):
            return
        elif cursor.at("{"):
            items.append(self.parse_scope())
        elif cursor.at(*_DECLARATION_DIRECTIVES):
            items.extend(parse_variables(cursor))
            cursor.expect(";")
        elif kind == "directive":
            self._parse_directive()
        else:
            items.append(self._parse_instruction())

    def _parse_label(self, items: list[BodyItem]) -> None:
        cursor = self.cursor
        name = cursor.take()
        cursor.take()
        if cursor.accept(".branchtargets"):
            labels = [cursor.kind("word")]
            while cursor.accept(","):
                labels.append(cursor.kind("word"))
            items.append(BranchTargetList(name, tuple(labels)))
        elif cursor.accept(".callprototype", ".calltargets"):
            while not cursor.at(";"):
                cursor.take()
        else:
            items.append(PtxLabel(name))

    def _parse_directive(self) -> None:
        cursor = self.cursor
        name = cursor.take()
        if name == ".loc":
            places = [self._parse_location()]
            while cursor.accept(","):
                places += self._parse_inlined_at()
            self.source = self._choose_source(places)
        elif name == ".pragma":
            cursor.kind("string")
            cursor.expect(";")
        else:
            cursor.index -= 1
            cursor.fail("unknown directive in a body")

    def _parse_location(self) -> Location:
        file, line, column = self.cursor.integer(), self.cursor.integer(), self.cursor.integer()
        return Location(self.files.get(file, f"file {file}"), line, column)

    def _parse_inlined_at(self) -> list[Location]:
        cursor = self.cursor
        if cursor.kind("word") != "function_name":
            return [self._parse_location()]
        cursor.kind("word")
        if cursor.accept("+"):
            cursor.integer()
        return []

    def _choose_source(self, places: list[Location]) -> Location:
        """The innermost place outside the library."""
        if not self.library or not places[0].file.startswith(self.library):
            return places[0]
        call = places[1] if len(places) > 1 else places[0]
        self.callers[places[0]] = source = self.callers.get(call, call)
        return source

    def _parse_instruction(self) -> PtxInstruction:
        cursor = self.cursor
        guard = None
        if cursor.accept("@"):
            negated = cursor.accept("!")
            guard = NameOperand(cursor.kind("word"), negated)
        location = cursor.place()
        op = _split_opcode(cursor.kind("word"))
        operands: list[PtxOperand] = []
        while not cursor.at(";"):
            operands.append(parse_operand(cursor, op[0] == "call"))
            if not cursor.accept(","):
                break
        cursor.expect(";")
        return PtxInstruction(op, tuple(operands), guard, location, self.source)


def parse_operand(cursor: PtxTokenCursor, call: bool = False) -> PtxOperand:
    """One operand or an `a|b` pair; in a call, parentheses enclose its arguments."""
    first = _parse_single_operand(cursor, call)
    if cursor.accept("|"):
        return VectorOperand((first, _parse_single_operand(cursor)), pair=True)
    return first


_CLOSING = {"{": "}", "(": ")"}


def _parse_single_operand(cursor: PtxTokenCursor, call: bool = False) -> PtxOperand:
    if cursor.here_kind == "word":
        return _parse_name(cursor)
    if cursor.at("{") or (call and cursor.at("(")):
        closing, parts = _CLOSING[cursor.take()], []
        while not cursor.at(closing):
            parts.append(parse_operand(cursor))
            if not cursor.accept(","):
                break
        cursor.expect(closing)
        return VectorOperand(tuple(parts))
    if cursor.accept("["):
        return _parse_address(cursor)
    if cursor.at("!", "-") and cursor.after_kind == "word":  # `-` in vmad alone
        cursor.take()
        return NameOperand(cursor.kind("word"), negated=True)
    return _parse_immediate(cursor)


def _parse_name(cursor: PtxTokenCursor) -> PtxOperand:
    text = cursor.kind("word")
    if cursor.at("+", "-") and cursor.after_kind == "number":
        offset = 0
        while cursor.at("+", "-"):
            cursor.accept("+")
            offset += cursor.integer()
        return AddressOperand(text, offset)
    return _make_name_operand(text)


@lru_cache(maxsize=1 << 14)
def _make_name_operand(text: str) -> NameOperand:
    """A name; equal names are one object."""
    return NameOperand(text)


@lru_cache(maxsize=1 << 12)
def _split_opcode(opcode: str) -> tuple[str, ...]:
    """The words of an opcode in the order of the ISA: ptxas takes modifiers in any order."""
    name, *words = opcode.split(".")
    if name not in _TYPES_INSIDE:
        words.sort(key=lambda w: w in TYPES)
    leading = _LEADING_WORDS.get(name, ())
    words.sort(key=lambda w: leading.index(w) if w in leading else len(leading))
    return (name, *words)


# The words that come first after some opcodes, in their order.
_COMPARISONS = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor".split()
_LEADING_WORDS = {
    **dict.fromkeys(("shfl", "vote", "redux"), ["sync"]),
    **dict.fromkeys(("ex2", "lg2", "rcp", "rsqrt"), ["approx"]),
    **dict.fromkeys(("set", "setp"), _COMPARISONS),
    "match": ["any", "all"],
    "multimem": ["ld_reduce", "st", "red"],
    "wgmma": ["mma_async", "fence", "commit_group", "wait_group", "sp", "sync", "aligned"],
    "tensormap": ["replace", "cp_fenceproxy", "tile"],
    "wmma": ["load", "store", "mma", "a", "b", "c", "d", "sync", "aligned"],
    "movmatrix": ["sync", "aligned", "m8n8", "trans"],
    "prmt": ["b32"],
}
# Opcodes whose modifiers follow a type.
_TYPES_INSIDE = {
    "prmt", "mma", "vset", "vset2", "vset4", "vshl", "vshr", "vmad",
    *(f"v{name}{count}" for name in ("add", "sub", "absdiff", "min", "max", "avrg") for count in ("", 2, 4)),
}  # fmt: skip


def _parse_address(cursor: PtxTokenCursor) -> AddressOperand:
    base = cursor.kind("word") if cursor.here_kind == "word" else None
    offset = cursor.integer() if base is None else 0
    while cursor.at("+", "-"):
        cursor.accept("+")
        offset += cursor.integer()
    coordinates, sampler = None, None
    if cursor.accept(","):
        group = _parse_single_operand(cursor)
        if isinstance(group, NameOperand) and cursor.accept(","):
            sampler, group = group.text, _parse_single_operand(cursor)
        coordinates = group.parts if isinstance(group, VectorOperand) else (group,)
    cursor.expect("]")
    return AddressOperand(base, offset, coordinates, sampler=sampler)


def _parse_immediate(cursor: PtxTokenCursor) -> ImmediateOperand:
    negative = cursor.at("-") and cursor.after_kind == "float" and cursor.accept("-")
    if cursor.here_kind != "float":
        return ImmediateOperand(parse_constant_expression(cursor))
    text = cursor.take()
    if text[:2] in ("0f", "0F"):
        return ImmediateOperand(int(text[2:], 16) ^ (negative << 31), 32)
    if text[:2] in ("0d", "0D"):
        return ImmediateOperand(int(text[2:], 16) ^ (negative << 63), 64)
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(text)))
    return ImmediateOperand(bits ^ (negative << 63), 64)


# Modules, functions and variables.


STATE_SPACE_DIRECTIVES = {".reg", ".param", ".shared", ".global", ".const", ".local"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_LIMITS = (".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".reqnctapercluster")
_FLAGS = {".noreturn", ".explicitcluster", ".blocksareclusters"}


class PtxModuleParser:
    """Parses a module."""

    def __init__(self, text: str, file: str, library: tuple[str, ...] = ()) -> None:
        self.cursor, self.library = PtxTokenCursor(text, file), library
        self.version = ""
        self.target: tuple[str, ...] = ()
        self.variables: list[PtxVariable] = []
        self.functions: list[PtxFunction] = []
        texts = self.cursor.texts
        # Compilers write `.file` directives after the code that refers to them.
        self.files = {
            int(texts[i + 1]): re.sub(r"\\(.)", r"\1", texts[i + 2][1:-1])
            for i, t in enumerate(texts[:-2])
            if t == ".file" and self.cursor.kinds[i + 1] == "number"
        }

    def parse_module_items(self) -> PtxModuleSyntax:
        """The whole module."""
        while self.cursor.here_kind != "end":
            self._parse_item()
        if not self.version:
            raise ParseError("the module has no .version directive", location=self.cursor.place())
        return PtxModuleSyntax(self.version, self.target, tuple(self.variables), tuple(self.functions))

    def _parse_item(self) -> None:
        cursor = self.cursor
        if cursor.accept(";"):
            return
        if cursor.here_kind != "directive":
            cursor.fail("expected a directive")
        linkage = set()
        while cursor.at(*_LINKAGE):
            linkage.add(cursor.take())
        if cursor.at(".entry", ".func"):
            self.functions.append(self._parse_function())
        elif cursor.at(*STATE_SPACE_DIRECTIVES):
            self.variables.extend(parse_variables(cursor, ".extern" in linkage))
            cursor.expect(";")
        else:
            self._parse_directive()

    def _parse_directive(self) -> None:
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
            self._skip_file()
        elif name == ".section":
            cursor.take()
            cursor.skip_group()
        elif name == ".pragma":
            cursor.kind("string")
            cursor.expect(";")
        else:
            cursor.index -= 1
            cursor.fail("unknown directive")

    def _skip_file(self) -> None:
        self.cursor.integer()
        self.cursor.kind("string")
        while self.cursor.accept(","):
            self.cursor.integer()

    def _parse_function(self) -> PtxFunction:
        cursor = self.cursor
        location = cursor.place()
        entry = cursor.take() == ".entry"
        results = self._parse_params() if cursor.at("(") else ()
        name = cursor.kind("word")
        params = self._parse_params() if cursor.at("(") else ()
        limits = []
        while cursor.here_kind == "directive" and cursor.at(*_LIMITS, *_FLAGS, ".pragma"):
            limits.append(self._parse_limit())
        if cursor.accept(";"):
            return PtxFunction(name, entry, results, params, None, tuple(limits), location)
        body = parse_body(cursor, self.files, self.library)
        self.variables.extend(replace(v, name=name_body_variable(v)) for v in _list_static_variables(body))
        return PtxFunction(name, entry, results, params, body, tuple(limits), location)

    def _parse_limit(self) -> tuple[str, tuple[int, ...]]:
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

    def _parse_params(self) -> tuple[PtxVariable, ...]:
        cursor = self.cursor
        cursor.expect("(")
        result: list[PtxVariable] = []
        while not cursor.at(")"):
            result.extend(parse_variables(cursor, single=True))
            if not cursor.accept(","):
                break
        cursor.expect(")")
        return tuple(result)


def _list_static_variables(scope: PtxScope) -> Iterator[PtxVariable]:
    """The variables of a body in global and constant memory: they exist once, like those of a module."""
    for item in scope.items:
        if isinstance(item, PtxScope):
            yield from _list_static_variables(item)
        elif isinstance(item, PtxVariable) and item.space in ("global", "const"):
            yield item


def parse_variables(cursor: PtxTokenCursor, extern: bool = False, single: bool = False) -> list[PtxVariable]:
    """One declaration, of several variables unless it is a `single` parameter: commas also separate parameters."""
    location = cursor.place()
    space = cursor.take()[1:]
    align, type, vector, opaque = 0, "", 1, ""
    while cursor.here_kind == "directive":
        word = cursor.take()[1:]
        if word == "align":
            align = cursor.integer()
        elif word in TYPES:
            type = word
        elif word in ("v2", "v4", "v8"):
            vector = int(word[1])
        elif word in ("texref", "samplerref", "surfref"):
            type, opaque = "b64", word
        elif word not in ("ptr", "global", "shared", "const", "local", "attribute"):
            cursor.index -= 1
            cursor.fail("unknown type or attribute")
    if not type:
        cursor.fail("expected a type")
    result = []
    while True:
        name = cursor.kind("word")
        properties = _parse_properties(cursor) if opaque else ()
        register_count, count, initial = _parse_array_size(cursor)
        size = TYPES[type].bits // 8 * vector
        result.append(
            PtxVariable(
                name,
                space,
                type,
                max(align, size, 1),
                count,
                register_count,
                vector,
                initial,
                extern,
                location,
                opaque,
                properties,
            )  # fmt: skip
        )
        if single or not cursor.accept(","):
            return result


def _parse_properties(cursor: PtxTokenCursor) -> tuple[tuple[str, str], ...]:
    """The initial values of an opaque variable: `= { filter_mode = linear, ... }`."""
    result = []
    if cursor.accept("="):
        cursor.expect("{")
        while not cursor.accept("}"):
            name = cursor.kind("word")
            cursor.expect("=")
            result.append((name, cursor.take()))
            cursor.accept(",")
    return tuple(result)


def _parse_array_size(cursor: PtxTokenCursor) -> tuple[int, int, tuple[PtxOperand, ...]]:
    register_count, count = 0, 1
    if cursor.accept("<"):
        register_count = cursor.integer()
        cursor.expect(">")
    while cursor.accept("["):
        count *= 0 if cursor.at("]") else parse_constant_expression(cursor)
        cursor.expect("]")
    return register_count, count, _parse_initialiser(cursor) if cursor.accept("=") else ()


def _parse_initialiser(cursor: PtxTokenCursor) -> tuple[PtxOperand, ...]:
    if cursor.accept("generic"):
        cursor.expect("(")
        inside = parse_operand(cursor)
        cursor.expect(")")
        return (inside,)
    if cursor.here_kind == "number" and cursor.after_text == "(":
        return (_parse_masked_address(cursor),)
    if not cursor.accept("{"):
        return (parse_operand(cursor),)
    result: list[PtxOperand] = []
    while not cursor.accept("}"):
        result.extend(_parse_initialiser(cursor))
        cursor.accept(",")
    return tuple(result)


def _parse_masked_address(cursor: PtxTokenCursor) -> AddressOperand:
    """`0xFF00(name + 4)`: one byte of an address, which the mask selects."""
    mask = cursor.integer()
    cursor.expect("(")
    inside = parse_operand(cursor)
    cursor.expect(")")
    if isinstance(inside, NameOperand):
        inside = AddressOperand(inside.text, 0)
    if not isinstance(inside, AddressOperand) or mask not in [0xFF << 8 * k for k in range(8)]:
        cursor.fail("expected one byte of an address")
    return replace(inside, mask=mask)


def parse_module(text: str, file: str = "<ptx>", library: tuple[str, ...] = ()) -> PtxModuleSyntax:
    """The syntax tree of a module; a ParseError has the location of a syntax error.

    >>> parse_module(".version 8.0 .target sm_80 .address_size 64 .visible .entry k() { ret; }").functions[0].name
    'k'
    """
    parser = PtxModuleParser(text, file, library)
    with deep_nesting(parser.cursor.place):
        return parser.parse_module_items()
