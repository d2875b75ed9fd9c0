// Paged attention: K and V are read from the cache only. A partial softmax starts anew at every absolute 256-token
// chunk and partials are combined in ascending order; inside, steps of 32 absolute tokens. What a row computes depends
// on its position and the cache, not on the other rows of the item (Dao et al., FlashAttention, 2022, for the running
// softmax).
#include <string.h>

#include "../kernels.h"
#include "simd.h"

namespace {

using namespace octavo;

constexpr int kStep = 32;
constexpr int kChunkTokens = 256;
const float kMinusInfinity = -__builtin_inff();

inline int at_least(int a, int b) { return a > b ? a : b; }
inline int at_most(int a, int b) { return a < b ? a : b; }

// The rows of an item (token-major, then query head) with their running sums.
struct Rows {
    int count;
    int group;     // query heads per KV head
    int depth;     // head_dim
    int padded;    // head_dim rounded up to 8
    float* k;      // [depth][32] of the current step
    float* v;      // [32][padded]
    float* q;      // [count][padded]
    float* part;   // [count][padded]: sum of the current chunk
    float* total;  // [count][padded]
    float* score;  // [count][32]
    float* part_max;
    float* part_sum;
    float* total_max;
    float* total_sum;
};

Rows lay_out(const AttendItem& item, const HeadShape& shape) {
    Rows rows;
    rows.group = shape.heads / shape.kv_heads;
    rows.count = item.tokens * rows.group;
    rows.depth = shape.head_dim;
    rows.padded = (shape.head_dim + 7) / 8 * 8;
    float* at = item.scratch;
    const auto take = [&](int64_t n) {
        float* from = at;
        at += n;
        return from;
    };
    const int64_t matrix = int64_t{rows.count} * rows.padded;
    rows.k = take(int64_t{kStep} * rows.padded);
    rows.v = take(int64_t{kStep} * rows.padded);
    rows.q = take(matrix);
    rows.part = take(matrix);
    rows.total = take(matrix);
    rows.score = take(int64_t{kStep} * rows.count);
    rows.part_max = take(rows.count);
    rows.part_sum = take(rows.count);
    rows.total_max = take(rows.count);
    rows.total_sum = take(rows.count);
    return rows;
}

inline __m256 load_cached(const uint8_t* p, int64_t index, bool half) {
    if (half) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * index)));
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p) + index);
}

inline float load_cached_one(const uint8_t* p, int64_t index, bool half) {
    if (!half) return reinterpret_cast<const float*>(p)[index];
    uint16_t bits;
    memcpy(&bits, p + 2 * index, 2);
    return _cvtsh_ss(bits);
}

inline void store_cached(uint8_t* p, int64_t index, bool half, float value) {
    if (half) {
        const uint16_t bits = static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
        memcpy(p + 2 * index, &bits, 2);
    } else {
        memcpy(p + 4 * index, &value, 4);
    }
}

// K and V of tokens [low, high) of the step at `start` to float32. Only blocks with a token in the range are touched:
// entries of the table before it may be stale.
template <bool HALF>
void load_step(const AttendItem& item, const HeadShape& shape, int start, int low, int high, const Rows& rows) {
    const int size = shape.block_size;
    const int run = at_most(kStep, size);
    const int64_t element = HALF ? 2 : 4;
    const int64_t head = int64_t{shape.head_dim} * size;
    for (int first = start; first < start + kStep; first += run) {
        float* k = rows.k + (first - start);
        if (first >= high || first + run <= low) {
            for (int i = 0; i < rows.depth; ++i) {
                for (int t = 0; t < run; t += 8) _mm256_storeu_ps(k + i * kStep + t, _mm256_setzero_ps());
            }
            continue;
        }
        const uint8_t* block = item.cache.data + item.table[first / size] * item.cache.block_bytes;
        const uint8_t* keys = block + item.kv_head * head * element;
        const uint8_t* values = block + (shape.kv_heads + item.kv_head) * head * element;
        const int offset = first % size;
        for (int i = 0; i < rows.depth; ++i) {
            for (int t = 0; t < run; t += 8) {
                _mm256_storeu_ps(k + i * kStep + t, load_cached(keys, int64_t{i} * size + offset + t, HALF));
            }
        }
        for (int t = at_least(first, low); t < at_most(first + run, high); ++t) {
            float* v = rows.v + (t - start) * rows.padded;
            const int64_t from = int64_t{t % size} * rows.depth;
            int i = 0;
            for (; i + 8 <= rows.depth; i += 8) _mm256_storeu_ps(v + i, load_cached(values, from + i, HALF));
            for (; i < rows.padded; ++i) v[i] = i < rows.depth ? load_cached_one(values, from + i, HALF) : 0.0f;
        }
    }
}

