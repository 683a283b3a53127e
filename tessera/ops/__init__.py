"""Every op: tensor ops with their rules, the dialects of the lower levels, and the user-facing API of Tensor."""

import tessera.ir.builder  # gives composites their type rule  # noqa: F401
from tessera.ops.api import creation, methods  # `methods` gives ops their calls  # noqa: F401
from tessera.ops.dialects import control_flow, host, inline_asm, mbarrier, mesh, schedule, tile  # noqa: F401
from tessera.ops.tensor import (  # noqa: F401
    attention,
    basic,
    bits,
    collectives,
    contractions,
    decompositions,
    elementwise,
    nn,
    random,
    rearrange,
    reduce,
    running_extremes,
    scalar_functions,
    scatter,
    shape,
    sorting,
)

methods.attach_methods()
