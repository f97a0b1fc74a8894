// Stand-ins for the memory of a device: the process's own, filled with NaN, with a fence behind each piece.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr {
  cudaDevAttrMemoryPoolsSupported,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold };
using cudaMemPool_t = void*;

namespace shim {

constexpr size_t ahead = 256, fence = 256;
static int64_t pieces = 0;    // how often memory was asked for
static int64_t held = 0;      // how many pieces there are
static int64_t trampled = 0;  // how many had a write behind their end
static int64_t limit = 0;     // bytes that a piece may have, 0 for any number

inline cudaError_t allocate(void** to, size_t bytes) {
  if (limit && int64_t(bytes) > limit) return cudaErrorMemoryAllocation;
  size_t total = ahead + bytes + fence;
  char* raw = static_cast<char*>(std::aligned_alloc(ahead, (total + ahead - 1) / ahead * ahead));
  std::memcpy(raw, &bytes, sizeof bytes);
  std::memset(raw + ahead, 0xff, bytes + fence);
  *to = raw + ahead;
  ++pieces, ++held;
  return cudaSuccess;
}

inline cudaError_t release(void* piece) {
  char* raw = static_cast<char*>(piece) - ahead;
  size_t bytes;
  std::memcpy(&bytes, raw, sizeof bytes);
  for (size_t k = 0; k < fence; ++k)
    if (static_cast<unsigned char>(raw[ahead + bytes + k]) != 0xff) {
      ++trampled;
      break;
    }
  std::memset(raw + ahead, 0xff, bytes);
  std::free(raw);
  --held;
  return cudaSuccess;
}

}  // namespace shim

static inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
static inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  *value = what == cudaDevAttrComputeCapabilityMajor ? 9 : what == cudaDevAttrMemoryPoolsSupported;
  return cudaSuccess;
}
static inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return *pool = nullptr, cudaSuccess; }
static inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
static inline cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  return *left = *total = size_t(shim::limit), cudaSuccess;
}
static inline cudaError_t cudaMalloc(void** to, size_t bytes) { return shim::allocate(to, bytes); }
static inline cudaError_t cudaMallocAsync(void** to, size_t bytes, cudaStream_t) { return shim::allocate(to, bytes); }
static inline cudaError_t cudaFree(void* piece) { return shim::release(piece); }
static inline cudaError_t cudaFreeAsync(void* piece, cudaStream_t) { return shim::release(piece); }
static inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
static inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                            size_t height, cudaMemcpyKind, cudaStream_t) {
  if (width > to_pitch || width > from_pitch) throw std::runtime_error("rows of a copy overlap");
  for (size_t row = 0; row < height; ++row)
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

#define ATTNC_DEVICE_TYPE kDLCPU