// Scores of N rows against the 32 keys of the step: one fma chain per score, ascending element.
template <int N>
void dot_rows(const Rows& rows, int row) {
    __m256 acc[N][4];
#pragma GCC unroll 3
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[r][j] = _mm256_setzero_ps();
    }
    const float* q = rows.q + int64_t{row} * rows.padded;
    for (int i = 0; i < rows.depth; ++i) {
        const float* k = rows.k + i * kStep;
#pragma GCC unroll 3
        for (int r = 0; r < N; ++r) {
            const __m256 value = _mm256_broadcast_ss(q + r * rows.padded + i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) acc[r][j] = _mm256_fmadd_ps(value, _mm256_loadu_ps(k + 8 * j), acc[r][j]);
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) _mm256_storeu_ps(rows.score + (row + r) * kStep + 8 * j, acc[r][j]);
    }
}

// Scores to exp(score - running maximum) for tokens [low, high) of the step, 0 elsewhere; returns the factor that the
// sums so far must be multiplied by.
float soften(const Rows& rows, int row, const HeadShape& shape, int low, int high) {
    float* score = rows.score + row * kStep;
    __m256 s[4];
    __m256 mask[4];
    __m256 largest = _mm256_set1_ps(rows.part_max[row]);
    for (int j = 0; j < 4; ++j) {
        const __m256i token = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * j));
        mask[j] = _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), token),
                                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(high), token)));
        s[j] = _mm256_mul_ps(_mm256_loadu_ps(score + 8 * j), _mm256_set1_ps(shape.scale));
        if (shape.softcap > 0) {
            const __m256 cap = _mm256_set1_ps(shape.softcap);
            s[j] = _mm256_mul_ps(cap, tanh_ps(_mm256_div_ps(s[j], cap)));
        }
        s[j] = _mm256_blendv_ps(_mm256_set1_ps(kMinusInfinity), s[j], mask[j]);
        largest = _mm256_max_ps(largest, s[j]);
    }
    const float maximum = max_lanes(largest);
    const float before = rows.part_max[row];
    const float factor = before == kMinusInfinity ? 0.0f : _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(before - maximum)));
    __m256 sum = _mm256_setzero_ps();
    for (int j = 0; j < 4; ++j) {
        const __m256 p = _mm256_and_ps(exp_ps(_mm256_sub_ps(s[j], _mm256_set1_ps(maximum))), mask[j]);
        _mm256_storeu_ps(score + 8 * j, p);
        sum = _mm256_add_ps(sum, p);
    }
    rows.part_max[row] = maximum;
    rows.part_sum[row] = __builtin_fmaf(rows.part_sum[row], factor, sum_lanes(sum));
    return factor;
}

