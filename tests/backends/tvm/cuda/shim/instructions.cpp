// Each instruction of ptx.h as a function of the module, fragments by the formulas of NVIDIA's PTX manual ("Matrix
// Fragments for mma.m16n8k16 with floating point type": the row and column of entry i of a lane's fragment).
#include "ptx.h"
#include <tvm/ffi/container/tensor.h>
using tvm::ffi::TensorView;

static uint32_t pair(const uint16_t* p, int first, int second) { return p[first] | uint32_t(p[second]) << 16; }

static void product(const uint16_t* a, const uint16_t* b, float* c) {
  int group = threadIdx.x >> 2, thread = threadIdx.x % 4;
  auto a_at = [&](int i) {
    int row = (0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8;
    return 16 * row + thread * 2 + (i & 1) + (i >= 4 ? 8 : 0);
  };
  auto b_at = [&](int i) { return 8 * (thread * 2 + (i & 1) + (i >= 2 ? 8 : 0)) + group; };
  auto c_at = [&](int i) { return 8 * (i < 2 ? group : group + 8) + thread * 2 + (i & 1); };
  uint32_t x[4], y[2];
  for (int r = 0; r < 4; ++r) x[r] = pair(a, a_at(2 * r), a_at(2 * r + 1));
  for (int r = 0; r < 2; ++r) y[r] = pair(b, b_at(2 * r), b_at(2 * r + 1));
  float d[4];
  tvm_builtin_ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(d[0], d[1], d[2], d[3], x[0], x[1], x[2], x[3], y[0],
                                                                   y[1], c[c_at(0)], c[c_at(1)], c[c_at(2)], c[c_at(3)]);
  for (int i = 0; i < 4; ++i) c[c_at(i)] = d[i];
}

// Four 8 x 8 matrices one after the other in shared memory; what lane l gets goes to row l of ``to``, register by register.
static void load(const uint16_t* from, uint32_t* to, bool transposed) {
  if (threadIdx.x == 0) std::memcpy(pool_ptr, from, 512);
  __syncthreads();
  uint32_t* r = to + 4 * threadIdx.x;
  uint32_t row = __cvta_generic_to_shared(pool_ptr + 16 * threadIdx.x);
  if (transposed)
    tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(r[0], r[1], r[2], r[3], row);
  else
    tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(r[0], r[1], r[2], r[3], row);
}

// A copy read before its wait, after it, and the number of entries that were asked for.
static void copied(const float* from, float* to, int bytes) {
  uint32_t place = __cvta_generic_to_shared(pool_ptr);
  tvm_builtin_ptx_cp_async_cg_src_size_async_cg_shared_global_16(place, from, bytes);
  tvm_builtin_ptx_cp_async_commit_group_async_commit_group();
  std::memcpy(to, pool_ptr, 16);
  tvm_builtin_ptx_cp_async_wait_group_async_wait_group_0();
  std::memcpy(to + 4, pool_ptr, 16);
}

static void pack(const float* from, uint32_t* to) { tvm_builtin_ptx_cvt_f16x2_f32_rn_f16x2_f32(*to, from[0], from[1]); }

static cudaLaunchConfig_t threads(int count) { return {dim3(1), dim3(count), 1024}; }
static void run_product(TensorView a, TensorView b, TensorView c) {
  auto config = threads(32);
  cudaLaunchKernelEx(&config, product, (const uint16_t*)a.data_ptr(), (const uint16_t*)b.data_ptr(), (float*)c.data_ptr());
}
static void run_load(TensorView from, TensorView to, bool transposed) {
  auto config = threads(32);
  cudaLaunchKernelEx(&config, load, (const uint16_t*)from.data_ptr(), (uint32_t*)to.data_ptr(), transposed);
}
static void run_copied(TensorView from, TensorView to, int bytes) {
  auto config = threads(1);
  cudaLaunchKernelEx(&config, copied, (const float*)from.data_ptr(), (float*)to.data_ptr(), bytes);
}
static void run_pack(TensorView from, TensorView to) {
  auto config = threads(1);
  cudaLaunchKernelEx(&config, pack, (const float*)from.data_ptr(), (uint32_t*)to.data_ptr());
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(product, run_product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load, run_load);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copied, run_copied);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, run_pack);
