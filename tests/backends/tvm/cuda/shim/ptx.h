// The PTX helpers of the exported file in C++, by the layouts of NVIDIA's PTX manual ("Matrix Fragments for
// mma.m16n8k16", "ldmatrix", "cp.async"), and the order of threads as a function of the module.
#pragma once
#include <tvm/ffi/function.h>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

static void shim_set_order(bool falling) { shim::falling = falling; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shim_order, shim_set_order);
static int64_t shim_memory_count(int64_t which) { return which == 0 ? shim::pieces : which == 1 ? shim::held : shim::trampled; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shim_memory, shim_memory_count);
static void shim_set_limit(int64_t bytes) { shim::limit = bytes; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shim_limit, shim_set_limit);

// Shared addresses are 32-bit offsets.
static inline uint32_t __cvta_generic_to_shared(const void* p) {
  auto at = static_cast<const unsigned char*>(p) - pool_ptr;
  if (at < 0 || at >= (long)sizeof(pool_ptr)) shim::fail("an address that is not in shared memory");
  return uint32_t(at);
}

// -- cp.async: what is copied appears at the wait, not before; until then the place holds NaN ---------------------------

static inline void tvm_builtin_ptx_cp_async_cg_src_size_async_cg_shared_global_16(uint32_t to, const void* from,
                                                                                  uint32_t bytes) {
  if (to % 16 || uintptr_t(from) % 16) shim::fail("cp.async of 16 bytes at an address that is no multiple of 16");
  std::memset(pool_ptr + to, 0xff, 16);
  shim::self().open.push_back({pool_ptr + to, from, bytes, 16 - bytes});
}
static inline void tvm_builtin_ptx_cp_async_commit_group_async_commit_group() {
  auto& me = shim::self();
  me.groups.push_back(std::move(me.open));
  me.open.clear();
}
static inline void shim_wait(size_t most) {  // until so many groups, the newest, are still on their way
  auto& me = shim::self();
  for (; me.groups.size() > most; me.groups.pop_front())
    for (auto& copy : me.groups.front()) {
      std::memcpy(copy.to, copy.from, copy.bytes);
      std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, copy.zeros);
    }
}
static inline void tvm_builtin_ptx_cp_async_wait_group_async_wait_group_0() { shim_wait(0); }
static inline void tvm_builtin_ptx_cp_async_wait_group_async_wait_group_1() { shim_wait(1); }

// -- ldmatrix: lane 8k + r gives the address of row r of matrix k; lane 4r + c gets columns 2c and 2c + 1 of row r ------

namespace shim {
inline void load_matrices(uint32_t* r[4], uint32_t address, bool transposed) {
  if (address % 16) fail("ldmatrix of a row that does not start at a multiple of 16 bytes");
  const uint32_t* rows = Slots<uint32_t>::exchange(address);
  unsigned lane = threadIdx.x & 31;
  for (int k = 0; k < 4; ++k) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      unsigned row = lane / 4, column = lane % 4 * 2 + e;
      if (transposed) std::swap(row, column);
      std::memcpy(&pair[e], pool_ptr + rows[8 * k + row] + 2 * column, 2);
    }
    std::memcpy(r[k], pair, 4);
  }
}

// -- mma.m16n8k16: d = a · b + c. With g = lane / 4 and t = lane % 4: a0 is row g, columns 2t, 2t + 1; a1 row g + 8; a2
// and a3 the same eight columns further; b0 is rows 2t, 2t + 1 of column g, b1 eight rows further; c0, c1 are row g,
// columns 2t, 2t + 1, and c2, c3 row g + 8.

template <typename T>
float entry(uint32_t word, int which) {
  uint16_t bits = uint16_t(word >> (16 * which));
  T value;
  std::memcpy(&value, &bits, 2);
  return float(value);
}

struct Operands {
  uint32_t a[4], b[2];
};

template <typename T>
void multiply(float* d[4], const Operands& mine, const float c[4]) {
  const Operands* lanes = Slots<Operands>::exchange(mine);
  unsigned g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
  for (unsigned e = 0; e < 4; ++e) {
    unsigned row = g + e / 2 * 8, column = 2 * t + e % 2;
    float sum = c[e];
    for (unsigned k = 0; k < 16; ++k) {
      const Operands& left = lanes[row % 8 * 4 + k % 8 / 2];
      const Operands& right = lanes[column * 4 + k % 8 / 2];
      sum += entry<T>(left.a[row / 8 + k / 8 * 2], k % 2) * entry<T>(right.b[k / 8], k % 2);
    }
    *d[e] = sum;
  }
}
}  // namespace shim

#define SHIM_LDMATRIX(name, transposed)                                                               \
  static inline void name(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) { \
    uint32_t* r[4] = {&r0, &r1, &r2, &r3};                                                            \
    shim::load_matrices(r, address, transposed);                                                      \
  }
SHIM_LDMATRIX(tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16, false)
SHIM_LDMATRIX(tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16, true)

#define SHIM_MMA(name, type)                                                                                        \
  static inline void name(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,        \
                          uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {          \
    float *d[4] = {&d0, &d1, &d2, &d3}, c[4] = {c0, c1, c2, c3};                                                    \
    shim::multiply<type>(d, {{a0, a1, a2, a3}, {b0, b1}}, c);                                                       \
  }
SHIM_MMA(tvm_builtin_ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, half)
SHIM_MMA(tvm_builtin_ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, nv_bfloat16)

// cvt.rn.…x2.f32 d, a, b: a in the upper half of d, b in the lower.
#define SHIM_PACK(name, type)                                \
  static inline void name(uint32_t& d, float a, float b) {   \
    type pair[2] = {type(b), type(a)};                       \
    std::memcpy(&d, pair, 4);                                \
  }
SHIM_PACK(tvm_builtin_ptx_cvt_f16x2_f32_rn_f16x2_f32, half)
SHIM_PACK(tvm_builtin_ptx_cvt_bf16x2_f32_rn_bf16x2_f32, nv_bfloat16)

static inline void tvm_builtin_ptx_ex2_approx_ftz_f32(float& d, float a) { d = a < -126.0f ? 0.0f : exp2f(a); }
