// Cells of two panels side by side: 16 columns, those of the first panel in the lower half of a register. Local to the
// unit that includes it.
#pragma once

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

// Two panels and which of their columns are stored: a panel that has no neighbour stands for both.
struct PairOfPanels {
    const uint8_t* low;
    const uint8_t* high;
    __mmask16 columns;
};

template <int KIND>
inline PairPlace place_of(PairOfPanels w, int cell) {
    return {place_of<KIND>(w.low, cell), place_of<KIND>(w.high, cell)};
}

template <int KIND>
inline void fetch_ahead(PairPlace at) {
    fetch_ahead<KIND>(at.low.cell);
    fetch_ahead<KIND>(at.high.cell);
}

template <int KIND>
inline __m512i quad_of(PairPlace at, int index) {
    constexpr int skipped = kKinds[KIND].meta_bytes;
    return quad_of<KIND>(PairPlanes{{at.low.cell + skipped}, {at.high.cell + skipped}}, index);
}

template <int KIND>
inline __m512 scale_of(PairPlace at, int half = 0) {
    return join(scale_of<KIND>(at.low, half), scale_of<KIND>(at.high, half));
}

template <int KIND>
inline __m512 minimum_of(PairPlace at, int half = 0) {
    return join(minimum_of<KIND>(at.low, half), minimum_of<KIND>(at.high, half));
}

// Cuts a product into pairs of panels and blocks of nearly equally many rows, at most MOST of them, and calls
// work(blocks[rows - 1], pair, first row, first column).
template <class Block, int MOST, class Work>
inline void each_block(const Block (&blocks)[MOST], const octavo::Panels& w, int panel, int count, int rows,
                       const Work& work) {
    const int cuts = (rows + MOST - 1) / MOST;
    for (int p = 0; p < count; p += 2) {
        const uint8_t* low = w.data + (panel + p) * w.panel_bytes;
        const bool both = p + 1 < count;
        const PairOfPanels pair = {low, both ? low + w.panel_bytes : low, static_cast<__mmask16>(both ? 0xffff : 0xff)};
        for (int cut = 0, first = 0; cut < cuts; ++cut) {
            const int size = (rows - first + cuts - cut - 1) / (cuts - cut);
            work(blocks[size - 1], pair, first, p * octavo::kColumns);
            first += size;
        }
    }
}

}  // namespace
