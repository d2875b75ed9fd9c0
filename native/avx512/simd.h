// Sixteen lanes of what ../avx2/simd.h has for eight. Everything is local to the unit that includes it.
#pragma once

#include "../avx2/simd.h"

namespace {

inline __mmask16 first_lanes(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1); }

template <>
inline __m512 all<__m512>(float value) {
    return _mm512_set1_ps(value);
}
template <>
inline __m512 load<__m512>(const float* p, int n) {
    return n >= 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(first_lanes(n), p);
}
inline __m512 first_of(int n, __m512 v) { return _mm512_maskz_mov_ps(first_lanes(n), v); }
inline void store(float* p, int n, __m512 v) {
    if (n >= 16) {
        _mm512_storeu_ps(p, v);
    } else {
        _mm512_mask_storeu_ps(p, first_lanes(n), v);
    }
}
inline __m512 largest(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
inline __m512 smallest(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512 fms(__m512 a, __m512 b, __m512 c) { return _mm512_fmsub_ps(a, b, c); }
inline __m512 fnma(__m512 a, __m512 b, __m512 c) { return _mm512_fnmadd_ps(a, b, c); }
inline __m512 negative(__m512 v) { return _mm512_xor_ps(v, _mm512_set1_ps(-0.0f)); }
inline __m512 magnitude(__m512 v) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), v); }
inline __m512 nearest(__m512 v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline __m512 power_of_two(__m512 n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline __m512 to_bfloat16(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    const __m512 upper =
        _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    return _mm512_mask_mov_ps(upper, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_ps(__builtin_nanf("")));
}
inline __mmask16 is_less(__m512 a, __m512 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline __mmask16 is_nan(__m512 v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
inline __mmask16 is_minus(__m512 v) { return _mm512_movepi32_mask(_mm512_castps_si512(v)); }
inline __m512 pick(__mmask16 condition, __m512 yes, __m512 no) { return _mm512_mask_blend_ps(condition, no, yes); }

}  // namespace
