// Paged attention: K and V are read from the cache only. A partial softmax starts anew at every absolute 256-token
// chunk and partials are combined in ascending order; inside, steps of 32 absolute tokens. What a row computes depends
// on its position and the cache, not on the other rows of the item, nor on which items a context was cut into (Dao et
// al., FlashAttention, 2022, for the running softmax; split contexts as in Dao et al., Flash-Decoding, 2023).
#include <string.h>

#include "../kernels.h"
#include "simd.h"

namespace {

using namespace octavo;

constexpr int kStep = 32;
constexpr int kTileRows = 6;  // 6 rows x 16 columns are 12 registers; 2 for the columns and 1 for a row are left
const float kMinusInfinity = -__builtin_inff();

inline int at_least(int a, int b) { return a > b ? a : b; }
inline int at_most(int a, int b) { return a < b ? a : b; }

// A softmax over a part of the context, for every row.
struct Partial {
    float* sum_v;    // [count][padded]: sum of exp(score - largest) * v
    float* largest;  // [count]
    float* sum;      // [count]: sum of exp(score - largest)
};

// The rows of an item (token-major, then query head) with their running sums.
struct Rows {
    int count;
    int group;      // query heads per KV head
    int depth;      // head_dim
    int padded;     // head_dim rounded up to 8
    float* k;       // [depth][32] of the current step
    float* v;       // [32][padded]
    float* q;       // [count][padded]
    float* score;   // [count][32]
    float* factor;  // [count]: what a step multiplies the sums so far by
    int* position;  // [count]
    Partial part;   // of the current chunk
    Partial total;
};

// Tokens of a step that a row sees, relative to its start.
struct Seen {
    int first;
    int end;
};

Partial lay_out_partial(float* at, int count, int padded) {
    float* largest = at + int64_t{count} * padded;
    return {at, largest, largest + count};
}

Rows lay_out(const AttendItem& item, const HeadShape& shape) {
    Rows rows;
    rows.group = shape.heads / shape.kv_heads;
    rows.count = item.tokens * rows.group;
    rows.depth = shape.head_dim;
    rows.padded = (shape.head_dim + 7) / 8 * 8;
    const int64_t partial = attend_partial(rows.count, rows.depth);
    rows.k = item.scratch;
    rows.v = rows.k + int64_t{kStep} * rows.padded;
    rows.score = rows.v + int64_t{kStep} * rows.padded;
    rows.q = rows.score + int64_t{kStep} * rows.count;
    rows.factor = rows.q + int64_t{rows.count} * rows.padded;
    rows.position = reinterpret_cast<int*>(rows.factor + rows.count);
    float* partials = rows.factor + 2 * rows.count;
    rows.part = lay_out_partial(partials, rows.count, rows.padded);
    rows.total = lay_out_partial(partials + partial, rows.count, rows.padded);
    return rows;
}

void clear(const Rows& rows, const Partial& partial) {
    memset(partial.sum_v, 0, sizeof(float) * rows.count * rows.padded);
    for (int r = 0; r < rows.count; ++r) {
        partial.largest[r] = kMinusInfinity;
        partial.sum[r] = 0;
    }
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

// Where the keys of a token's block begin, and its values.
struct Cached {
    const uint8_t* keys;
    const uint8_t* values;
    int offset;  // of the token in the block
};

Cached find(const AttendItem& item, const HeadShape& shape, int token) {
    const int64_t head = int64_t{shape.head_dim} * shape.block_size * (shape.half ? 2 : 4);
    const uint8_t* block = item.cache.data + item.table[token / shape.block_size] * item.cache.block_bytes;
    return {block + item.kv_head * head, block + (shape.kv_heads + item.kv_head) * head, token % shape.block_size};
}

inline void prefetch(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
}

// K and V of tokens [low, high) of the step at `start` to float32, while those of the step after it are fetched (blocks
// are small and anywhere, which the processor does not foresee). Only blocks with a token in the range are touched:
// entries of the table before it may be stale.
template <bool HALF>
void load_step(const AttendItem& item, const HeadShape& shape, int start, int low, int high, const Rows& rows) {
    const int size = shape.block_size;
    const int run = at_most(kStep, size);
    const int64_t element = HALF ? 2 : 4;
    for (int first = start; first < start + kStep; first += run) {
        if (first >= high || first + run <= low) continue;  // the keys left there are those of no row
        const Cached at = find(item, shape, first);
        const bool more = first + kStep < item.position + item.tokens;
        const Cached next = more ? find(item, shape, first + kStep) : at;
        float* k = rows.k + (first - start);
        for (int i = 0; i < rows.depth; ++i, k += kStep) {
            const int64_t row = int64_t{i} * size;
            prefetch(next.keys + (row + next.offset) * element, run * element);
            for (int t = 0; t < run; t += 8) _mm256_storeu_ps(k + t, load_cached(at.keys, row + at.offset + t, HALF));
        }
        for (int t = at_least(first, low); t < at_most(first + run, high); ++t) {
            float* v = rows.v + (t - start) * rows.padded;
            const int64_t from = int64_t{at.offset + t - first} * rows.depth;
            prefetch(next.values + int64_t{next.offset + t - first} * rows.depth * element, rows.depth * element);
            int i = 0;
            for (; i + 8 <= rows.depth; i += 8) _mm256_storeu_ps(v + i, load_cached(at.values, from + i, HALF));
            for (; i < rows.padded; ++i) v[i] = i < rows.depth ? load_cached_one(at.values, from + i, HALF) : 0.0f;
        }
    }
}

// e^x for x <= 0: x = n ln 2 + r, the minimax polynomial of degree 6 for e^r with 1 + r in front, and n added to the
// exponent. Relative error below 1e-7; 0 below -87.3, NaN stays NaN, and 0 gives exactly 1.
inline __m256 exp_down(__m256 x) {
    const __m256 low = _mm256_set1_ps(-87.3f);
    const __m256 shift = _mm256_set1_ps(12582912.0f);  // 1.5 * 2^23: a sum has the nearest integer in its low bits
    const __m256 clamped = _mm256_max_ps(low, x);      // x where that is NaN
    const __m256 shifted = _mm256_fmadd_ps(clamped, _mm256_set1_ps(1.44269504f), shift);
    const __m256 n = _mm256_sub_ps(shifted, shift);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), clamped);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.38144668e-3f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.36878042e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.16683942e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.166665201f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.499999934f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    const __m256 y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
    return _mm256_and_ps(y, _mm256_cmp_ps(x, low, _CMP_NLT_UQ));
}

