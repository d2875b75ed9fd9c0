// Persistent worker threads. The calling thread is worker 0; between the parts of a job the workers meet at a barrier
// that spins for some 50 microseconds and then sleeps, so an idle process uses no CPU.
//
// A worker belongs to a node: CPUs that are near the same part of memory (NUMA). What lies in a node's memory is owned
// by that node, and its workers take it before others do. Which worker does what changes no result.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

class Pool {
public:
    // `node_of`: the node of each worker, from 0 on. `cpus`: of each node, the CPUs that its workers are bound to; the
    // caller of a job is while it runs. Empty: nobody is bound.
    explicit Pool(std::vector<int> node_of, std::vector<std::vector<int>> cpus = {});
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    int nodes() const { return static_cast<int>(counters_.size()); }

    int node_of(int worker) const { return node_of_[worker]; }
    int workers(int node) const { return workers_before_[node + 1] - workers_before_[node]; }

    // The first of `count` things in a row that `node` owns. Each owns as large a part as it has of the workers.
    int first_owned(int node, int count) const {
        return static_cast<int>(int64_t{count} * workers_before_[node] / threads_);
    }

    // Runs body(worker) on every worker and returns when all are done. Jobs of several callers follow one another.
    // Denormals are flushed to zero while a body runs; the caller's setting is restored. A body must not throw.
    template <class Body>
    void run(const Body& body) {
        run_job([](const void* context, int worker) { (*static_cast<const Body*>(context))(worker); }, &body);
    }

    // The next item of [0, ...) of the current phase: shared by all workers, started anew by barrier().
    int next() { return next_of(0); }

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

    // `share` of items that nodes own, starts[n] to starts[n + 1] node n, and each `times` times over: body(item,
    // time). A worker takes those of its own node, then what other nodes have left.
    template <class Body>
    void share_nearby(const std::vector<int>& starts, int times, int worker, const Body& body) {
        int node = node_of_[worker];
        for (int left = nodes(); left > 0; --left) {
            each_of(node, starts, times, body);
            if (++node == nodes()) node = 0;
        }
    }

    // The same, then a barrier.
    template <class Body>
    void each_nearby(const std::vector<int>& starts, int times, int worker, const Body& body) {
        share_nearby(starts, times, worker, body);
        barrier();
    }

    // The same once, each by a worker of its node: for memory, which lies where it is first written.
    template <class Body>
    void each_local(const std::vector<int>& starts, int worker, const Body& body) {
        each_of(node_of_[worker], starts, 1, [&](int item, int) { body(item, worker); });
        barrier();
    }

private:
    using Job = void (*)(const void* context, int worker);
    void run_job(Job job, const void* context);
    void work(int worker);
    void release(uint32_t phase);
    int next_of(int node) { return counters_[node].value.fetch_add(1, std::memory_order_relaxed); }

    template <class Body>
    void each_of(int node, const std::vector<int>& starts, int times, const Body& body) {
        const int first = starts[node];
        const int owned = starts[node + 1] - first;
        for (int i = next_of(node); i < owned * times; i = next_of(node)) body(first + i % owned, i / owned);
    }
    static void wait_while(const std::atomic<uint32_t>& value, uint32_t old);

    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };

    const int threads_;
    const std::vector<int> node_of_;
    const std::vector<std::vector<int>> cpus_;
    std::vector<int> workers_before_;  // of the nodes before each, and of all
    std::mutex callers_;
    std::vector<std::thread> workers_;
    Job job_ = nullptr;
    const void* context_ = nullptr;
    bool stop_ = false;
    alignas(64) std::atomic<uint32_t> started_{0};  // generation of the newest job
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};  // generation of the barrier
    std::vector<Counter> counters_;               // of each node; phases without nodes use the first
};

}  // namespace octavo
