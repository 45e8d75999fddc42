// One team of threads that executes a whole step, op by op, each op cut into chunks that threads claim as they come.
//
// Claiming instead of fixed shares and barriers, because cores are shared: with a barrier per op both threads must be
// on a core at the same moment, hundreds of times a step, and a team of two is slower than one thread as soon as
// something else runs. Here a thread that is not running is not waited for, unless it stopped in the middle of a chunk.
// When it comes back it finds the ops it missed done, and joins in where the others are.
//
// The calling thread is thread 0, so a team of one has no threads of its own. Waiting means spinning for a few tens of
// microseconds, then sleeping. Nothing is allocated while a team runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
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
    run_erased(task_of<Body>(), &body, true);
  }

  // The same, but a thread that has not come by the time the caller is done is left out. All work must be in chunks.
  template <class Body>
  void run_chunks(const Body& body) {
    run_erased(task_of<Body>(), &body, false);
  }

  // Inside a running body: calls `work(chunk)` once for each chunk 0 .. num_chunks - 1, on whichever threads come, and
  // returns when all chunks are done and their writes can be seen. Every thread of the body makes the same calls in the
  // same order. A thread for which no chunk is left may touch nothing that later chunks write; so what a thread
  // prepares for its chunks, it prepares in its first one.
  template <class Work>
  void for_chunks(int thread, int64_t num_chunks, const Work& work) {
    if (num_chunks <= 0) return;
    if (num_threads_ == 1) {
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) work(chunk);
      return;
    }
    const uint32_t phase = phases_[size_t(thread)].number++;
    for (;;) {
      const int64_t chunk = claim(phase, num_chunks);
      if (chunk < 0) break;
      work(chunk);
      if (finish(phase, num_chunks)) return;
    }
    wait_past_phase(phase);
  }

  // Inside a body of `run`: every thread calls this the same number of times; what one wrote before, all see after it.
  void barrier();

 private:
  using Task = void (*)(const void* context, int thread);
  template <class Body>
  static Task task_of() {
    return [](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); };
  }

  // Number of the next call of for_chunks that a thread makes; each on its own cache line.
  struct alignas(64) Phase {
    uint32_t number = 0;
  };

  void run_erased(Task task, const void* context, bool waits_for_all);
  void work(int thread);
  bool enter(uint32_t& last_run);
  void leave();
  int64_t claim(uint32_t phase, int64_t num_chunks);
  bool finish(uint32_t phase, int64_t num_chunks);
  void wait_past_phase(uint32_t phase) const;

  const int num_threads_;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  uint32_t first_phase_ = 0;  // of the run
  std::unique_ptr<Phase[]> phases_;

  // Each on its own cache line: some are polled while others are written.
  alignas(64) std::atomic<uint32_t> run_number_{0};
  alignas(64) std::atomic<uint64_t> gate_{0};  // number of the run, whether it is open, and how many workers are inside
  alignas(64) std::atomic<uint32_t> num_entered_{0};
  alignas(64) std::atomic<uint64_t> next_chunk_{0};  // upper half: the open phase; lower half: its next chunk
  alignas(64) std::atomic<int64_t> num_finished_{0};
  alignas(64) std::atomic<uint32_t> open_phase_{0};
  alignas(64) std::atomic<int32_t> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> barrier_epoch_{0};
  alignas(64) std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> workers_;
};

// A contiguous part of `0 .. count - 1`.
struct Share {
  int64_t begin;
  int64_t end;
};

// Part `part` of `num_parts`: sizes differ by at most one `multiple` (the last part may be cut short).
inline Share share_of(int64_t count, int64_t num_parts, int64_t part, int64_t multiple = 1) {
  const int64_t num_units = (count + multiple - 1) / multiple;
  const int64_t begin = num_units * part / num_parts * multiple;
  const int64_t end = num_units * (part + 1) / num_parts * multiple;
  return {begin < count ? begin : count, end < count ? end : count};
}

// How many chunks to cut `num_units` into: a few per thread, so that a thread that falls behind holds little up.
inline int64_t num_chunks_of(int64_t num_units, int num_threads) {
  constexpr int64_t kChunksPerThread = 4;
  const int64_t wanted = num_threads == 1 ? 1 : num_threads * kChunksPerThread;
  return num_units < wanted ? num_units : wanted;
}

}  // namespace octavo
