// Products of quantized weights with int16 activations, of two panels at once (VNNI). The integers are exact and the
// float epilogue is that of ../avx2/linear_int16.cpp, operation for operation, so that both give the same bits.
#include "../kernels.h"
#include "cells.h"

namespace {

using namespace octavo;

constexpr int kMostRows = 7;   // that meet two pairs of panels at once: their sums, those of the cell, and weights
constexpr int kOpenCells = 8;  // that are unpacked at a time

// Two elements of K of each column, as int16 pairs [column][2].
template <int KIND>
inline __m512i pair_at(PairPlace at, int index) {
    if constexpr (kKinds[KIND].planes == PAIRS) {
        constexpr int skipped = kKinds[KIND].meta_bytes;
        const auto* low = reinterpret_cast<const __m128i*>(at.low.cell + skipped) + index;
        const auto* high = reinterpret_cast<const __m128i*>(at.high.cell + skipped) + index;
        return _mm512_cvtepi8_epi16(
            _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1));
    } else {
        const __m512i front =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
        const __m512i back =
            _mm512_broadcast_i32x4(_mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1));
        const __m512i spread = _mm512_shuffle_epi8(quad_of<KIND>(at, index / 2), index % 2 == 0 ? front : back);
        return _mm512_sub_epi16(spread, _mm512_set1_epi16(zero_point(KIND)));
    }
}

// A cell where the panels have it: what is asked for is unpacked then.
template <int KIND>
struct PackedCell {
    PairPlace at;

    __m512i pair(int index) const { return pair_at<KIND>(at, index); }
    __m512 scale(int half) const { return scale_of<KIND>(at, half); }
    __m512 minimum(int half) const { return minimum_of<KIND>(at, half); }
};

// Makes the compiler forget what it has read of a cell, for which there are no registers.
template <int KIND>
inline void forget(PackedCell<KIND>& w) {
    asm volatile("" : "+r"(w.at.low.cell), "+r"(w.at.high.cell));
}

// A cell that was unpacked before.
template <int KIND>
struct OpenCell {
    __m512i pairs[16];
    __m512 scales[2];
    __m512 minima[2];

    void fill(PairPlace at) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) pairs[i] = pair_at<KIND>(at, i);
        for (int half = 0; half < (has_halves(KIND) ? 2 : 1); ++half) {
            scales[half] = scale_of<KIND>(at, half);
            if constexpr (has_minimum(KIND)) minima[half] = minimum_of<KIND>(at, half);
        }
    }
    __m512i pair(int index) const { return pairs[index]; }
    __m512 scale(int half) const { return scales[half]; }
    __m512 minimum(int half) const { return minima[half]; }
};

template <int KIND>
inline void forget(const OpenCell<KIND>&) {}

// Adds the products of a cell of each pair of panels and ROWS rows from `index` on. All of them meet some weights
// before the next ones are unpacked or loaded.
template <int KIND, int ROWS, class Cell>
inline __attribute__((always_inline)) void add_cells(__m512 (&acc)[2][ROWS], Cell* w, const Act16& x, int64_t index) {
    constexpr bool apart = !has_halves(KIND) && ROWS == 1;  // sums of halves: they need not wait for each other
    const int16_t* a = x.q + index * kCell;
    __m512i sum[2][ROWS];
    __m512i front[2][ROWS];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) forget(w[p]);
#pragma GCC unroll 8
        for (int i = 8 * half; i < 8 * half + 8; ++i) {
            const bool begins = i == 0 || (i == 8 && (has_halves(KIND) || apart));
            __m512i weights[2];
#pragma GCC unroll 2
            for (int p = 0; p < 2; ++p) weights[p] = w[p].pair(i);
#pragma GCC unroll 7
            for (int r = 0; r < ROWS; ++r) {
                int32_t both;
                __builtin_memcpy(&both, a + r * kCell + 2 * i, 4);
                const __m512i two = _mm512_set1_epi32(both);
#pragma GCC unroll 2
                for (int p = 0; p < 2; ++p) {
                    sum[p][r] = _mm512_dpwssd_epi32(begins ? _mm512_setzero_si512() : sum[p][r], weights[p], two);
                }
            }
        }
        if (half == 0 && !has_halves(KIND)) {
            if constexpr (apart) {
#pragma GCC unroll 2
                for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 7
                    for (int r = 0; r < ROWS; ++r) front[p][r] = sum[p][r];
                }
            }
            continue;
        }
        const int part = has_halves(KIND) ? half : 0;
