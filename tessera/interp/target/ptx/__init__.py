"""PTX emulator: parses PTX text and runs all threads side by side on NumPy arrays.

Results equal an H200's bit for bit. Where the ISA leaves a result open, the emulator has what was measured there: NaN
payloads, quotient and remainder of a division by zero, bit fields beyond their registers, and the NaN that fills the
out-of-bounds elements of a box. What ends a kernel on an H200 (a box of a tensor map that starts inside 16 bytes, or is
stored before 0) is an error here. tests/interp/target/ptx/compare_on_gpu.py replays every launch of the tests on a GPU
and reports differences. It excuses:

- approximations (ex2, lg2, sin, cos, tanh, rcp, rsqrt, sqrt and div with `.approx` or `.full`): rounded once here,
  on a GPU within the error that the ISA documents; results computed from them inherit it (expf, rsqrt of doubles).
  Coarse doubles (`.approx.ftz.f64`) agree in 20 bits;
- atomics: lanes are serialised in lane order here, in any order on a GPU, which shows in the values that each thread
  reads and in float sums;
- tensor cores on floats: exact products summed and rounded here, on a GPU in an unspecified order and width;
- a product without a rounding mode before a sum: ptxas may fuse the two, which rounds once less;
- the 128 bytes of a tensor map that a kernel makes: the hardware's layout is not documented;
- sizes of the system's shared memory, clocks, and numbers of multiprocessors;
- NaN in `cvt.rna.satfinite.tf32.f32`, which is a NaN here and depends on ptxas's expansion on a GPU.
- linear filters of textures: products are summed in double precision here, on a GPU in an unspecified one; normalized
  coordinates within rounding of a texel's edge.

An unsupported instruction is an error at its line: conversions of formats of 4 and 6 bits, textures with levels, cubes,
multiple samples or depth comparison, and the instructions of GPUs after sm_90 (tcgen05). A multimem address is the
address of the one copy that this device has. The sanitizer does not track bulk copies in global memory.
"""

from tessera.interp.target.ptx.isa.tensor_map import ImageTensorMap, TensorMap
from tessera.interp.target.ptx.isa.texture import SamplerObject, SurfaceObject, TextureObject
from tessera.interp.target.ptx.machine.simt import PtxObserver
from tessera.interp.target.ptx.module import DevicePointer, PtxFaultSite, PtxModule

__all__ = [
    "DevicePointer",
    "ImageTensorMap",
    "PtxFaultSite",
    "PtxModule",
    "PtxObserver",
    "SamplerObject",
    "SurfaceObject",
    "TensorMap",
    "TextureObject",
]
