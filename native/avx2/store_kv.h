// Tokens' queries, keys and values: norms and rotation, then K and V into the cache. Templates over the width of
// vectors (see simd.h); `encode` of the unit makes elements of the cache of one. Everything is local to the unit that
// includes it.
#pragma once

#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "float8.h"
#include "simd.h"

namespace {

using namespace octavo;

// Elements of the cache, kCacheTypes[TYPE].bytes each.
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
inline float integer_scale(const float* x, int depth) {
    const __m256 infinite = _mm256_set1_ps(__builtin_inff());
    __m256 most = _mm256_setzero_ps();
    __m256 wrong = _mm256_setzero_ps();
    for (int i = 0; i < depth; i += 8) {
        const __m256 size = magnitude(load_some(x + i, depth - i));
        most = _mm256_max_ps(most, size);
        wrong = _mm256_or_ps(wrong, _mm256_cmp_ps(size, infinite, _CMP_NLT_UQ));
    }
    if (_mm256_movemask_ps(wrong) != 0) return __builtin_nanf("");
    const float scale = max_lanes(most) / 127.0f;
    return scale > kLeastCacheScale ? scale : kLeastCacheScale;
}

// Where the keys, or the values, of a token's head begin in its block, and the place of its scale.
struct HeadPlace {
    uint8_t* elements;
    float* scale;
};

template <int TYPE>
HeadPlace place_of(uint8_t* block, int head, const HeadShape& shape, int offset) {
    uint8_t* elements = block + head * shape.head_bytes;
    const int64_t bytes = int64_t{shape.head_dim} * shape.block_size * kCacheTypes[TYPE].bytes;
    return {elements, reinterpret_cast<float*>(elements + bytes) + offset};
}

// What the elements of a head are divided by; it is stored where it is of this token alone.
template <int TYPE>
float scale_for(const float* x, const HeadShape& shape, float of_head, float* place) {
    if constexpr (kCacheTypes[TYPE].scale_bytes == 0) return of_head;
    return *place = integer_scale(x, shape.head_dim);
}

template <class V, int TYPE>
void store_values(const float* v, const float* scales, uint8_t* block, int offset, const HeadShape& shape) {
    constexpr int bytes = kCacheTypes[TYPE].bytes;
    const int depth = shape.head_dim;
    for (int h = 0; h < shape.kv_heads; ++h, v += depth) {
        const HeadPlace place = place_of<TYPE>(block, h, shape, offset);
        const V scale = all<V>(scale_for<TYPE>(v, shape, scales[h], place.scale));
        uint8_t* to = place.elements + int64_t{offset} * depth * bytes;
        for (int i = 0; i < depth; i += kLanes<V>, to += kLanes<V> * bytes) {
            V some = load<V>(v + i, depth - i);
            if constexpr (bytes == 1) some = some / scale;
            if (depth - i >= kLanes<V>) {
                encode<TYPE>(some, to);
            } else {
                uint8_t last[kLanes<V> * bytes];
                encode<TYPE>(some, last);
                memcpy(to, last, (depth - i) * bytes);
            }
        }
    }
}

// Keys of one token, whose elements lie a block's tokens apart.
template <int TYPE>
void store_key(const float* k, const float* scales, uint8_t* block, int offset, const HeadShape& shape) {
    constexpr int bytes = kCacheTypes[TYPE].bytes;
    const int64_t step = int64_t{shape.block_size} * bytes;
    const int depth = shape.head_dim;
    for (int h = 0; h < shape.kv_heads; ++h, k += depth) {
        const HeadPlace place = place_of<TYPE>(block, h, shape, offset);
        const __m256 scale = _mm256_set1_ps(scale_for<TYPE>(k, shape, scales[h], place.scale));
        uint8_t* to = place.elements + offset * bytes;
        for (int i = 0; i < depth; i += 8, to += 8 * step) {
            __m256 some = load_some(k + i, depth - i);
            if constexpr (bytes == 1) some = _mm256_div_ps(some, scale);
            alignas(32) uint8_t eight[8 * bytes];
            encode<TYPE>(some, eight);
            if (depth - i >= 8) {
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) memcpy(to + j * step, eight + j * bytes, bytes);
            } else {
                for (int j = 0; j < depth - i; ++j) memcpy(to + j * step, eight + j * bytes, bytes);
            }
        }
    }
}

