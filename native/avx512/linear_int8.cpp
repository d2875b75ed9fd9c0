// Products of 2 to 6-bit weights with int8 activations in groups of 32, of two panels at once: bytes times bytes are
// added up in int32 (VNNI). The integers are exact and the float epilogue is that of ../avx2/linear_int8.cpp, operation
// for operation, so that both give the same bits.
#include "../kernels.h"
#include "cells.h"

namespace {

using namespace octavo;

constexpr int kBlockRows = 12;  // beside the eight quads of a cell and its scales

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
inline CellMeta meta_of(PairPlace at) {
    CellMeta meta{};
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
        meta.zeros = _mm512_set1_epi16(-zero_point(KIND));
    }
    return meta;
}

// Sum over the four quads of a half.
inline __m512i dot_half(__m512i sum, const __m512i* w, const int8_t* a) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        int32_t four;
        __builtin_memcpy(&four, a + 4 * i, 4);
        sum = _mm512_dpbusd_epi32(sum, w[i], _mm512_set1_epi32(four));
    }
    return sum;
}

template <int KIND>
inline __attribute__((always_inline)) __m512 add_cell(__m512 acc, const __m512i (&w)[8], const CellMeta& meta,
                                                      const Group8& x, int64_t row) {
    const __m512i none = _mm512_setzero_si512();
    const __m512 activations = _mm512_set1_ps(x.scale[row]);
    const __m512i halves = _mm512_set1_epi32(x.halves[row]);
    const int8_t* a = x.q + row * kCell;
    if constexpr (kKinds[KIND].scales == FLOAT_2) {
        const __m512i front = _mm512_dpwssd_epi32(none, _mm512_srli_epi32(meta.zeros, 16), halves);
        const __m512i back = _mm512_dpwssd_epi32(none, _mm512_slli_epi32(meta.zeros, 16), halves);
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot_half(front, w, a)), _mm512_mul_ps(meta.scale, activations), acc);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot_half(back, w + 4, a + 16)),
                               _mm512_mul_ps(meta.second, activations), acc);
    } else {
        __m512i sum;
        if constexpr (has_integer_halves(KIND)) {
            sum = _mm512_add_epi32(_mm512_mullo_epi32(dot_half(none, w, a), meta.scales[0]),
                                   _mm512_mullo_epi32(dot_half(none, w + 4, a + 16), meta.scales[1]));
            if constexpr (zero_point(KIND) != 0) sum = _mm512_dpwssd_epi32(sum, meta.zeros, halves);
        } else {
            const __m512i start = zero_point(KIND) != 0 ? _mm512_dpwssd_epi32(none, meta.zeros, halves) : none;
            sum = _mm512_add_epi32(dot_half(start, w, a), dot_half(none, w + 4, a + 16));
        }
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(meta.scale, activations), acc);
        if constexpr (kKinds[KIND].scales == SUB4_MIN_2) {
            const __m512i count = _mm512_dpwssd_epi32(none, meta.minima, halves);
            acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(count), _mm512_mul_ps(meta.minimum, activations), acc);
        } else if constexpr (has_minimum(KIND)) {
            acc = _mm512_fmadd_ps(meta.minimum, _mm512_set1_ps(x.sum[row]), acc);
        }
        return acc;
    }
}

// Sums of all columns of a pair of panels and ROWS rows stay in registers along K.
template <int KIND, int ROWS>
void block(PairOfPanels w, int cells, const Act8& x, int row, float* out, int64_t stride) {
    __m512 acc[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) acc[r] = _mm512_setzero_ps();
    for (int c = 0; c < cells; ++c) {
        const PairPlace at = place_of<KIND>(w, c);
        fetch_ahead<KIND>(at);
        const CellMeta meta = meta_of<KIND>(at);
        __m512i quads[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) quads[i] = quad_of<KIND>(at, i);
        const Group8 group(x, c * x.rows + row);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) acc[r] = add_cell<KIND>(acc[r], quads, meta, group, r);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) _mm512_mask_storeu_ps(out + r * stride, w.columns, acc[r]);
}

using BlockFn = void (*)(PairOfPanels, int cells, const Act8&, int row, float* out, int64_t stride);

template <int KIND>
constexpr BlockFn kBlocks[kBlockRows] = {block<KIND, 1>, block<KIND, 2>,  block<KIND, 3>,  block<KIND, 4>,
                                         block<KIND, 5>, block<KIND, 6>,  block<KIND, 7>,  block<KIND, 8>,
                                         block<KIND, 9>, block<KIND, 10>, block<KIND, 11>, block<KIND, 12>};

template <int KIND>
void linear(const Panels& w, int panel, int count, const Act8& x, int row, int rows, float* out, int64_t stride) {
    each_block(kBlocks<KIND>, w, panel, count, rows, [&](BlockFn block, PairOfPanels pair, int first, int column) {
        block(pair, w.n_in / kCell, x, row + first, out + first * stride + column, stride);
    });
}

template <int KIND>
void fill(Kernels& table) {
    if constexpr (has_small_integers(KIND)) table.linear_int8[KIND] = linear<KIND>;
    if constexpr (KIND + 1 < KIND_COUNT) fill<KIND + 1>(table);
}

}  // namespace

void octavo::fill_linear_int8_avx512(Kernels& table) { fill<Q4_0>(table); }
