// A CUDA grid on one CPU thread: the blocks one after the other, a fiber for every thread of a block.
//
// A fiber runs until it waits at a barrier, and a warp until it waits for others, so that threads are as far apart as
// barriers allow: a missing one shows as a wrong value. Blocks and threads run in rising or falling order of their
// numbers (shim_order), and shared memory starts as NaN.
#pragma once
#undef _FORTIFY_SOURCE  // its longjmp takes a jump to another stack for an error
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 : uint3 {
  dim3(size_t x = 1, size_t y = 1, size_t z = 1) : uint3{unsigned(x), unsigned(y), unsigned(z)} {}
};

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
alignas(128) static unsigned char pool_ptr[1 << 18];  // the dynamic shared memory, by the name that kernels give it

namespace shim {

enum class State { ready, block, warp, done };

struct Copy {  // one cp.async that was not waited for yet
  void* to;
  const void* from;
  size_t bytes, zeros;
};

struct Fiber {
  jmp_buf place;  // where it goes on; jumps cost no call of the system, as swapcontext does
  bool begun = false;
  State state = State::ready;
  std::vector<Copy> open;                  // issued, in no group yet
  std::deque<std::vector<Copy>> groups;    // committed, oldest first
  unsigned collectives = 0;                // how many exchanges between lanes it took part in
  static constexpr size_t stack_bytes = 1 << 16;
};

static std::vector<Fiber> fibers;
static std::vector<std::unique_ptr<char[]>> stacks;  // of the fibers, from one grid to the next
static jmp_buf scheduler;
static std::function<void()> body;
static std::string failure;
static bool falling = false;

inline Fiber& self() { return fibers[threadIdx.x]; }

inline void leave(State state) {
  unsigned me = threadIdx.x;
  fibers[me].state = state;
  if (_setjmp(fibers[me].place) == 0) _longjmp(scheduler, 1);
  threadIdx.x = me;
}

inline void fail(const std::string& why) {
  if (failure.empty()) failure = why;
  leave(State::done);
}

inline void wait_block() { leave(State::block); }
inline void wait_warp() { leave(State::warp); }

static void enter() {
  body();
  if (!self().open.empty() || !self().groups.empty()) fail("a cp.async was never waited for");
  leave(State::done);
}

// Runs a fiber until it leaves.
inline void resume(unsigned t) {
  if (_setjmp(scheduler) != 0) return;
  Fiber& f = fibers[t];
  if (f.begun) _longjmp(f.place, 1);
  f.begun = true;
  static ucontext_t unused, fresh;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = stacks[t].get();
  fresh.uc_stack.ss_size = Fiber::stack_bytes;
  fresh.uc_link = nullptr;
  makecontext(&fresh, enter, 0);
  swapcontext(&unused, &fresh);
}

// Lets the fibers first … end - 1 go on if all of them wait in this way: a barrier needs every thread.
inline bool release(size_t first, size_t end, State state) {
  for (size_t t = first; t < end; ++t)
    if (fibers[t].state != state) return false;
  for (size_t t = first; t < end; ++t) fibers[t].state = State::ready;
  return true;
}

inline size_t in_order(size_t k, size_t count) { return falling ? count - 1 - k : k; }

// Runs one warp until it waits for other warps or is done.
inline void run_warp(size_t first, size_t end) {
  do {
    for (size_t k = 0; k < end - first; ++k) {
      size_t t = first + in_order(k, end - first);
      if (fibers[t].state != State::ready) continue;
      threadIdx = {unsigned(t), 0, 0};
      resume(t);
      if (!failure.empty()) throw std::runtime_error(failure);
    }
  } while (release(first, end, State::warp));
}

inline void run_block() {
  for (size_t t = 0; t < fibers.size(); ++t) {
    Fiber& f = fibers[t];
    f.begun = false, f.state = State::ready, f.open.clear(), f.groups.clear(), f.collectives = 0;
  }
  size_t warps = (fibers.size() + 31) / 32;
  do
    for (size_t k = 0; k < warps; ++k) {
      size_t first = 32 * in_order(k, warps);
      run_warp(first, std::min(first + 32, fibers.size()));
    }
  while (release(0, fibers.size(), State::block));
  for (Fiber& f : fibers)
    if (f.state != State::done) throw std::runtime_error("threads wait at a barrier that others never reach");
}

inline void run_grid(dim3 grid, dim3 block, size_t shared) {
  constexpr size_t guard = 1024;
  if (block.y != 1 || block.z != 1) throw std::runtime_error("blocks of one dimension only");
  if (shared + guard > sizeof(pool_ptr)) throw std::runtime_error("too much shared memory");
  failure.clear();
  fibers = std::vector<Fiber>(block.x);
  while (stacks.size() < block.x) stacks.emplace_back(new char[Fiber::stack_bytes]);
  gridDim = grid, blockDim = block;
  const size_t blocks = size_t(grid.x) * grid.y * grid.z;
  for (size_t k = 0; k < blocks; ++k) {
    const unsigned number = in_order(k, blocks), rest = number / grid.x;
    blockIdx = {number % grid.x, rest % grid.y, rest / grid.y};
    std::memset(pool_ptr, 0xff, shared + guard);
    run_block();
    for (size_t at = shared; at < shared + guard; ++at)
      if (pool_ptr[at] != 0xff) throw std::runtime_error("a write beyond shared memory");
  }
}

// What another lane of the warp passes to the same call. Two sets of slots in turn, so that one wait is enough.
template <typename T>
struct Slots {
  static inline T values[2][1024];
  static const T* exchange(const T& mine) {
    T* set = values[self().collectives++ & 1];
    set[threadIdx.x] = mine;
    wait_warp();
    return set + (threadIdx.x & ~31u);
  }
};

}  // namespace shim

static inline void __syncthreads() { shim::wait_block(); }
static inline void __syncwarp(unsigned = ~0u) { shim::wait_warp(); }
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return shim::Slots<T>::exchange(value)[(threadIdx.x & 31) ^ mask];
}
template <typename T>
static T __shfl_sync(unsigned, T value, int lane, int = 32) {
  return shim::Slots<T>::exchange(value)[lane & 31];
}
template <typename T>
static T __shfl_up_sync(unsigned, T value, unsigned distance, int = 32) {
  const T* all = shim::Slots<T>::exchange(value);
  unsigned lane = threadIdx.x & 31;
  return all[lane < distance ? lane : lane - distance];
}
