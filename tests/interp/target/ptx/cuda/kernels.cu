// Small kernels of everyday shapes: what nvcc makes of them is the interpreter's corpus.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}

extern "C" __global__ void reduce(const float* x, float* out, int n) {
  __shared__ float part[32];
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
  for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(~0u, sum, d);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0;
    for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(~0u, sum, d);
    if (threadIdx.x == 0) atomicAdd(out, sum);
  }
}

extern "C" __global__ void scan(const int* x, int* y) {
  extern __shared__ int t[];
  int i = threadIdx.x;
  t[i] = x[blockIdx.x * blockDim.x + i];
  __syncthreads();
  for (int d = 1; d < blockDim.x; d *= 2) {
    int v = i >= d ? t[i - d] : 0;
    __syncthreads();
    t[i] += v;
    __syncthreads();
  }
  y[blockIdx.x * blockDim.x + i] = t[i];
}

extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[16][17];
  int c = blockIdx.x * 16 + threadIdx.x, r = blockIdx.y * 16 + threadIdx.y;
  if (r < rows && c < columns) tile[threadIdx.y][threadIdx.x] = x[r * columns + c];
  __syncthreads();
  c = blockIdx.y * 16 + threadIdx.x, r = blockIdx.x * 16 + threadIdx.y;
  if (r < columns && c < rows) y[r * rows + c] = tile[threadIdx.x][threadIdx.y];
}

extern "C" __global__ void histogram(const unsigned char* x, unsigned* counts, int n) {
  __shared__ unsigned local[256];
  local[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) atomicAdd(&local[x[i]], 1);
  __syncthreads();
  atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}

extern "C" __global__ void stencil(const double* x, double* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0 || i >= n - 1) return;
  y[i] = 0.25 * x[i - 1] + 0.5 * x[i] + 0.25 * x[i + 1];
}

extern "C" __global__ void bitonic(int* x) {
  __shared__ int t[256];
  int i = threadIdx.x;
  t[i] = x[blockIdx.x * 256 + i];
  for (int k = 2; k <= 256; k *= 2)
    for (int j = k / 2; j > 0; j /= 2) {
      __syncthreads();
      int other = i ^ j;
      if (other > i) {
        bool up = (i & k) == 0;
        if ((t[i] > t[other]) == up) { int v = t[i]; t[i] = t[other]; t[other] = v; }
      }
    }
  __syncthreads();
  x[blockIdx.x * 256 + i] = t[i];
}

extern "C" __global__ void gemm_naive(const float* a, const float* b, float* c, int m, int n, int k) {
  int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= m || column >= n) return;
  float sum = 0;
  for (int p = 0; p < k; p++) sum += a[row * k + p] * b[p * n + column];
  c[row * n + column] = sum;
}

extern "C" __global__ void gemm_tiled(const float* a, const float* b, float* c, int n) {
  __shared__ float ta[16][16], tb[16][16];
  int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  float sum = 0;
  for (int p = 0; p < n; p += 16) {
    ta[threadIdx.y][threadIdx.x] = a[row * n + p + threadIdx.x];
    tb[threadIdx.y][threadIdx.x] = b[(p + threadIdx.y) * n + column];
    __syncthreads();
    for (int q = 0; q < 16; q++) sum += ta[threadIdx.y][q] * tb[q][threadIdx.x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}

extern "C" __global__ void half_math(const __half* x, const __half* y, __half* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = __hadd(__hmul(x[i], y[i]), __hsub(x[i], y[i]));
}

extern "C" __global__ void half_pairs(const __half2* x, const __half2* y, __half2* z) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  z[i] = __hfma2(x[i], y[i], __hmax2(x[i], y[i]));
}

extern "C" __global__ void bfloat_math(const __nv_bfloat16* x, const float* y, __nv_bfloat16* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = __float2bfloat16(__bfloat162float(x[i]) * y[i]);
}

extern "C" __global__ void collatz(const unsigned* x, unsigned* steps, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned v = x[i], count = 0;
  while (v != 1) { v = v % 2 ? 3 * v + 1 : v / 2; count++; }
  steps[i] = count;
}

__noinline__ __device__ long long mix(long long a, int b) { return a * b + (a >> 3) % (b | 1); }

extern "C" __global__ void calls(const long long* x, long long* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = mix(x[i], i) - mix(i, 7);
}

__constant__ int weights[8] = {1, -2, 3, -4, 5, -6, 7, -8};

extern "C" __global__ void local_table(const int* x, int* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, table[8];
  for (int k = 0; k < 8; k++) table[(k * x[i]) & 7] = weights[k] * i + k;
  y[i] = i < n ? table[x[i] & 7 & n] : 0;
}

extern "C" __global__ void votes(const int* x, unsigned* out) {
  int i = threadIdx.x;
  unsigned m = __ballot_sync(~0u, x[i] > 0);
  unsigned same = __match_any_sync(~0u, x[i]);
  int sum = __reduce_add_sync(~0u, x[i]);
  out[i] = m ^ same ^ (unsigned)sum ^ (unsigned)__any_sync(~0u, x[i] == 3) ^ __popc(x[i]) ^ __brev(i) ^ __clz(i) ^ __byte_perm(i, x[i], 0x2531);
}
