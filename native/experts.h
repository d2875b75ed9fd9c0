// Which experts a token goes to, and the work of a mixture of experts cut by expert.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace octavo {

enum Scoring : int { SCORE_SOFTMAX, SCORE_SIGMOID, SCORE_SPARSEMIXER };

// Router of octavo/ops/contract.py, where each field is explained.
struct Router {
    int experts;
    int top_k;
    int scoring;
    bool renormalize;
    int groups;
    int top_groups;
    bool two_largest;  // of a group, else the largest
    float scale;
    float eps;
    float floor;
    float jitter;
    bool weigh_input;
};

// The experts of a row with these logits, in router order, and their weights: top_k of each. `correction` may be null;
// `scratch` holds route_scratch(router) floats.
void route(const Kernels& kernels, const Router& router, const float* logits, const float* correction, float* scratch,
           int32_t* chosen, float* weights);
int64_t route_scratch(const Router& router);

// Rows that go to one expert: pairs [first, first + count) of Routes::order.
struct ExpertTask {
    int expert;
    int first;
    int count;
};

// A pair is a row and one of its experts: pair row * top_k + j is the j-th expert of the row.
struct Routes {
    std::vector<int32_t> chosen;    // [pairs]: expert
    std::vector<float> weights;     // [pairs]
    std::vector<int32_t> order;     // [pairs]: pairs by expert, those of an expert by row
    std::vector<int32_t> place;     // [pairs]: where each is in `order`
    std::vector<int32_t> next;      // [experts]
    std::vector<ExpertTask> tasks;  // of at most so many rows as a work item of a product has

    // Makes room for steps of up to `pairs` pairs.
    void reserve(int pairs, int experts);
    // Fills `order`, `place` and `tasks` from `chosen`.
    void group(int pairs, int experts, int task_rows);
};

}  // namespace octavo
