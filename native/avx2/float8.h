// Floats of 8 bits (Micikevicius et al., "FP8 formats for deep learning", 2022): E4M3, which has no infinities, and
// E5M2. Everything is local to the unit that includes it (see ../kernels.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

enum Float8 { E4M3, E5M2 };

// What from_float8 gives is to be multiplied by.
template <Float8 FORMAT>
constexpr float kFloat8Unit = FORMAT == E4M3 ? 256.0f : 1.0f;

// Floats, divided by kFloat8Unit, as float16 in which both kinds are exact, their denormals too: E5M2 is the upper byte
// of a float16, and the bits of E4M3, whose exponent is offset by 7 instead of 15, give its value divided by 256.
template <Float8 FORMAT>
inline __m256i halves_of_float8(__m128i bytes) {
    if constexpr (FORMAT == E5M2) {
        return _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    } else {
        // The sign fills the upper bits, and all but the uppermost one of them are cleared.
        const __m256i half =
            _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16(-0x4001));
        // Of the magnitude 0x7f, and no other, the next one has a higher bit; with it, the exponent is that of NaN.
        const __m256i nan =
            _mm256_and_si256(_mm256_add_epi16(half, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
        return _mm256_or_si256(half, nan);
    }
}

// Eight floats, divided by kFloat8Unit.
template <Float8 FORMAT>
inline __m256 from_float8(const void* p) {
    const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(halves_of_float8<FORMAT>(bytes)));
}

// Eight values, rounded to the nearest, ties to even; those beyond the largest finite float become it.
template <Float8 FORMAT>
inline __m128i to_float8(__m256 x) {
    constexpr int mantissa = FORMAT == E4M3 ? 3 : 2;
    constexpr int bias = FORMAT == E4M3 ? 7 : 15;
    constexpr int dropped = 23 - mantissa;
    const __m256 minus = _mm256_set1_ps(-0.0f);
    // The second operand is what min returns for NaN.
    const __m256 magnitude =
        _mm256_min_ps(_mm256_set1_ps(FORMAT == E4M3 ? 448.0f : 57344.0f), _mm256_andnot_ps(minus, x));
    const __m256i bits = _mm256_castps_si256(magnitude);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, dropped), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32((1 << (dropped - 1)) - 1)));
    const __m256i normal =
        _mm256_sub_epi32(_mm256_srli_epi32(nearest, dropped), _mm256_set1_epi32((127 - bias) << mantissa));
    // Denormals are multiples of 2^(1 - bias - mantissa): the last bit of a float of this size.
    const __m256 large = _mm256_castsi256_ps(_mm256_set1_epi32((127 + 23 + 1 - bias - mantissa) << 23));
    const __m256i denormal =
        _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(magnitude, large)), _mm256_castps_si256(large));
    const __m256 least = _mm256_castsi256_ps(_mm256_set1_epi32((127 + 1 - bias) << 23));
    const __m256i small = _mm256_castps_si256(_mm256_cmp_ps(magnitude, least, _CMP_LT_OQ));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i code = _mm256_blendv_epi8(normal, denormal, small);
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), nan);
    code = _mm256_or_si256(code, _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(x, minus)), 24));
    const __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    return _mm_packus_epi16(pairs, pairs);
}

}  // namespace