// part = part * factor + sum over tokens [low, high) of p * v, ascending.
template <int N>
inline void add_values(const Rows& rows, int row, int column, int low, int high, __m256 factor) {
    float* part = rows.part + int64_t{row} * rows.padded + column;
    const float* p = rows.score + row * kStep;
    __m256 acc[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[j] = _mm256_mul_ps(_mm256_loadu_ps(part + 8 * j), factor);
    for (int t = low; t < high; ++t) {
        const __m256 weight = _mm256_broadcast_ss(p + t);
        const float* v = rows.v + t * rows.padded + column;
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[j] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(v + 8 * j), acc[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) _mm256_storeu_ps(part + 8 * j, acc[j]);
}

void add_step(const Rows& rows, int row, int low, int high, float factor) {
    const __m256 wide = _mm256_set1_ps(factor);
    int column = 0;
    for (; column + 64 <= rows.padded; column += 64) add_values<8>(rows, row, column, low, high, wide);
    for (; column < rows.padded; column += 8) add_values<1>(rows, row, column, low, high, wide);
}

void start_chunk(const Rows& rows) {
    memset(rows.part, 0, sizeof(float) * rows.count * rows.padded);
    for (int r = 0; r < rows.count; ++r) {
        rows.part_max[r] = kMinusInfinity;
        rows.part_sum[r] = 0;
    }
}

// Adds the chunk's partial of each row that saw a token of it to the row's total.
void end_chunk(const Rows& rows) {
    for (int r = 0; r < rows.count; ++r) {
        if (rows.part_max[r] == kMinusInfinity && rows.part_sum[r] == 0) continue;
        const float before = rows.total_max[r];
        const float now = rows.part_max[r];
        const float maximum = now > before || now != now ? now : before;
        const float old_factor =
            before == kMinusInfinity ? 0.0f : _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(before - maximum)));
        const float new_factor = _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(now - maximum)));
        rows.total_max[r] = maximum;
        rows.total_sum[r] = __builtin_fmaf(rows.total_sum[r], old_factor, rows.part_sum[r] * new_factor);
        float* total = rows.total + int64_t{r} * rows.padded;
        const float* part = rows.part + int64_t{r} * rows.padded;
        for (int i = 0; i < rows.padded; i += 8) {
            const __m256 added = _mm256_mul_ps(_mm256_loadu_ps(part + i), _mm256_set1_ps(new_factor));
            _mm256_storeu_ps(total + i, _mm256_fmadd_ps(_mm256_loadu_ps(total + i), _mm256_set1_ps(old_factor), added));
        }
    }
}

void step(const AttendItem& item, const HeadShape& shape, const Rows& rows, int start, int low, int high) {
    if (shape.half) {
        load_step<true>(item, shape, start, low, high, rows);
    } else {
        load_step<false>(item, shape, start, low, high, rows);
    }
    int r = 0;
    for (; r + 3 <= rows.count; r += 3) dot_rows<3>(rows, r);
    for (; r < rows.count; ++r) dot_rows<1>(rows, r);
    for (r = 0; r < rows.count; ++r) {
        const int position = item.position + r / rows.group;
        const int first = shape.window > 0 ? at_least(low, position - shape.window + 1) : low;
        const int end = at_most(high, position + 1);
        if (first >= end) continue;
        const float factor = soften(rows, r, shape, first - start, end - start);
        add_step(rows, r, first - start, end - start, factor);
    }
}

void attend(const AttendItem& item, const HeadShape& shape) {
    const Rows rows = lay_out(item, shape);
    const int width = shape.heads * shape.head_dim;
    const int head0 = item.kv_head * rows.group;
    memset(rows.total, 0, sizeof(float) * rows.count * rows.padded);
    for (int r = 0; r < rows.count; ++r) {
        const int64_t from = int64_t{r / rows.group} * width + (head0 + r % rows.group) * rows.depth;
        memcpy(rows.q + int64_t{r} * rows.padded, item.q + from, sizeof(float) * rows.depth);
        rows.total_max[r] = kMinusInfinity;
        rows.total_sum[r] = 0;
    }
    const int end = item.position + item.tokens;
    const int begin = shape.window > 0 ? at_least(0, item.position - shape.window + 1) : 0;
    for (int chunk = begin / kChunkTokens * kChunkTokens; chunk < end; chunk += kChunkTokens) {
        start_chunk(rows);
        for (int start = chunk; start < at_most(chunk + kChunkTokens, end); start += kStep) {
            const int low = at_least(start, begin);
            const int high = at_most(start + kStep, end);
            if (low < high) step(item, shape, rows, start, low, high);
        }
        end_chunk(rows);
    }
    for (int r = 0; r < rows.count; ++r) {
        float* out = item.out + int64_t{r / rows.group} * width + (head0 + r % rows.group) * rows.depth;
        const __m256 sum = _mm256_set1_ps(rows.total_sum[r]);
        for (int i = 0; i < rows.depth; i += 8) {
            const __m256 total = _mm256_loadu_ps(rows.total + int64_t{r} * rows.padded + i);
            store_some(out + i, rows.depth - i, _mm256_div_ps(total, sum));
        }
    }
}

// A head after its norm and rotation, to `out`.
void prepare_head(const float* x, const float* weight, float eps, const float* rotary, int half, int depth,
                  float* out) {
    if (weight != nullptr) {
        octavo::kernels().norm(x, weight, nullptr, depth, eps, out);
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

void octavo::fill_attention_avx2(Kernels& table) {
    table.attend = attend;
    table.store_kv = store_kv;
}
