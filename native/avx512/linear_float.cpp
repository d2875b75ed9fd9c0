// Products with float32 activations: one fma chain per (row, column) in ascending k, as in ../avx2/linear_float.cpp, so
// that both give the same bits.
#include "../avx2/unpack.h"
#include "../kernels.h"
#include "tiles.h"

namespace {

struct FusedMultiplyAdd {
    static constexpr int kElements = 1;
    static __m512 multiply_add(__m512 x, __m512 w, __m512 sums) { return _mm512_fmadd_ps(x, w, sums); }
};

// Floats, which few instructions convert.
template <int KIND>
struct InPlace : InPanels<kKinds[KIND].cell_bytes()>, FusedMultiplyAdd {
    static constexpr int kWords = KIND == BF16 ? 2 : 1;

    template <int>
    static InPlace of(const Panels& w, int panel, int count, int cell, int, float*) {
        return {{{w, panel, count, int64_t{cell} * kKinds[KIND].cell_bytes()}}, {}};
    }

    template <int VECTORS>
    void load(int step, __m512 (&weights)[kWords][VECTORS]) const {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
            if constexpr (KIND == F16) {
                weights[0][v] = load_halves(this->at.panels[2 * v] + step * 16, this->at.panels[2 * v + 1] + step * 16);
            } else {
                weights[0][v] = this->word(step, v);
            }
            if constexpr (KIND == BF16) {
                const __m512i pairs = _mm512_castps_si512(weights[0][v]);
                const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
                weights[0][v] = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
                weights[1][v] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
            }
        }
    }
};

// Others, as float32 in a buffer: [k][kTileColumns].
struct Copied : FusedMultiplyAdd {
    static constexpr bool kCopies = true;
    static constexpr int kWords = 1;
    static constexpr int kMostCells = kFloatScratch / (kTileColumns * kCell);
    const float* values;

    template <int KIND>
    static Copied of(const Panels& w, int panel, int count, int cell, int cells, float* scratch) {
        for (int i = 0; i < count; ++i) {
            unpack<KIND>(w.data + (panel + i) * w.panel_bytes, cell, cells, scratch + 8 * i, kTileColumns);
        }
        return {{}, scratch};
    }

    void skip(int cells) { values += cells * kCell * kTileColumns; }

    template <int VECTORS>
    void load(int step, __m512 (&weights)[kWords][VECTORS]) const {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) weights[0][v] = _mm512_load_ps(values + step * kTileColumns + 16 * v);
    }
};

template <int KIND>
void linear(const Panels& w, int panel, int count, const float* x, int64_t x_stride, int row, int rows, float* out,
            int64_t stride, float* scratch) {
    auto some = columns_of<KIND, Copied>;
    if constexpr (!is_quantized(KIND)) {
        // The second half of a pair that the matrix does not have would meet what lies behind a row. The conversion of
        // float16 takes the place of multiply-adds: done once, it pays from the fifth tile on.
        const bool whole = w.n_in % InPlace<KIND>::kWords == 0;
        if (whole && (KIND != F16 || rows <= 4 * kBlockRows)) some = columns_of<KIND, InPlace<KIND>>;
    }
    for (int p = 0; p < count; p += 4) {
        some(w, panel + p, count - p < 4 ? count - p : 4, x + row * x_stride, x_stride, rows, out + 8 * p, stride,
             scratch);
    }
}

template <int KIND>
void fill(Kernels& table) {
    table.linear_float[KIND] = linear<KIND>;
    if constexpr (KIND + 1 < KIND_COUNT) fill<KIND + 1>(table);
}

}  // namespace

void octavo::fill_linear_float_avx512(Kernels& table) {
    fill<0>(table);
    table.linear_bfloat16 = linear<BF16>;
}