// Scores of N rows against 8 * J keys of the step from `token`: one fma chain per score, ascending element.
template <int N, int J>
inline void dot_keys(const Rows& rows, int row, int token) {
    __m256 acc[N][J];
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) acc[r][j] = _mm256_setzero_ps();
    }
    const int64_t stride = rows.padded;
    const float* q = rows.q + row * stride;
    const float* k = rows.k + token;
    for (int i = 0; i < rows.depth; ++i, ++q, k += kStep) {
        __m256 key[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) key[j] = _mm256_loadu_ps(k + 8 * j);
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r) {
            const __m256 value = _mm256_broadcast_ss(q + r * stride);
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j) acc[r][j] = _mm256_fmadd_ps(value, key[j], acc[r][j]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) _mm256_storeu_ps(rows.score + (row + r) * kStep + token + 8 * j, acc[r][j]);
    }
}

// Few rows take more columns at once: eight chains at least hide the latency of an fma.
template <int N>
constexpr int kVectors = N <= 3 ? 4 : 2;

template <int N>
void dot_step(const Rows& rows, int row, int low, int high) {
    constexpr int J = kVectors<N>;
    for (int token = low / (8 * J) * (8 * J); token < high; token += 8 * J) dot_keys<N, J>(rows, row, token);
}

// The row's scores for the tokens it sees, scaled and capped, -inf elsewhere, in place. Returns the largest and
// `before`.
float scale_scores(float* score, const HeadShape& shape, Seen seen, float before) {
    __m256 largest = _mm256_set1_ps(before);
    const bool whole = seen.first == 0 && seen.end == kStep;
    for (int j = 0; j < kStep; j += 8) {
        __m256 s = _mm256_mul_ps(_mm256_loadu_ps(score + j), _mm256_set1_ps(shape.scale));
        if (shape.softcap > 0) {
            const __m256 cap = _mm256_set1_ps(shape.softcap);
            s = _mm256_mul_ps(cap, tanh_ps(_mm256_div_ps(s, cap)));
        }
        if (!whole) {
            const __m256i token = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(j));
            const __m256i hidden = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(seen.first), token),
                                                   _mm256_cmpgt_epi32(token, _mm256_set1_epi32(seen.end - 1)));
            s = _mm256_blendv_ps(s, _mm256_set1_ps(kMinusInfinity), _mm256_castsi256_ps(hidden));
        }
        _mm256_storeu_ps(score + j, s);
        largest = _mm256_max_ps(largest, s);
    }
    return max_lanes(largest);
}

