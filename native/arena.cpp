#include "arena.h"

#include <algorithm>
#include <new>
#include <utility>

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace octavo {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kStoreArena = size_t{64} << 20;  // address space; only what is used becomes memory
}  // namespace

Arena::Arena(size_t bytes) {
    if (bytes == 0) return;
    // Whole huge pages, and one more so that the mapping can be aligned to them.
    const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    const bool huge = bytes >= kHugePage;
    const size_t mapped = huge ? rounded + kHugePage : (bytes + 4095) / 4096 * 4096;
    void* address = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(address);
    size_ = mapped;
    if (huge) {
        const size_t skip = (kHugePage - reinterpret_cast<uintptr_t>(data_) % kHugePage) % kHugePage;
        if (skip > 0) munmap(data_, skip);
        if (mapped - skip > rounded) munmap(data_ + skip + rounded, mapped - skip - rounded);
        data_ += skip;
        size_ = rounded;
        madvise(data_, size_, MADV_HUGEPAGE);  // advice: a refusal costs speed only
    }
}

Arena::~Arena() {
    if (data_ != nullptr) munmap(data_, size_);
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

void Arena::interleave(const std::vector<int>& nodes) const {
    constexpr int kBits = 8 * sizeof(unsigned long);
    std::vector<unsigned long> mask;
    for (const int node : nodes) {
        mask.resize(std::max<size_t>(mask.size(), node / kBits + 1));
        mask[node / kBits] |= 1ul << (node % kBits);
    }
    if (mask.empty() || size_ == 0) return;
    // The kernel reads one bit less than it is told.
    syscall(SYS_mbind, data_, size_, MPOL_INTERLEAVE, mask.data(), mask.size() * kBits + 1, 0u);
}

std::shared_ptr<uint8_t> Store::take(size_t bytes, int node) {
    const std::lock_guard<std::mutex> one_at_a_time(mutex_);
    open_.resize(std::max<size_t>(open_.size(), node + 1));
    auto& [arena, used] = open_[node];
    const size_t rounded = (bytes + 63) / 64 * 64;
    if (!arena || used + rounded > arena->size()) {
        if (rounded > kStoreArena / 4) {
            const auto own = std::make_shared<Arena>(rounded);
            return {own, own->data()};
        }
        arena = std::make_shared<Arena>(kStoreArena);
        used = 0;
    }
    uint8_t* at = arena->data() + used;
    used += rounded;
    return {arena, at};
}

}  // namespace octavo
