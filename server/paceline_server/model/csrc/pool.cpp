#include "pool.h"

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

// Turns of about 20 to 40 ns: long enough for the gap between two operations, too short to matter to others.
constexpr int kSpins = 2000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

Pool::Pool(int threads) {
  for (int index = 1; index < threads; ++index) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
  stopping_.store(true);
  jobs_.fetch_add(1);
  jobs_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(int tasks, Function function, const void* context) {
  if (tasks <= 1 || workers_.empty()) {
    for (int task = 0; task < tasks; ++task) function(context, task);
    return;
  }
  const uint64_t job = uint64_t{jobs_.load(std::memory_order_relaxed)} + 1;
  ticket_.store(job << 32 | kClosed, std::memory_order_release);  // before the fields: see `ticket_`
  function_.store(function, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  tasks_.store(tasks, std::memory_order_release);
  unfinished_.store(tasks, std::memory_order_release);
  ticket_.store(job << 32, std::memory_order_release);
  jobs_.fetch_add(1, std::memory_order_release);
  jobs_.notify_all();
  claim_and_run();
  for (int spin = 0; unfinished_.load(std::memory_order_acquire) != 0; ++spin) {
    // Whoever holds the last task may be waiting for this very core.
    if (spin < kSpins) pause();
    else sched_yield();
  }
}

void Pool::work() {
  uint32_t seen = 0;
  while (!stopping_.load(std::memory_order_relaxed)) {
    for (int spin = 0; spin < kSpins && jobs_.load(std::memory_order_acquire) == seen; ++spin) pause();
    jobs_.wait(seen, std::memory_order_acquire);
    seen = jobs_.load(std::memory_order_acquire);
    claim_and_run();
  }
}

void Pool::claim_and_run() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (true) {
    const int tasks = tasks_.load(std::memory_order_acquire);
    const Function function = function_.load(std::memory_order_acquire);
    const void* context = context_.load(std::memory_order_acquire);
    const uint64_t task = ticket & 0xffffffffu;
    if (task >= static_cast<uint64_t>(tasks)) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    function(context, static_cast<int>(task));
    unfinished_.fetch_sub(1, std::memory_order_acq_rel);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

}  // namespace paceline
