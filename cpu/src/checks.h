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

namespace ffi = xla::ffi;

namespace jqx {

using Integers = ffi::Span<const int64_t>;

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

// What a handler is given first: threads and N buffers.
template <int N>
auto bound() {
  if constexpr (N == 0) {
    return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>();
  } else {
    return bound<N - 1>().template Arg<ffi::AnyBuffer>();
  }
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

// Which weights rows meet: one for each batch, one of a stack, or one for each group of rows.
struct Groups {
  const int32_t* sizes = nullptr;  // of groups, where there are any
  int64_t weights = 0;             // how many rows meet
  int64_t stack = 0;               // how many there are
  int64_t at = 0;                  // the first that rows meet

  template <class P>
  void product(const P& p, Pool& pool) const {
    if (sizes == nullptr) return multiply(p, kernels(), pool);
    multiply_groups(p, sizes, weights, kernels(), pool);
  }
};

// Finds the weight of a step in a stack [steps, n, width], of one batch: as elsewhere in XLA, a step
// beyond the ends is the last or the first. Without a step the stack is the batch, or has a weight
// for each group.
inline ffi::Error find(const char* function, const ffi::AnyBuffer& step,
                       const ffi::AnyBuffer* sizes, const ffi::AnyBuffer& w, int64_t batch,
                       Groups* groups) {
  const bool in_groups = sizes != nullptr && !is_absent(*sizes);
  groups->weights = groups->stack = batch;
  if (is_absent(step) && !in_groups) return ffi::Error::Success();
  if (batch != 1) return wrong(function, "a stack is read by one batch", w);
  groups->stack = w.dimensions()[0];
  if (in_groups) {
    if (!is_absent(step)) return wrong(function, "groups have no step", *sizes);
    if (!has(*sizes, ffi::S32, {groups->stack})) {
      return wrong(function, "sizes are s32[groups]", *sizes);
    }
    groups->sizes = static_cast<const int32_t*>(sizes->untyped_data());
    groups->weights = groups->stack;
    return ffi::Error::Success();
  }
  if (!has(step, ffi::S32, {1})) return wrong(function, "a step is s32[1]", step);
  if (groups->stack == 0) return wrong(function, "there is no weight in the stack", w);
  const int64_t last = groups->stack - 1;
  const int64_t wanted = *static_cast<const int32_t*>(step.untyped_data());
  groups->at = std::max<int64_t>(0, std::min(wanted, last));
  return ffi::Error::Success();
}

}  // namespace jqx

#endif  // JQX_CPU_CHECKS_H_
