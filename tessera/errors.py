"""Errors: every exception that Tessera raises for users, by its public name."""

from tessera.core.errors import *  # noqa: F403
from tessera.core.errors import __all__  # noqa: F401
