// How the attention of a step is cut into work items: the longest first, and a long context in pieces where threads
// would otherwise wait for one of them. What a row computes does not depend on it (see attend_part in kernels.h).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"

namespace octavo {

struct Step;

// Consecutive tokens of one sequence over consecutive chunks of their context. One work item per KV head.
struct AttendPiece {
    int sequence;
    int token;
    int tokens;
    int first_chunk;
    int chunks;
    int64_t cost;
    // Of a context in several pieces; `pieces` is 1 when it is whole.
    int pieces;
    int begin_chunk;   // first chunk of the context
    int all_chunks;    // of the context
    int64_t partials;  // offset of its partials, [kv_head][all_chunks]
    int counter;       // index of its first counter, one per KV head
};

struct AttendPlan {
    HeadShape shape;
    std::vector<AttendPiece> pieces;
    std::unique_ptr<std::atomic<int>[]> left;  // pieces to do until the partials can be joined
};

// An empty plan for layers of this shape and steps of up to `tokens` tokens.
AttendPlan make_attend_plan(const HeadShape& shape, int tokens, int threads);

// Fills the plan for a step. The partials of all contexts in pieces take at most `capacity` floats.
void plan_attention(const Step& step, int threads, int64_t capacity, AttendPlan& plan);

}  // namespace octavo
