// What the compiler's own library and the language's rarer parts turn into.
#include <cassert>
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void functions(const float* x, float* out, int n) {
  int i = threadIdx.x;
  float v = x[i];
  out[i] = expf(v);
  out[n + i] = logf(v);
  out[2 * n + i] = sinf(v);
  out[3 * n + i] = cosf(v);
  out[4 * n + i] = tanhf(v);
  out[5 * n + i] = erff(v);
  out[6 * n + i] = powf(v, 1.7f);
  out[7 * n + i] = v / 3.7f;
  out[8 * n + i] = sqrtf(v);
  out[9 * n + i] = cbrtf(v);
  out[10 * n + i] = atan2f(v, 2.0f);
  out[11 * n + i] = fmodf(v, 0.7f);
}

extern "C" __global__ void doubles(const double* x, double* out, int n) {
  int i = threadIdx.x;
  double v = x[i];
  out[i] = exp(v);
  out[n + i] = log(v);
  out[2 * n + i] = sin(v);
  out[3 * n + i] = v / 3.7;
  out[4 * n + i] = sqrt(v);
  out[5 * n + i] = rsqrt(v);
  out[6 * n + i] = pow(v, 1.7);
  out[7 * n + i] = erf(v);
}

extern "C" __global__ void fast(const float* x, float* out, int n) {
  int i = threadIdx.x;
  float v = x[i];
  out[i] = __expf(v);
  out[n + i] = __logf(v);
  out[2 * n + i] = __sinf(v);
  out[3 * n + i] = __fdividef(v, 3.7f);
  out[4 * n + i] = __saturatef(v);
  out[5 * n + i] = rsqrtf(v);
}

extern "C" __global__ void integers(const int* x, const int* y, int* out, int n) {
  int i = threadIdx.x, a = x[i], b = y[i];
  out[i] = __mulhi(a, b);
  out[n + i] = __funnelshift_l(a, b, a & 31);
  out[2 * n + i] = __dp4a(a, b, 5);
  out[3 * n + i] = __sad(a, b, 9u);
  out[4 * n + i] = __ffs(a) + 100 * __popcll((long long)a * b);
  out[5 * n + i] = (int)((long long)a * b / ((b >> 20) | 1));
  out[6 * n + i] = (unsigned)a % 1000u;
  out[7 * n + i] = __vadd4(a, b) ^ __vmaxs2(a, b);
}

// A dense switch becomes an indexed branch.
extern "C" __global__ void jumps(const int* x, int* out) {
  int i = threadIdx.x, v = x[i], r = v;
  switch (v) {
    case 0: r = v * 17 + 1; break;
    case 1: r = v ^ 0x55; break;
    case 2: for (int k = 0; k < i; k++) r = r * 3 + k; break;
    case 3: r = -v; break;
    case 4: r = __popc(i) << 4; break;
    case 5: r = i / 3; break;
    case 6: r = 1 << (i & 7); break;
    case 7: if (i & 1) r = 99;
    case 8: r += 5; break;
    default: r = 1000 + i;
  }
  out[i] = r;
}

__device__ __noinline__ int twice(int v) { return 2 * v; }
__device__ __noinline__ int squared(int v) { return v * v; }
__device__ __noinline__ int negated(int v) { return -v; }
typedef int (*Function)(int);
__device__ Function table[3] = {twice, squared, negated};

extern "C" __global__ void pointers(const int* which, int* out) {
  int i = threadIdx.x;
  out[i] = table[which[i]](i + 1);
}

extern "C" __global__ void messages(int limit) {
  printf("thread %d of %u: %5.2f %s %lld %c%%\n", threadIdx.x, blockDim.x, threadIdx.x * 1.5, "text", 1ll << 40, 'x');
  assert((int)threadIdx.x < limit);
}

extern "C" __global__ void atomics(const float* x, float* largest, double* sum, unsigned* count, unsigned long long* bits, half2* pair) {
  int i = threadIdx.x;
  int* place = (int*)largest;
  int old = *place, seen;
  do {
    seen = old;
    old = atomicCAS(place, seen, __float_as_int(fmaxf(x[i], __int_as_float(seen))));
  } while (old != seen);
  atomicAdd(sum, (double)x[i]);
  atomicInc(count, 99);
  atomicDec(count + 1, 10);
  atomicExch(count + 2, 7);
  atomicSub(count + 3, i);
  atomicOr(bits, 1ull << (i & 63));
  atomicMin((int*)count + 4, -i);
  atomicMax(count + 5, i);
  atomicAdd(pair, __floats2half2_rn(1, 0.5f));
}

// Barriers that count votes.
extern "C" __global__ void signals(const int* x, int* out) {
  int i = threadIdx.x;
  int many = __syncthreads_count(x[i] > 0);
  int all = __syncthreads_and(x[i] > -100), some = __syncthreads_or(x[i] == 5);
  out[i] = many * 4 + (all ? 2 : 0) + (some ? 1 : 0);
}

// Each warp sums in rounds with neighbours; warps have different numbers of rounds.
extern "C" __global__ void uneven(const int* x, int* out) {
  int i = threadIdx.x, v = x[i], rounds = i / 32 + 1;
  for (int r = 0; r < rounds; r++) v += __shfl_xor_sync(~0u, v, 1 << r);
  if (i % 3 == 0) v = __reduce_max_sync(__activemask(), v);
  unsigned half_of_warp = __match_any_sync(~0u, i & 1);
  out[i] = v + __shfl_sync(half_of_warp, v, i & 1);
}
