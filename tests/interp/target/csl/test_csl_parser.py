"""Parser: every production of docs/csl-grammar.md, and the location of syntax errors."""

import os

import pytest
from csl_harness import PROGRAMS, cases, outcome

from tessera.core.errors import FileError, ParseError
from tessera.interp.target.csl import parse, parse_file
from tessera.interp.target.csl.text import syntax as s


def kinds(node, found):
    found.add(type(node))
    for value in vars(node).values() if hasattr(node, "__dict__") else ():
        for item in value if isinstance(value, tuple) else (value,):
            if type(item).__module__ == s.__name__:
                kinds(item, found)
    return found


def test_every_construct():
    wanted = {c for c in vars(s).values() if isinstance(c, type) and c.__module__ == s.__name__}
    assert kinds(parse_file(PROGRAMS / "lang_grammar.csl"), set()) | {s.SyntaxNode} == wanted


def shape(node):
    """An expression with brackets that show its tree."""
    if isinstance(node, s.BinaryExpr):
        return f"({shape(node.left)}{node.sign}{shape(node.right)})"
    return node.text if isinstance(node, s.NameExpr) else f"{node.sign}{shape(node.operand)}"


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


@pytest.mark.parametrize(("name", "title"), cases("lang_syntax.csl"))
def test_syntax_error(name, title):
    error, line, message = outcome(name, title)
    assert isinstance(error, ParseError) and error.message == message and error.location.column > 0
    # A missing end is reported at the end of the text, one line before the expected message.
    assert error.location.line in (line, line - 1)


LONG = [
    ("const a = " + "9" * 5000 + ";", "a number of 5,000 characters"),
    ("const a = " + "(" * 9999 + "1", "the text nests too deep"),
    ("fn f() void " + "{" * 9999, "the text nests too deep"),
    ("const a: " + "*" * 9999 + "i32 = 0;", "the text nests too deep"),
]


@pytest.mark.parametrize(("text", "says"), LONG)
def test_numbers_and_nesting_have_limits(text, says):
    with pytest.raises(ParseError, match=says) as error:
        parse(text)
    assert error.value.location.line == 1
    assert shape(parse("const x = " + "(" * 100 + "a + b" + ")" * 100 + ";").items[0].value) == "(a+b)"


def test_a_file_that_is_not_utf_8(tmp_path):
    (tmp_path / "a.csl").write_bytes(b"const a = 1; // \xff")
    with pytest.raises(FileError, match=r"a\.csl is not UTF-8"):
        parse_file(tmp_path / "a.csl")


def test_a_file_that_changes_is_read_again(tmp_path):
    """The trees of equal texts are shared; the time of the file says nothing."""
    file = tmp_path / "a.csl"
    for text, name in (("param n;", "n"), ("param m;", "m"), ("param n;", "n")):
        file.write_text(text)
        os.utime(file, (0, 0))
        assert parse_file(file).items[0].name == name
    assert parse_file(file) is parse_file(file)


@pytest.mark.parametrize("text", ["a // b #\n#", "/* a */", 'var "a', "a\n  // b\n\t`"])
def test_text_that_is_no_token_is_named_after_comments(text):
    with pytest.raises(ParseError) as caught:
        parse(text)
    offset = {"a": 9, "/": 0, "v": 4}[text[0]] if "`" not in text else text.index("`")
    line, column = text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
    assert (caught.value.location.line, caught.value.location.column) == (line, column)
