// Weights from the checkpoint's bytes to panels.
#pragma once

#include <memory>
#include <vector>

#include "arena.h"
#include "kinds.h"
#include "pool.h"

namespace octavo {

// Rows of a matrix as the file stores them; rows `row_stride` bytes apart.
struct StoredPart {
    int kind;
    int n_out;
    int n_in;
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

// Lossless: the stored integers and scales, re-ordered. All parts must have the same n_in.
std::shared_ptr<Weight> pack_weight(Pool& pool, Store& store, const std::vector<StoredPart>& parts);

}  // namespace octavo
