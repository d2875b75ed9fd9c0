// What a core can do at most with the instructions of a unit: the multiply-adds that its products are made of, without
// waiting for memory or for one another. Everything is local to the unit that includes it (see ../kernels.h).
#pragma once

#include "../kernels.h"

namespace {

using namespace octavo;

constexpr int kChains = 10;  // enough to hide five cycles of two units, few enough for 16 registers

// The compiler takes what this has for used.
template <class T>
inline void use(T x) {
    asm volatile("" : : "x"(x));
}

// `rounds` times kChains sums, each to be sum = step(sum, x). Returns how often that was.
template <class Vector, class Step>
inline int64_t multiply(int64_t rounds, Vector x, const Step& step) {
    Vector sums[kChains];
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) sums[i] = Vector{};
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 10
        for (int i = 0; i < kChains; ++i) {
            asm volatile("" : "+x"(x));  // it could have changed, so this is not done once for all rounds
            sums[i] = step(sums[i], x);
        }
    }
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) use(sums[i]);
    return rounds * kChains;
}

// Reads all the bytes; fewer than four vectors at the end may be left.
template <class Vector>
void read(const uint8_t* data, int64_t bytes) {
    Vector sums[4] = {};
    constexpr int64_t kBytes = 4 * sizeof(Vector);
    for (int64_t at = 0; at + kBytes <= bytes; at += kBytes) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            Vector more;
            __builtin_memcpy(&more, data + at + i * sizeof(Vector), sizeof(Vector));
            sums[i] ^= more;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) use(sums[i]);
}

}  // namespace
