// Weights from the checkpoint's bytes to panels.
#pragma once

#include <memory>
#include <vector>

#include "arena.h"
#include "kinds.h"
#include "pool.h"

namespace octavo {

// Rows of a matrix as the file stores them; rows `row_stride` bytes apart.
struct StoredRows {
    int n_out;
    const uint8_t* data;
    int64_t row_stride;
};

struct Weight {
    int n_out = 0;
    int n_in = 0;
    std::vector<Panels> parts;
    std::vector<int> first;  // first output column of each part
    size_t bytes = 0;
    std::shared_ptr<uint8_t> data;
};

struct PartShape {
    int kind;
    int n_out;
};

// A weight whose panels are there, and zero.
std::shared_ptr<Weight> make_weight(Store& store, const std::vector<PartShape>& parts, int n_in);

// Puts rows of a part, from `first_row` on (a multiple of kColumns), into their panels. Lossless: the stored integers
// and scales, re-ordered.
void pack_rows(Pool& pool, const Weight& weight, int part, int first_row, const StoredRows& rows);

}  // namespace octavo
