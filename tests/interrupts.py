"""Ctrl-C for tests of long operations."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

LIMIT = 1.0  # seconds from the signal to the exception


def signal_soon(after=0.2):
    """Send SIGINT to this process; the list that is returned receives the time."""
    sent = []

    def send():
        time.sleep(after)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    return sent


@contextmanager
def interrupted(after=0.2):
    """A context whose statements Ctrl-C ends within LIMIT; skipped where signals do not reach this thread."""
    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread of a POSIX system alone")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sent = signal_soon(after)
        with pytest.raises(KeyboardInterrupt):
            yield
        assert time.perf_counter() - sent[0] < LIMIT
    finally:
        signal.signal(signal.SIGINT, before)
