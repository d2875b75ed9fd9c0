// One draw per row; the order of the rules is that of octavo/ops/contract.py (SAMPLING_ORDER).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace octavo {

// Parameters of all rows; see Sampling in octavo/ops/contract.py.
struct Sampling {
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const uint64_t* seed;
    const int32_t* choice;
    const int32_t* position;
    const int32_t* target;
    const int32_t* logprobs;
    const float* repetition;
    const float* presence;
    const float* frequency;
    const int32_t* seen_ptr;
    const int32_t* seen_ids;
    const int32_t* seen_counts;
    const int32_t* bias_ptr;
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* allow_ptr;
    const int32_t* allow_ids;
    const int32_t* report_ptr;  // null: no row asks for any
    const int32_t* report_ids;
};

struct Drawn {
    int32_t* token;
    float* logprob;
    int32_t* rank;
    int32_t* top_ids;  // [rows, width], filled with -1 before
    float* top_logprobs;
    uint8_t* ok;
    int64_t width;
    float* report_logprobs;
};

// A worker's buffers, of the size of the vocabulary.
struct SamplerScratch {
    std::vector<float> scores;
    std::vector<float> mass;
    std::vector<int32_t> ids;
    std::vector<int32_t> edge;
};

// Draws for row `row` of `sampling` from `logits` [vocab] and writes row `row` of `drawn`.
void draw_row(const Kernels& kernels, const float* logits, int vocab, const Sampling& sampling, int row,
              SamplerScratch& scratch, const Drawn& drawn);

// 32 random bits of a token id; see uniform_bits in octavo/ops/contract.py.
uint64_t noise_key(uint64_t seed, int64_t choice, int64_t position);
uint32_t noise_bits(uint64_t key, uint64_t id);

}  // namespace octavo
