#include "kernels.h"

#include <algorithm>
#include <numeric>

#include "cpu_features.h"

namespace octavo {

namespace {

Kernels fill(Tier tier) {
    Kernels table{};
    fill_linear_float_avx2(table);
    fill_linear_int8_avx2(table);
    fill_linear_int16_avx2(table);
    fill_rows_avx2(table);
    fill_attention_avx2(table);
    fill_store_kv_avx2(table);
    fill_vocabulary_avx2(table);
    fill_roofline_avx2(table);
    if (tier == TIER_AVX2) return table;
    fill_attention_avx512(table);
    fill_linear_float_avx512(table);
    fill_linear_int8_avx512(table);
    fill_linear_int16_avx512(table);
    fill_roofline_avx512(table);
    fill_rows_avx512(table);
    fill_store_kv_avx512(table);
    fill_vocabulary_avx512(table);
    if (tier == TIER_AVX512) return table;
    fill_linear_bfloat16_avx512bf16(table);
    return table;
}

}  // namespace

const Kernels& kernels() {
    static const Kernels table = fill(kernel_tier());
    return table;
}

// A little more than a power of two: else the keys of all tokens of a lot would share one set of the first-level cache.
int64_t store_stride(const HeadShape& shape) { return int64_t{shape.kv_heads} * shape.head_dim + 16; }

int64_t store_scratch(const HeadShape& shape) { return (kStoreLot + 1) * store_stride(shape); }

// The rows (tokens x query heads of a KV head) of an item share one conversion of K and V. What they take is to stay in
// the second-level cache. Whole tiles of both six and eight rows where that is possible.
int attend_tokens(const HeadShape& shape) {
    const int group = shape.heads / shape.kv_heads;
    const int rows = std::min(144, (128 << 10) / (shape.head_dim + 2 * attend_width(shape) + kChunkTokens));
    const int tokens = std::max(1, rows / group);
    const int whole = 24 / std::gcd(group, 24);
    return tokens < 2 * whole ? tokens : tokens / whole * whole;
}

int attend_begin(const HeadShape& shape, int position) {
    if (shape.chunk > 0) return position - position % shape.chunk;
    return shape.window > 0 ? std::max(0, position - shape.window + 1) : 0;
}

int attend_width(const HeadShape& shape) { return shape.latent > 0 ? shape.latent : shape.head_dim; }

int64_t attend_partial(int rows, int width) { return int64_t{rows} * ((width + 7) / 8 * 8 + 2); }

int64_t attend_scratch(const HeadShape& shape) {
    const int rows = attend_tokens(shape) * (shape.heads / shape.kv_heads);
    const int64_t depth = (shape.head_dim + 7) / 8 * 8;
    const int64_t width = (attend_width(shape) + 7) / 8 * 8;
    const int64_t step = 64 * (depth + width);  // keys and values of as many tokens as are copied at once
    return step + rows * (depth + kChunkTokens + 3) + 2 * attend_partial(rows, attend_width(shape));
}

}  // namespace octavo
