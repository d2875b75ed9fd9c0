// Cells of two panels side by side: 16 columns, those of the first panel in the lower half of a register. Local to the
// unit that includes it.
#pragma once

#include <algorithm>

#include "../avx2/cells.h"

namespace {

inline __m512i join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
inline __m512 join(__m256 low, __m256 high) { return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1); }

// The planes of both cells (see CellPlanes).
struct PairPlanes {
    CellPlanes low;
    CellPlanes high;

    __m512i load(int offset) const { return join(low.load(offset), high.load(offset)); }
    static __m512i all(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }
    static __m512i left(__m512i words, int bits) { return _mm512_slli_epi16(words, bits); }
    static __m512i right(__m512i words, int bits) { return _mm512_srli_epi16(words, bits); }
    static __m512i look_up(__m128i values, __m512i codes) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), codes);
    }
};

// Where the same cell of two panels is.
struct PairPlace {
    CellPlace low;
    CellPlace high;
};

// Two panels, which of their columns are stored (where one or both are missing, others stand for them), and how far
// ahead to ask for weights.
struct PairOfPanels {
    const uint8_t* low;
    const uint8_t* high;
    __mmask16 columns;
    int64_t ahead;
};

// The first two of `left` panels from `panel` on.
inline PairOfPanels pair_of(const octavo::Panels& w, int panel, int left) {
    const uint8_t* low = left > 0 ? w.data + panel * w.panel_bytes : w.data;
    const int columns = octavo::kColumns * std::clamp(left, 0, 2);
    return {low, left > 1 ? low + w.panel_bytes : low, static_cast<__mmask16>((1 << columns) - 1), w.ahead};
}

template <int KIND>
inline PairPlace place_of(PairOfPanels w, int cell) {
    return {place_of<KIND>(w.low, cell), place_of<KIND>(w.high, cell)};
}

template <int KIND>
inline __attribute__((always_inline)) void fetch_ahead(const PairOfPanels (&w)[2], int cell) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
        fetch_ahead<KIND>(place_of<KIND>(w[p].low, cell).cell, w[p].ahead);
        fetch_ahead<KIND>(place_of<KIND>(w[p].high, cell).cell, w[p].ahead);
    }
}

template <int KIND>
inline __m512i quad_of(PairPlace at, int index) {
    constexpr int skipped = kKinds[KIND].meta_bytes;
    return quad_of<KIND>(PairPlanes{{at.low.cell + skipped}, {at.high.cell + skipped}}, index);
}

// Eight float16 of either panel.
inline __m512 load_halves(const uint8_t* low, const uint8_t* high) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));
}

template <int KIND>
inline __m512 scale_of(PairPlace at, int half = 0) {
    constexpr octavo::Scales scales = kKinds[KIND].scales;
    if constexpr (scales == octavo::HALF || scales == octavo::HALF_MIN) return load_halves(at.low.head, at.high.head);
    return join(scale_of<KIND>(at.low, half), scale_of<KIND>(at.high, half));
}

template <int KIND>
inline __m512 minimum_of(PairPlace at, int half = 0) {
    if constexpr (kKinds[KIND].scales == octavo::HALF_MIN) return load_halves(at.low.head + 16, at.high.head + 16);
    return join(minimum_of<KIND>(at.low, half), minimum_of<KIND>(at.high, half));
}

// Calls work(size, first) for `rows` rows in blocks of nearly equally many, at most `most`.
template <class Work>
inline void each_block(int rows, int most, const Work& work) {
    const int blocks = (rows + most - 1) / most;
    for (int block = 0, first = 0; block < blocks; ++block) {
        const int size = (rows - first + blocks - block - 1) / (blocks - block);
        work(size, first);
        first += size;
    }
}

// Sums of some rows and two pairs of panels.
template <int ROWS>
inline __attribute__((always_inline)) void clear(__m512 (&acc)[2][ROWS]) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 7
        for (int r = 0; r < ROWS; ++r) acc[p][r] = _mm512_setzero_ps();
    }
}

// Many rows meet two pairs of panels: OPEN cells of both at a time are unpacked into the nearest cache, then
// tile(cells, first cell, their number, rows, first row) is called for blocks of at most `most` rows.
template <int KIND, class Cell, int OPEN, class Tile>
inline void each_tile(const PairOfPanels (&w)[2], int cells, int rows, int most, const Tile& tile) {
    Cell open[OPEN][2];
    for (int first = 0; first < cells; first += OPEN) {
        const int count = cells - first < OPEN ? cells - first : OPEN;
        for (int c = 0; c < count; ++c) {
            for (int p = 0; p < 2; ++p) open[c][p].fill(place_of<KIND>(w[p], first + c));
        }
        each_block(rows, most, [&](int size, int row) { tile(open, first, count, size, row); });
    }
}

constexpr int kMostFew = 32;  // rows for which unpacking cells anew costs less than storing them unpacked

// Cuts a product into what few(pairs, rows, first row, first column) and many(pairs, first column) make of two pairs of
// panels: blocks of at most `most` rows, which unpack each cell anew, or all rows, for which it is unpacked once.
template <class Few, class Many>
inline void cut(const octavo::Panels& w, int panel, int count, int rows, int most, const Few& few, const Many& many) {
    for (int p = 0; p < count; p += 4) {
        const PairOfPanels pairs[2] = {pair_of(w, panel + p, count - p), pair_of(w, panel + p + 2, count - p - 2)};
        const int column = p * octavo::kColumns;
        if (rows > kMostFew) {
            many(pairs, column);
        } else {
            each_block(rows, most, [&](int size, int first) { few(pairs, size, first, column); });
        }
    }
}

}  // namespace
