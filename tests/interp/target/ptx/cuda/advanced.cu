// Kernels that use tensor cores, asynchronous copies and barriers in shared memory.
#include <cuda/barrier>
#include <cuda/ptx>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>

namespace wmma = nvcuda::wmma;

// One warp computes a tile of 16 by 16.
extern "C" __global__ void wmma_gemm(const half* a, const half* b, float* c, int m, int n, int k) {
  int row = blockIdx.y * 16, column = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 16;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fill_fragment(sum, 0.0f);
  for (int p = 0; p < k; p += 16) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::load_matrix_sync(fa, a + row * k + p, k);
    wmma::load_matrix_sync(fb, b + column * k + p, k);
    wmma::mma_sync(sum, fa, fb, sum);
  }
  for (int i = 0; i < sum.num_elements; i++) sum.x[i] *= 2;
  wmma::store_matrix_sync(c + row * n + column, sum, n, wmma::mem_row_major);
}

extern "C" __global__ void wmma_bytes(const signed char* a, const signed char* b, int* c) {
  wmma::fragment<wmma::matrix_a, 32, 8, 16, signed char, wmma::col_major> fa;
  wmma::fragment<wmma::matrix_b, 32, 8, 16, signed char, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 32, 8, 16, int> sum;
  wmma::load_matrix_sync(fa, a, 32);
  wmma::load_matrix_sync(fb, b, 8);
  wmma::fill_fragment(sum, 7);
  wmma::mma_sync(sum, fa, fb, sum);
  wmma::store_matrix_sync(c, sum, 32, wmma::mem_col_major);
}

// Double-buffered copies of each thread for itself.
extern "C" __global__ void pipelined_scale(const float4* x, float4* y, int tiles) {
  __shared__ float4 stage[2][64];
  int t = threadIdx.x, first = blockIdx.x * tiles * 64;
  __pipeline_memcpy_async(&stage[0][t], &x[first + t], 16);
  __pipeline_commit();
  for (int i = 0; i < tiles; i++) {
    if (i + 1 < tiles) __pipeline_memcpy_async(&stage[(i + 1) & 1][t], &x[first + (i + 1) * 64 + t], 16);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    float4 v = stage[i & 1][63 - t];
    y[first + i * 64 + t] = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w);
    __syncthreads();
  }
}

// A warp fills a ring of stages, the others empty it.
extern "C" __global__ void specialised_copy(const int* x, int* y, int tiles) {
  constexpr int stages = 3, width = 96;
  __shared__ int ring[stages][width];
  __shared__ cuda::barrier<cuda::thread_scope_block> full[stages], empty[stages];
  if (threadIdx.x == 0)
    for (int s = 0; s < stages; s++) { init(&full[s], 32 + width); init(&empty[s], 32 + width); }
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int i = 0; i < tiles; i++) {
      empty[i % stages].arrive_and_wait();
      for (int k = threadIdx.x; k < width; k += 32) ring[i % stages][k] = x[(blockIdx.x * tiles + i) * width + k];
      (void)full[i % stages].arrive();
    }
  } else {
    int t = threadIdx.x - 32;
    for (int s = 0; s < stages; s++) (void)empty[s].arrive();
    for (int i = 0; i < tiles; i++) {
      full[i % stages].arrive_and_wait();
      y[(blockIdx.x * tiles + i) * width + t] = ring[i % stages][width - 1 - t] + i;
      (void)empty[i % stages].arrive();
    }
  }
}

#if __CUDA_ARCH__ >= 900
#include <cooperative_groups.h>

// Each CTA of a cluster adds its neighbour's numbers to its own.
extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_exchange(const int* x, int* y) {
  __shared__ int own[64];
  auto cluster = cooperative_groups::this_cluster();
  int i = blockIdx.x * 64 + threadIdx.x;
  own[threadIdx.x] = x[i];
  cluster.sync();
  int* other = cluster.map_shared_rank(own, cluster.block_rank() ^ 1);
  y[i] = own[threadIdx.x] + 1000 * other[63 - threadIdx.x];
  cluster.sync();
}

// A bulk copy in, counted by a barrier, and one out.
extern "C" __global__ void bulk_reverse(const int* x, int* y) {
  __shared__ alignas(128) int in[256];
  __shared__ alignas(128) int out[256];
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  if (threadIdx.x == 0) init(&bar, blockDim.x);
  __syncthreads();
  cuda::barrier<cuda::thread_scope_block>::arrival_token token;
  if (threadIdx.x == 0) {
    cuda::device::memcpy_async_tx(in, x + blockIdx.x * 256, cuda::aligned_size_t<16>(sizeof in), bar);
    token = cuda::device::barrier_arrive_tx(bar, 1, sizeof in);
  } else {
    token = bar.arrive();
  }
  bar.wait(std::move(token));
  out[threadIdx.x] = in[255 - threadIdx.x] * 3;
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::ptx::cp_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared, y + blockIdx.x * 256, out, sizeof out);
    cuda::ptx::cp_async_bulk_commit_group();
    cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
  }
}
#endif
