#include "roofline.h"

#include <immintrin.h>

namespace {

int64_t multiply_float(int64_t rounds) {
    const __m256 y = _mm256_set1_ps(0.25f);
    return 16 *
           multiply(rounds, _mm256_set1_ps(0.5f), [&](__m256 sum, __m256 x) { return _mm256_fmadd_ps(x, y, sum); });
}

int64_t multiply_int8(int64_t rounds) {
    const __m256i y = _mm256_set1_epi8(2);
    return 64 * multiply(rounds, _mm256_set1_epi8(1),
                         [&](__m256i sum, __m256i x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(x, y)); });
}

int64_t multiply_int16(int64_t rounds) {
    const __m256i y = _mm256_set1_epi16(2);
    return 32 * multiply(rounds, _mm256_set1_epi16(1),
                         [&](__m256i sum, __m256i x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y)); });
}

}  // namespace

void octavo::fill_roofline_avx2(Kernels& table) {
    table.multiply_float = multiply_float;
    table.multiply_int8 = multiply_int8;
    table.multiply_int16 = multiply_int16;
    table.multiply_bfloat16 = multiply_float;
    table.read = read<__m256i>;
}
