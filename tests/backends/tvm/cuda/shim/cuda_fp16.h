// IEEE half precision as the compiler's own type; arithmetic on it is not needed, conversions round to nearest even.
#pragma once
#include "cuda_runtime.h"

struct half {
  _Float16 value;
  half() = default;
  half(float x) : value(_Float16(x)) {}
  operator float() const { return float(value); }
};
using __half = half;
struct half2 {
  half x, y;
};
using __half2 = half2;
static inline bool __hgt(half a, half b) { return float(a) > float(b); }
static inline bool __hlt(half a, half b) { return float(a) < float(b); }
static inline float __half2float(half x) { return float(x); }
static inline half __float2half(float x) { return half(x); }
static inline half __float2half_rn(float x) { return half(x); }
