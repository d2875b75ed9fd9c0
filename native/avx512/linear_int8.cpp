// Products of 2 to 6-bit weights with int8 activations in groups of 32, of two panels at once: bytes times bytes are
// added up in int32 (VNNI). The integers are exact and the float epilogue is that of ../avx2/linear_int8.cpp, operation
// for operation, so that both give the same bits.
#include "../kernels.h"
#include "cells.h"

namespace {

using namespace octavo;

// Rows that meet two pairs of panels at once: what the registers hold of their sums, those of the cell, where halves
// have integer scales also those of its first half, and a quad of each pair.
constexpr int most_rows(int kind) { return has_integer_halves(kind) ? 4 : 7; }
constexpr int kOpenCells = 16;  // that are unpacked at a time

// What the epilogue of one cell needs, per column.
struct CellMeta {
    __m512 scale;
    __m512 second;  // of the second half, where the halves have float scales
    __m512 minimum;
    __m512i scales[2];  // where the halves have integer scales: these
    __m512i minima;     // and their integer minima, as int16 pairs
    __m512i zeros;  // by what the sums of activations count: minus the zero point (times integer scales), int16 pairs
};

template <int KIND>
inline void read_meta(PairPlace at, CellMeta& meta) {
    if constexpr (has_integer_halves(KIND)) {
        constexpr bool small = kKinds[KIND].scales == SUB4_MIN_2;
        meta.scale = join(load_halves(at.low.head), load_halves(at.high.head));
        const auto bytes = [&](int half) {
            const uint8_t* low = at.low.cell + 8 * half;
            const uint8_t* high = at.high.cell + 8 * half;
            return small ? join(load_bytes_u(low), load_bytes_u(high)) : join(load_bytes_s(low), load_bytes_s(high));
        };
        const __m512i first = bytes(0), second = bytes(1);
        const auto pairs = [](__m512i a, __m512i b) {
            return _mm512_or_si512(_mm512_and_si512(a, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(b, 16));
        };
        if constexpr (small) {
            const __m512i four_bits = _mm512_set1_epi32(15);
            const __m512 minimum = join(load_halves(at.low.head + 16), load_halves(at.high.head + 16));
            meta.minimum = _mm512_xor_ps(minimum, _mm512_set1_ps(-0.0f));
            meta.scales[0] = _mm512_and_si512(first, four_bits);
            meta.scales[1] = _mm512_and_si512(second, four_bits);
            meta.minima = pairs(_mm512_srli_epi32(first, 4), _mm512_srli_epi32(second, 4));
        } else {
            meta.scales[0] = first;
            meta.scales[1] = second;
            meta.zeros = _mm512_mullo_epi16(pairs(first, second), _mm512_set1_epi16(-zero_point(KIND)));
        }
    } else {
        meta.scale = scale_of<KIND>(at);
        if constexpr (has_halves(KIND)) meta.second = scale_of<KIND>(at, 1);
        if constexpr (has_minimum(KIND)) meta.minimum = minimum_of<KIND>(at);
        if constexpr (zero_point(KIND) != 0) meta.zeros = _mm512_set1_epi16(-zero_point(KIND));
    }
}

// A cell where the panels have it: what is asked for is unpacked then.
template <int KIND>
struct PackedCell {
    PairPlace at;

    __m512i quad(int index) const { return quad_of<KIND>(at, index); }
    CellMeta meta() const {
        CellMeta meta;
        read_meta<KIND>(at, meta);
        return meta;
    }
};

// Makes the compiler forget what it has read of a cell, for which there are no registers.
template <int KIND>
inline void forget(PackedCell<KIND>& w) {
    asm volatile("" : "+r"(w.at.low.cell), "+r"(w.at.high.cell));
}

// A cell that was unpacked before.
template <int KIND>
struct OpenCell {
    __m512i quads[8];
    CellMeta kept;

    void fill(PairPlace at) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) quads[i] = quad_of<KIND>(at, i);
        read_meta<KIND>(at, kept);
    }
    __m512i quad(int index) const { return quads[index]; }
    const CellMeta& meta() const { return kept; }
};

template <int KIND>
inline void forget(const OpenCell<KIND>&) {}

