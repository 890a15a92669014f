// The threads that compute a step. The caller works too, and waits only for tasks that somebody has begun.
//
// A fork-join barrier waits for all threads at every operation; when one of them has lost its core to another process,
// everybody waits for the scheduler. Here tasks are claimed one by one: a thread that is away has claimed nothing, and
// the others do its share. An idle thread spins for a moment, because the next operation usually follows within
// microseconds, and then sleeps.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace paceline {

class Pool {
 public:
  // threads: the calling one included, at least 1.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Call body(task) for 0 <= task < tasks, in any order and on any thread; returns when all are done. Only one thread
  // may call it at a time, and `body` may not call it.
  template <class Body>
  void run(int tasks, const Body& body) {
    run(tasks, [](const void* context, int task) { (*static_cast<const Body*>(context))(task); }, &body);
  }

 private:
  using Function = void (*)(const void* context, int task);

  void run(int tasks, Function function, const void* context);
  void work();
  void claim_and_run();

  // Low half: the next task; high half: number of the job. A claim is a compare-exchange of the whole, so it fails
  // when the job has changed since the claimer read the job's fields.
  std::atomic<uint64_t> ticket_{kClosed};
  std::atomic<Function> function_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int> tasks_{0};
  alignas(64) std::atomic<int> unfinished_{0};
  alignas(64) std::atomic<uint32_t> jobs_{0};  // what idle threads watch
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;

  static constexpr uint64_t kClosed = 0xffffffffu;  // as a task number: no task is left
};

}  // namespace paceline
