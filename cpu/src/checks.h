// What handlers check before a kernel reads a buffer: a wrong one is an error of XLA.

#ifndef JQX_CPU_CHECKS_H_
#define JQX_CPU_CHECKS_H_

#include <algorithm>
#include <initializer_list>
#include <new>
#include <string>
#include <utility>

#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace jqx {

namespace ffi = xla::ffi;

class XlaPool : public Pool {
 public:
  explicit XlaPool(ffi::ThreadPool& pool) : pool_(pool), threads_(pool.num_threads()) {}
  int64_t threads() const override { return threads_ < 1 ? 1 : threads_; }
  void schedule(std::function<void()> work) override { pool_.Schedule(std::move(work)); }

 private:
  ffi::ThreadPool& pool_;
  int64_t threads_;
};

inline std::string shape_of(const ffi::AnyBuffer& x) {
  std::string text = "[";
  for (const int64_t n : x.dimensions()) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

inline ffi::Error wrong(const char* function, const char* what, const ffi::AnyBuffer& x) {
  return ffi::Error::InvalidArgument(std::string("jqx_cpu: ") + function + ": " + what +
                                     ", given " + shape_of(x) + ".");
}

// Runs a kernel; where there is no memory for it, that is an error of XLA.
template <class F>
ffi::Error run(ffi::ThreadPool& pool, F f) {
  try {
    XlaPool threads(pool);
    f(threads);
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jqx_cpu: out of memory.");
  }
}

inline bool is_aligned(const void* data, int64_t size) {
  return reinterpret_cast<uintptr_t>(data) % size == 0;
}

// Whether a buffer has a dtype and a shape, and lies as its dtype needs it.
inline bool has(const ffi::AnyBuffer& x, ffi::DataType dtype, std::initializer_list<int64_t> shape) {
  const auto own = x.dimensions();
  if (x.element_type() != dtype || own.size() != shape.size()) return false;
  if (!std::equal(shape.begin(), shape.end(), own.begin())) return false;
  return is_aligned(x.untyped_data(), ffi::ByteWidth(dtype));
}

inline bool is_absent(const ffi::AnyBuffer& x) { return x.element_count() == 0; }

// Reads a parameter [batch, count] or [batch, 1]; returns whether it is one, or absent.
template <class T>
bool read(const ffi::AnyBuffer& x, ffi::DataType dtype, int64_t batch, int64_t count, Each<T>* to) {
  if (is_absent(x)) return true;
  const bool one = has(x, dtype, {batch, 1});
  if (!one && !has(x, dtype, {batch, count})) return false;
  *to = {static_cast<const T*>(x.untyped_data()), one};
  return true;
}

// Finds the weight of a step in a stack [steps, n, width], of one batch: as elsewhere in XLA, a step
// beyond the ends is the last or the first. Without a step the stack is the batch.
inline ffi::Error find(const char* function, const ffi::AnyBuffer& step, const ffi::AnyBuffer& w,
                int64_t batch, int64_t* count, int64_t* at) {
  *count = batch, *at = 0;
  if (is_absent(step)) return ffi::Error::Success();
  if (!has(step, ffi::S32, {1})) return wrong(function, "a step is s32[1]", step);
  if (batch != 1) return wrong(function, "a stack is read by one batch", w);
  *count = w.dimensions()[0];
  const int64_t last = *count - 1, wanted = *static_cast<const int32_t*>(step.untyped_data());
  *at = std::max<int64_t>(0, std::min(wanted, last));
  return ffi::Error::Success();
}

}  // namespace jqx

#endif  // JQX_CPU_CHECKS_H_
