"""Derivatives of functions over tensors, as transforms of Graph functions.

Forward mode (`dual`) walks a recorded block with a tangent beside each value, by each op's JVP. Reverse mode
(`linear`) records that walk, runs the part that knows no tangent, and walks the rest backwards by each op's
transpose. Both write ops into the trace that is open, or run them at once, so that they nest and jit.
"""

from tessera.autodiff.custom import autodiff, checkpoint, custom_jvp, custom_vjp, straight_through
from tessera.autodiff.grad import grad, jvp, value_and_grad, vjp
from tessera.autodiff.jacobian import hessian, jacfwd, jacrev
from tessera.autodiff.policies import checkpoint_here
from tessera.autodiff.tape import backward

__all__ = [
    "autodiff",
    "backward",
    "checkpoint",
    "checkpoint_here",
    "custom_jvp",
    "custom_vjp",
    "grad",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "straight_through",
    "value_and_grad",
    "vjp",
]
