// Products with float32 activations: weights become their exact float32 values in a small buffer, then one fma chain
// per (row, column) in ascending k, whatever the number of rows.
#include "../kernels.h"
#include "ahead.h"
#include "unpack.h"

namespace {

constexpr int kFewRows = 3;    // that meet four panels at once: 12 of 16 registers
constexpr int kBlockRows = 6;  // that meet two
constexpr int kChunk = 64;     // k per pass through the buffer: with more, a single row takes a fifth longer
static_assert(kChunk * kTileColumns <= kFloatScratch);

// out[r][0 .. 8 PANELS) (+)= x[r][0 .. depth) * w; w is [depth][kTileColumns].
template <int ROWS, int PANELS>
void tile(const float* w, const Ahead& ahead, int depth, const float* x, int64_t x_stride, float* out, int64_t stride,
          bool first) {
    __m256 acc[ROWS][PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
            acc[r][p] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(out + r * stride + 8 * p);
        }
    }
    for (int start = 0; start < depth; start += kCell) {
        ahead.fetch(start / kCell);
        const int end = depth - start < kCell ? depth : start + kCell;
        for (int k = start; k < end; ++k) {
            const float* columns = w + k * kTileColumns;
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) {
                const __m256 a = _mm256_broadcast_ss(x + r * x_stride + k);
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; ++p) {
                    acc[r][p] = _mm256_fmadd_ps(a, _mm256_load_ps(columns + 8 * p), acc[r][p]);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) _mm256_storeu_ps(out + r * stride + 8 * p, acc[r][p]);
    }
}

using TileFn = void (*)(const float* w, const Ahead&, int depth, const float* x, int64_t x_stride, float* out,
                        int64_t stride, bool first);

template <int ROWS>
constexpr TileFn kFew[4] = {tile<ROWS, 1>, tile<ROWS, 2>, tile<ROWS, 3>, tile<ROWS, 4>};
constexpr const TileFn* kFewTiles[kFewRows] = {kFew<1>, kFew<2>, kFew<3>};

template <int PANELS>
constexpr TileFn kTiles[kBlockRows] = {tile<1, PANELS>, tile<2, PANELS>, tile<3, PANELS>,
                                       tile<4, PANELS>, tile<5, PANELS>, tile<6, PANELS>};

// Columns of `count` (1 to 4) panels.
template <int KIND>
void columns_of(const Panels& w, int panel, int count, const float* x, int64_t x_stride, int rows, float* out,
                int64_t stride, float* scratch) {
    const bool few = rows <= kFewRows;
    const int blocks = (rows + kBlockRows - 1) / kBlockRows;
    for (int k = 0; k < w.n_in; k += kChunk) {
        const int depth = w.n_in - k < kChunk ? w.n_in - k : kChunk;
        const int cells = (depth + kCell - 1) / kCell;
        for (int i = 0; i < count; ++i) {
            unpack<KIND>(w.data + (panel + i) * w.panel_bytes, k / kCell, cells, scratch + 8 * i, kTileColumns);
        }
        for (int block = 0, row = 0; block < blocks; ++block) {
            const int these = (rows - row + blocks - block - 1) / (blocks - block);
            const Ahead ahead = ahead_of<KIND>(w, panel, count, k / kCell, cells, block, blocks);
            const Ahead nothing = {ahead.from, 0};
            const float* from = x + row * x_stride + k;
            float* to = out + row * stride;
            if (few) {
                kFewTiles[these - 1][count - 1](scratch, ahead, depth, from, x_stride, to, stride, k == 0);
            } else {
                for (int p = 0; p < count; p += 2) {
                    const TileFn* tiles = count - p == 1 ? kTiles<1> : kTiles<2>;
                    tiles[these - 1](scratch + 8 * p, p == 0 ? ahead : nothing, depth, from, x_stride, to + 8 * p,
                                     stride, k == 0);
                }
            }
            row += these;
        }
    }
}

template <int KIND>
void linear(const Panels& w, int panel, int count, const float* x, int64_t x_stride, int row, int rows, float* out,
            int64_t stride, float* scratch) {
    for (int p = 0; p < count; p += 4) {
        columns_of<KIND>(w, panel + p, count - p < 4 ? count - p : 4, x + row * x_stride, x_stride, rows, out + 8 * p,
                         stride, scratch);
    }
}

template <int KIND>
void fill(Kernels& table) {
    table.unpack[KIND] = unpack<KIND>;
    table.linear_float[KIND] = linear<KIND>;
    if constexpr (KIND + 1 < KIND_COUNT) fill<KIND + 1>(table);
}

}  // namespace

void octavo::fill_linear_float_avx2(Kernels& table) {
    fill<0>(table);
    table.linear_bfloat16 = linear<BF16>;
}
