"""Automatic differentiation: forward mode by JVP rules, reverse mode by linearisation and transposition.

Forward mode computes a tangent with each value of a recorded block. Reverse mode records that computation, evaluates
the part that does not depend on tangents, and transposes the linear rest (Radul et al. 2022). Both record ops in the
open trace, or run them at once, so that they nest and can be jitted.
"""

from tessera.transforms.autodiff import attention
from tessera.transforms.autodiff.call_primitives import checkpoint_here
from tessera.transforms.autodiff.custom_rules import autodiff, checkpoint, custom_jvp, custom_vjp, straight_through
from tessera.transforms.autodiff.gradients import grad, hessian, jacfwd, jacrev, jvp, value_and_grad, vjp

assert attention  # its rule is in the table

__all__ = [
    "autodiff",
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
