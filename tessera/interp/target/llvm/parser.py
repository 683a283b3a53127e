"""Reading a module: functions, variables and metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tessera.errors import UnsupportedOpError
from tessera.interp.target.llvm.attribute_grammar import skip_attributes
from tessera.interp.target.llvm.constant_grammar import starts_value, value
from tessera.interp.target.llvm.instruction_grammar import TERMINATORS, instruction
from tessera.interp.target.llvm.lexer import Lexer
from tessera.interp.target.llvm.syntax import (
    BasicBlock,
    Function,
    Instruction,
    Node,
    Parameter,
    Program,
    Variable,
)
from tessera.interp.target.llvm.type_grammar import TypeCursor
from tessera.interp.target.llvm.types import VOID

_CALLER_FIXES = ("byval", "inalloca", "preallocated")


class _Parser(TypeCursor):
    """A cursor that collects the module's entities."""

    def __init__(self, lexer: Lexer) -> None:
        super().__init__(lexer)
        self.program = Program({}, {}, {})


def parse(text: str, file: str = "<llvm>") -> Program:
    """The module that a text spells."""
    p = _Parser(Lexer(text, file))
    while p.here.kind != "end":
        token = p.here
        reader = _WORDS.get(token.text) if token.kind == "word" else _KINDS.get(token.kind)
        if reader is None:
            p.fail("expected a definition")
        reader(p)
    return p.program


def _skip_line(p: _Parser) -> None:
    p.skip_line()


def _skip_assembly(p: _Parser) -> None:
    raise UnsupportedOpError("module assembly is not supported", location=p.place())


def _skip_definition(p: _Parser) -> None:
    """`attributes #0 = { ... }`"""
    while not p.at("{"):
        p.take()
    p.skip_group()


def _type_name(p: _Parser) -> None:
    """`%T = type ...`: its body was found beforehand."""
    p.take()
    p.expect("=")
    p.expect("type")
    if not p.accept("opaque"):
        p.type()


def _declare(p: _Parser) -> None:
    p.take()
    _skip_linkage(p)
    function = _header(p)
    p.program.functions.setdefault(function.name, function)
    if p.line() == p.line(p.tokens[p.index - 1]):
        p.skip_line()


def _skip_linkage(p: _Parser) -> None:
    while p.here.kind == "meta":  # declare !dbg !5 ...
        p.index += 2
    skip_attributes(p)


def _header(p: _Parser) -> Function:
    where, result = p.place(), p.type()
    skip_attributes(p)
    name = p.expect_kind("global")
    p.expect("(")
    parameters: list[Parameter] = []
    unnamed = 0
    while not p.at(")"):
        if p.accept("..."):
            break
        found = _parameter(p, str(unnamed))
        unnamed += found.name == str(unnamed)
        parameters.append(found)
        if not p.accept(","):
            break
    p.expect(")")
    return Function(name, result, tuple(parameters), where=where)


def _parameter(p: _Parser, number: str) -> Parameter:
    type, first = p.type(), p.index
    skip_attributes(p)
    by_value = any(t.text in _CALLER_FIXES for t in p.tokens[first : p.index])
    return Parameter(type, p.take().text if p.here.kind == "local" else number, by_value)


def _define(p: _Parser) -> None:
    p.take()
    _skip_linkage(p)
    head = _header(p)
    while not p.at("{"):
        if p.take().kind == "end":
            p.fail("expected '{'")
    p.take()
    blocks = _Body(p, sum(q.name.isdigit() for q in head.parameters)).blocks()
    function = Function(head.name, head.type, head.parameters, blocks, head.where)
    p.program.functions[head.name] = function


class _Body:
    """The blocks of one function, counting the names that the text leaves out."""

    def __init__(self, p: _Parser, number: int) -> None:
        self.p = p
        self.number = number

    def _name(self, given: str) -> str:
        """The given name, or the next number."""
        name = given or str(self.number)
        self.number = int(name) + 1 if name.isdigit() else self.number
        return name

    def blocks(self) -> tuple[BasicBlock, ...]:
        """Every block up to the closing brace."""
        found = []
        while not self.p.accept("}"):
            given = self.p.take().text if self.p.here.kind == "label" else ""
            found.append(BasicBlock(self._name(given), self._instructions()))
        if not found:
            self.p.fail("a function needs a block")
        return tuple(found)

    def _instructions(self) -> tuple[Instruction, ...]:
        body: list[Instruction] = []
        while not body or body[-1].op not in TERMINATORS:
            if self.p.here.kind == "record":  # #dbg_value(...)
                self.p.skip_line()
                continue
            if self.p.at("}") or self.p.here.kind in ("label", "end"):
                self.p.fail("expected an instruction: the block has no terminator")
            body.append(self._instruction())
        return tuple(body)

    def _instruction(self) -> Instruction:
        found = instruction(self.p)
        if found.type == VOID or found.op in TERMINATORS:
            return found
        return replace(found, result=self._name(found.result))


def _variable(p: _Parser) -> None:
    """`@name = internal unnamed_addr constant [4 x i8] c"...", align 4`"""
    name = p.take().text
    p.expect("=")
    while not p.at("constant", "global"):
        if p.at("alias", "ifunc") or p.here.kind == "end":
            raise UnsupportedOpError(f"@{name} is neither constant nor variable", location=p.place())
        p.take()
        if p.at("("):
            p.skip_group()
    constant = p.take().text == "constant"
    type = p.type()
    initial = value(p, type) if starts_value(p) else None
    align = 0
    while p.accept(","):
        align = _variable_tail(p) or align
    p.program.variables[name] = Variable(name, type, initial, constant, align)


def _variable_tail(p: _Parser) -> int:
    """An alignment, or something that is passed over: section, comdat, metadata."""
    if p.accept("align"):
        return p.integer()
    p.take()
    if p.at("("):
        p.skip_group()
    elif p.here.kind in ("string", "meta"):
        p.take()
    return 0


def _metadata(p: _Parser) -> None:
    """`!7 = distinct !DILocation(line: 3, column: 5, scope: !4)`"""
    name = p.take().text
    p.expect("=")
    p.accept("distinct")
    kind = p.take().text
    if kind == "!":
        p.skip_group()
        return
    first = p.index
    p.skip_group()
    inside = p.tokens[first : p.index]
    fields = {t.text: after.text for t, after in zip(inside, inside[1:], strict=False) if t.kind == "label"}
    p.program.nodes[name] = Node(kind[1:], fields)


_Reader = Callable[[_Parser], None]

_WORDS: dict[str, _Reader] = {
    "define": _define,
    "declare": _declare,
    "attributes": _skip_definition,
    "target": _skip_line,
    "source_filename": _skip_line,
    "uselistorder": _skip_line,
    "module": _skip_assembly,
}

_KINDS: dict[str, _Reader] = {
    "global": _variable,
    "local": _type_name,
    "meta": _metadata,
    "comdat": _skip_line,
    "group": _skip_line,
}
