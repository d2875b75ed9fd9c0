// Products of 2 to 6-bit weights with int8 activations in groups of 32. The dot product of a cell is an exact integer,
// added up in int16 as long as it cannot overflow (15 * 127 * 2 * 8 < 2^15 for 4 bits, 31 * 127 * 2 * 4 for 5), so only
// the float epilogue, one fma chain per (row, column) in ascending k, has an order; it is the same in both tilings
// below.
#include "../kernels.h"
#include "cells.h"

namespace {

using namespace octavo;

// What the epilogue of one cell needs, per column.
struct CellMeta {
    __m256 scale;
    __m256 second;  // of the second half, where the halves have float scales
    __m256 minimum;
    __m256i scales;  // where the halves have integer scales: these, as int16 pairs
    __m256i minima;  // and their integer minima
    __m256i zeros;   // by what the sums of activations count: the zero point (times integer scales), as int16 pairs
};

// Eight bytes of either half as int16 pairs.
inline __m256i pairs_of(__m256i first, __m256i second) {
    return _mm256_or_si256(_mm256_and_si256(first, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(second, 16));
}

// The integer scales of the halves of a cell, as int16 pairs; with the minima in their higher bits where there are
// such.
template <int KIND>
inline __m256i halves_of(const uint8_t* cell) {
    if constexpr (kKinds[KIND].scales == SUB8_2) return pairs_of(load_bytes_s(cell), load_bytes_s(cell + 8));
    return pairs_of(load_bytes_u(cell), load_bytes_u(cell + 8));
}

template <int KIND>
inline CellMeta meta_of(CellPlace at) {
    CellMeta meta{};
    if constexpr (kKinds[KIND].scales == SUB8_2) {
        meta.scale = load_halves(at.head);
        meta.scales = halves_of<KIND>(at.cell);
        meta.zeros = _mm256_mullo_epi16(meta.scales, _mm256_set1_epi16(zero_point(KIND)));
    } else if constexpr (kKinds[KIND].scales == SUB4_MIN_2) {
        meta.scale = load_halves(at.head);
        meta.minimum = _mm256_xor_ps(load_halves(at.head + 16), _mm256_set1_ps(-0.0f));
        const __m256i both = halves_of<KIND>(at.cell);
        meta.scales = _mm256_and_si256(both, _mm256_set1_epi16(15));
        meta.minima = _mm256_srli_epi16(both, 4);
    } else {
        meta.scale = scale_of<KIND>(at);
        if constexpr (has_halves(KIND)) meta.second = scale_of<KIND>(at, 1);
        if constexpr (has_minimum(KIND)) meta.minimum = minimum_of<KIND>(at);
        meta.zeros = _mm256_set1_epi16(zero_point(KIND));
    }
    return meta;
}

inline __m256i times(__m256i weights, const int8_t* activations) {
    int32_t four;
    __builtin_memcpy(&four, activations, 4);
    return _mm256_maddubs_epi16(weights, _mm256_set1_epi32(four));
}

// Sums over two quads each, in int16: 63 * 127 * 2 * 2 < 2^15.
struct HalfSums {
    __m256i s01, s23, s45, s67;

    HalfSums(const __m256i (&w)[8], const int8_t* a)
        : s01(_mm256_add_epi16(times(w[0], a), times(w[1], a + 4))),
          s23(_mm256_add_epi16(times(w[2], a + 8), times(w[3], a + 12))),
          s45(_mm256_add_epi16(times(w[4], a + 16), times(w[5], a + 20))),
          s67(_mm256_add_epi16(times(w[6], a + 24), times(w[7], a + 28))) {}
};

// The integer scale of one half of each column, as int16 pairs.
inline __m256i scales_of_half(__m256i scales, bool back) {
    const int at = back ? 2 : 0;
    return _mm256_shuffle_epi8(
        scales, _mm256_add_epi8(_mm256_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13, 0, 1, 0, 1, 4, 5,
                                                 4, 5, 8, 9, 8, 9, 12, 13, 12, 13),
                                _mm256_set1_epi8(static_cast<char>(at))));
}

// Exact: sum of q * a over the cell (times the integer scales of the halves).
template <int KIND>
inline __m256i dot(const __m256i (&w)[8], const int8_t* a, const CellMeta& meta) {
    const __m256i ones = _mm256_set1_epi16(1);
    const HalfSums s(w, a);
    __m256i sum;
    if constexpr (has_integer_halves(KIND)) {
        const __m256i low = scales_of_half(meta.scales, false), high = scales_of_half(meta.scales, true);
        if constexpr (KIND == Q6_K) {  // 63 * 127 * 2 * 4 does not fit
            sum = _mm256_add_epi32(_mm256_madd_epi16(s.s01, low), _mm256_madd_epi16(s.s23, low));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(s.s45, high));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(s.s67, high));
        } else {
            sum = _mm256_add_epi32(_mm256_madd_epi16(_mm256_add_epi16(s.s01, s.s23), low),
                                   _mm256_madd_epi16(_mm256_add_epi16(s.s45, s.s67), high));
        }
    } else if constexpr (kKinds[KIND].planes == N4_B1 || KIND == MXFP4) {
        sum = _mm256_add_epi32(_mm256_madd_epi16(_mm256_add_epi16(s.s01, s.s23), ones),
                               _mm256_madd_epi16(_mm256_add_epi16(s.s45, s.s67), ones));
    } else {
        sum = _mm256_madd_epi16(_mm256_add_epi16(_mm256_add_epi16(s.s01, s.s23), _mm256_add_epi16(s.s45, s.s67)), ones);
    }
    return sum;
}

