// Sixteen lanes (see ../avx2/lanes.h). Everything is local to the unit that includes it.
#pragma once

#include "../avx2/lanes.h"

namespace {

// Thirty-two floats of 8 bits (see ../avx2/float8.h).
template <Float8 FORMAT>
inline __m512i halves_of_float8(__m256i bytes) {
    if constexpr (FORMAT == E5M2) {
        return _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
    } else {
        // The sign fills the two upper bits. Of the magnitude 0x7f, and no other, the next one carries into the second
        // of them, which becomes what the addition changed of it: the exponent of NaN, or zero.
        const __m512i half = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
        const __m512i next = _mm512_add_epi16(half, _mm512_set1_epi16(0x80));
        return _mm512_ternarylogic_epi64(half, next, _mm512_set1_epi16(0x4000), 0x78);  // a ^ (b & c)
    }
}

struct Sixteen {
    using Vector = __m512;
    static constexpr int kCount = 16;
    static constexpr int kTileRows = 8;
    // Four for few rows, where what a token costs beside its products weighs most; with elements of four bytes,
    // memory is what costs.
    template <int N, int SOURCE>
    static constexpr int kVectors = N == 1 || (N <= 4 && kBytes<SOURCE> < 4) ? 4 : 2;
    template <int SOURCE, int J>
    static constexpr int kAtOnce = J > 1 && is_float8(SOURCE) ? 2 : 1;

    static Vector all(float value) { return _mm512_set1_ps(value); }
    static Vector load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
    static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
    static Vector largest(Vector a, Vector b) { return _mm512_max_ps(a, b); }
    static __m256 low(Vector v) { return _mm512_castps512_ps256(v); }
    static __m256 high(Vector v) { return _mm512_extractf32x8_ps(v, 1); }
    static float largest_of(Vector v) { return max_lanes(_mm256_max_ps(low(v), high(v))); }
    static float sum_of(const Vector (&v)[1]) { return sum_lanes(low(v[0]) + high(v[0])); }
    template <int SOURCE>
    static Vector load_as(const char* p) {
        if constexpr (SOURCE == CACHE_FLOAT16) {
            return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        } else if constexpr (kBytes<SOURCE> == 4) {
            return _mm512_loadu_ps(p);
        } else {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
            if constexpr (SOURCE == CACHE_INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
            return _mm512_cvtph_ps(halves_of_float8<kFormat<SOURCE>>(bytes));
        }
    }
    // Of keys, the second half of a step may lie in another block.
    template <int SOURCE, int COUNT>
    static Columns<Vector, COUNT> columns(const char* p, const char* second) {
        if constexpr (COUNT == 2) {
            const auto bytes = [](const char* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); };
            const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes(p)), bytes(second), 1);
            const __m512i halves = halves_of_float8<kFormat<SOURCE>>(both);
            return {_mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
                    _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))};
        } else {
            return {load_as<SOURCE>(p)};
        }
    }
    static Vector raise(Vector v, Vector power) {
        const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(power), 23);
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), shifted));
    }
};

}  // namespace
