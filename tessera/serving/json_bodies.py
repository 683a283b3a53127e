"""JSON bodies of requests: strict parsing, and errors with the status of HTTP that they become."""

from __future__ import annotations

import json
from typing import Any


class ProtocolError(Exception):
    """A request that is refused, with the status of the response, and headers that it needs."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.message, self.parameter = escape(message), None if parameter is None else escape(parameter)


def escape(text: str) -> str:
    """A text that UTF-8 can encode: half a surrogate pair, which JSON can name, is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def parse_json(body: bytes) -> Any:
    """JSON as RFC 8259 has it: UTF-8, no NaN, no name twice, and not nested deeper than Python's recursion limit.

    >>> parse_json(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}

    Raises:
        ProtocolError: it is something else.
    """
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_make_object)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(400, f"the request is no JSON: {str(error)[:200]}") from None


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found
