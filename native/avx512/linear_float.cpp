// Products with float32 activations, of up to four panels at once: one fma chain per (row, column) in ascending k,
// whatever the number of rows, as in ../avx2/linear_float.cpp, so that both give the same bits.
#include "../avx2/unpack.h"
#include "../kernels.h"
#include "cells.h"

namespace {

constexpr int kBlockRows = 12;  // 12 rows x 32 columns are 24 of 32 registers

// Where the weights of a tile are: in their panels, where plain floats of few rows stay, or as float32 in a buffer,
// which others become. Of many rows all do: joining panels and converting take instructions for every tile, and panels
// are in the second-level cache, the buffer is in the first. Both give 16 columns of element k of a cell.
template <int KIND>
struct InPlace {
    static constexpr int kChunk = 1024;  // k per pass
    const uint8_t* panels[4];            // the last again where there are fewer

    struct Cell {
        const uint8_t* panels[4];

        __m512 operator()(int k, int vector) const {
            const uint8_t* low = panels[2 * vector];
            const uint8_t* high = panels[2 * vector + 1];
            if constexpr (KIND == F32) return join(load_floats(low + k * 32), load_floats(high + k * 32));
            const auto half = [&](const uint8_t* p) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + k);
            };
            const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(half(low)), half(high), 1);
            if constexpr (KIND == F16) return _mm512_cvtph_ps(both);
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16));
        }
    };

    template <int VECTORS>
    Cell cell(int index) const {
        Cell at;
#pragma GCC unroll 4
        for (int p = 0; p < 2 * VECTORS; ++p) {
            at.panels[p] = panels[p] + int64_t{index} * kKinds[KIND].cell_bytes();
            fetch_ahead<KIND>(at.panels[p]);
        }
        return at;
    }

    template <int>
    static InPlace of(const Panels& w, int panel, int count, int k, int, float*) {
        InPlace source;
        for (int i = 0; i < 4; ++i) {
            const int at = panel + (i < count ? i : count - 1);
            source.panels[i] = w.data + at * w.panel_bytes + int64_t{k / kCell} * kKinds[KIND].cell_bytes();
        }
        return source;
    }
};

struct Copied {
    static constexpr int kChunk = kFloatScratch / kTileColumns;
    const float* values;  // [k][kTileColumns]

    struct Cell {
        const float* values;

        __m512 operator()(int k, int vector) const { return _mm512_load_ps(values + k * kTileColumns + 16 * vector); }
    };

    template <int VECTORS>
    Cell cell(int index) const {
        return {values + index * kCell * kTileColumns};
    }

    template <int KIND>
    static Copied of(const Panels& w, int panel, int count, int k, int depth, float* scratch) {
        for (int i = 0; i < count; ++i) {
            const uint8_t* data = w.data + (panel + i) * w.panel_bytes;
            unpack<KIND>(data, k / kCell, (depth + kCell - 1) / kCell, scratch + 8 * i, kTileColumns);
        }
        return {scratch};
    }
};

// out[r][column] (+)= x[r][0 .. depth) * w for ROWS rows and VECTORS vectors of columns, `last` of the last.
template <class Source, int ROWS, int VECTORS>
void tile(const Source& w, int depth, const float* x, int64_t x_stride, float* out, int64_t stride, bool first,
          __mmask16 last) {
    const auto columns = [&](int vector) { return vector == VECTORS - 1 ? last : static_cast<__mmask16>(0xffff); };
    __m512 acc[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
            acc[r][v] = first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(columns(v), out + r * stride + 16 * v);
        }
    }
    for (int start = 0; start < depth; start += kCell, x += kCell) {
        const auto cell = w.template cell<VECTORS>(start / kCell);
        const int end = depth - start < kCell ? depth - start : kCell;
        for (int k = 0; k < end; ++k) {
            __m512 weights[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) weights[v] = cell(k, v);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                const __m512 a = _mm512_set1_ps(x[r * x_stride + k]);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; ++v) acc[r][v] = _mm512_fmadd_ps(a, weights[v], acc[r][v]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) _mm512_mask_storeu_ps(out + r * stride + 16 * v, columns(v), acc[r][v]);
    }
}

template <class Source>
using TileFn = void (*)(const Source&, int depth, const float* x, int64_t x_stride, float* out, int64_t stride,
                        bool first, __mmask16 last);

template <class S, int V>
constexpr TileFn<S> kTiles[kBlockRows] = {tile<S, 1, V>, tile<S, 2, V>,  tile<S, 3, V>,  tile<S, 4, V>,
                                          tile<S, 5, V>, tile<S, 6, V>,  tile<S, 7, V>,  tile<S, 8, V>,
                                          tile<S, 9, V>, tile<S, 10, V>, tile<S, 11, V>, tile<S, 12, V>};

// Columns of `count` (1 to 4) panels.
template <int KIND, class Source>
void columns_of(const Panels& w, int panel, int count, const float* x, int64_t x_stride, int rows, float* out,
                int64_t stride, float* scratch) {
    const TileFn<Source>* tiles = count > 2 ? kTiles<Source, 2> : kTiles<Source, 1>;
    const __mmask16 last = count % 2 == 0 ? 0xffff : 0xff;
    const int cuts = (rows + kBlockRows - 1) / kBlockRows;
    for (int k = 0; k < w.n_in; k += Source::kChunk) {
        const int depth = w.n_in - k < Source::kChunk ? w.n_in - k : Source::kChunk;
        const Source source = Source::template of<KIND>(w, panel, count, k, depth, scratch);
        for (int cut = 0, row = 0; cut < cuts; ++cut) {  // of nearly equally many rows
            const int size = (rows - row + cuts - cut - 1) / (cuts - cut);
            tiles[size - 1](source, depth, x + row * x_stride + k, x_stride, out + row * stride, stride, k == 0, last);
            row += size;
        }
    }
}

template <int KIND>
void linear(const Panels& w, int panel, int count, const float* x, int64_t x_stride, int row, int rows, float* out,
            int64_t stride, float* scratch) {
    auto some = columns_of<KIND, Copied>;
    if constexpr (!is_quantized(KIND)) {
        // A copy waits for memory, while the first tile in place computes: it pays from the fifth tile on.
        if (rows <= 4 * kBlockRows) some = columns_of<KIND, InPlace<KIND>>;
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

void octavo::fill_linear_float_avx512(Kernels& table) { fill<0>(table); }
