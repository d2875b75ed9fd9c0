// Products of BF16 weights with activations rounded to bfloat16, two elements of K at a time. VDPBF16PS adds the
// product of the upper halves, then that of the lower halves, each with one rounding to nearest even, denormals being
// zero: the words have the first k in their upper half, so this is the fma chain in ascending k of
// ../avx2/linear_float.cpp, bit for bit.
#include "../avx2/roofline.h"
#include "../avx512/simd.h"
#include "../avx512/tiles.h"
#include "../kernels.h"

namespace {

inline __m512 multiply_add_pairs(__m512 x, __m512 w, __m512 sums) {
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
}

struct Pairs : InPanels<kKinds[BF16].cell_bytes()> {
    static constexpr int kElements = 2;
    static constexpr int kWords = 1;

    template <int>
    static Pairs of(const Panels& w, int panel, int count, int cell, int, float*) {
        return {{{w, panel, count, int64_t{cell} * kKinds[BF16].cell_bytes()}}};
    }

    template <int VECTORS>
    void load(int step, __m512 (&weights)[kWords][VECTORS]) const {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) weights[0][v] = word(step, v);
    }
    static __m512 multiply_add(__m512 x, __m512 w, __m512 sums) { return multiply_add_pairs(x, w, sums); }
};

void linear(const Panels& w, int panel, int count, const float* x, int64_t x_stride, int row, int rows, float* out,
            int64_t stride, float* scratch) {
    for (int p = 0; p < count; p += 4) {
        columns_of<BF16, Pairs>(w, panel + p, count - p < 4 ? count - p : 4, x + row * x_stride, x_stride, rows,
                                out + 8 * p, stride, scratch);
    }
}

// As the weights are: pairs with the first element in the upper half.
void pack(const float* x, int width, float* row, int first) {
    for (int k = 0; k < width; k += 16) {
        const __m512i values = _mm512_castps_si512(to_bfloat16(load<__m512>(x + k, width - k)));
        const __m512i upper = _mm512_and_si512(values, _mm512_set1_epi64(0xffff0000));
        const __m256i words = _mm512_cvtepi64_epi32(_mm512_or_si512(upper, _mm512_srli_epi64(values, 48)));
        store(row + (first + k) / 2, (width - k) / 2, _mm256_castsi256_ps(words));
    }
}

int64_t multiply_bfloat16(int64_t rounds) {
    const __m512 y = _mm512_castsi512_ps(_mm512_set1_epi16(0x3e80));  // 0.25
    return 64 * multiply(rounds, _mm512_castsi512_ps(_mm512_set1_epi16(0x3f00)),
                         [&](__m512 sum, __m512 x) { return multiply_add_pairs(x, y, sum); });
}

}  // namespace

void octavo::fill_linear_bfloat16_avx512bf16(Kernels& table) {
    table.linear_bfloat16 = linear;
    table.pack_bfloat16 = pack;
    table.multiply_bfloat16 = multiply_bfloat16;
}
