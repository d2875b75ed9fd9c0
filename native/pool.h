// Persistent worker threads. The calling thread is worker 0; between the parts of a job the workers meet at a barrier
// that spins for some 50 microseconds and then sleeps, so an idle process uses no CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Runs body(worker) on every worker and returns when all are done. Jobs of several callers follow one another.
    // Denormals are flushed to zero while a body runs; the caller's setting is restored. A body must not throw.
    template <class Body>
    void run(const Body& body) {
        run_job([](const void* context, int worker) { (*static_cast<const Body*>(context))(worker); }, &body);
    }

    // The next item of [0, ...) of the current phase: shared by all workers, started anew by barrier().
    int next() { return counter_.fetch_add(1, std::memory_order_relaxed); }

    // Ends a phase: every worker of the job must call it. The last one to come runs alone() before any goes on.
    template <class Alone>
    void barrier(const Alone& alone) {
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            alone();
            release(phase);
        } else {
            wait_while(phase_, phase);
        }
    }
    void barrier() {
        barrier([] {});
    }

    // body(item) for the items of [0, count) that this worker gets. Every worker of the job must call it.
    template <class Body>
    void share(int count, const Body& body) {
        for (int item = next(); item < count; item = next()) body(item);
    }

    // One phase: body(item, worker) for items [0, count), then a barrier. Every worker of the job must call it.
    template <class Body>
    void each(int count, int worker, const Body& body) {
        share(count, [&](int item) { body(item, worker); });
        barrier();
    }

private:
    using Job = void (*)(const void* context, int worker);
    void run_job(Job job, const void* context);
    void work(int worker);
    void release(uint32_t phase);
    static void wait_while(const std::atomic<uint32_t>& value, uint32_t old);

    const int threads_;
    std::mutex callers_;
    std::vector<std::thread> workers_;
    Job job_ = nullptr;
    const void* context_ = nullptr;
    bool stop_ = false;
    alignas(64) std::atomic<uint32_t> started_{0};  // generation of the newest job
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};  // generation of the barrier
    alignas(64) std::atomic<int> counter_{0};
};

}  // namespace octavo