// The same place, of which the compiler does not know that: what it reads there for one half of a cell takes no
// registers until the other.
inline Group8 anew(Group8 x) {
    asm volatile("" : "+r"(x.scale), "+r"(x.halves));
    return x;
}

// Adds the products of a cell of each pair of panels and ROWS rows. All rows meet a quad before the next one is
// unpacked or loaded, so that quads need no registers; what is broadcast of a row serves all pairs.
template <int KIND, int ROWS, class Cell>
inline __attribute__((always_inline)) void add_cells(__m512 (&acc)[2][ROWS], Cell* w, const Group8& x) {
    constexpr bool apart = kKinds[KIND].scales != FLOAT_2 && ROWS == 1;  // sums of halves: they need not wait
    __m512i sum[2][ROWS];
    __m512i front[2][ROWS];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) forget(w[p]);
#pragma GCC unroll 4
        for (int q = 4 * half; q < 4 * half + 4; ++q) {
            const bool begins = q == 0 || (q == 4 && (has_halves(KIND) || apart));
            __m512i weights[2];
#pragma GCC unroll 2
            for (int p = 0; p < 2; ++p) weights[p] = w[p].quad(q);
#pragma GCC unroll 7
            for (int r = 0; r < ROWS; ++r) {
                int32_t four;
                __builtin_memcpy(&four, x.q + r * kCell + 4 * q, 4);
                const __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 2
                for (int p = 0; p < 2; ++p) {
                    sum[p][r] = _mm512_dpbusd_epi32(begins ? _mm512_setzero_si512() : sum[p][r], weights[p], a);
                }
            }
        }
        if constexpr (kKinds[KIND].scales == FLOAT_2) {
            const Group8 again = anew(x);
#pragma GCC unroll 7
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
                for (int p = 0; p < 2; ++p) {
                    const __m512i zeros =
                        _mm512_set1_epi32(half == 0 ? -zero_point(KIND) & 0xffff : -zero_point(KIND) * 65536);
                    const __m512i exact = _mm512_dpwssd_epi32(sum[p][r], zeros, _mm512_set1_epi32(again.halves[r]));
                    const __m512 scale = _mm512_mul_ps(half == 0 ? w[p].meta().scale : w[p].meta().second,
                                                       _mm512_set1_ps(again.scale[r]));
                    acc[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, acc[p][r]);
                }
            }
        }
        if constexpr (has_integer_halves(KIND) || apart) {
#pragma GCC unroll 2
            for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 7
                for (int r = 0; r < ROWS; ++r) {
                    if constexpr (has_integer_halves(KIND)) {
                        sum[p][r] = _mm512_mullo_epi32(sum[p][r], w[p].meta().scales[half]);
                    }
                    if (half == 0) front[p][r] = sum[p][r];
                    if (half == 1) sum[p][r] = _mm512_add_epi32(sum[p][r], front[p][r]);
                }
            }
        }
    }
    if constexpr (kKinds[KIND].scales != FLOAT_2) {
#pragma GCC unroll 7
        for (int r = 0; r < ROWS; ++r) {
            const __m512 activations = _mm512_set1_ps(x.scale[r]);
            const __m512i halves = _mm512_set1_epi32(x.halves[r]);
#pragma GCC unroll 2
            for (int p = 0; p < 2; ++p) {
                const CellMeta& meta = w[p].meta();
                __m512i exact = sum[p][r];
                if constexpr (zero_point(KIND) != 0) exact = _mm512_dpwssd_epi32(exact, meta.zeros, halves);
                acc[p][r] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), _mm512_mul_ps(meta.scale, activations), acc[p][r]);
                if constexpr (kKinds[KIND].scales == SUB4_MIN_2) {
                    const __m512i count = _mm512_dpwssd_epi32(_mm512_setzero_si512(), meta.minima, halves);
                    acc[p][r] =
                        _mm512_fmadd_ps(_mm512_cvtepi32_ps(count), _mm512_mul_ps(meta.minimum, activations), acc[p][r]);
                } else if constexpr (has_minimum(KIND)) {
                    acc[p][r] = _mm512_fmadd_ps(meta.minimum, _mm512_set1_ps(x.sum[r]), acc[p][r]);
                }
            }
        }
    }
}

