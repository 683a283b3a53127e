"""Hashes of text that stay the same from run to run and from machine to machine."""

from __future__ import annotations


def digest(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal.

    >>> digest("tile")[:8]
    '8b668b89'
    """
    import hashlib  # it loads OpenSSL, which takes longer than most of this package

    return hashlib.sha256(text.encode()).hexdigest()
