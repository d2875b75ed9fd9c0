// The functions that have implementations for several instruction sets, as a table that is filled once from cpuid.
//
// The units that implement them are compiled with their own -m flags and keep everything in anonymous namespaces. They
// include this header, intrinsics and C headers only: an inline function or template shared with other units could be
// merged by the linker into a copy that older CPUs cannot run.
#pragma once

#include "kinds.h"

namespace octavo {

// Activations as signed bytes, groups of 32, for weights of 4 to 6 bits. Group g of row r is at index g * rows + r.
struct Act8 {
    int8_t* q;        // 32 values
    float* scale;     // value = q * scale
    float* sum;       // scale * (sum of q)
    int32_t* halves;  // sums of q over the two halves of the group, as two int16
    int64_t rows;
};

// Activations as int16 with one scale per row.
struct Act16 {
    int16_t* q;    // 32 values of group g, row r at index g * rows + r
    float* sum;    // sum of q over the group
    float* scale;  // [rows]
    int64_t rows;
};

enum ActivationKind : int { SILU, GELU_TANH, GELU, RELU, RELU2, TANH, IDENTITY, XIELU, SWIGLU_OAI };

// A norm of a row: x / sqrt(mean(x^2) + eps) * weight + bias + residual; with `center` the mean is taken off x first.
// Bias and residual may be null.
struct NormTerms {
    const float* weight;
    const float* bias;
    const float* residual;
    float eps;
    bool center;
};

// A gated product's end: activation(gate + its bias) * (up + its bias). Biases may be null; with limit > 0 the gate is
// clamped to at most it, the other to [-limit, limit].
struct GateTerms {
    const float* gate_bias;
    const float* up_bias;
    int activation;
    float limit;
};

// How elements of the KV cache are stored: KV_TYPES of octavo/ops/contract.py, in its order.
enum CacheType : int { CACHE_FLOAT32, CACHE_FLOAT16, CACHE_E4M3, CACHE_E5M2, CACHE_INT8, CACHE_TYPES };

struct CacheTypeInfo {
    const char* name;
    int bytes;        // of an element
    int scale_bytes;  // of the float that multiplies the elements of a head of a token, or 0
};

constexpr CacheTypeInfo kCacheTypes[CACHE_TYPES] = {
    {"float32", 4, 0}, {"float16", 2, 0}, {"fp8_e4m3", 1, 0}, {"fp8_e5m2", 1, 0}, {"int8", 1, 4},
};

constexpr float kLeastCacheScale = 1e-30f;  // KV_LEAST_SCALE of octavo/ops/contract.py

// AttentionShape of octavo/ops/contract.py, and what the cache adds to it.
struct HeadShape {
    int heads;
    int kv_heads;
    int head_dim;
    int block_size;
    int type;            // of the cache: a CacheType
    int64_t head_bytes;  // what the keys, or the values, of a head take in a block
    int window;          // 0: none
    int chunk;           // 0: none
    int latent;          // 0: the cache has values; else they are the first elements of the keys
    float scale;
    float softcap;
    float clip;         // 0: none
    float temperature;  // of queries; none where the floor is 0
    float temperature_floor;
    int temperature_start;
    int stores;
};

// A layer's part of the KV cache. In a block, the keys of each head are [head_dim][block_size] elements, its values
// [block_size][head_dim], both followed by a scale for each token where the type has them; first are all heads' keys,
// then the values, which latent attention has not.
struct LayerCache {
    uint8_t* data;
    int64_t block_stride;   // from one block to the next: those of all layers of the group lie between
    const float* k_scales;  // [kv_heads]: what the elements are multiplied by, beside the scales of tokens
    const float* v_scales;
};

// Where a token of a step lies in its sequence and in the cache.
struct TokenPlace {
    int block;
    int offset;  // in the block
    int position;
};

// HeadNorm of octavo/ops/contract.py.
struct HeadNorm {
    const float* weight;  // [heads * head_dim]; null: no norm
    float eps;
    bool over_all;
    bool center;
    bool after;
};

// The queries, keys and values of some tokens, one row each.
struct StoreItem {
    const float* qkv;     // [(heads + 2 * kv_heads) * head_dim]; q alone where nothing is stored
    const float* rotary;  // [2 * rotary_half]
    int rotary_half;
    HeadNorm norms[3];  // of q, k and v
    LayerCache cache;
    const TokenPlace* places;
    int tokens;
    float* q;        // [heads * head_dim]
    float* scratch;  // store_scratch() floats
};

// The same of latent attention, with n = shape.latent and r = head_dim - n.
struct LatentItem {
    const float* q_latent;  // [heads * n]
    const float* q_rope;    // [heads * r]
    const float* latent;    // [n]
    const float* k_rope;    // [r]
    const float* rotary;    // [2 * rotary_half]
    int rotary_half;
    LayerCache cache;
    const TokenPlace* places;
    int tokens;
    float* q;        // [heads * head_dim]
    float* scratch;  // store_scratch() floats
};

// One work item of attention: consecutive tokens of one sequence, one KV head, all query heads that read it.
struct AttendItem {
    const float* q;  // row of the first token, [heads * head_dim] each
    float* out;      // same, [heads * attend_width()]
    LayerCache cache;
    const int32_t* table;
    const float* slopes;  // [heads], of the distance to a key; null: none
    const float* sinks;   // [heads]; null: none
    int kv_head;
    int position;  // of the first token
    int tokens;
    float* scratch;               // attend_scratch() floats
    const AttendItem* following;  // whose first keys and values are fetched meanwhile; null: none
};

using UnpackFn = void (*)(const uint8_t* panel, int first_cell, int cells, float* out, int64_t stride);
// Columns [8 * panel, 8 * (panel + count)) of x @ weight^T for `rows` rows from `row`, to out[r * stride + column].
// `scratch` holds kFloatScratch floats.
using LinearFloatFn = void (*)(const Panels&, int panel, int count, const float* x, int64_t x_stride, int row, int rows,
                               float* out, int64_t stride, float* scratch);
using LinearInt8Fn = void (*)(const Panels&, int panel, int count, const Act8&, int row, int rows, float* out,
                              int64_t stride);
using LinearInt16Fn = void (*)(const Panels&, int panel, int count, const Act16&, int row, int rows, float* out,
                               int64_t stride);

constexpr int kFloatScratch = 192 * kTileColumns;  // 24 KiB: with the activations of a tile, a first-level cache

struct Kernels {
    UnpackFn unpack[KIND_COUNT];
    LinearFloatFn linear_float[KIND_COUNT];
    LinearInt8Fn linear_int8[KIND_COUNT];    // null for kinds without
    LinearInt16Fn linear_int16[KIND_COUNT];  // null for kinds without
    LinearFloatFn linear_bfloat16;           // of BF16, with whole cells and rows of pack_bfloat16()