// Keys of eight tokens that follow one another in the block; those of a token begin `stride` floats after the last's.
template <int TYPE>
void store_eight_keys(const float* k, int64_t stride, const float* scales, uint8_t* block, int offset,
                      const HeadShape& shape) {
    constexpr int bytes = kCacheTypes[TYPE].bytes;
    const int64_t step = int64_t{shape.block_size} * bytes;
    const int depth = shape.head_dim;
    for (int h = 0; h < shape.kv_heads; ++h, k += depth) {
        const HeadPlace place = place_of<TYPE>(block, h, shape, offset);
        float own[8];
        for (int t = 0; t < 8; ++t) own[t] = scale_for<TYPE>(k + t * stride, shape, scales[h], place.scale + t);
        const __m256 scale = _mm256_loadu_ps(own);
        uint8_t* to = place.elements + offset * bytes;
        for (int i = 0; i < depth; i += 8) {
            __m256 rows[8];
#pragma GCC unroll 8
            for (int t = 0; t < 8; ++t) rows[t] = load_some(k + t * stride + i, depth - i);
            transpose(rows);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j, to += step) {
                if (j >= depth - i) break;
                if constexpr (bytes == 1) rows[j] = _mm256_div_ps(rows[j], scale);
                encode<TYPE>(rows[j], to);
            }
        }
    }
}

struct StoreFns {
    void (*values)(const float* v, const float* scales, uint8_t* block, int offset, const HeadShape&);
    void (*key)(const float* k, const float* scales, uint8_t* block, int offset, const HeadShape&);
    void (*eight_keys)(const float* k, int64_t stride, const float* scales, uint8_t* block, int offset,
                       const HeadShape&);
};

template <class V, int TYPE>
constexpr StoreFns kOneType = {store_values<V, TYPE>, store_key<TYPE>, store_eight_keys<TYPE>};

template <class V>
constexpr StoreFns kOfType[CACHE_TYPES] = {kOneType<V, CACHE_FLOAT32>, kOneType<V, CACHE_FLOAT16>,
                                           kOneType<V, CACHE_E4M3>, kOneType<V, CACHE_E5M2>, kOneType<V, CACHE_INT8>};

template <class V>
void store_keys(const float* k, int64_t stride, const LayerCache& cache, const TokenPlace& first, int tokens,
                const HeadShape& shape) {
    const StoreFns& fns = kOfType<V>[shape.type];
    uint8_t* block = cache.data + first.block * cache.block_stride;
    if (tokens == kStoreLot) {
        fns.eight_keys(k, stride, cache.k_scales, block, first.offset, shape);
        return;
    }
    for (int t = 0; t < tokens; ++t) fns.key(k + t * stride, cache.k_scales, block, first.offset + t, shape);
}

// How many tokens from the first on lie side by side in a block, as many as go together at most.
inline int lot_of(const TokenPlace* places, int tokens) {
    int n = 1;
    while (n < tokens && n < kStoreLot && places[n].block == places[0].block &&
           places[n].offset == places[0].offset + n) {
        ++n;
    }
    return n;
}

// Calls work(first token, count) for lots of tokens that lie side by side.
template <class Work>
void each_lot(const TokenPlace* places, int tokens, const Work& work) {
    for (int first = 0; first < tokens;) {
        const int count = lot_of(places + first, tokens - first);
        work(first, count);
        first += count;
    }
}

// Over each head or all of them. `out` may be x.
inline void norm_heads(const float* x, const HeadNorm& norm, int heads, int depth, float* out) {
    const int width = norm.over_all ? heads * depth : depth;
    for (int i = 0; i < heads * depth; i += width) {
        octavo::kernels().norm(x + i, {norm.weight + i, nullptr, nullptr, norm.eps, norm.center}, width, out + i);
    }
}

// NaN stays NaN. `out` may be x.
template <class V>
void clamp(const float* x, int width, float limit, float* out) {
    for (int i = 0; i < width; i += kLanes<V>) {
        store(out + i, width - i, smallest(all<V>(limit), largest(all<V>(-limit), load<V>(x + i, width - i))));
    }
}

// Turns the pairs (i, i + half) of a head. `out` may be x.
template <class V>
void rotate(const float* x, const float* rotary, int half, float* out) {
    for (int i = 0; i < half; i += kLanes<V>) {
        const int left = half - i;
        const V a = load<V>(x + i, left);
        const V b = load<V>(x + half + i, left);
        const V cosine = load<V>(rotary + i, left);
        const V sine = load<V>(rotary + half + i, left);
        store(out + i, left, fms(a, cosine, b * sine));
        store(out + half + i, left, fma(b, cosine, a * sine));
    }
}

