// The language and its libraries: cooperative groups, libcu++, structures, recursion, virtual functions, printf.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cstdio>
#include <cuda/std/array>
#include <cuda/std/bit>
#include <cuda/std/complex>
#include <cuda/std/optional>
#include <cuda/std/tuple>

namespace cg = cooperative_groups;

extern "C" __global__ void group_reduce(const float* x, float* out, int n) {
  auto block = cg::this_thread_block();
  auto tile = cg::tiled_partition<16>(block);
  __shared__ float part[64];
  float v = 0;
  for (int i = block.thread_rank(); i < n; i += block.size()) v += x[i];
  v = cg::reduce(tile, v, cg::plus<float>());
  if (tile.thread_rank() == 0) part[tile.meta_group_rank()] = v;
  block.sync();
  if (block.thread_rank() == 0) {
    float s = 0;
    for (int i = 0; i < tile.meta_group_size(); i++) s += part[i];
    out[0] = s;
  }
}

extern "C" __global__ void group_scan(const int* x, int* y, int* z) {
  auto tile = cg::tiled_partition<32>(cg::this_thread_block());
  int i = cg::this_thread_block().thread_rank();
  y[i] = cg::inclusive_scan(tile, x[i]);
  z[i] = cg::exclusive_scan(tile, x[i], cg::greater<int>());
}

// Of the lanes that took the branch one asks for room, and the others get it from there.
extern "C" __global__ void compact(const int* x, int* y, int* count) {
  int i = threadIdx.x;
  if (x[i] > 0) {
    auto group = cg::coalesced_threads();
    int base;
    if (group.thread_rank() == 0) base = atomicAdd(count, group.size());
    base = group.shfl(base, 0);
    y[base + group.thread_rank()] = x[i];
  }
}

extern "C" __global__ void group_copy(const int* x, int* y) {
  __shared__ int s[256];
  auto block = cg::this_thread_block();
  cg::memcpy_async(block, s, x + blockIdx.x * 256, sizeof(int) * 256);
  cg::wait(block);
  y[blockIdx.x * 256 + threadIdx.x] = s[255 - threadIdx.x];
}

extern "C" __global__ void library(const float* x, float* y, int n) {
  int i = threadIdx.x;
  cuda::std::array<float, 4> a{x[i], x[i] * 2, 3, 4};
  float s = 0;
  for (auto v : a) s += v;
  cuda::std::complex<float> c(x[i], 1.5f);
  c = c * c / cuda::std::complex<float>(2, -1);
  auto t = cuda::std::make_tuple(s, c.real(), c.imag());
  cuda::std::optional<int> o;
  if (i & 1) o = i;
  y[i] = cuda::std::get<0>(t) + o.value_or(-7);
  y[n + i] = cuda::std::get<1>(t);
  y[2 * n + i] = cuda::std::get<2>(t);
  y[3 * n + i] = cuda::std::popcount(i * 2654435761u) + cuda::std::countl_zero((unsigned)i) * 100;
}

struct Record {  // no gaps: what is copied there is anything
  char c[8];
  double d;
  short s[8];
  float4 v;
};

extern "C" __global__ void structures(Record a, Record* out, const __grid_constant__ Record b) {
  int i = threadIdx.x;
  out[i] = a;
  out[i].d += b.d + i;
  out[i].v.z = b.v.w;
  out[i].s[i % 3] = b.s[(i + 1) % 3];
}

__device__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
extern "C" __global__ void recursion(int* out) { out[threadIdx.x] = fibonacci(threadIdx.x); }

struct Shape {
  float r;
  virtual __device__ float area() const = 0;
};
struct Square : Shape {
  __device__ float area() const override { return r * r; }
};
struct Round : Shape {
  __device__ float area() const override { return 3 * r * r; }
};
extern "C" __global__ void virtuals(float* out) {
  Square a;
  Round b;
  a.r = b.r = threadIdx.x;
  Shape* p = threadIdx.x & 1 ? (Shape*)&a : (Shape*)&b;
  out[threadIdx.x] = p->area();
}

__device__ int counter;
__constant__ int table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__device__ float2 pairs[4] = {{1, 2}, {3, 4}};
__device__ const char* names[2] = {"ab", "cd"};
extern "C" __global__ void globals(int* out, float* f, char* s) {
  int i = threadIdx.x;
  atomicAdd(&counter, table[i & 7]);
  __syncthreads();
  out[i] = *(volatile int*)&counter;
  f[i] = pairs[i & 3].y;
  s[i] = names[i & 1][i >> 1 & 1];
}

extern "C" __global__ void wide(const unsigned long long* x, unsigned long long* y) {
  typedef unsigned __int128 wide_t;
  int i = threadIdx.x;
  wide_t a = (wide_t)x[2 * i] << 64 | x[2 * i + 1];
  wide_t b = a * (a >> 3) + a / 12345;
  b ^= a % 987654321987ull;
  y[2 * i] = b >> 64;
  y[2 * i + 1] = b;
}

extern "C" __global__ void as_needed(int* out, int n) {
  int* p = (int*)alloca(4 * (n + threadIdx.x));
  for (int i = 0; i < n + threadIdx.x; i++) p[i] = i * 3;
  int s = 0;
  for (int i = 0; i < n + threadIdx.x; i++) s += p[i];
  out[threadIdx.x] = s;
}

extern "C" __global__ void prints(int a, long long b, double d) {
  printf("[%d|%5d|%-5d|%05d|%+d|% d|%i]", a, a, a, a, a, a, a);
  printf("[%u|%o|%#o|%x|%X|%#x|%08X]", a, a, a, a, a, a, a);
  printf("[%lld|%llu|%llx|%ld|%hd|%hhd|%zu]", b, b, b, (long)b, (short)a, (char)a, (size_t)b);
  printf("[%f|%.3f|%10.2f|%-10.2f|%e|%E|%g|%G|%a|%A]", d, d, d, d, d, d, d, d, d, d);
  printf("[%c|%s|%10s|%-10s|%.2s|%%|%p|%5c|%-5c]", 'q', "text", "text", "text", "text", (void*)0x1234, 'a', 'b');
  printf("[%*d|%.*f|%#g|%+.2e|%f|%f]\n", 8, a, 2, d, d, d, d / (a - a), -d / (a - a));
}
