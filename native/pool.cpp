#include "pool.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <immintrin.h>
#include <sched.h>

namespace octavo {

namespace {

constexpr unsigned kFlushDenormals = 0x8040;  // MXCSR: flush to zero, denormals are zero
constexpr int kSpins = 400;                   // pauses before sleeping: 20 to 60 microseconds

// CPUs that a thread may run on: as many as this has bits for.
constexpr int kMostCpus = 8192;
struct CpuSet {
    cpu_set_t bits[kMostCpus / CPU_SETSIZE];
};

// Binds the calling thread. A refusal costs speed only.
void bind(const CpuSet& set) { sched_setaffinity(0, sizeof(set), set.bits); }

void bind(const std::vector<int>& cpus) {
    CpuSet set{};
    for (const int cpu : cpus) CPU_SET_S(cpu, sizeof(set), set.bits);
    bind(set);
}

// Binds the calling thread for as long as this lives.
class Bound {
public:
    explicit Bound(const std::vector<int>& cpus) : known_(sched_getaffinity(0, sizeof(before_), before_.bits) == 0) {
        if (known_) bind(cpus);
    }
    ~Bound() {
        if (known_) bind(before_);
    }
    Bound(const Bound&) = delete;
    Bound& operator=(const Bound&) = delete;

private:
    CpuSet before_{};
    bool known_;
};

}  // namespace

Pool::Pool(std::vector<int> node_of, std::vector<std::vector<int>> cpus)
    : threads_(static_cast<int>(node_of.size())),
      node_of_(std::move(node_of)),
      cpus_(std::move(cpus)),
      counters_(*std::max_element(node_of_.begin(), node_of_.end()) + 1) {
    for (int node = 0; node <= nodes(); ++node) {
        const auto before = [node](int own) { return own < node; };
        workers_before_.push_back(static_cast<int>(std::count_if(node_of_.begin(), node_of_.end(), before)));
    }
    workers_.reserve(threads_ - 1);
    for (int worker = 1; worker < threads_; ++worker) workers_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
    stop_ = true;
    started_.fetch_add(1);
    started_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        _mm_pause();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void Pool::work(int worker) {
    _mm_setcsr(_mm_getcsr() | kFlushDenormals);
    if (!cpus_.empty()) bind(cpus_[node_of_[worker]]);
    for (uint32_t seen = 0;;) {
        wait_while(started_, seen);
        // Jobs do not overlap and each ends with a barrier of all, so none can be missed.
        ++seen;
        if (stop_) return;
        job_(context_, worker);
        barrier();
    }
}

void Pool::run_job(Job job, const void* context) {
    const std::lock_guard<std::mutex> one_at_a_time(callers_);
    std::optional<Bound> bound;
    if (!cpus_.empty()) bound.emplace(cpus_[node_of_[0]]);
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | kFlushDenormals);
    job_ = job;
    context_ = context;
    if (threads_ > 1) {
        started_.fetch_add(1, std::memory_order_seq_cst);
        started_.notify_all();
    }
    job(context, 0);
    barrier();
    _mm_setcsr(control);
}

void Pool::release(uint32_t phase) {
    arrived_.store(0, std::memory_order_relaxed);
    for (Counter& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
    // Not merely released: notify_all looks whether anybody sleeps, and must not look before the new value is there, or
    // one who falls asleep between the two is never woken.
    phase_.store(phase + 1, std::memory_order_seq_cst);
    phase_.notify_all();
}

}  // namespace octavo
