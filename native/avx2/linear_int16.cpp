// Products of quantized weights with int16 activations, one scale per row: 8-bit weights, the output head, and every
// quantized weight in the int16 mode. Integer dots are exact (127 * 32767 * 32 < 2^31); the float epilogue is one fma
// chain per (row, column) in ascending k, and the row's scale multiplies the end result.
#include "../kernels.h"
#include "cells.h"

namespace {

using namespace octavo;

// The weights of a cell as int16 pairs [k / 2][column][2]. 8-bit cells are read in place; the rest from a buffer.
template <int KIND>
struct Pairs {
    alignas(32) int16_t values[kCell * kColumns];

    explicit Pairs(const uint8_t* cell) {
        const __m256i zero = _mm256_set1_epi16(zero_point(KIND));
        const __m256i front = _mm256_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1, 0, -1, 1, -1,
                                               4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);
        const __m256i back = _mm256_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1, 2, -1, 3, -1,
                                              6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1);
        __m256i* out = reinterpret_cast<__m256i*>(values);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const __m256i q = quad_of<KIND>(cell, i);
            _mm256_store_si256(out + 2 * i, _mm256_sub_epi16(_mm256_shuffle_epi8(q, front), zero));
            _mm256_store_si256(out + 2 * i + 1, _mm256_sub_epi16(_mm256_shuffle_epi8(q, back), zero));
        }
    }

    __m256i operator[](int pair) const { return _mm256_load_si256(reinterpret_cast<const __m256i*>(values) + pair); }
};

template <int KIND>
    requires(kKinds[KIND].planes == PAIRS)
struct Pairs<KIND> {
    const uint8_t* values;

    explicit Pairs(const uint8_t* cell) : values(cell + kKinds[KIND].meta_bytes) {}

    __m256i operator[](int pair) const {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + 16 * pair)));
    }
};

// Sum over pairs [first, end) of the cell for ROWS rows.
template <int KIND, int ROWS>
inline void dots(const Pairs<KIND>& w, const int16_t* a, int first, int end, __m256i (&sum)[ROWS]) {
    for (int r = 0; r < ROWS; ++r) sum[r] = _mm256_setzero_si256();
#pragma GCC unroll 16
    for (int pair = first; pair < end; ++pair) {
        const __m256i weights = w[pair];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            int32_t two;
            __builtin_memcpy(&two, a + r * kCell + 2 * pair, 4);
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(weights, _mm256_set1_epi32(two)));
        }
    }
}

// The epilogue constants of a cell or of its halves, per column.
template <int KIND>
struct CellScales {
    __m256 scale[2];
    __m256 minimum[2];

    explicit CellScales(CellPlace at) {
        for (int half = 0; half < (has_halves(KIND) ? 2 : 1); ++half) {
            scale[half] = scale_of<KIND>(at, half);
            if constexpr (has_minimum(KIND)) minimum[half] = minimum_of<KIND>(at, half);
        }
    }
};

template <int KIND, int ROWS>
inline void add_cell(__m256 (&acc)[ROWS], const Pairs<KIND>& w, const CellScales<KIND>& scales, const Act16& x,
                     int64_t index) {
    constexpr int halves = has_halves(KIND) ? 2 : 1;
    const int16_t* a = x.q + index * kCell;
#pragma GCC unroll 2
    for (int half = 0; half < halves; ++half) {
        __m256i sum[ROWS];
        dots<KIND, ROWS>(w, a, 16 / halves * half, 16 / halves * (half + 1), sum);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), scales.scale[half], acc[r]);
            if constexpr (has_minimum(KIND)) {
                const __m256 added = halves == 2 ? _mm256_set1_ps(sum_of_half(a + r * kCell + 16 * half))
                                                 : _mm256_broadcast_ss(x.sum + index + r);
                acc[r] = _mm256_fmadd_ps(scales.minimum[half], added, acc[r]);
            }
        }
    }
}

