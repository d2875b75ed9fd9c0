// A token's queries, keys and values: norms and rotation, then K and V into the cache.
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "simd.h"

namespace {

using namespace octavo;

inline void store_cached(uint8_t* p, int64_t index, bool half, float value) {
    if (half) {
        const uint16_t bits = static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
        memcpy(p + 2 * index, &bits, 2);
    } else {
        memcpy(p + 4 * index, &value, 4);
    }
}

// In place, over each head or all of them.
void norm_heads(float* x, const HeadNorm& norm, int heads, int depth) {
    const int width = norm.over_all ? heads * depth : depth;
    for (int i = 0; i < heads * depth; i += width) {
        octavo::kernels().norm(x + i, {norm.weight + i, nullptr, nullptr, norm.eps, norm.center != 0}, width, x + i);
    }
}

// NaN stays NaN: the second operand is what min and max return for it.
void clamp(float* x, int width, float limit) {
    const __m256 high = _mm256_set1_ps(limit);
    const __m256 low = _mm256_set1_ps(-limit);
    for (int i = 0; i < width; i += 8) {
        store_some(x + i, width - i, _mm256_min_ps(high, _mm256_max_ps(low, load_some(x + i, width - i))));
    }
}

// Turns the pairs (i, i + half) of a head.
void rotate(float* x, const float* rotary, int half) {
    for (int i = 0; i < half; i += 8) {
        const int left = half - i;
        const __m256 a = load_some(x + i, left);
        const __m256 b = load_some(x + half + i, left);
        const __m256 cosine = load_some(rotary + i, left);
        const __m256 sine = load_some(rotary + half + i, left);
        store_some(x + i, left, _mm256_fmsub_ps(a, cosine, _mm256_mul_ps(b, sine)));
        store_some(x + half + i, left, _mm256_fmadd_ps(b, cosine, _mm256_mul_ps(a, sine)));
    }
}

// The heads of x as they are used, to `out`. Values are not turned: their `half` is 0.
void prepare(const float* x, int heads, const HeadNorm& norm, const HeadShape& shape, const float* rotary, int half,
             float* out) {
    const int depth = shape.head_dim;
    memcpy(out, x, sizeof(float) * heads * depth);
    if (norm.weight != nullptr && !norm.after) norm_heads(out, norm, heads, depth);
    if (shape.clip > 0) clamp(out, heads * depth, shape.clip);
    if (half > 0) {
        for (int h = 0; h < heads; ++h) rotate(out + h * depth, rotary, half);
    }
    if (norm.weight != nullptr && norm.after) norm_heads(out, norm, heads, depth);
}

void store_kv(const StoreItem& item, const HeadShape& shape) {
    const int depth = shape.head_dim;
    const int size = shape.block_size;
    prepare(item.qkv, shape.heads, item.norms[0], shape, item.rotary, item.rotary_half, item.q);
    if (shape.temperature_floor > 0) {
        const float steps =
            floorf(static_cast<float>(item.place.position + shape.temperature_start) / shape.temperature_floor);
        const __m256 factor = _mm256_set1_ps(1.0f + shape.temperature * log1pf(steps));
        for (int i = 0; i < shape.heads * depth; i += 8) {
            const int left = shape.heads * depth - i;
            store_some(item.q + i, left, _mm256_mul_ps(load_some(item.q + i, left), factor));
        }
    }
    if (!shape.stores) return;
    const int width = shape.kv_heads * depth;
    const float* from = item.qkv + shape.heads * depth;
    float* k = item.scratch;
    float* v = k + width;
    prepare(from, shape.kv_heads, item.norms[1], shape, item.rotary, item.rotary_half, k);
    prepare(from + width, shape.kv_heads, item.norms[2], shape, nullptr, 0, v);
    uint8_t* keys = item.place.cache.data + item.place.block * item.place.cache.block_bytes;
    uint8_t* values = keys + int64_t{width} * size * (shape.half ? 2 : 4);
    for (int h = 0; h < shape.kv_heads; ++h) {
        for (int i = 0; i < depth; ++i) {
            store_cached(keys, (int64_t{h} * depth + i) * size + item.place.offset, shape.half, k[h * depth + i]);
            store_cached(values, (int64_t{h} * size + item.place.offset) * depth + i, shape.half, v[h * depth + i]);
        }
    }
}

void store_latent(const LatentItem& item, const HeadShape& shape) {
    const int latent = shape.latent;
    const int rope = shape.head_dim - latent;
    for (int h = 0; h < shape.heads; ++h) {
        float* q = item.q + h * shape.head_dim;
        memcpy(q, item.q_latent + h * latent, sizeof(float) * latent);
        memcpy(q + latent, item.q_rope + h * rope, sizeof(float) * rope);
        rotate(q + latent, item.rotary, item.rotary_half);
    }
    float* k = item.scratch;
    memcpy(k, item.latent, sizeof(float) * latent);
    memcpy(k + latent, item.k_rope, sizeof(float) * rope);
    rotate(k + latent, item.rotary, item.rotary_half);
    uint8_t* keys = item.place.cache.data + item.place.block * item.place.cache.block_bytes;
    for (int i = 0; i < shape.head_dim; ++i) {
        store_cached(keys, int64_t{i} * shape.block_size + item.place.offset, shape.half, k[i]);
    }
}

}  // namespace

void octavo::fill_store_kv_avx2(Kernels& table) {
    table.store_kv = store_kv;
    table.store_latent = store_latent;
}
