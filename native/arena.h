// Memory for weights, activations and the KV cache: 64-byte aligned, zero-filled, in huge pages where the system
// gives them (a matrix-vector product is bound by memory, and by TLB misses with 4 KiB pages).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace octavo {

class Arena {
public:
    Arena() = default;
    explicit Arena(size_t bytes);  // throws std::bad_alloc
    ~Arena();
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&& other) noexcept;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Spreads pages that nobody has written yet over these nodes of the system, in turn. Where the system does not let
    // us (containers may not), a page lies where it is first written.
    void interleave(const std::vector<int>& nodes) const;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Hands out pieces of large arenas, so that small pieces lie in huge pages too. A piece keeps its arena alive. Pieces
// of different nodes share no page.
class Store {
public:
    // Zero-filled, 64-byte aligned; throws std::bad_alloc.
    std::shared_ptr<uint8_t> take(size_t bytes, int node);

private:
    struct Open {
        std::shared_ptr<Arena> arena;
        size_t used = 0;
    };
    std::mutex mutex_;
    std::vector<Open> open_;  // of each node
};

}  // namespace octavo
