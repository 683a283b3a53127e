"""What a launch asks of streams: which one it goes to, and whether any launch is under way whose order matters."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

# The stream that launches go to; None: they run at once.
CURRENT: ContextVar[Any] = ContextVar("stream", default=None)
# What launches on streams have touched and nobody has waited for, in debug mode (stream_order.py).
TOUCHED: list[Any] = []


def ordered(module: Any, arrays: Any) -> Any:
    """A launch takes its place in the order of its stream, or of the host; its stream, or None.

    Raises:
        RaceError: in debug mode, it meets a launch that nothing orders.
    """
    stream = CURRENT.get()
    if stream is not None or TOUCHED:
        from tessera.kernel.stream_order import HOST, ORDER  # only where there are streams

        ORDER.launch(HOST if stream is None else stream.number, module, arrays())
    return stream
