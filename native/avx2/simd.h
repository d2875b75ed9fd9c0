// Vector pieces that several AVX2 units use. Everything is local to the unit that includes it (see ../kernels.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

inline __m256i tail_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// n values (at least 8: all of the vector), zero beyond.
inline __m256 load_some(const float* p, int n) {
    return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, tail_mask(n));
}

inline void store_some(float* p, int n, __m256 v) {
    if (n >= 8) {
        _mm256_storeu_ps(p, v);
    } else {
        _mm256_maskstore_ps(p, tail_mask(n), v);
    }
}

// Fixed tree: ((0+4)+(2+6)) + ((1+5)+(3+7)).
inline float sum_lanes(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float max_lanes(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline void transpose(__m256 (&rows)[8]) {
    __m256 pairs[8];
    for (int i = 0; i < 4; ++i) {
        pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    __m256 fours[8];
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
            const __m256 a = pairs[4 * i + j];
            const __m256 b = pairs[4 * i + 2 + j];
            fours[4 * i + 2 * j] = _mm256_shuffle_ps(a, b, 0x44);
            fours[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a, b, 0xee);
        }
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
        rows[4 + i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
    }
}

// What templates over the width of vectors are made of: ../avx512/simd.h has the same for sixteen lanes, and comes
// before such templates. Where an operand of largest or smallest is NaN, they give the second.
template <class V>
inline constexpr int kLanes = sizeof(V) / sizeof(float);

template <class V>
inline V all(float value);
template <>
inline __m256 all<__m256>(float value) {
    return _mm256_set1_ps(value);
}
template <class V>
inline V load(const float* p, int n);
template <>
inline __m256 load<__m256>(const float* p, int n) {
    return load_some(p, n);
}
inline __m256 first_of(int n, __m256 v) { return _mm256_and_ps(v, _mm256_castsi256_ps(tail_mask(n))); }  // 0 beyond
inline void store(float* p, int n, __m256 v) { store_some(p, n, v); }
inline __m256 largest(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
inline __m256 smallest(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
inline __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256 fms(__m256 a, __m256 b, __m256 c) { return _mm256_fmsub_ps(a, b, c); }
inline __m256 fnma(__m256 a, __m256 b, __m256 c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b
inline __m256 negative(__m256 v) { return _mm256_xor_ps(v, _mm256_set1_ps(-0.0f)); }
inline __m256 magnitude(__m256 v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
inline __m256 nearest(__m256 v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// To nearest even.
inline __m256 to_bfloat16(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256 upper =
        _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    return _mm256_blendv_ps(upper, _mm256_set1_ps(__builtin_nanf("")), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
inline __m256 is_less(__m256 a, __m256 b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline __m256 is_nan(__m256 v) { return _mm256_cmp_ps(v, v, _CMP_UNORD_Q); }
inline __m256 is_minus(__m256 v) { return v; }  // by the sign, of zero too
inline __m256 pick(__m256 condition, __m256 yes, __m256 no) { return _mm256_blendv_ps(no, yes, condition); }

}  // namespace
