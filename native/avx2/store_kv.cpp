// A row's queries, keys and values: norms and rotation, then K and V into the cache.
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

// A head after its norm and rotation, to `out`.
void prepare_head(const float* x, const float* weight, float eps, const float* rotary, int half, int depth,
                  float* out) {
    if (weight != nullptr) {
        octavo::kernels().norm(x, {weight, nullptr, nullptr, eps, false}, depth, out);
    } else {
        memcpy(out, x, sizeof(float) * depth);
    }
    for (int i = 0; i < half; i += 8) {
        const int left = half - i;
        const __m256 a = load_some(out + i, left);
        const __m256 b = load_some(out + half + i, left);
        const __m256 cosine = load_some(rotary + i, left);
        const __m256 sine = load_some(rotary + half + i, left);
        store_some(out + i, left, _mm256_fmsub_ps(a, cosine, _mm256_mul_ps(b, sine)));
        store_some(out + half + i, left, _mm256_fmadd_ps(b, cosine, _mm256_mul_ps(a, sine)));
    }
}

void store_kv(const float* qkv, const float* rotary, int rotary_half, const float* q_norm, const float* k_norm,
              float eps, const HeadShape& shape, const LayerCache& cache, int block, int offset, float* q,
              float* scratch) {
    const int depth = shape.head_dim;
    const int size = shape.block_size;
    for (int h = 0; h < shape.heads; ++h) {
        prepare_head(qkv + h * depth, q_norm, eps, rotary, rotary_half, depth, q + h * depth);
    }
    const float* k = qkv + shape.heads * depth;
    const float* v = k + shape.kv_heads * depth;
    uint8_t* keys = cache.data + block * cache.block_bytes;
    uint8_t* values = keys + int64_t{shape.kv_heads} * depth * size * (shape.half ? 2 : 4);
    for (int h = 0; h < shape.kv_heads; ++h) {
        prepare_head(k + h * depth, k_norm, eps, rotary, rotary_half, depth, scratch);
        for (int i = 0; i < depth; ++i) {
            store_cached(keys, (int64_t{h} * depth + i) * size + offset, shape.half, scratch[i]);
            store_cached(values, (int64_t{h} * size + offset) * depth + i, shape.half, v[h * depth + i]);
        }
    }
}

}  // namespace

void octavo::fill_store_kv_avx2(Kernels& table) { table.store_kv = store_kv; }
