// What a core can do at most with these instructions: the multiply-adds that the products are made of, without waiting
// for memory or for one another.
#include <immintrin.h>

#include "../kernels.h"

namespace {

using namespace octavo;

constexpr int kChains = 12;  // enough to hide four cycles of two units, few enough for 16 registers

// The compiler takes `x` for changed here, so it can neither leave the work out nor do it once for all rounds.
template <class T>
inline void touch(T& x) {
    asm volatile("" : "+x"(x));
}

int64_t multiply_float(int64_t rounds) {
    __m256 sums[kChains];
#pragma GCC unroll 12
    for (__m256& sum : sums) sum = _mm256_setzero_ps();
    __m256 x = _mm256_set1_ps(0.5f), y = _mm256_set1_ps(0.25f);
    for (int64_t round = 0; round < rounds; ++round) {
        touch(x);
        touch(y);
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sums[i] = _mm256_fmadd_ps(x, y, sums[i]);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) touch(sums[i]);
    return rounds * kChains * 8 * 2;
}

int64_t multiply_int8(int64_t rounds) {
    __m256i sums[kChains];
#pragma GCC unroll 12
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    __m256i x = _mm256_set1_epi8(1), y = _mm256_set1_epi8(2);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) {
            touch(x);
            sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(x, y));
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) touch(sums[i]);
    return rounds * kChains * 32 * 2;
}

int64_t multiply_int16(int64_t rounds) {
    __m256i sums[kChains];
#pragma GCC unroll 12
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    __m256i x = _mm256_set1_epi16(1), y = _mm256_set1_epi16(2);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) {
            touch(x);
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(x, y));
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) touch(sums[i]);
    return rounds * kChains * 16 * 2;
}

void read(const uint8_t* data, int64_t bytes) {
    __m256i sums[4];
#pragma GCC unroll 12
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    for (int64_t at = 0; at + 128 <= bytes; at += 128) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m256i* from = reinterpret_cast<const __m256i*>(data + at) + i;
            sums[i] = _mm256_xor_si256(sums[i], _mm256_loadu_si256(from));
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) touch(sums[i]);
}

}  // namespace

void octavo::fill_roofline_avx2(Kernels& table) {
    table.multiply_float = multiply_float;
    table.multiply_int8 = multiply_int8;
    table.multiply_int16 = multiply_int16;
    table.read = read;
}
