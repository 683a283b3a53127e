"""An interpreter of PTX text on NumPy: parses on its own, runs all threads side by side.

Its results are an H200's, bit for bit: NaN payloads, the quotient and the remainder of a division by zero, bit fields
beyond their registers and the NaN that fills a box's outside are as measured there where the ISA leaves them open, and
what ends a kernel there (a box of a tensor map that starts inside 16 bytes, or is stored before 0) is an error here.
tests/interp/target/ptx/compare_on_gpu.py replays every launch of the tests on a GPU and says what differs. It excuses:

- approximations (ex2, lg2, sin, cos, tanh, rcp, rsqrt, sqrt and div with `.approx` or `.full`): rounded once here,
  there within the error that the ISA documents; what is computed from them inherits it (expf, rsqrt of doubles).
  Coarse doubles (`.approx.ftz.f64`) agree in 20 bits;
- atomics: threads take their turns in order here, in any order there, which shows in what each finds and in float sums;
- tensor cores on floats: exact products summed and rounded here, there in an order and a width of their own;
- a product without a rounding mode before a sum: ptxas may fuse the two, which rounds once less;
- the 128 bytes of a tensor map that a kernel makes: the hardware's layout is not documented;
- sizes of what the system keeps for itself in shared memory, clocks, and numbers of multiprocessors;
- NaN in `cvt.rna.satfinite.tf32.f32`, which is one here and whatever ptxas's expansion gives there.

What it does not know it names at its line: `mma` of 1 and 4 bits and of sparse matrices, conversions of formats of 4
and 6 bits, tensor maps of images (im2col), video instructions, textures, surfaces, `multimem`, and what only GPUs after
sm_90 have (tcgen05). The debug mode does not follow bulk copies in global memory.
"""

from tessera.interp.target.ptx.isa.tensor_map import TensorMap
from tessera.interp.target.ptx.module import PtxModule

__all__ = ["PtxModule", "TensorMap"]
