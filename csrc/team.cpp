#include "team.h"

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// Long enough to cover the waits between ops of a small model, short enough to be no burden when cores are shared.
constexpr std::chrono::microseconds kSpin{40};
constexpr int kPausesPerClockRead = 32;

// The gate: the number of the run in the upper half, then whether it is open, then how many workers are inside.
constexpr uint64_t kIsOpen = uint64_t(1) << 31;
constexpr uint64_t kInside = kIsOpen - 1;

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Returns the value of `word` once it is no longer `seen`.
template <class Word>
Word wait_past(const std::atomic<Word>& word, Word seen) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  for (;;) {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      const Word value = word.load(std::memory_order_acquire);
      if (value != seen) return value;
      pause_cpu();
    }
    if (std::chrono::steady_clock::now() >= deadline) word.wait(seen, std::memory_order_acquire);
  }
}

}  // namespace

Team::Team(int num_threads) : num_threads_(num_threads), phases_(std::make_unique<Phase[]>(size_t(num_threads))) {
  workers_.reserve(static_cast<size_t>(num_threads - 1));
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back(&Team::work, this, thread);
}

Team::~Team() {
  is_stopping_.store(true, std::memory_order_relaxed);
  run_number_.fetch_add(1, std::memory_order_release);
  run_number_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Team::run_erased(Task task, const void* context, bool waits_for_all) {
  if (num_threads_ == 1) {
    task(context, 0);
    return;
  }
  task_ = task;
  context_ = context;
  first_phase_ = open_phase_.load(std::memory_order_relaxed);
  phases_[0].number = first_phase_;
  num_entered_.store(0, std::memory_order_relaxed);
  const uint32_t number = run_number_.load(std::memory_order_relaxed) + 1;
  gate_.store(uint64_t(number) << 32 | kIsOpen, std::memory_order_release);
  run_number_.store(number, std::memory_order_release);
  run_number_.notify_all();  // a system call only if somebody sleeps
  task(context, 0);
  if (waits_for_all) {
    uint32_t entered = num_entered_.load(std::memory_order_acquire);
    while (entered < uint32_t(num_threads_ - 1)) entered = wait_past(num_entered_, entered);
  }
  // Whoever is inside still looks at the body, so it has to get out first; nobody else gets in.
  uint64_t gate = gate_.fetch_and(~kIsOpen, std::memory_order_acq_rel) & ~kIsOpen;
  while ((gate & kInside) != 0) gate = wait_past(gate_, gate);
}

void Team::work(int thread) {
  uint32_t last_run = 0;  // that this worker was in, or missed
  for (;;) {
    wait_past(run_number_, last_run);
    if (is_stopping_.load(std::memory_order_relaxed)) return;
    if (!enter(last_run)) continue;
    // Inside, the run cannot end, and what it is about stays as it is.
    phases_[size_t(thread)].number = first_phase_;
    task_(context_, thread);
    leave();
  }
}

// Enters the run of the gate, if that is open and not `last_run`, which becomes the run of the gate.
bool Team::enter(uint32_t& last_run) {
  uint64_t gate = gate_.load(std::memory_order_acquire);
  do {
    const bool is_new = uint32_t(gate >> 32) != last_run;
    if (!is_new || (gate & kIsOpen) == 0) {
      last_run = uint32_t(gate >> 32);
      return false;
    }
  } while (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire));
  last_run = uint32_t(gate >> 32);
  num_entered_.fetch_add(1, std::memory_order_acq_rel);
  num_entered_.notify_all();
  return true;
}

void Team::leave() {
  gate_.fetch_sub(1, std::memory_order_acq_rel);
  gate_.notify_all();
}

// Takes the next chunk of a phase; -1 when none is left or the phase is over.
int64_t Team::claim(uint32_t phase, int64_t num_chunks) {
  uint64_t next = next_chunk_.load(std::memory_order_acquire);
  do {
    if (uint32_t(next >> 32) != phase || int64_t(uint32_t(next)) >= num_chunks) return -1;
  } while (!next_chunk_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire));
  return int64_t(uint32_t(next));
}

// Counts a chunk as done; with the last one the next phase opens. Returns whether it was the last.
bool Team::finish(uint32_t phase, int64_t num_chunks) {
  if (num_finished_.fetch_add(1, std::memory_order_acq_rel) + 1 != num_chunks) return false;
  num_finished_.store(0, std::memory_order_relaxed);
  next_chunk_.store(uint64_t(phase + 1) << 32, std::memory_order_release);
  open_phase_.store(phase + 1, std::memory_order_release);
  open_phase_.notify_all();
  return true;
}

void Team::wait_past_phase(uint32_t phase) const {
  // A thread that fell behind finds a later phase open: then this one is over, too.
  if (open_phase_.load(std::memory_order_acquire) == phase) wait_past(open_phase_, phase);
}

void Team::barrier() {
  if (num_threads_ == 1) return;
  // The epoch is read before arriving: it cannot advance until this thread has arrived.
  const uint32_t epoch = barrier_epoch_.load(std::memory_order_acquire);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    num_arrived_.store(0, std::memory_order_relaxed);
    barrier_epoch_.fetch_add(1, std::memory_order_acq_rel);
    barrier_epoch_.notify_all();
  } else {
    wait_past(barrier_epoch_, epoch);
  }
}

}  // namespace octavo
