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

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Returns once `epoch` no longer holds `seen`.
void wait_past(const std::atomic<uint32_t>& epoch, uint32_t seen) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (epoch.load(std::memory_order_acquire) != seen) return;
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  epoch.wait(seen, std::memory_order_acquire);
}

void advance(std::atomic<uint32_t>& epoch) {
  epoch.fetch_add(1, std::memory_order_acq_rel);
  epoch.notify_all();  // a system call only if somebody sleeps
}

}  // namespace

Team::Team(int num_threads) : num_threads_(num_threads) {
  workers_.reserve(static_cast<size_t>(num_threads - 1));
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back(&Team::work, this, thread);
}

Team::~Team() {
  is_stopping_.store(true, std::memory_order_relaxed);
  advance(start_epoch_);
  for (std::thread& worker : workers_) worker.join();
}

void Team::run_erased(Task task, const void* context) {
  if (num_threads_ == 1) {
    task(context, 0);
    return;
  }
  task_ = task;
  context_ = context;
  advance(start_epoch_);
  task(context, 0);
  barrier();  // all bodies are done, and nobody reads task_ any more
}

void Team::barrier() {
  if (num_threads_ == 1) return;
  // The epoch is read before arriving: it cannot advance until this thread has arrived.
  const uint32_t epoch = barrier_epoch_.load(std::memory_order_acquire);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    num_arrived_.store(0, std::memory_order_relaxed);
    advance(barrier_epoch_);
  } else {
    wait_past(barrier_epoch_, epoch);
  }
}

void Team::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_past(start_epoch_, seen);
    ++seen;
    if (is_stopping_.load(std::memory_order_relaxed)) return;
    task_(context_, thread);
    barrier();
  }
}

}  // namespace octavo