#pragma GCC unroll 7
        for (int r = 0; r < ROWS; ++r) {
            __m512 added{};
            if constexpr (has_minimum(KIND)) {
                added = _mm512_set1_ps(has_halves(KIND) ? sum_of_half(a + r * kCell + 16 * half) : x.sum[index + r]);
            }
#pragma GCC unroll 2
            for (int p = 0; p < 2; ++p) {
                if constexpr (apart) sum[p][r] = _mm512_add_epi32(sum[p][r], front[p][r]);
                acc[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p][r]), w[p].scale(part), acc[p][r]);
                if constexpr (has_minimum(KIND)) acc[p][r] = _mm512_fmadd_ps(w[p].minimum(part), added, acc[p][r]);
            }
        }
    }
}

// Few rows: each cell is unpacked for all of them at once, and read once.
template <int KIND, int ROWS>
void few_rows(const PairOfPanels (&w)[2], int cells, const Act16& x, int row, float* out, int64_t stride) {
    __m512 acc[2][ROWS];
    clear(acc);
    for (int c = 0; c < cells; ++c) {
        PackedCell<KIND> pair[2] = {{place_of<KIND>(w[0], c)}, {place_of<KIND>(w[1], c)}};
        fetch_ahead<KIND>(w, c);
        add_cells<KIND>(acc, pair, x, c * x.rows + row);
    }
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 7
        for (int r = 0; r < ROWS; ++r) {
            const __m512 scaled = _mm512_mul_ps(acc[p][r], _mm512_set1_ps(x.scale[row + r]));
            _mm512_mask_storeu_ps(out + r * stride + 16 * p, w[p].columns, scaled);
        }
    }
}

// Many rows: ROWS of them meet `count` of the `cells` cells of two pairs of panels, which lie unpacked in the nearest
// cache.
template <int KIND, int ROWS>
void tile(const OpenCell<KIND> (*w)[2], int first, int count, int cells, const Act16& x, int row, float* out,
          int64_t stride, const PairOfPanels (&panels)[2], bool fetches) {
    __m512 acc[2][ROWS];
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 7
        for (int r = 0; r < ROWS; ++r) {
            acc[p][r] =
                first == 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(panels[p].columns, out + r * stride + 16 * p);
        }
    }
    for (int c = 0; c < count; ++c) {
        if (fetches) fetch_ahead<KIND>(panels, first + c);
        add_cells<KIND>(acc, w[c], x, (first + c) * x.rows + row);
    }
    const bool ends = first + count == cells;
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 7
        for (int r = 0; r < ROWS; ++r) {
            if (ends) acc[p][r] = _mm512_mul_ps(acc[p][r], _mm512_set1_ps(x.scale[row + r]));
            _mm512_mask_storeu_ps(out + r * stride + 16 * p, panels[p].columns, acc[p][r]);
        }
    }
}

using FewFn = void (*)(const PairOfPanels (&)[2], int cells, const Act16&, int row, float* out, int64_t stride);
template <int KIND>
constexpr FewFn kFewRows[kMostRows] = {few_rows<KIND, 1>, few_rows<KIND, 2>, few_rows<KIND, 3>, few_rows<KIND, 4>,
                                       few_rows<KIND, 5>, few_rows<KIND, 6>, few_rows<KIND, 7>};

template <int KIND>
using TileFn = void (*)(const OpenCell<KIND> (*w)[2], int first, int count, int cells, const Act16&, int row,
                        float* out, int64_t stride, const PairOfPanels (&panels)[2], bool fetches);
// Blocks of nearly equally many rows, where there are more than kMostFew, have no fewer than these.
template <int KIND>
constexpr TileFn<KIND> kTiles[2] = {tile<KIND, kMostRows - 1>, tile<KIND, kMostRows>};

template <int KIND>
void linear(const Panels& w, int panel, int count, const Act16& x, int row, int rows, float* out, int64_t stride) {
    const int cells = w.n_in / kCell;
    const auto few = [&](const PairOfPanels(&pairs)[2], int size, int first, int column) {
        kFewRows<KIND>[size - 1](pairs, cells, x, row + first, out + first* stride + column, stride);
    };
    const auto many = [&](const PairOfPanels(&pairs)[2], int column) {
        const auto tile = [&](const OpenCell<KIND>(*open)[2], int first, int count, int size, int r) {
            kTiles<KIND>[size - kMostRows + 1](open, first, count, cells, x, row + r, out + column + r* stride, stride,
                                               pairs, r == 0);
        };
        each_tile<KIND, OpenCell<KIND>, kOpenCells>(pairs, cells, rows, kMostRows, tile);
    };
    cut(w, panel, count, rows, kMostRows, few, many);
}

template <int KIND>
void fill(Kernels& table) {
    if constexpr (has_integers(KIND)) table.linear_int16[KIND] = linear<KIND>;
    if constexpr (KIND + 1 < KIND_COUNT) fill<KIND + 1>(table);
}

}  // namespace

void octavo::fill_linear_int16_avx512(Kernels& table) { fill<Q4_0>(table); }
