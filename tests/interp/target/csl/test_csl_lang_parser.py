"""The parser: every production of docs/csl-grammar.md, and where text that is not CSL goes wrong."""

import pytest
from csl_lang import PROGRAMS

from tessera.errors import ParseError
from tessera.interp.target.csl import parse, parse_file
from tessera.interp.target.csl import syntax as s


def kinds(node, found):
    found.add(type(node))
    for value in vars(node).values() if hasattr(node, "__dict__") else ():
        for item in value if isinstance(value, tuple) else (value,):
            if type(item).__module__ == s.__name__:
                kinds(item, found)
    return found


def test_every_construct():
    wanted = {c for c in vars(s).values() if isinstance(c, type) and c.__module__ == s.__name__}
    assert kinds(parse_file(PROGRAMS / "lang_grammar.csl"), set()) | {s.Syntax} == wanted


def shape(node):
    """An expression with brackets where the tree has them."""
    if isinstance(node, s.Binary):
        return f"({shape(node.left)}{node.sign}{shape(node.right)})"
    return node.text if isinstance(node, s.Name) else f"{node.sign}{shape(node.operand)}"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a + b * c - d", "((a+(b*c))-d)"),
        ("a << b + c & d", "((a<<(b+c))&d)"),
        ("a & b == c", "((a&b)==c)"),
        ("a or b and c == d", "(aor(band(c==d)))"),
        ("a - b - c", "((a-b)-c)"),
        ("-a * !b", "(-a*!b)"),
    ],
)
def test_precedence(text, want):
    assert shape(parse(f"const x = {text};").items[0].value) == want


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("const x = ;", "1:11: ParseError: expected an expression, found ';'"),
        ("const x = 1", "1:12: ParseError: expected ';', found 'end of file'"),
        ("fn f() void {\n  var if = 1;\n}", "2:7: ParseError: expected a name, found 'if'"),
        ("fn f() void {", "1:14: ParseError: expected '}', found 'end of file'"),
        ("var x: [2]f32 = $;", "1:17: ParseError: unexpected character '$'"),
        ('const s = "abc;', "1:11: ParseError: a string does not end on its line"),
        ("f();", "1:1: ParseError: expected a declaration, found 'f'"),
        ("fn f() void { a: return; }", "1:18: ParseError: expected a loop or a block after a label"),
        ("const x = 1; /* y */", "1:14: ParseError: unexpected character '/'"),
    ],
)
def test_not_csl(text, message):
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert message in str(caught.value)