    void (*pack_int8)(const float* x, int width, const Act8& out, int64_t row);
    void (*pack_int16)(const float* x, int width, const Act16& out, int64_t row);
    // Elements [first, first + width), both even, of a row of activations, rounded to bfloat16: as float32, or two to a
    // word where the products of the tier read them so, in the first half of the row.
    void (*pack_bfloat16)(const float* x, int width, float* row, int first);

    void (*norm)(const float* x, const NormTerms&, int width, float* out);
    // out = (x + bias) * scale + residual; bias and residual may be null.
    void (*finish)(const float* x, int width, const float* bias, float scale, const float* residual, float* out);
    void (*gate)(const float* gate, const float* up, const GateTerms&, int width, float* out);
    // out = activation(x) * times; times may be null, and parameters but for XIELU.
    void (*activate)(const float* x, int activation, const float* parameters, const float* times, int width,
                     float* out);
    void (*add)(const float* x, const float* y, float scale, int width, float* out);          // (x + y) * scale
    void (*add_scaled)(const float* x, float factor, int width, float* out);                  // out += factor * x
    void (*blend)(const float* x, float gate, const float* residual, int width, float* out);  // residual may be null
    void (*match_rms)(const float* x, const float* like, float eps, int width, float* out);
    void (*keep_top)(const float* x, float deviations, int width, float* out);
    void (*cap)(float* x, int64_t width, float softcap);  // softcap * tanh(x / softcap)

