// Memory for weights, activations and the KV cache: 64-byte aligned, zero-filled, in huge pages where the system
// gives them (a matrix-vector product is bound by memory, and by TLB misses with 4 KiB pages).
#pragma once

#include <cstddef>
#include <cstdint>

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

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace octavo
