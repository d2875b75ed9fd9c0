#include "pool.h"

#include <immintrin.h>

namespace octavo {

namespace {

constexpr unsigned kFlushDenormals = 0x8040;  // MXCSR: flush to zero, denormals are zero
constexpr int kSpins = 400;                   // pauses before sleeping: 20 to 60 microseconds

}  // namespace

Pool::Pool(int threads) : threads_(threads) {
    workers_.reserve(threads - 1);
    for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
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
    counter_.store(0, std::memory_order_relaxed);
    // Not merely released: notify_all looks whether anybody sleeps, and must not look before the new value is there, or
    // one who falls asleep between the two is never woken.
    phase_.store(phase + 1, std::memory_order_seq_cst);
    phase_.notify_all();
}

}  // namespace octavo
