// Work on single rows (see rows.h), eight lanes at a time, and what it needs of them beside simd.h.
#include "simd.h"

namespace {

// Fixed tree, first over vectors of 8 lanes.
inline float sum_lanes(const __m256 (&v)[4]) { return sum_lanes((v[0] + v[2]) + (v[1] + v[3])); }

// The bits of whichever has the higher ones, and the highest of all lanes.
inline __m256 higher_bits(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
inline uint32_t highest(__m256 v) {
    const __m256i all = _mm256_castps_si256(v);
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
}
inline uint32_t highest(const __m256 (&v)[4]) {
    return highest(higher_bits(higher_bits(v[0], v[1]), higher_bits(v[2], v[3])));
}

inline __m256i integers(const float* x, __m256 factor) { return _mm256_cvtps_epi32(_mm256_loadu_ps(x) * factor); }

// Thirty-two values as integers, in their order.
inline __m256i to_int8(const float* x, __m256 factor) {
    const __m256i words = _mm256_packs_epi32(integers(x, factor), integers(x + 8, factor));
    const __m256i more = _mm256_packs_epi32(integers(x + 16, factor), integers(x + 24, factor));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words, more), order);
}

inline int32_t sum_lanes(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// The same to `out`; returns their sum.
inline int32_t to_int16(const float* x, __m256 factor, int16_t* out) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 16) {
        const __m256i a = integers(x + i, factor);
        const __m256i b = integers(x + i + 8, factor);
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), words);
    }
    return sum_lanes(sum);
}

}  // namespace

#include "rows.h"

void octavo::fill_rows_avx2(Kernels& table) { fill_rows<__m256>(table); }
