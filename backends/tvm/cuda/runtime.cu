// What a program needs of the CUDA runtime beside its kernels: memory, copies, the device. The functions work on the
// current stream, as apache-tvm-ffi keeps it for each device, and raise what the runtime says.
#include <cstdint>
#include <vector>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#ifndef ATTNC_DEVICE_TYPE
#define ATTNC_DEVICE_TYPE kDLCUDA
#endif

namespace attnc {

namespace ffi = tvm::ffi;

static void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  TVM_FFI_THROW(RuntimeError) << "CUDA: " << what << ": " << cudaGetErrorString(error);
}

static int current_device() {
  int device;
  check(cudaGetDevice(&device), "which device");
  return device;
}

static cudaStream_t current_stream(int device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(ATTNC_DEVICE_TYPE, device));
}

// Whether the device gives memory in the order of a stream; its pool then keeps what is freed for the next call.
static bool has_pool(int device) {
  static int known[64] = {};
  if (device >= 64) return false;
  if (known[device] == 0) {
    int supported = 0;
    check(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device), "memory pools");
    cudaMemPool_t pool;
    uint64_t all = UINT64_MAX;
    if (supported) {
      check(cudaDeviceGetDefaultMemPool(&pool, device), "the memory pool");
      check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all), "the memory pool");
    }
    known[device] = supported ? 1 : 2;
  }
  return known[device] == 1;
}

// Memory of a tensor. It is freed in the order of the stream on which it was made.
struct Memory {
  cudaStream_t stream = nullptr;
  bool pooled = false;

  void AllocData(DLTensor* tensor) {
    size_t bytes = ffi::GetDataSize(*tensor);
    tensor->data = nullptr;
    if (bytes == 0) return;
    int device = tensor->device.device_id;
    stream = current_stream(device);
    pooled = has_pool(device);
    cudaError_t error = pooled ? cudaMallocAsync(&tensor->data, bytes, stream) : cudaMalloc(&tensor->data, bytes);
    if (error == cudaSuccess) return;
    cudaGetLastError();
    size_t left = 0, total = 0;
    cudaMemGetInfo(&left, &total);
    TVM_FFI_THROW(RuntimeError) << "CUDA: " << bytes << " bytes of memory are needed, and " << left << " of " << total
                                << " are free: " << cudaGetErrorString(error);
  }

  void FreeData(DLTensor* tensor) {  // whatever goes wrong when the process ends does not matter
    if (tensor->data == nullptr) return;
    if ((pooled ? cudaFreeAsync(tensor->data, stream) : cudaFree(tensor->data)) != cudaSuccess) cudaGetLastError();
  }
};

static int64_t device_type() { return ATTNC_DEVICE_TYPE; }

// Why kernels for a compute capability (80 for 8.0) cannot run on a device; empty when they can.
static ffi::String why_not(int64_t device, int64_t capability) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    return ffi::String(std::string("no CUDA device; ") + cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
  }
  if (device < 0 || device >= count)
    return ffi::String("no CUDA device " + std::to_string(device) + "; there are " + std::to_string(count));
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, int(device)), "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, int(device)), "compute capability");
  if (10 * major + minor < capability)
    return ffi::String("the kernels are for compute capability " + std::to_string(capability / 10) + "." +
                       std::to_string(capability % 10) + " or later, and the device " + std::to_string(device) + " has " +
                       std::to_string(major) + "." + std::to_string(minor));
  return ffi::String("");
}

// Makes a device the current one; gives the one before.
static int64_t use(int64_t device) {
  int before = current_device();
  if (before != device) check(cudaSetDevice(int(device)), "choosing the device");
  return before;
}

static ffi::Tensor empty(ffi::Shape shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(Memory(), shape, dtype, DLDevice{ATTNC_DEVICE_TYPE, current_device()});
}

// Copies ``height`` rows of ``width`` bytes that begin ``to_pitch`` and ``from_pitch`` bytes apart. ``direction``: 0 on
// the device, 1 to it, 2 from it. On the device and to it the copy has only been queued when this returns.
static void copy(void* to, int64_t to_pitch, void* from, int64_t from_pitch, int64_t width, int64_t height,
                 int64_t direction) {
  if (width <= 0 || height <= 0) return;
  cudaMemcpyKind kinds[] = {cudaMemcpyDeviceToDevice, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost};
  cudaStream_t stream = current_stream(current_device());
  if (height == 1 || (to_pitch == width && from_pitch == width)) {
    check(cudaMemcpyAsync(to, from, size_t(width) * height, kinds[direction], stream), "copying");
  } else if (to_pitch <= INT32_MAX && from_pitch <= INT32_MAX) {
    check(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kinds[direction], stream), "copying");
  } else {  // a row is longer than the runtime takes at once
    for (int64_t row = 0; row < height; ++row)
      check(cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch, static_cast<char*>(from) + row * from_pitch, width,
                            kinds[direction], stream),
            "copying");
  }
}

static void synchronise() { check(cudaStreamSynchronize(current_stream(current_device())), "running the kernels"); }

// The steps of a plan. ``table`` holds for each the number of its kernel, the size that says whether it is called (-1
// for always) with the least and the most that it may be, and the numbers of its pointers and sizes, each list behind
// its length. What is given back takes the addresses, the sizes, and a place where it notes the step that it is at.
static ffi::Function launcher(ffi::Array<ffi::Function> kernels, void* table, int64_t length) {
  struct Step {
    ffi::Function kernel;
    int64_t when, least, most;
    std::vector<int64_t> pointers, sizes;
  };
  std::vector<Step> steps;
  size_t longest = 0;
  for (const int64_t *at = static_cast<int64_t*>(table), *end = at + length; at < end;) {
    Step step{kernels[at[0]], at[1], at[2], at[3], {}, {}};
    at += 4;
    for (std::vector<int64_t>* list : {&step.pointers, &step.sizes}) {
      list->assign(at + 1, at + 1 + at[0]);
      at += 1 + at[0];
    }
    longest = std::max(longest, step.pointers.size() + step.sizes.size());
    steps.push_back(step);
  }
  return ffi::Function::FromTyped([=](void* addresses, void* numbers, void* place) {
    std::vector<ffi::AnyView> args(longest);
    void** address = static_cast<void**>(addresses);
    const int64_t* size = static_cast<int64_t*>(numbers);
    int64_t* current = static_cast<int64_t*>(place);
    for (size_t k = 0; k < steps.size(); ++k) {
      const Step& step = steps[k];
      if (step.when >= 0 && (size[step.when] < step.least || size[step.when] > step.most)) continue;
      *current = int64_t(k);
      size_t count = 0;
      for (int64_t at : step.pointers) args[count++] = address[at];
      for (int64_t at : step.sizes) args[count++] = size[at];
      ffi::Any nothing;
      step.kernel.CallPacked(args.data(), int32_t(count), &nothing);
    }
  });
}

}  // namespace attnc

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attnc_device_type, attnc::device_type);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attnc_why_not, attnc::why_not);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attnc_use, attnc::use);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attnc_empty, attnc::empty);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attnc_copy, attnc::copy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attnc_launcher, attnc::launcher);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attnc_synchronise, attnc::synchronise);