// Adds a dot product of row `row` with what belongs to it: the zero point, the scales, the minimum.
template <int KIND>
inline __m256 add_sum(__m256 acc, __m256i sum, const CellMeta& meta, const Group8& x, int64_t row) {
    const __m256 activations = _mm256_broadcast_ss(x.scale + row);
    if constexpr (zero_point(KIND) != 0) {
        sum = _mm256_sub_epi32(sum, _mm256_madd_epi16(meta.zeros, _mm256_set1_epi32(x.halves[row])));
    }
    acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(meta.scale, activations), acc);
    if constexpr (kKinds[KIND].scales == SUB4_MIN_2) {
        const __m256i count = _mm256_madd_epi16(meta.minima, _mm256_set1_epi32(x.halves[row]));
        acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(count), _mm256_mul_ps(meta.minimum, activations), acc);
    } else if constexpr (has_minimum(KIND)) {
        acc = _mm256_fmadd_ps(meta.minimum, _mm256_broadcast_ss(x.sum + row), acc);
    }
    return acc;
}

template <int KIND>
inline __m256 add_cell(__m256 acc, const __m256i (&w)[8], const CellMeta& meta, const Group8& x, int64_t row) {
    if constexpr (kKinds[KIND].scales == FLOAT_2) {
        const __m256 activations = _mm256_broadcast_ss(x.scale + row);
        const __m256i ones = _mm256_set1_epi16(1), sums = _mm256_set1_epi32(x.halves[row]);
        const HalfSums s(w, x.q + row * kCell);
        const __m256i front = _mm256_sub_epi32(_mm256_madd_epi16(_mm256_add_epi16(s.s01, s.s23), ones),
                                               _mm256_madd_epi16(_mm256_srli_epi32(meta.zeros, 16), sums));
        const __m256i back = _mm256_sub_epi32(_mm256_madd_epi16(_mm256_add_epi16(s.s45, s.s67), ones),
                                              _mm256_madd_epi16(_mm256_slli_epi32(meta.zeros, 16), sums));
        acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(front), _mm256_mul_ps(meta.scale, activations), acc);
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(back), _mm256_mul_ps(meta.second, activations), acc);
    } else {
        return add_sum<KIND>(acc, dot<KIND>(w, x.q + row * kCell, meta), meta, x, row);
    }
}

template <int KIND>
inline void load_quads(const uint8_t* cell, __m256i (&w)[8]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = quad_of<KIND>(cell, i);
}

// How many quads of a cell can be added up in int16, and of which the sums have one factor.
constexpr int quads_together(int kind) {
    if (kind == Q6_K) return 2;  // 63 * 127 * 2 * 4 does not fit
    const bool halves = has_integer_halves(kind) || kKinds[kind].scales == FLOAT_2;
    return halves || kKinds[kind].planes == N4_B1 || kind == MXFP4 ? 4 : 8;
}

