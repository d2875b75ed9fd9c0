// Asking for the weights of products whose sums are float32. Local to the unit that includes it.
#pragma once

#include "cells.h"

namespace {

using namespace octavo;

// The same place of four panels; the last panel again where there are fewer.
struct Four {
    const uint8_t* panels[4];

    Four(const Panels& w, int panel, int count, int64_t offset) {
        for (int i = 0; i < 4; ++i) {
            panels[i] = w.data + (panel + (i < count ? i : count - 1)) * w.panel_bytes + offset;
        }
    }
};

// What a tile asks for meanwhile: `bytes` of each panel for every cell that it multiplies. Into the second-level cache:
// the first has no room for it, and its few requests to memory at a time would bound the speed (2 to 8 rows take 1.5
// times as long).
struct Ahead {
    Four from;
    int bytes;

    __attribute__((always_inline)) void fetch(int cell) const {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            for (int at = 0; at < bytes; at += 64) {
                _mm_prefetch(from.panels[i] + cell * bytes + at, _MM_HINT_T1);
            }
        }
    }
};

// What a tile asks for that meets `cells` cells from `cell` on with one of `blocks` blocks of rows: these share the
// asking. Many rows ask for the next cells where items are large, and else, like few rows, for the worker's next item.
template <int KIND>
Ahead ahead_of(const Panels& w, int panel, int count, int cell, int cells, int block, int blocks) {
    constexpr int kCellBytes = kKinds[KIND].unit_bytes() / kKinds[KIND].unit_cells;
    const int bytes = (kCellBytes / blocks + 63) / 64 * 64;
    const int64_t distance = blocks > 1 && w.ahead == kNear ? int64_t{cells} * kCellBytes : w.ahead;
    return {Four(w, panel, count, int64_t{cell} * kCellBytes + distance + int64_t{block} * cells * bytes), bytes};
}

}  // namespace
