// Work on single rows (see ../avx2/rows.h), sixteen lanes at a time.
#include "simd.h"

namespace {

inline __m256 low(__m512 v) { return _mm512_castps512_ps256(v); }
inline __m256 high(__m512 v) { return _mm512_extractf32x8_ps(v, 1); }

inline float sum_lanes(const __m512 (&v)[2]) {
    const __m512 sum = v[0] + v[1];
    return sum_lanes(low(sum) + high(sum));
}

inline __m512 higher_bits(__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline uint32_t highest(const __m512 (&v)[2]) {
    const __m512i both = _mm512_castps_si512(higher_bits(v[0], v[1]));
    return _mm512_reduce_max_epu32(both);
}

inline __m512i integers(const float* x, __m512 factor) { return _mm512_cvtps_epi32(_mm512_loadu_ps(x) * factor); }

inline __m256i to_int8(const float* x, __m512 factor) {
    const __m128i first = _mm512_cvtsepi32_epi8(integers(x, factor));
    const __m128i second = _mm512_cvtsepi32_epi8(integers(x + 16, factor));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

inline int32_t to_int16(const float* x, __m512 factor, int16_t* out) {
    const __m512i a = integers(x, factor);
    const __m512i b = integers(x + 16, factor);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtsepi32_epi16(a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm512_cvtsepi32_epi16(b));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}

}  // namespace

#include "../avx2/rows.h"

void octavo::fill_rows_avx512(Kernels& table) { fill_rows<__m512>(table); }