    // Norms, clamps and turns the heads of tokens, stores k and v, and writes q.
    void (*store_kv)(const StoreItem&, const HeadShape&);
    // Turns the queries and the keys of tokens of latent attention, stores the keys and writes q.
    void (*store_latent)(const LatentItem&, const HeadShape&);
    void (*attend)(const AttendItem&, const HeadShape&);
    // The same in pieces, with the same bits: the partials of chunks [first, first + count), attend_partial() floats
    // each, and then the output from the partials of all chunks, in order.
    void (*attend_part)(const AttendItem&, const HeadShape&, int first, int count, float* partials);
    void (*attend_join)(const AttendItem&, const HeadShape&, int count, float* partials);

    // Largest value; NaN when any value is NaN.
    float (*maximum)(const float* x, int64_t n);
    int64_t (*first_equal)(const float* x, int64_t n, float value);  // index, n if none
    // sum of exp(x - top): float32 lanes over tiles of 1024, tiles added in float64 in order.
    double (*sum_exp)(const float* x, int64_t n, float top);
    int64_t (*count_greater)(const float* x, int64_t n, float value);
    // Ids with x >= value, ascending; returns how many, at most n.
    int64_t (*at_least)(const float* x, int64_t n, float value, int32_t* ids);
    void (*exp)(const float* x, int64_t n, float* out);
    // Ids of the scores that can reach `least` with their noise, and maybe others, ascending; returns how many. The
    // noise of an id is Gumbel's, of the upper 32 bits of mix(key + kNoiseStep * (id + 1)); see sampler.cpp.
    int64_t (*noisy)(const float* scores, int64_t n, uint64_t key, float least, int32_t* ids);

    // As many multiply-adds as the instructions of the products make possible, `rounds` times; tells how many
    // operations that were, two each.
    int64_t (*multiply_float)(int64_t rounds);
    int64_t (*multiply_int8)(int64_t rounds);
    int64_t (*multiply_int16)(int64_t rounds);
    int64_t (*multiply_bfloat16)(int64_t rounds);
    void (*read)(const uint8_t* data, int64_t bytes);  // all of it, and nothing else
};

// mix(z): z ^= z >> 30, times the first; z ^= z >> 27, times the second; z ^= z >> 31.
constexpr uint64_t kNoiseStep = 0x9E3779B97F4A7C15u;
constexpr uint64_t kNoiseFactors[2] = {0xBF58476D1CE4E5B9u, 0x94D049BB133111EBu};

constexpr int kStoreLot = 8;  // tokens whose keys are stored together where they lie side by side in a block

int64_t store_stride(const HeadShape&);   // floats from the keys of a token to those of the next of a lot
int64_t store_scratch(const HeadShape&);  // floats

constexpr int kChunkTokens = 256;  // of the context; a partial softmax begins anew at each multiple

int64_t attend_scratch(const HeadShape&);          // floats
int attend_width(const HeadShape&);                // elements of a value
int64_t attend_partial(int rows, int width);       // floats of the partial softmax of a chunk
int attend_tokens(const HeadShape&);               // largest `tokens` of an item
int attend_begin(const HeadShape&, int position);  // first token that a row at `position` sees

void fill_linear_float_avx2(Kernels&);
void fill_linear_int8_avx2(Kernels&);
void fill_linear_int16_avx2(Kernels&);
void fill_rows_avx2(Kernels&);
void fill_attention_avx2(Kernels&);
void fill_store_kv_avx2(Kernels&);
void fill_vocabulary_avx2(Kernels&);
void fill_roofline_avx2(Kernels&);
void fill_attention_avx512(Kernels&);
void fill_linear_int8_avx512(Kernels&);
void fill_linear_int16_avx512(Kernels&);
void fill_linear_float_avx512(Kernels&);
void fill_roofline_avx512(Kernels&);
void fill_rows_avx512(Kernels&);
void fill_store_kv_avx512(Kernels&);
void fill_vocabulary_avx512(Kernels&);
void fill_linear_bfloat16_avx512bf16(Kernels&);

// The table of this process's tier (cpu_features.h); where a tier has no function of its own, that of the tier below.
// All tiers give the same bits. Throws std::runtime_error that says why no kernels can be used.
const Kernels& kernels();

}  // namespace octavo
