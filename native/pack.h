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

// The panels of a matrix that one node owns, and that lie in its memory, are a part of their own: each of the parts
// that a weight is made of is cut between nodes, at whole work items.
struct Weight {
    int n_out = 0;
    int n_in = 0;
    std::vector<Panels> parts;
    std::vector<int> first;   // first output column of each part
    std::vector<int> node;    // that owns each part
    std::vector<int> source;  // which of the parts that the weight was made of each is cut from
    size_t bytes = 0;
    std::vector<std::shared_ptr<uint8_t>> data;  // of each node
};

struct PartShape {
    int kind;
    int n_out;
};

// A weight whose panels are there, zero, and owned by the nodes of the pool.
std::shared_ptr<Weight> make_weight(const Pool& pool, Store& store, const std::vector<PartShape>& parts, int n_in);

// Writes to every page of a source, which must be zero still, from a worker of the node that owns it, so that it lies
// there whoever packs. With one node there is nothing to do.
void touch_pages(Pool& pool, const Weight& weight, int source);

// Puts rows of a source, from `first_row` on (a multiple of kColumns), into their panels. Lossless: the stored integers
// and scales, re-ordered. A panel is packed by a worker of the node that owns it, which `packers`, where it is not
// null, tells for each panel of these rows.
void pack_rows(Pool& pool, const Weight& weight, int source, int first_row, const StoredRows& rows, int32_t* packers);

}  // namespace octavo
