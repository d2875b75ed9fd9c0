#include "../avx2/roofline.h"

#include <immintrin.h>

namespace {

int64_t multiply_float(int64_t rounds) {
    const __m512 y = _mm512_set1_ps(0.25f);
    return 32 *
           multiply(rounds, _mm512_set1_ps(0.5f), [&](__m512 sum, __m512 x) { return _mm512_fmadd_ps(x, y, sum); });
}

int64_t multiply_int8(int64_t rounds) {
    const __m512i y = _mm512_set1_epi8(2);
    return 128 * multiply(rounds, _mm512_set1_epi8(1),
                          [&](__m512i sum, __m512i x) { return _mm512_dpbusd_epi32(sum, x, y); });
}

int64_t multiply_int16(int64_t rounds) {
    const __m512i y = _mm512_set1_epi16(2);
    return 64 * multiply(rounds, _mm512_set1_epi16(1),
                         [&](__m512i sum, __m512i x) { return _mm512_dpwssd_epi32(sum, x, y); });
}

}  // namespace

void octavo::fill_roofline_avx512(Kernels& table) {
    table.multiply_float = multiply_float;
    table.multiply_int8 = multiply_int8;
    table.multiply_int16 = multiply_int16;
    table.multiply_bfloat16 = multiply_float;
    table.read = read<__m512i>;
}