// Scores of `count` rows to exp(score - largest so far), their sums, and in rows.factor what the sums of values so far
// must be multiplied by.
void soften(const Rows& rows, int row, int count, const Seen* seen, const HeadShape& shape) {
    alignas(32) float factor[8];
    alignas(32) float before[8] = {};
    alignas(32) float largest[8] = {};
    for (int r = 0; r < count; ++r) {
        if (seen[r].first >= seen[r].end) continue;
        before[r] = rows.part.largest[row + r];
        largest[r] = scale_scores(rows.score + (row + r) * kStep, shape, seen[r], before[r]);
    }
    const __m256 old = _mm256_load_ps(before);
    const __m256 shrink = exp_down(_mm256_sub_ps(old, _mm256_load_ps(largest)));
    const __m256 none = _mm256_cmp_ps(old, _mm256_set1_ps(kMinusInfinity), _CMP_EQ_OQ);
    _mm256_store_ps(factor, _mm256_andnot_ps(none, shrink));
    for (int r = 0; r < count; ++r) {
        if (seen[r].first >= seen[r].end) continue;
        float* score = rows.score + (row + r) * kStep;
        const __m256 maximum = _mm256_set1_ps(largest[r]);
        __m256 p[kStep / 8];
#pragma GCC unroll 4
        for (int j = 0; j < kStep / 8; ++j) {
            p[j] = exp_down(_mm256_sub_ps(_mm256_loadu_ps(score + 8 * j), maximum));
            _mm256_storeu_ps(score + 8 * j, p[j]);
        }
        const float sum = sum_lanes(_mm256_add_ps(_mm256_add_ps(_mm256_add_ps(p[0], p[1]), p[2]), p[3]));
        rows.factor[row + r] = factor[r];
        rows.part.largest[row + r] = largest[r];
        rows.part.sum[row + r] = __builtin_fmaf(rows.part.sum[row + r], factor[r], sum);
    }
}

// sum_v = sum_v * factor + sum over tokens [low, high) of p * v, ascending, for N rows and 8 * J columns.
template <int N, int J>
inline void add_columns(const Rows& rows, int row, int column, int low, int high, const float* factor) {
    const int64_t stride = rows.padded;
    float* part = rows.part.sum_v + row * stride + column;
    __m256 acc[N][J];
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r) {
        const __m256 wide = _mm256_broadcast_ss(factor + r);
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) acc[r][j] = _mm256_mul_ps(_mm256_loadu_ps(part + r * stride + 8 * j), wide);
    }
    const float* p = rows.score + row * kStep + low;
    const float* v = rows.v + low * stride + column;
    for (int t = low; t < high; ++t, ++p, v += stride) {
        __m256 value[J];
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) value[j] = _mm256_loadu_ps(v + 8 * j);
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r) {
            const __m256 weight = _mm256_broadcast_ss(p + r * kStep);
#pragma GCC unroll 8
            for (int j = 0; j < J; ++j) acc[r][j] = _mm256_fmadd_ps(weight, value[j], acc[r][j]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) _mm256_storeu_ps(part + r * stride + 8 * j, acc[r][j]);
    }
}

template <int N>
void add_values(const Rows& rows, int row, int low, int high, const float* factor) {
    constexpr int J = kVectors<N>;
    int column = 0;
    for (; column + 8 * J <= rows.padded; column += 8 * J) add_columns<N, J>(rows, row, column, low, high, factor);
    for (; column < rows.padded; column += 8) add_columns<N, 1>(rows, row, column, low, high, factor);
}

// Rows of a tile go together over the tokens that all of them see, and alone before and after: to each it is one chain
// of ascending tokens, and p = 0 never meets the value of a token that a row does not see.
template <int N>
void add_step(const Rows& rows, int row, const Seen* seen, float* factor) {
    int low = 0;
    int high = kStep;
    for (int r = 0; r < N; ++r) {
        low = at_least(low, seen[r].first);
        high = at_most(high, seen[r].end);
    }
    const bool together = low < high;
    if (!together) low = high = kStep;
    for (int r = 0; r < N; ++r) {
        const int end = at_most(low, seen[r].end);
        if (seen[r].first >= end) continue;
        add_values<1>(rows, row + r, seen[r].first, end, factor + r);
        factor[r] = 1;
    }
    if (!together) return;
    add_values<N>(rows, row, low, high, factor);
    const float one = 1;
    for (int r = 0; r < N; ++r) {
        if (high < seen[r].end) add_values<1>(rows, row + r, high, seen[r].end, &one);
    }
}

using DotFn = void (*)(const Rows&, int row, int low, int high);
using AddFn = void (*)(const Rows&, int row, const Seen*, float* factor);
constexpr DotFn kDot[kTileRows + 1] = {nullptr,     dot_step<1>, dot_step<2>, dot_step<3>,
                                       dot_step<4>, dot_step<5>, dot_step<6>};
constexpr AddFn kAdd[kTileRows + 1] = {nullptr,     add_step<1>, add_step<2>, add_step<3>,
                                       add_step<4>, add_step<5>, add_step<6>};

// Tokens [low, high) of the step at `start`. All rows take the keys and then all take the values, so that these stay in
// the first-level cache.
void step(const AttendItem& item, const HeadShape& shape, const Rows& rows, int start, int low, int high) {
    if (shape.half) {
        load_step<true>(item, shape, start, low, high, rows);
    } else {
        load_step<false>(item, shape, start, low, high, rows);
    }
    const int tiles = (rows.count + kTileRows - 1) / kTileRows;
    const auto each_tile = [&](const auto& work) {
        for (int tile = 0, row = 0; tile < tiles; ++tile) {
            const int count = (rows.count - row + tiles - tile - 1) / (tiles - tile);
            Seen seen[kTileRows];
            Seen all = {kStep, 0};
            for (int r = 0; r < count; ++r) {
                const int position = rows.position[row + r];
                const int first = shape.window > 0 ? at_least(low, position - shape.window + 1) : low;
                seen[r] = {first - start, at_most(high, position + 1) - start};
                if (seen[r].first >= seen[r].end) continue;
                all = {at_most(all.first, seen[r].first), at_least(all.end, seen[r].end)};
            }
            if (all.first < all.end) work(row, count, seen, all);
            row += count;
        }
    };
    each_tile([&](int row, int count, const Seen* seen, Seen all) {
        kDot[count](rows, row, all.first, all.end);
        soften(rows, row, count, seen, shape);
    });
    each_tile([&](int row, int count, const Seen* seen, Seen) { kAdd[count](rows, row, seen, rows.factor + row); });
}

// Adds the chunk's partial of each row that saw a token of it to the row's total.
void end_chunk(const Rows& rows) {
    for (int r = 0; r < rows.count; ++r) {
        if (rows.part.largest[r] == kMinusInfinity && rows.part.sum[r] == 0) continue;
        const float before = rows.total.largest[r];
        const float now = rows.part.largest[r];
        const float maximum = now > before || now != now ? now : before;
        const float old_factor =
            before == kMinusInfinity ? 0.0f : _mm256_cvtss_f32(exp_down(_mm256_set1_ps(before - maximum)));
        const float new_factor = _mm256_cvtss_f32(exp_down(_mm256_set1_ps(now - maximum)));
        rows.total.largest[r] = maximum;
        rows.total.sum[r] = __builtin_fmaf(rows.total.sum[r], old_factor, rows.part.sum[r] * new_factor);
        float* total = rows.total.sum_v + int64_t{r} * rows.padded;
        const float* part = rows.part.sum_v + int64_t{r} * rows.padded;
        for (int i = 0; i < rows.padded; i += 8) {
            const __m256 added = _mm256_mul_ps(_mm256_loadu_ps(part + i), _mm256_set1_ps(new_factor));
            _mm256_storeu_ps(total + i, _mm256_fmadd_ps(_mm256_loadu_ps(total + i), _mm256_set1_ps(old_factor), added));
        }
    }
}

// Attention over the tokens [begin, end) of one chunk, into rows.part.
void attend_chunk(const AttendItem& item, const HeadShape& shape, const Rows& rows, int chunk) {
    const int end = at_most(item.position + item.tokens, chunk + kChunkTokens);
    const int begin = attend_begin(shape, item.position);
    clear(rows, rows.part);
    for (int start = chunk; start < end; start += kStep) {
        const int low = at_least(start, begin);
        const int high = at_most(start + kStep, end);
        if (low < high) step(item, shape, rows, start, low, high);
    }
}

void load_queries(const AttendItem& item, const HeadShape& shape, const Rows& rows) {
    const int64_t width = int64_t{shape.heads} * shape.head_dim;
    for (int r = 0; r < rows.count; ++r) {
        const int64_t from = r / rows.group * width + (item.kv_head * rows.group + r % rows.group) * rows.depth;
        memcpy(rows.q + int64_t{r} * rows.padded, item.q + from, sizeof(float) * rows.depth);
        rows.position[r] = item.position + r / rows.group;
    }
}

void store_rows(const AttendItem& item, const HeadShape& shape, const Rows& rows) {
    const int64_t width = int64_t{shape.heads} * shape.head_dim;
    for (int r = 0; r < rows.count; ++r) {
        float* out = item.out + r / rows.group * width + (item.kv_head * rows.group + r % rows.group) * rows.depth;
        const __m256 sum = _mm256_set1_ps(rows.total.sum[r]);
        for (int i = 0; i < rows.depth; i += 8) {
            const __m256 total = _mm256_loadu_ps(rows.total.sum_v + int64_t{r} * rows.padded + i);
            store_some(out + i, rows.depth - i, _mm256_div_ps(total, sum));
        }
    }
}

void attend(const AttendItem& item, const HeadShape& shape) {
    const Rows rows = lay_out(item, shape);
    load_queries(item, shape, rows);
    clear(rows, rows.total);
    const int end = item.position + item.tokens;
    for (int chunk = attend_begin(shape, item.position) / kChunkTokens * kChunkTokens; chunk < end;
         chunk += kChunkTokens) {
        attend_chunk(item, shape, rows, chunk);
        end_chunk(rows);
    }
    store_rows(item, shape, rows);
}

void attend_part(const AttendItem& item, const HeadShape& shape, int first, int count, float* partials) {
    Rows rows = lay_out(item, shape);
    load_queries(item, shape, rows);
    const int64_t partial = attend_partial(rows.count, rows.depth);
    for (int i = 0; i < count; ++i) {
        rows.part = lay_out_partial(partials + i * partial, rows.count, rows.padded);
        attend_chunk(item, shape, rows, (first + i) * kChunkTokens);
    }
}

void attend_join(const AttendItem& item, const HeadShape& shape, int count, float* partials) {
    Rows rows = lay_out(item, shape);
    clear(rows, rows.total);
    const int64_t partial = attend_partial(rows.count, rows.depth);
    for (int i = 0; i < count; ++i) {
        rows.part = lay_out_partial(partials + i * partial, rows.count, rows.padded);
        end_chunk(rows);
    }
    store_rows(item, shape, rows);
}

}  // namespace

void octavo::fill_attention_avx2(Kernels& table) {
    table.attend = attend;
    table.attend_part = attend_part;
    table.attend_join = attend_join;
}