template <int KIND, int ROWS>
inline void rows_of_cell(const Pairs<KIND>& w, const CellScales<KIND>& scales, const Act16& x, int64_t index,
                         float* out, int64_t stride) {
    __m256 acc[ROWS];
    for (int r = 0; r < ROWS; ++r) acc[r] = _mm256_loadu_ps(out + r * stride);
    add_cell<KIND, ROWS>(acc, w, scales, x, index);
    for (int r = 0; r < ROWS; ++r) _mm256_storeu_ps(out + r * stride, acc[r]);
}

// Few rows: accumulators stay in registers along K.
template <int KIND, int ROWS>
void few_rows(const uint8_t* panel, int64_t ahead, int cells, const Act16& x, int row, float* out, int64_t stride) {
    __m256 acc[ROWS];
    for (int r = 0; r < ROWS; ++r) acc[r] = _mm256_setzero_ps();
    for (int c = 0; c < cells; ++c) {
        const CellPlace at = place_of<KIND>(panel, c);
        fetch_ahead<KIND>(at.cell, ahead);
        add_cell<KIND, ROWS>(acc, Pairs<KIND>(at.cell), CellScales<KIND>(at), x, c * x.rows + row);
    }
    for (int r = 0; r < ROWS; ++r) {
        _mm256_storeu_ps(out + r * stride, _mm256_mul_ps(acc[r], _mm256_broadcast_ss(x.scale + row + r)));
    }
}

// Many rows: a cell is unpacked once, rows stream past it four at a time.
template <int KIND>
void many_rows(const uint8_t* panel, int64_t ahead, int cells, const Act16& x, int row, int rows, float* out,
               int64_t stride) {
    for (int r = 0; r < rows; ++r) _mm256_storeu_ps(out + r * stride, _mm256_setzero_ps());
    for (int c = 0; c < cells; ++c) {
        const CellPlace at = place_of<KIND>(panel, c);
        fetch_ahead<KIND>(at.cell, ahead);
        const Pairs<KIND> w(at.cell);
        const CellScales<KIND> scales(at);
        const int64_t index = c * x.rows + row;
        int r = 0;
        for (; r + 4 <= rows; r += 4) rows_of_cell<KIND, 4>(w, scales, x, index + r, out + r * stride, stride);
        for (; r < rows; ++r) rows_of_cell<KIND, 1>(w, scales, x, index + r, out + r * stride, stride);
    }
    for (int r = 0; r < rows; ++r) {
        const __m256 scale = _mm256_broadcast_ss(x.scale + row + r);
        _mm256_storeu_ps(out + r * stride, _mm256_mul_ps(_mm256_loadu_ps(out + r * stride), scale));
    }
}

template <int KIND>
void linear(const Panels& w, int panel, int count, const Act16& x, int row, int rows, float* out, int64_t stride) {
    const int cells = w.n_in / kCell;
    for (int p = 0; p < count; ++p) {
        const uint8_t* data = w.data + (panel + p) * w.panel_bytes;
        float* to = out + 8 * p;
        switch (rows) {
            case 1:
                few_rows<KIND, 1>(data, w.ahead, cells, x, row, to, stride);
                break;
            case 2:
                few_rows<KIND, 2>(data, w.ahead, cells, x, row, to, stride);
                break;
            case 3:
                few_rows<KIND, 3>(data, w.ahead, cells, x, row, to, stride);
                break;
            case 4:
                few_rows<KIND, 4>(data, w.ahead, cells, x, row, to, stride);
                break;
            default:
                many_rows<KIND>(data, w.ahead, cells, x, row, rows, to, stride);
        }
    }
}

template <int KIND>
void fill(Kernels& table) {
    if constexpr (has_integers(KIND)) table.linear_int16[KIND] = linear<KIND>;
    if constexpr (KIND + 1 < KIND_COUNT) fill<KIND + 1>(table);
}

}  // namespace

void octavo::fill_linear_int16_avx2(Kernels& table) { fill<Q4_0>(table); }
