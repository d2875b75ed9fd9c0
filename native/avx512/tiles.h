// Products whose sums are float32, of up to four panels at once: one chain of multiply-adds per (row, column) in
// ascending k, whatever the number of rows. Local to the unit that includes it.
//
// The weights of a pass over K come from a source, which has:
//     kElements                   elements of K that a word (4 bytes) of the activations holds
//     kWords                      words whose weights are loaded together
//     kMostCells                  of a pass with many rows
//     kCopies                     whether it is a copy of the panels
//     of<KIND>(w, panel, count, cell, cells, scratch)
//     skip(cells)
//     load(step, weights)         the weights of kWords words from step * kWords on, as __m512 [kWords][VECTORS]
//     multiply_add(x, w, sums)    with a word of a row in all lanes of x
#pragma once

#include "../avx2/ahead.h"
#include "cells.h"

namespace {

using namespace octavo;

constexpr int kBlockRows = 12;  // 12 rows x 32 columns are 24 of 32 registers

// A source that is the panels themselves. The weights of a pass leave room for activations in a first-level cache.
template <int CELL_BYTES>
struct InPanels {
    static constexpr bool kCopies = false;
    static constexpr int kMostCells = (24 << 10) / (4 * CELL_BYTES);
    Four at;

    void skip(int cells) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) at.panels[i] += int64_t{cells} * CELL_BYTES;
    }

    // A word of each of 16 columns, where panels have a word of each column after the other.
    __m512 word(int index, int vector) const {
        return join(load_floats(at.panels[2 * vector] + index * 32),
                    load_floats(at.panels[2 * vector + 1] + index * 32));
    }
};

// out[r][column] (+)= x[r][0 .. words) * w for ROWS rows and VECTORS vectors of columns, `last` of the last.
template <class Source, int ROWS, int VECTORS>
void tile(const Source& w, const Ahead& ahead, int words, const float* x, int64_t x_stride, float* out, int64_t stride,
          bool first, __mmask16 last) {
    constexpr int kCellWords = kCell / Source::kElements;
    const auto columns = [&](int vector) { return vector == VECTORS - 1 ? last : static_cast<__mmask16>(0xffff); };
    __m512 acc[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
            acc[r][v] = first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(columns(v), out + r * stride + 16 * v);
        }
    }
    for (int start = 0; start < words; start += kCellWords) {
        const int cell = start / kCellWords;
        ahead.fetch(cell);
        Source here = w;
        here.skip(cell);
        const int end = words - start < kCellWords ? words - start : kCellWords;
        for (int word = 0; word < end; word += Source::kWords, x += Source::kWords) {
            __m512 weights[Source::kWords][VECTORS];
            here.load(word / Source::kWords, weights);
#pragma GCC unroll 2
            for (int i = 0; i < Source::kWords; ++i) {
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const __m512 a = _mm512_set1_ps(x[r * x_stride + i]);
#pragma GCC unroll 2
                    for (int v = 0; v < VECTORS; ++v) acc[r][v] = Source::multiply_add(a, weights[i][v], acc[r][v]);
                }
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
using TileFn = void (*)(const Source&, const Ahead&, int words, const float* x, int64_t x_stride, float* out,
                        int64_t stride, bool first, __mmask16 last);

template <class S, int V>
constexpr TileFn<S> kTiles[kBlockRows] = {tile<S, 1, V>, tile<S, 2, V>,  tile<S, 3, V>,  tile<S, 4, V>,
                                          tile<S, 5, V>, tile<S, 6, V>,  tile<S, 7, V>,  tile<S, 8, V>,
                                          tile<S, 9, V>, tile<S, 10, V>, tile<S, 11, V>, tile<S, 12, V>};

// Columns of `count` (1 to 4) panels; x and x_stride in words. Many rows meet the weights of a pass in the first-level
// cache, where the first of their tiles brings them; a single tile reads its weights once, in one pass. All the time
// those that come next are on their way from memory: of the worker's next item, or of the next pass where items are
// large.
template <int KIND, class Source>
void columns_of(const Panels& w, int panel, int count, const float* x, int64_t x_stride, int rows, float* out,
                int64_t stride, float* scratch) {
    const TileFn<Source>* tiles = count > 2 ? kTiles<Source, 2> : kTiles<Source, 1>;
    const __mmask16 last = count % 2 == 0 ? 0xffff : 0xff;
    const int cells = (w.n_in + kCell - 1) / kCell;
    const int blocks = (rows + kBlockRows - 1) / kBlockRows;
    const int passes = blocks == 1 && !Source::kCopies ? 1 : (cells + Source::kMostCells - 1) / Source::kMostCells;
    for (int pass = 0, cell = 0; pass < passes; ++pass) {  // of nearly equally many cells
        const int size = (cells - cell + passes - pass - 1) / (passes - pass);
        const int k = cell * kCell;
        const int depth = w.n_in - k < size * kCell ? w.n_in - k : size * kCell;
        const Source source = Source::template of<KIND>(w, panel, count, cell, size, scratch);
        for (int block = 0, row = 0; block < blocks; ++block) {
            const int these = (rows - row + blocks - block - 1) / (blocks - block);
            const Ahead ahead = ahead_of<KIND>(w, panel, count, cell, size, block, blocks);
            tiles[these - 1](source, ahead, depth / Source::kElements, x + row * x_stride + k / Source::kElements,
                             x_stride, out + row * stride, stride, pass == 0, last);
            row += these;
        }
        cell += size;
    }
}

}  // namespace