// Few rows: each cell is unpacked for all of them at once, and read once.
template <int KIND, int ROWS>
void few_rows(const PairOfPanels (&w)[2], int cells, const Act8& x, int row, float* out, int64_t stride) {
    __m512 acc[2][ROWS];
    clear(acc);
    for (int c = 0; c < cells; ++c) {
        PackedCell<KIND> pair[2] = {{place_of<KIND>(w[0], c)}, {place_of<KIND>(w[1], c)}};
        fetch_ahead<KIND>(w, c);
        add_cells<KIND>(acc, pair, Group8(x, c * x.rows + row));
    }
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 7
        for (int r = 0; r < ROWS; ++r) _mm512_mask_storeu_ps(out + r * stride + 16 * p, w[p].columns, acc[p][r]);
    }
}

// Many rows: ROWS of them meet `cells` cells of two pairs of panels, which lie unpacked in the nearest cache.
template <int KIND, int ROWS>
void tile(const OpenCell<KIND> (*w)[2], int first, int cells, const Act8& x, int row, float* out, int64_t stride,
          const PairOfPanels (&panels)[2], bool fetches) {
    __m512 acc[2][ROWS];
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 7
        for (int r = 0; r < ROWS; ++r) {
            acc[p][r] =
                first == 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(panels[p].columns, out + r * stride + 16 * p);
        }
    }
    for (int c = 0; c < cells; ++c) {
        if (fetches) fetch_ahead<KIND>(panels, first + c);
        add_cells<KIND>(acc, w[c], Group8(x, (first + c) * x.rows + row));
    }
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 7
        for (int r = 0; r < ROWS; ++r) _mm512_mask_storeu_ps(out + r * stride + 16 * p, panels[p].columns, acc[p][r]);
    }
}

using FewFn = void (*)(const PairOfPanels (&)[2], int cells, const Act8&, int row, float* out, int64_t stride);
template <int KIND, int ROWS>
constexpr FewFn kFew = few_rows<KIND, (ROWS < most_rows(KIND) ? ROWS : most_rows(KIND))>;
template <int KIND>
constexpr FewFn kFewRows[7] = {kFew<KIND, 1>, kFew<KIND, 2>, kFew<KIND, 3>, kFew<KIND, 4>,
                               kFew<KIND, 5>, kFew<KIND, 6>, kFew<KIND, 7>};

template <int KIND>
using TileFn = void (*)(const OpenCell<KIND> (*w)[2], int first, int cells, const Act8&, int row, float* out,
                        int64_t stride, const PairOfPanels (&panels)[2], bool fetches);
// Blocks of nearly equally many rows, where there are more than kMostFew, have no fewer than these.
template <int KIND>
constexpr TileFn<KIND> kTiles[2] = {tile<KIND, most_rows(KIND) - 1>, tile<KIND, most_rows(KIND)>};

template <int KIND>
void linear(const Panels& w, int panel, int count, const Act8& x, int row, int rows, float* out, int64_t stride) {
    const int cells = w.n_in / kCell;
    const auto few = [&](const PairOfPanels(&pairs)[2], int size, int first, int column) {
        kFewRows<KIND>[size - 1](pairs, cells, x, row + first, out + first* stride + column, stride);
    };
    const auto many = [&](const PairOfPanels(&pairs)[2], int column) {
        const auto tile = [&](const OpenCell<KIND>(*open)[2], int first, int count, int size, int r) {
            kTiles<KIND>[size - most_rows(KIND) + 1](open, first, count, x, row + r, out + column + r* stride, stride,
                                                     pairs, r == 0);
        };
        each_tile<KIND, OpenCell<KIND>, kOpenCells>(pairs, cells, rows, most_rows(KIND), tile);
    };
    cut(w, panel, count, rows, most_rows(KIND), few, many);
}

template <int KIND>
void fill(Kernels& table) {
    if constexpr (has_small_integers(KIND)) table.linear_int8[KIND] = linear<KIND>;
    if constexpr (KIND + 1 < KIND_COUNT) fill<KIND + 1>(table);
}

}  // namespace

void octavo::fill_linear_int8_avx512(Kernels& table) { fill<Q4_0>(table); }
