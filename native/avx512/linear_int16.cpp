// Products of quantized weights with int16 activations, of two panels at once (VNNI). The integers are exact and the
// float epilogue is that of ../avx2/linear_int16.cpp, operation for operation, so that both give the same bits.
#include "../kernels.h"
#include "cells.h"

namespace {

using namespace octavo;

constexpr int kBlockRows = 8;  // beside the 16 pairs of a cell

// The weights of a cell as int16 pairs [k / 2][column][2].
template <int KIND>
inline void load_pairs(PairPlace at, __m512i (&w)[16]) {
    if constexpr (kKinds[KIND].planes == PAIRS) {
        const auto* low = reinterpret_cast<const __m128i*>(at.low.cell + kKinds[KIND].meta_bytes);
        const auto* high = reinterpret_cast<const __m128i*>(at.high.cell + kKinds[KIND].meta_bytes);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            w[i] = _mm512_cvtepi8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low + i)),
                                                                _mm_loadu_si128(high + i), 1));
        }
    } else {
        const __m512i zero = _mm512_set1_epi16(zero_point(KIND));
        const __m512i front =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
        const __m512i back =
            _mm512_broadcast_i32x4(_mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1));
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const __m512i q = quad_of<KIND>(at, i);
            w[2 * i] = _mm512_sub_epi16(_mm512_shuffle_epi8(q, front), zero);
            w[2 * i + 1] = _mm512_sub_epi16(_mm512_shuffle_epi8(q, back), zero);
        }
    }
}

// Sum over eight pairs: half a cell.
inline __m512i dot_half(const __m512i* w, const int16_t* a) {
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        int32_t two;
        __builtin_memcpy(&two, a + 2 * i, 4);
        sum = _mm512_dpwssd_epi32(sum, w[i], _mm512_set1_epi32(two));
    }
    return sum;
}

// Sums of all columns of a pair of panels and ROWS rows stay in registers along K.
template <int KIND, int ROWS>
void block(PairOfPanels w, int cells, const Act16& x, int row, float* out, int64_t stride) {
    constexpr int halves = has_halves(KIND) ? 2 : 1;
    __m512 acc[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) acc[r] = _mm512_setzero_ps();
    for (int c = 0; c < cells; ++c) {
        const PairPlace at = place_of<KIND>(w, c);
        fetch_ahead<KIND>(at);
        __m512 scale[2], minimum[2];
        for (int half = 0; half < halves; ++half) {
            scale[half] = scale_of<KIND>(at, half);
            if constexpr (has_minimum(KIND)) minimum[half] = minimum_of<KIND>(at, half);
        }
        __m512i pairs[16];
        load_pairs<KIND>(at, pairs);
        const int64_t index = c * x.rows + row;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const int16_t* a = x.q + (index + r) * kCell;
            __m512i sum[2] = {dot_half(pairs, a), dot_half(pairs + 8, a + 16)};
            if constexpr (halves == 1) sum[0] = _mm512_add_epi32(sum[0], sum[1]);
            for (int half = 0; half < halves; ++half) {
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[half]), scale[half], acc[r]);
                if constexpr (has_minimum(KIND)) {
                    const float added = halves == 2 ? sum_of_half(a + 16 * half) : x.sum[index + r];
                    acc[r] = _mm512_fmadd_ps(minimum[half], _mm512_set1_ps(added), acc[r]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        _mm512_mask_storeu_ps(out + r * stride, w.columns, _mm512_mul_ps(acc[r], _mm512_set1_ps(x.scale[row + r])));
    }
}

using BlockFn = void (*)(PairOfPanels, int cells, const Act16&, int row, float* out, int64_t stride);

template <int KIND>
constexpr BlockFn kBlocks[kBlockRows] = {block<KIND, 1>, block<KIND, 2>, block<KIND, 3>, block<KIND, 4>,
                                         block<KIND, 5>, block<KIND, 6>, block<KIND, 7>, block<KIND, 8>};

template <int KIND>
void linear(const Panels& w, int panel, int count, const Act16& x, int row, int rows, float* out, int64_t stride) {
    each_block(kBlocks<KIND>, w, panel, count, rows, [&](BlockFn block, PairOfPanels pair, int first, int column) {
        block(pair, w.n_in / kCell, x, row + first, out + first * stride + column, stride);
    });
}

template <int KIND>
void fill(Kernels& table) {
    if constexpr (has_integers(KIND)) table.linear_int16[KIND] = linear<KIND>;
    if constexpr (KIND + 1 < KIND_COUNT) fill<KIND + 1>(table);
}

}  // namespace

void octavo::fill_linear_int16_avx512(Kernels& table) { fill<Q4_0>(table); }
