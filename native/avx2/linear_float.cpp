// Products with float32 activations: weights become their exact float32 values in a small buffer, then one fma chain
// per (row, column) in ascending k, whatever the number of rows.
#include "../kernels.h"
#include "unpack.h"

namespace {

using namespace octavo;

constexpr int kChunk = 64;  // k per pass through the buffer: with more, a single row takes a fifth longer
static_assert(kChunk * kTileColumns <= kFloatScratch);

// out[r][0 .. 8 PANELS) (+)= x[r][0 .. depth) * w; w is [depth][kTileColumns].
template <int ROWS, int PANELS>
void tile(const float* w, int depth, const float* x, int64_t x_stride, float* out, int64_t stride, bool first) {
    __m256 acc[ROWS][PANELS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
            acc[r][p] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(out + r * stride + 8 * p);
        }
    }
    for (int k = 0; k < depth; ++k) {
        const float* columns = w + k * kTileColumns;
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const __m256 a = _mm256_broadcast_ss(x + r * x_stride + k);
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; ++p) {
                acc[r][p] = _mm256_fmadd_ps(a, _mm256_load_ps(columns + 8 * p), acc[r][p]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) _mm256_storeu_ps(out + r * stride + 8 * p, acc[r][p]);
    }
}

template <int PANELS>
void rows_of(const float* w, int depth, const float* x, int64_t x_stride, int rows, float* out, int64_t stride,
             bool first) {
    int r = 0;
    for (; r + 3 <= rows; r += 3) {
        tile<3, PANELS>(w, depth, x + r * x_stride, x_stride, out + r * stride, stride, first);
    }
    if (rows - r == 2) tile<2, PANELS>(w, depth, x + r * x_stride, x_stride, out + r * stride, stride, first);
    if (rows - r == 1) tile<1, PANELS>(w, depth, x + r * x_stride, x_stride, out + r * stride, stride, first);
}

template <int KIND>
void linear(const Panels& w, int panel, int count, const float* x, int64_t x_stride, int row, int rows, float* out,
            int64_t stride, float* scratch) {
    x += row * x_stride;
    for (int p = 0; p < count; p += 4) {
        const int panels = count - p < 4 ? count - p : 4;
        for (int k = 0; k < w.n_in; k += kChunk) {
            const int depth = w.n_in - k < kChunk ? w.n_in - k : kChunk;
            for (int i = 0; i < panels; ++i) {
                const uint8_t* data = w.data + (panel + p + i) * w.panel_bytes;
                unpack<KIND>(data, k / kCell, (depth + kCell - 1) / kCell, scratch + 8 * i, kTileColumns);
            }
            float* to = out + 8 * p;
            switch (panels) {
                case 1:
                    rows_of<1>(scratch, depth, x + k, x_stride, rows, to, stride, k == 0);
                    break;
                case 2:
                    rows_of<2>(scratch, depth, x + k, x_stride, rows, to, stride, k == 0);
                    break;
                case 3:
                    rows_of<3>(scratch, depth, x + k, x_stride, rows, to, stride, k == 0);
                    break;
                default:
                    rows_of<4>(scratch, depth, x + k, x_stride, rows, to, stride, k == 0);
            }
        }
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