// All rows meet a quad of the cell before the next one is unpacked, so that the quads need no registers.
template <int KIND, int ROWS>
inline void add_quads(__m256 (&acc)[ROWS], CellPlace at, const Group8& x) {
    constexpr int together = quads_together(KIND);
    __m256i scales{};
    if constexpr (has_integer_halves(KIND)) scales = halves_of<KIND>(at.cell);
    if constexpr (kKinds[KIND].scales == SUB4_MIN_2) scales = _mm256_and_si256(scales, _mm256_set1_epi16(15));
    __m256i sum[ROWS];
#pragma GCC unroll 4
    for (int first = 0; first < 8; first += together) {
        const bool back = first >= 4;
        __m256i part[ROWS];
#pragma GCC unroll 8
        for (int q = first; q < first + together; ++q) {
            const __m256i w = quad_of<KIND>(at.cell, q);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const __m256i products = times(w, x.q + r * kCell + 4 * q);
                part[r] = q == first ? products : _mm256_add_epi16(part[r], products);
            }
        }
        const __m256i factor = has_integer_halves(KIND) ? scales_of_half(scales, back) : _mm256_set1_epi16(1);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const __m256i more = _mm256_madd_epi16(part[r], factor);
            sum[r] = first == 0 ? more : _mm256_add_epi32(sum[r], more);
        }
        if constexpr (kKinds[KIND].scales == FLOAT_2) {
            // Two epilogues, in the order of add_cell.
            const __m256 scale = scale_of<KIND>(at, back);
            const __m256i zeros = _mm256_set1_epi32(zero_point(KIND) << (back ? 16 : 0));
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                sum[r] = _mm256_sub_epi32(sum[r], _mm256_madd_epi16(zeros, _mm256_set1_epi32(x.halves[r])));
                acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]),
                                         _mm256_mul_ps(scale, _mm256_broadcast_ss(x.scale + r)), acc[r]);
                sum[r] = _mm256_setzero_si256();
            }
        }
    }
    if constexpr (kKinds[KIND].scales != FLOAT_2) {
        const CellMeta meta = meta_of<KIND>(at);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) acc[r] = add_sum<KIND>(acc[r], sum[r], meta, x, r);
    }
}

// Few rows: accumulators stay in registers along K.
template <int KIND, int ROWS>
void few_rows(const uint8_t* panel, int64_t ahead, int cells, const Act8& x, int row, float* out, int64_t stride) {
    __m256 acc[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) acc[r] = _mm256_setzero_ps();
    for (int c = 0; c < cells; ++c) {
        const CellPlace at = place_of<KIND>(panel, c);
        fetch_ahead<KIND>(at.cell, ahead);
        add_quads<KIND, ROWS>(acc, at, Group8(x, c * x.rows + row));
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) _mm256_storeu_ps(out + r * stride, acc[r]);
}

// Many rows: a cell stays in registers while the rows stream past it.
template <int KIND>
void many_rows(const uint8_t* panel, int64_t ahead, int cells, const Act8& x, int row, int rows, float* out,
               int64_t stride) {
    for (int r = 0; r < rows; ++r) _mm256_storeu_ps(out + r * stride, _mm256_setzero_ps());
    for (int c = 0; c < cells; ++c) {
        const CellPlace at = place_of<KIND>(panel, c);
        fetch_ahead<KIND>(at.cell, ahead);
        const CellMeta meta = meta_of<KIND>(at);
        __m256i w[8];
        load_quads<KIND>(at.cell, w);
        const Group8 group(x, c * x.rows + row);
        for (int r = 0; r < rows; ++r) {
            const __m256 acc = _mm256_loadu_ps(out + r * stride);
            _mm256_storeu_ps(out + r * stride, add_cell<KIND>(acc, w, meta, group, r));
        }
    }
}

template <int KIND>
void linear(const Panels& w, int panel, int count, const Act8& x, int row, int rows, float* out, int64_t stride) {
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
    if constexpr (has_small_integers(KIND)) table.linear_int8[KIND] = linear<KIND>;
    if constexpr (KIND + 1 < KIND_COUNT) fill<KIND + 1>(table);
}

}  // namespace

void octavo::fill_linear_int8_avx2(Kernels& table) { fill<Q4_0>(table); }
