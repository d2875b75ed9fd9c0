// A token's queries, keys and values: norms and rotation, then K and V into the cache.
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "float8.h"
#include "simd.h"

namespace {

using namespace octavo;

// Eight elements of the cache, kCacheTypes[TYPE].bytes each.
template <int TYPE>
inline void encode(__m256 x, uint8_t* out) {
    if constexpr (TYPE == CACHE_FLOAT32) {
        _mm256_storeu_ps(reinterpret_cast<float*>(out), x);
    } else if constexpr (TYPE == CACHE_FLOAT16) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    } else if constexpr (TYPE == CACHE_INT8) {
        const __m256i codes = _mm256_cvtps_epi32(x);
        const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(pairs, pairs));
    } else {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), to_float8<TYPE == CACHE_E4M3 ? E4M3 : E5M2>(x));
    }
}

// The scale of a head's integers. NaN where a value is not finite.
float integer_scale(const float* x, int depth) {
    const __m256 infinite = _mm256_set1_ps(__builtin_inff());
    __m256 largest = _mm256_setzero_ps();
    __m256 wrong = _mm256_setzero_ps();
    for (int i = 0; i < depth; i += 8) {
        const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), load_some(x + i, depth - i));
        largest = _mm256_max_ps(largest, magnitude);
        wrong = _mm256_or_ps(wrong, _mm256_cmp_ps(magnitude, infinite, _CMP_NLT_UQ));
    }
    if (_mm256_movemask_ps(wrong) != 0) return __builtin_nanf("");
    const float scale = max_lanes(largest) / 127.0f;
    return scale > kLeastCacheScale ? scale : kLeastCacheScale;
}

// A head of a token, whose elements lie `stride` elements apart. `scale`: of the layer, where the type has none for
// each token.
template <int TYPE>
void store_head(const float* x, int depth, float scale, uint8_t* to, int64_t stride, float* token_scale) {
    constexpr int bytes = kCacheTypes[TYPE].bytes;
    if constexpr (kCacheTypes[TYPE].scale_bytes > 0) *token_scale = scale = integer_scale(x, depth);
    const int64_t step = stride * bytes;
    for (int i = 0; i < depth; i += 8, to += 8 * step) {
        __m256 v = load_some(x + i, depth - i);
        if constexpr (bytes == 1) v = _mm256_div_ps(v, _mm256_set1_ps(scale));
        if (stride == 1 && depth - i >= 8) {
            encode<TYPE>(v, to);
            continue;
        }
        alignas(32) uint8_t eight[8 * bytes];
        encode<TYPE>(v, eight);
        if (depth - i >= 8) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) memcpy(to + j * step, eight + j * bytes, bytes);
        } else {
            for (int j = 0; j < depth - i; ++j) memcpy(to + j * step, eight + j * bytes, bytes);
        }
    }
}

using StoreHead = void (*)(const float* x, int depth, float scale, uint8_t* to, int64_t stride, float* token_scale);

constexpr StoreHead kStoreHead[CACHE_TYPES] = {
    store_head<CACHE_FLOAT32>, store_head<CACHE_FLOAT16>, store_head<CACHE_E4M3>,
    store_head<CACHE_E5M2>,    store_head<CACHE_INT8>,
};

// Keys, or values, of a token to its block, at `block`.
void store_heads(const float* x, const float* scales, uint8_t* block, int64_t first, int64_t stride, int offset,
                 const HeadShape& shape) {
    const int64_t elements = int64_t{shape.head_dim} * shape.block_size * kCacheTypes[shape.type].bytes;
    for (int h = 0; h < shape.kv_heads; ++h, x += shape.head_dim, block += shape.head_bytes) {
        kStoreHead[shape.type](x, shape.head_dim, scales[h], block + first * kCacheTypes[shape.type].bytes, stride,
                               reinterpret_cast<float*>(block + elements) + offset);
    }
}

void store_keys(const float* k, const TokenPlace& place, const HeadShape& shape) {
    uint8_t* block = place.cache.data + place.block * place.cache.block_stride;
    store_heads(k, place.cache.k_scales, block, place.offset, shape.block_size, place.offset, shape);
}

void store_values(const float* v, const TokenPlace& place, const HeadShape& shape) {
    uint8_t* block = place.cache.data + place.block * place.cache.block_stride + shape.kv_heads * shape.head_bytes;
    store_heads(v, place.cache.v_scales, block, int64_t{place.offset} * shape.head_dim, 1, place.offset, shape);
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
    store_keys(k, item.place, shape);
    store_values(v, item.place, shape);
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
    store_keys(k, item.place, shape);
}

}  // namespace

void octavo::fill_store_kv_avx2(Kernels& table) {
    table.store_kv = store_kv;
    table.store_latent = store_latent;
}
