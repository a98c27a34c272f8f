// Loops whose steps run at the same time.

#ifndef JQX_CPU_PARALLEL_H_
#define JQX_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

namespace jqx {

// Threads that run what they are given.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t threads() const = 0;
  virtual void schedule(std::function<void()> work) = 0;
};

// Some loops, one after another, whose steps run at the same time on the threads of a pool and on the
// one that calls. It waits for no thread that has not begun: what begins late finds nothing to do, so
// threads that all wait for each other are no danger.
class Loops {
 public:
  Loops(Pool& pool, int64_t loops, int64_t helpers) : state_(std::make_shared<State>(loops)) {
    try {
      for (int64_t i = 0; i < helpers; ++i) pool.schedule([state = state_] { help(*state); });
    } catch (const std::bad_alloc&) {  // those that there are, and this thread, do it
    }
  }
  ~Loops() { state_->begun = kAll; }
  Loops(const Loops&) = delete;
  Loops& operator=(const Loops&) = delete;

  // Calls f(i) for i in [0, count); throws std::bad_alloc where a step threw it.
  void each(int64_t count, const std::function<void(int64_t)>& f) {
    Loop& loop = state_->loops[at_];
    loop.count = count, loop.f = &f;
    state_->begun.store(++at_, std::memory_order_release);
    run(*state_, loop);
    wait_until([&] { return loop.done.load() == count; });
    if (state_->failed) throw std::bad_alloc();  // a step throws nothing else
  }

 private:
  static constexpr int64_t kAll = INT64_MAX;

  struct Loop {
    std::atomic<int64_t> next{0}, done{0};
    int64_t count = 0;
    const std::function<void(int64_t)>* f = nullptr;  // is there until all steps are done
  };
  struct State {
    explicit State(int64_t count) : loops(count) {}
    std::vector<Loop> loops;
    std::atomic<int64_t> begun{0};
    std::atomic<bool> failed{false};
  };

  static void run(State& state, Loop& loop) {
    for (int64_t i; (i = loop.next.fetch_add(1)) < loop.count; loop.done.fetch_add(1)) {
      try {
        (*loop.f)(i);
      } catch (...) {
        state.failed = true;
      }
    }
  }

  static void help(State& state) {
    for (size_t i = 0; i < state.loops.size(); ++i) {
      wait_until([&] { return state.begun.load(std::memory_order_acquire) > int64_t(i); });
      if (state.begun == kAll) return;
      run(state, state.loops[i]);
    }
  }

  template <class F>
  static void wait_until(const F& is_done) {
    for (int spin = 0; !is_done(); ++spin) {
      if (spin > 4096) std::this_thread::yield();
    }
  }

  std::shared_ptr<State> state_;
  int64_t at_ = 0;
};

// One loop.
inline void parallel_for(Pool& pool, int64_t count, const std::function<void(int64_t)>& f) {
  const int64_t helpers = std::min(pool.threads(), count) - 1;
  if (helpers > 0) return Loops(pool, 1, helpers).each(count, f);
  for (int64_t i = 0; i < count; ++i) f(i);
}

}  // namespace jqx

#endif  // JQX_CPU_PARALLEL_H_
