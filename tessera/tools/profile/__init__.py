"""`ts.profile`: the time of each kernel under the user's lines, its share of the roofline, bottleneck and advice.

>>> import tessera as ts
>>> @ts.profile
... def model(x):
...     return ts.jit(lambda x: ts.softmax(x @ x))(x)
>>> _ = model(ts.ones((4, 4)))
>>> [k.name for k in ts.profile.latest().reports()[0].kernels]
['dot', 'softmax']
"""

import sys
from types import ModuleType
from typing import Any

from tessera.tools.profile.report import KernelRow, ProfileReport
from tessera.tools.profile.session import ProfileSession, latest, profile_function, profile_program, report
from tessera.tools.profile.session import profile as _profile

__all__ = ["KernelRow", "ProfileReport", "ProfileSession", "latest", "profile_function", "profile_program", "report"]


class _Profile(ModuleType):
    """The module, which also decorates functions: `@ts.profile`."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Profile a function, or make a session."""
        return _profile(*args, **named)


sys.modules[__name__].__class__ = _Profile
