// Stand-ins for what the exported file and tvm-ffi's headers use of the CUDA runtime.
#pragma once
#include <math.h>

#include <algorithm>
#include <limits>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define CUDART_INF_F std::numeric_limits<float>::infinity()
#define CUDART_INF std::numeric_limits<double>::infinity()
#define CUDART_NAN std::numeric_limits<double>::quiet_NaN()
#define CUDART_NAN_F std::numeric_limits<float>::quiet_NaN()

enum cudaError_t { cudaSuccess, cudaErrorCudartUnloading, cudaErrorMemoryAllocation, cudaErrorNoDevice };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = void*;
#include "memory.h"
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

static inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
static inline const char* cudaGetErrorName(cudaError_t) { return "none"; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

static size_t shim_shared_limit = 48 << 10;  // what a launch may have unless asked for more
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, size_t bytes) {
  return shim_shared_limit = std::max(shim_shared_limit, bytes), cudaSuccess;
}
template <typename... Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Params... args) {
  if (config->dynamicSmemBytes > shim_shared_limit) throw std::runtime_error("more shared memory than was asked for");
  shim::body = [=] { kernel(args...); };
  shim::run_grid(config->gridDim, config->blockDim, config->dynamicSmemBytes);
  return cudaSuccess;
}

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) short4 {
  short x, y, z, w;
};
struct alignas(4) short2 {
  short x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
struct alignas(4) ushort2 {
  unsigned short x, y;
};
struct alignas(2) uchar2 {
  unsigned char x, y;
};
struct alignas(2) char2 {
  signed char x, y;
};
struct alignas(16) longlong2 {
  int64_t x, y;
};
struct alignas(16) ulonglong2 {
  uint64_t x, y;
};
struct alignas(16) double2 {
  double x, y;
};
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline double max(double a, double b) { return fmax(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline float min(float a, float b) { return fminf(a, b); }
