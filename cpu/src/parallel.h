// A loop whose steps run at the same time, on the threads of a pool and on the one that calls.

#ifndef JQX_CPU_PARALLEL_H_
#define JQX_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace jqx {

// Threads that run what they are given.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t threads() const = 0;
  virtual void schedule(std::function<void()> work) = 0;
};

// Calls f(i) for i in [0, count); throws std::bad_alloc where a step threw it. It waits for no thread
// that has not begun: what begins late finds nothing to do, so threads that all wait for each other
// are no danger.
inline void parallel_for(Pool& pool, int64_t count, const std::function<void(int64_t)>& f) {
  const int64_t helpers = std::min(pool.threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto state = std::make_shared<State>();
  const auto* each = &f;  // read only for a step that is not done: the caller still waits for it
  const auto work = [state, count, each] {
    int64_t own = 0;
    for (int64_t i; (i = state->next.fetch_add(1)) < count; ++own) {
      try {
        (*each)(i);
      } catch (...) {
        state->failed = true;
      }
    }
    if (own > 0 && state->done.fetch_add(own) + own == count) {
      std::lock_guard<std::mutex> lock(state->mutex);
      state->finished.notify_one();
    }
  };
  try {
    for (int64_t i = 0; i < helpers; ++i) pool.schedule(work);
  } catch (const std::bad_alloc&) {  // those that there are, and this thread, do it
  }
  work();
  const auto is_done = [&] { return state->done.load() == count; };
  for (int spin = 0; spin < 4096 && !is_done(); ++spin) {
  }
  if (!is_done()) {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->finished.wait(lock, is_done);
  }
  if (state->failed) throw std::bad_alloc();  // a step throws nothing else
}

}  // namespace jqx

#endif  // JQX_CPU_PARALLEL_H_
