// One team of threads that executes a whole step, with barriers between ops.
//
// The calling thread is thread 0, so a team of one has no threads of its own and its barriers cost nothing. Workers
// wait by spinning for a few tens of microseconds (a step has hundreds of barriers, each far shorter than a wake-up)
// and then sleep, because a server's other threads share the cores. Nothing is allocated while a team runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

class Team {
 public:
  // `num_threads` >= 1, the caller included.
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return num_threads_; }

  // Calls `body(thread)` on every thread, thread 0 being the caller; returns when all are done. `body` must not throw.
  // Not re-entrant; one caller at a time.
  template <class Body>
  void run(const Body& body) {
    run_erased([](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); }, &body);
  }

  // Every thread of a running body calls this the same number of times; what one wrote before it, all see after it.
  void barrier();

 private:
  using Task = void (*)(const void* context, int thread);

  void run_erased(Task task, const void* context);
  void work(int thread);

  const int num_threads_;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  // Separate cache lines: the counter is written by all, the epochs are polled by all.
  alignas(64) std::atomic<uint32_t> start_epoch_{0};
  alignas(64) std::atomic<uint32_t> barrier_epoch_{0};
  alignas(64) std::atomic<int32_t> num_arrived_{0};
  alignas(64) std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> workers_;
};

// A contiguous part of `0 .. count - 1`.
struct Share {
  int64_t begin;
  int64_t end;
};

// The part of thread `thread` of `num_threads`: sizes differ by at most one `multiple` (the last part may be cut
// short).
inline Share share_of(int64_t count, int num_threads, int thread, int64_t multiple = 1) {
  const int64_t num_units = (count + multiple - 1) / multiple;
  const int64_t begin = num_units * thread / num_threads * multiple;
  const int64_t end = num_units * (thread + 1) / num_threads * multiple;
  return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace octavo