// The heads of x as they are used: x itself where nothing is done to them, else `out`. Values are not turned: their
// `half` is 0.
template <class V>
const float* prepare(const float* x, int heads, const HeadNorm& norm, const HeadShape& shape, const float* rotary,
                     int half, float* out) {
    const int depth = shape.head_dim;
    if (norm.weight != nullptr && !norm.after) {
        norm_heads(x, norm, heads, depth, out);
        x = out;
    }
    if (shape.clip > 0) {
        clamp<V>(x, heads * depth, shape.clip, out);
        x = out;
    }
    if (half > 0) {
        for (int h = 0; h < heads; ++h) {
            const int turned = 2 * half;
            rotate<V>(x + h * depth, rotary, half, out + h * depth);
            if (x != out && turned < depth) {
                memcpy(out + h * depth + turned, x + h * depth + turned, sizeof(float) * (depth - turned));
            }
        }
        x = out;
    }
    if (norm.weight != nullptr && norm.after) {
        norm_heads(x, norm, heads, depth, out);
        x = out;
    }
    return x;
}

template <class V>
void store_query(const StoreItem& item, const HeadShape& shape, int token, const float* qkv, const float* rotary) {
    const int width = shape.heads * shape.head_dim;
    float* q = item.q + int64_t{token} * width;
    const float* prepared = prepare<V>(qkv, shape.heads, item.norms[0], shape, rotary, item.rotary_half, q);
    if (prepared != q) memcpy(q, prepared, sizeof(float) * width);
    if (shape.temperature_floor > 0) {
        const int position = item.places[token].position;
        const float steps = floorf(static_cast<float>(position + shape.temperature_start) / shape.temperature_floor);
        const V factor = all<V>(1.0f + shape.temperature * log1pf(steps));
        for (int i = 0; i < width; i += kLanes<V>) store(q + i, width - i, load<V>(q + i, width - i) * factor);
    }
}

template <class V>
void store_kv(const StoreItem& item, const HeadShape& shape) {
    const int kv_width = shape.kv_heads * shape.head_dim;
    const int q_width = shape.heads * shape.head_dim;
    const int64_t width = q_width + (shape.stores ? 2 * kv_width : 0);
    const auto rotary = [&](int token) { return item.rotary + int64_t{token} * 2 * item.rotary_half; };
    if (!shape.stores) {
        for (int t = 0; t < item.tokens; ++t) store_query<V>(item, shape, t, item.qkv + t * width, rotary(t));
        return;
    }
    const int64_t stride = store_stride(shape);
    float* v = item.scratch + kStoreLot * stride;
    each_lot(item.places, item.tokens, [&](int first, int count) {
        const TokenPlace& place = item.places[first];
        uint8_t* values = item.cache.data + place.block * item.cache.block_stride + shape.kv_heads * shape.head_bytes;
        for (int t = 0; t < count; ++t) {
            const int token = first + t;
            const float* qkv = item.qkv + token * width;
            store_query<V>(item, shape, token, qkv, rotary(token));
            float* k = item.scratch + t * stride;
            const float* key =
                prepare<V>(qkv + q_width, shape.kv_heads, item.norms[1], shape, rotary(token), item.rotary_half, k);
            if (key != k) memcpy(k, key, sizeof(float) * kv_width);
            const float* value =
                prepare<V>(qkv + q_width + kv_width, shape.kv_heads, item.norms[2], shape, nullptr, 0, v);
            kOfType<V>[shape.type].values(value, item.cache.v_scales, values, place.offset + t, shape);
        }
        store_keys<V>(item.scratch, stride, item.cache, place, count, shape);
    });
}

template <class V>
void store_latent(const LatentItem& item, const HeadShape& shape) {
    const int latent = shape.latent;
    const int rope = shape.head_dim - latent;
    const int64_t stride = store_stride(shape);
    // A head of a row: what is not turned, and what is.
    const auto join = [&](const float* plain, const float* turned, const float* rotary, float* out) {
        memcpy(out, plain, sizeof(float) * latent);
        memcpy(out + latent, turned, sizeof(float) * rope);
        rotate<V>(out + latent, rotary, item.rotary_half, out + latent);
    };
    each_lot(item.places, item.tokens, [&](int first, int count) {
        for (int t = 0; t < count; ++t) {
            const int64_t token = first + t;
            const float* rotary = item.rotary + token * 2 * item.rotary_half;
            for (int h = 0; h < shape.heads; ++h) {
                const int64_t head = token * shape.heads + h;
                join(item.q_latent + head * latent, item.q_rope + head * rope, rotary, item.q + head * shape.head_dim);
            }
            join(item.latent + token * latent, item.k_rope + token * rope, rotary, item.scratch + t * stride);
        }
        store_keys<V>(item.scratch, stride, item.cache, item.places[first], count, shape);
    });
}

template <class V>
void fill_store_kv(Kernels& table) {
    table.store_kv = store_kv<V>;
    table.store_latent = store_latent<V>;
}

}  // namespace
