// bfloat16: the upper half of a float; conversions round to nearest even.
#pragma once
#include "cuda_runtime.h"

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    bits = x != x ? 0x7fff : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
};
using __nv_bfloat16 = nv_bfloat16;
struct nv_bfloat162 {
  nv_bfloat16 x, y;
  nv_bfloat162() = default;
  nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) : x(x), y(y) {}
};
using __nv_bfloat162 = nv_bfloat162;
static inline bool __hgt(nv_bfloat16 a, nv_bfloat16 b) { return float(a) > float(b); }
static inline bool __hlt(nv_bfloat16 a, nv_bfloat16 b) { return float(a) < float(b); }
static inline float __bfloat162float(nv_bfloat16 x) { return float(x); }
static inline nv_bfloat16 __float2bfloat16(float x) { return nv_bfloat16(x); }
static inline nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }
