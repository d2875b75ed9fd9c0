// Rows of attention against a step of 32 keys and values: scores, softmax, sums of values. Everything is local to the
// unit that includes it (see ../kernels.h).
#pragma once

#include "../kernels.h"
#include "float8.h"
#include "simd.h"

namespace {

using namespace octavo;

constexpr int kStep = 32;
constexpr int kTileRows = 6;      // 6 rows x 16 columns are 12 registers; 2 for the columns and 1 for a row are left
constexpr int kInPlaceRows = 16;  // so many rows at most read the cache in place; for more, a copy to float32 pays
const float kMinusInfinity = -__builtin_inff();

inline int at_least(int a, int b) { return a > b ? a : b; }
inline int at_most(int a, int b) { return a < b ? a : b; }

// A softmax over a part of the context, for every row.
struct Partial {
    float* sum_v;    // [count][wide]: sum of exp(score - largest) * v
    float* largest;  // [count]
    float* sum;      // [count]: sum of exp(score - largest)
};

// The rows of an item (token-major, then query head) with their running sums.
struct Rows {
    int count;
    int group;      // query heads per KV head
    int depth;      // elements of a key
    int padded;     // the same rounded up to 8
    int width;      // elements of a value
    int wide;       // the same rounded up to 8
    float* k;       // [depth][32] of the current step
    float* v;       // [32][wide]
    float* q;       // [count][padded]
    float* score;   // [count][32]
    float* factor;  // [count]: what a step multiplies the sums so far by
    float* slope;   // [count], or null: what a score loses for each token between the row and the key
    int* position;  // [count]
    int* begin;     // [count]: the first token it sees
    Partial part;   // of the current chunk
    Partial total;
};

// Tokens of a step that a row sees, relative to its start.
struct Seen {
    int first;
    int end;
};

// Where the keys and values of a step are: in the KV cache itself, by its CacheType, or float32 copies of the elements
// in the first-level cache. From the KV cache, the same places of the next step are fetched meanwhile: blocks are small
// and anywhere, which no processor foresees.
constexpr int COPIED = CACHE_TYPES;

// Two halves of 16 tokens. Of what no row sees, keys may be any that can be read and values any at all.
struct StepData {
    const char* k[2];
    const char* v[2];
    const char* next_k[2];
    const char* next_v[2];
    int64_t key_bytes;    // from one element of the head to the next
    int64_t value_bytes;  // from one token to the next
};

// Scales of the keys and values of a step that have their own: they multiply scores and weights, not elements, so
// that few rows cost little.
struct StepScales {
    alignas(32) float k[kStep];
    alignas(32) float v[kStep];
};

constexpr int source_bytes(int source) { return source == COPIED ? 4 : kCacheTypes[source].bytes; }

template <int SOURCE>
constexpr int kBytes = source_bytes(SOURCE);

// What the elements that load_eight gives are to be multiplied by, beside the scales of head and token.
constexpr float element_unit(int type) { return type == CACHE_E4M3 ? kFloat8Unit<E4M3> : 1.0f; }

template <int SOURCE>
inline __m256 load_eight(const char* p) {
    if constexpr (SOURCE == CACHE_FLOAT16) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    } else if constexpr (SOURCE == CACHE_E4M3) {
        return from_float8<E4M3>(p);
    } else if constexpr (SOURCE == CACHE_E5M2) {
        return from_float8<E5M2>(p);
    } else if constexpr (SOURCE == CACHE_INT8) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    } else {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    }
}

constexpr bool is_float8(int source) { return source == CACHE_E4M3 || source == CACHE_E5M2; }

// Columns of eight elements that are loaded together: floats of 8 bits are taken apart sixteen at a time, which costs
// half; for others, one at a time leaves more registers.
template <int COUNT>
struct Columns {
    __m256 column[COUNT];
};

template <int SOURCE, int J>
constexpr int kAtOnce = J > 1 && is_float8(SOURCE) ? 2 : 1;

template <int SOURCE, int COUNT>
inline Columns<COUNT> load_columns(const char* p) {
    if constexpr (COUNT == 1) {
        return {load_eight<SOURCE>(p)};
    } else {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m256i halves = halves_of_float8<SOURCE == CACHE_E4M3 ? E4M3 : E5M2>(bytes);
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    }
}

template <int SOURCE>
inline void prefetch(const char* p) {
    if (SOURCE != COPIED) _mm_prefetch(p, _MM_HINT_T0);
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

// acc[r][j] += row(r) * column j, with the fewer of both in registers: 3 x 4 and 6 x 2 fill all sixteen. `columns(j)`
// are columns [j, j + COUNT).
template <int COUNT, int N, int J, class Row, class Load>
inline __attribute__((always_inline)) void add_products(__m256 (&acc)[N][J], const Row& row, const Load& columns) {
    if constexpr (N < J) {
        __m256 rows[N];
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r) rows[r] = row(r);
#pragma GCC unroll 8
        for (int j = 0; j < J; j += COUNT) {
            const Columns<COUNT> values = columns(j);
#pragma GCC unroll 2
            for (int i = 0; i < COUNT; ++i) {
#pragma GCC unroll 6
                for (int r = 0; r < N; ++r) acc[r][j + i] = _mm256_fmadd_ps(rows[r], values.column[i], acc[r][j + i]);
            }
        }
    } else {
        Columns<COUNT> values[J / COUNT];
#pragma GCC unroll 8
        for (int j = 0; j < J; j += COUNT) values[j / COUNT] = columns(j);
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r) {
            const __m256 value = row(r);
#pragma GCC unroll 8
            for (int j = 0; j < J; ++j) {
                acc[r][j] = _mm256_fmadd_ps(value, values[j / COUNT].column[j % COUNT], acc[r][j]);
            }
        }
    }
}

// Scores of N rows against 8 * J keys of the step from `token`: one fma chain per score, ascending element.
template <int N, int J, int SOURCE>
inline void dot_keys(const Rows& rows, const StepData& data, int row, int token) {
    __m256 acc[N][J];
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) acc[r][j] = _mm256_setzero_ps();
    }
    constexpr int kTogether = kAtOnce<SOURCE, J>;
    const int64_t stride = rows.padded;
    const float* q = rows.q + row * stride;
    const char* k[2] = {data.k[token / 16], data.k[1]};
    const char* next[2] = {data.next_k[token / 16], data.next_k[1]};
    for (int i = 0; i < rows.depth; ++i, ++q) {
        add_products<kTogether>(
            acc, [&](int r) { return _mm256_broadcast_ss(q + r * stride); },
            [&](int j) { return load_columns<SOURCE, kTogether>(k[j / 2] + j % 2 * 8 * kBytes<SOURCE>); });
#pragma GCC unroll 2
        for (int half = 0; half < J / 2; ++half) {
            prefetch<SOURCE>(next[half]);
            k[half] += data.key_bytes;
            next[half] += data.key_bytes;
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) _mm256_storeu_ps(rows.score + (row + r) * kStep + token + 8 * j, acc[r][j]);
    }
}

// Few rows take more columns at once: eight chains at least hide the latency of an fma, and
// three rows of float8 six, whose conversion takes longer.
template <int N, int SOURCE>
constexpr int kVectors = N <= (is_float8(SOURCE) ? 2 : 3) ? 4 : 2;

template <int N, int SOURCE>
void dot_step(const Rows& rows, const StepData& data, int row, int low, int high) {
    constexpr int J = kVectors<N, SOURCE>;
    for (int token = low / (8 * J) * (8 * J); token < high; token += 8 * J) {
        dot_keys<N, J, SOURCE>(rows, data, row, token);
    }
}

// The row's scores for the tokens of the step at `start`, scaled, capped and less for those far away, in place.
__attribute__((noinline)) void bend_scores(const Rows& rows, int row, const HeadShape& shape, int start,
                                           const float* token_scales) {
    float* score = rows.score + row * kStep;
    for (int j = 0; j < kStep; j += 8) {
        __m256 s = _mm256_mul_ps(_mm256_loadu_ps(score + j), _mm256_set1_ps(shape.scale));
        if (token_scales != nullptr) s = _mm256_mul_ps(s, _mm256_load_ps(token_scales + j));
        if (shape.softcap > 0) {
            const __m256 cap = _mm256_set1_ps(shape.softcap);
            s = _mm256_mul_ps(cap, tanh_ps(_mm256_div_ps(s, cap)));
        }
        if (rows.slope != nullptr) {
            const __m256i away = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                                  _mm256_set1_epi32(start + j - rows.position[row]));
            s = _mm256_fmadd_ps(_mm256_set1_ps(rows.slope[row]), _mm256_cvtepi32_ps(away), s);
        }
        _mm256_storeu_ps(score + j, s);
    }
}

// The scores times `scale`, and times those of their tokens where there are such, for the tokens that the row sees,
// -inf elsewhere, in place. Returns the largest and `before`.
float scale_scores(float* score, float scale, const float* token_scales, Seen seen, float before) {
    __m256 largest = _mm256_set1_ps(before);
    const bool whole = seen.first == 0 && seen.end == kStep;
    for (int j = 0; j < kStep; j += 8) {
        __m256 s = _mm256_mul_ps(_mm256_loadu_ps(score + j), _mm256_set1_ps(scale));
        if (token_scales != nullptr) s = _mm256_mul_ps(s, _mm256_load_ps(token_scales + j));
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
// must be multiplied by. With `scales`, the scores get those of the keys first, and the exponentials those of the
// values when they have been added up.
void soften(const Rows& rows, int row, int count, int start, const Seen* seen, const HeadShape& shape,
            const StepScales* scales) {
    alignas(32) float factor[8];
    alignas(32) float before[8] = {};
    alignas(32) float largest[8] = {};
    const bool bent = shape.softcap > 0 || rows.slope != nullptr;
    const float* keys = scales == nullptr ? nullptr : scales->k;
    for (int r = 0; r < count; ++r) {
        if (seen[r].first >= seen[r].end) continue;
        if (bent) bend_scores(rows, row + r, shape, start, keys);
        before[r] = rows.part.largest[row + r];
        largest[r] = scale_scores(rows.score + (row + r) * kStep, bent ? 1.0f : shape.scale, bent ? nullptr : keys,
                                  seen[r], before[r]);
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
            const __m256 weight = scales == nullptr ? p[j] : _mm256_mul_ps(p[j], _mm256_load_ps(scales->v + 8 * j));
            _mm256_storeu_ps(score + 8 * j, weight);
        }
        const float sum = sum_lanes(_mm256_add_ps(_mm256_add_ps(_mm256_add_ps(p[0], p[1]), p[2]), p[3]));
        rows.factor[row + r] = factor[r];
        rows.part.largest[row + r] = largest[r];
        rows.part.sum[row + r] = __builtin_fmaf(rows.part.sum[row + r], factor[r], sum);
    }
}

// sum_v = sum_v * factor + sum over tokens [low, high) of p * v, ascending, for N rows and 8 * J columns.
template <int N, int J, int SOURCE>
inline void add_columns(const Rows& rows, const StepData& data, int row, int column, int low, int high,
                        const float* factor) {
    constexpr int kTogether = kAtOnce<SOURCE, J>;
    const int64_t stride = rows.wide;
    float* part = rows.part.sum_v + row * stride + column;
    __m256 acc[N][J];
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r) {
        const __m256 wide = _mm256_broadcast_ss(factor + r);
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) acc[r][j] = _mm256_mul_ps(_mm256_loadu_ps(part + r * stride + 8 * j), wide);
    }
    const float* p = rows.score + row * kStep + low;
    for (int t = low; t < high;) {
        const int half = SOURCE == COPIED ? 0 : t / 16;
        const int end = SOURCE == COPIED ? high : at_most(high, 16 * half + 16);
        const int64_t from = (t - 16 * half) * data.value_bytes + column * kBytes<SOURCE>;
        const char* v = data.v[half] + from;
        const char* next = data.next_v[half] + from;
        for (; t < end; ++t, ++p, v += data.value_bytes, next += data.value_bytes) {
            add_products<kTogether>(
                acc, [&](int r) { return _mm256_broadcast_ss(p + r * kStep); },
                [&](int j) { return load_columns<SOURCE, kTogether>(v + j * 8 * kBytes<SOURCE>); });
            prefetch<SOURCE>(next);
            if (J * 8 * kBytes<SOURCE> > 64) prefetch<SOURCE>(next + 64);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) _mm256_storeu_ps(part + r * stride + 8 * j, acc[r][j]);
    }
}

template <int N, int SOURCE>
void add_values(const Rows& rows, const StepData& data, int row, int low, int high, const float* factor) {
    constexpr int J = N == 1 ? 8 : kVectors<N, SOURCE>;
    int column = 0;
    for (; column + 8 * J <= rows.wide; column += 8 * J) {
        add_columns<N, J, SOURCE>(rows, data, row, column, low, high, factor);
    }
    for (; column < rows.wide; column += 8) {
        add_columns<N, 1, SOURCE>(rows, data, row, column, low, high, factor);
    }
}

// Rows of a tile go together over the tokens that all of them see, and alone before and after: to each it is one chain
// of ascending tokens, and p = 0 never meets the value of a token that a row does not see.
template <int N, int SOURCE>
void add_step(const Rows& rows, const StepData& data, int row, const Seen* seen, float* factor) {
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
        add_values<1, SOURCE>(rows, data, row + r, seen[r].first, end, factor + r);
        factor[r] = 1;
    }
    if (!together) return;
    add_values<N, SOURCE>(rows, data, row, low, high, factor);
    const float one = 1;
    for (int r = 0; r < N; ++r) {
        if (high < seen[r].end) add_values<1, SOURCE>(rows, data, row + r, high, seen[r].end, &one);
    }
}

// A tile's functions by its number of rows.
struct TileFns {
    void (*dot)(const Rows&, const StepData&, int row, int low, int high);
    void (*add)(const Rows&, const StepData&, int row, const Seen*, float* factor);
};

template <int SOURCE, int N>
constexpr TileFns kTile = {dot_step<N, SOURCE>, add_step<N, SOURCE>};

template <int SOURCE>
constexpr TileFns kTiles[kTileRows] = {kTile<SOURCE, 1>, kTile<SOURCE, 2>, kTile<SOURCE, 3>,
                                       kTile<SOURCE, 4>, kTile<SOURCE, 5>, kTile<SOURCE, 6>};

}  // namespace
