// Rows of attention against a step of 32 keys and values: scores, softmax, sums of values. Everything is local to the
// unit that includes it (see ../kernels.h).
#pragma once

#include "../kernels.h"
#include "elementary.h"
#include "lanes.h"

namespace {

using namespace octavo;

constexpr int kStep = 32;
constexpr int kInPlaceRows = 16;  // so many rows at most read the cache in place; for more, a copy to float32 pays
const float kMinusInfinity = -__builtin_inff();

constexpr int at_least(int a, int b) { return a > b ? a : b; }
constexpr int at_most(int a, int b) { return a < b ? a : b; }

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

// What the elements that load_eight gives are to be multiplied by, beside the scales of head and token.
constexpr float element_unit(int type) { return type == CACHE_E4M3 ? kFloat8Unit<E4M3> : 1.0f; }

template <int SOURCE>
inline void prefetch(const char* p) {
    if (SOURCE != COPIED) _mm_prefetch(p, _MM_HINT_T0);
}

// e^x for x <= 0: x = n ln 2 + r, the minimax polynomial of degree 6 for e^r with 1 + r in front, and n added to the
// exponent. Relative error below 1e-7; 0 below -87.3, NaN stays NaN, and 0 gives exactly 1.
template <class Lanes>
inline typename Lanes::Vector exp_down(typename Lanes::Vector x) {
    using Vector = typename Lanes::Vector;
    const Vector low = Lanes::all(-87.3f);
    const Vector shift = Lanes::all(12582912.0f);   // 1.5 * 2^23: a sum has the nearest integer in its low bits
    const Vector clamped = Lanes::largest(low, x);  // x where that is NaN
    const Vector shifted = Lanes::fma(clamped, Lanes::all(1.44269504f), shift);
    const Vector n = shifted - shift;
    Vector r = Lanes::fma(n, Lanes::all(-0.693359375f), clamped);
    r = Lanes::fma(n, Lanes::all(2.12194440e-4f), r);
    Vector p = Lanes::all(1.38144668e-3f);
    p = Lanes::fma(p, r, Lanes::all(8.36878042e-3f));
    p = Lanes::fma(p, r, Lanes::all(4.16683942e-2f));
    p = Lanes::fma(p, r, Lanes::all(0.166665201f));
    p = Lanes::fma(p, r, Lanes::all(0.499999934f));
    p = Lanes::fma(p, r, Lanes::all(1.0f));
    p = Lanes::fma(p, r, Lanes::all(1.0f));
    return Lanes::zero_below(low, x, Lanes::raise(p, shifted));
}

// acc[r][j] += row(r) * column j, with the fewer of both in registers. `columns(j)` are columns [j, j + COUNT).
template <class Lanes, int COUNT, int N, int J, class Row, class Load>
inline __attribute__((always_inline)) void add_products(typename Lanes::Vector (&acc)[N][J], const Row& row,
                                                        const Load& columns) {
    using Vector = typename Lanes::Vector;
    if constexpr (N < J) {
        Vector rows[N];
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) rows[r] = row(r);
#pragma GCC unroll 8
        for (int j = 0; j < J; j += COUNT) {
            const Columns<Vector, COUNT> values = columns(j);
#pragma GCC unroll 2
            for (int i = 0; i < COUNT; ++i) {
#pragma GCC unroll 8
                for (int r = 0; r < N; ++r) acc[r][j + i] = Lanes::fma(rows[r], values.column[i], acc[r][j + i]);
            }
        }
    } else {
        Columns<Vector, COUNT> values[J / COUNT];
#pragma GCC unroll 8
        for (int j = 0; j < J; j += COUNT) values[j / COUNT] = columns(j);
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
            const Vector value = row(r);
#pragma GCC unroll 8
            for (int j = 0; j < J; ++j) {
                acc[r][j] = Lanes::fma(value, values[j / COUNT].column[j % COUNT], acc[r][j]);
            }
        }
    }
}

// Scores of N rows against J vectors of keys of the step from `token`: one fma chain per score, ascending element.
template <class Lanes, int N, int J, int SOURCE>
inline void dot_keys(const Rows& rows, const StepData& data, int row, int token) {
    typename Lanes::Vector acc[N][J];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) acc[r][j] = Lanes::all(0.0f);
    }
    constexpr int kTogether = Lanes::template kAtOnce<SOURCE, J>;
    constexpr int kOfHalf = 16 / Lanes::kCount;
    constexpr int kSize = Lanes::kCount * kBytes<SOURCE>;
    const int64_t stride = rows.padded;
    const float* q = rows.q + row * stride;
    const char* k[2] = {data.k[token / 16], data.k[1]};
    const char* next[2] = {data.next_k[token / 16], data.next_k[1]};
    const auto place = [&](int j) { return k[j / kOfHalf] + j % kOfHalf * kSize; };
    for (int i = 0; i < rows.depth; ++i, ++q) {
        add_products<Lanes, kTogether>(
            acc, [&](int r) { return Lanes::all(q[r * stride]); },
            [&](int j) { return Lanes::template columns<SOURCE, kTogether>(place(j), place(j + kTogether - 1)); });
#pragma GCC unroll 2
        for (int half = 0; half < J / kOfHalf; ++half) {
            prefetch<SOURCE>(next[half]);
            k[half] += data.key_bytes;
            next[half] += data.key_bytes;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) {
            Lanes::store(rows.score + (row + r) * kStep + token + Lanes::kCount * j, acc[r][j]);
        }
    }
}

template <class Lanes, int N, int SOURCE>
void dot_step(const Rows& rows, const StepData& data, int row, int low, int high) {
    constexpr int J = at_most(Lanes::template kVectors<N, SOURCE>, kStep / Lanes::kCount);
    constexpr int kTokens = Lanes::kCount * J;
    for (int token = low / kTokens * kTokens; token < high; token += kTokens) {
        dot_keys<Lanes, N, J, SOURCE>(rows, data, row, token);
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
template <class Lanes>
float scale_scores(float* score, float scale, const float* token_scales, Seen seen, float before) {
    auto largest = Lanes::all(before);
    const bool whole = seen.first == 0 && seen.end == kStep;
    for (int j = 0; j < kStep; j += Lanes::kCount) {
        auto s = Lanes::load(score + j) * Lanes::all(scale);
        if (token_scales != nullptr) s = s * Lanes::load(token_scales + j);
        if (!whole) s = Lanes::between(seen.first - j, seen.end - j, s, kMinusInfinity);
        Lanes::store(score + j, s);
        largest = Lanes::largest(largest, s);
    }
    return Lanes::largest_of(largest);
}

// Scores of `count` rows to exp(score - largest so far), their sums, and in rows.factor what the sums of values so far
// must be multiplied by. With `scales`, the scores get those of the keys first, and the exponentials those of the
// values when they have been added up.
template <class Lanes>
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
        largest[r] = scale_scores<Lanes>(rows.score + (row + r) * kStep, bent ? 1.0f : shape.scale,
                                         bent ? nullptr : keys, seen[r], before[r]);
    }
    const __m256 old = _mm256_load_ps(before);
    const __m256 shrink = exp_down<Eight>(old - _mm256_load_ps(largest));
    const __m256 none = _mm256_cmp_ps(old, _mm256_set1_ps(kMinusInfinity), _CMP_EQ_OQ);
    _mm256_store_ps(factor, _mm256_andnot_ps(none, shrink));
    for (int r = 0; r < count; ++r) {
        if (seen[r].first >= seen[r].end) continue;
        float* score = rows.score + (row + r) * kStep;
        constexpr int kVectors = kStep / Lanes::kCount;
        typename Lanes::Vector p[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            p[j] = exp_down<Lanes>(Lanes::load(score + Lanes::kCount * j) - Lanes::all(largest[r]));
            Lanes::store(score + Lanes::kCount * j,
                         scales == nullptr ? p[j] : p[j] * Lanes::load(scales->v + Lanes::kCount * j));
        }
        const float sum = Lanes::sum_of(p);
        rows.factor[row + r] = factor[r];
        rows.part.largest[row + r] = largest[r];
        rows.part.sum[row + r] = __builtin_fmaf(rows.part.sum[row + r], factor[r], sum);
    }
}

// sum_v = sum_v * factor + sum over tokens [low, high) of p * v, ascending, for N rows and J vectors of columns.
template <class Lanes, int N, int J, int SOURCE>
inline void add_columns(const Rows& rows, const StepData& data, int row, int column, int low, int high,
                        const float* factor) {
    constexpr int kTogether = Lanes::template kAtOnce<SOURCE, J>;
    constexpr int kSize = Lanes::kCount * kBytes<SOURCE>;
    const int64_t stride = rows.wide;
    float* part = rows.part.sum_v + row * stride + column;
    typename Lanes::Vector acc[N][J];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
        const auto wide = Lanes::all(factor[r]);
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) acc[r][j] = Lanes::load(part + r * stride + Lanes::kCount * j) * wide;
    }
    const float* p = rows.score + row * kStep + low;
    for (int t = low; t < high;) {
        const int half = SOURCE == COPIED ? 0 : t / 16;
        const int end = SOURCE == COPIED ? high : at_most(high, 16 * half + 16);
        const int64_t from = (t - 16 * half) * data.value_bytes + column * kBytes<SOURCE>;
        const char* v = data.v[half] + from;
        const char* next = data.next_v[half] + from;
        for (; t < end; ++t, ++p, v += data.value_bytes, next += data.value_bytes) {
            add_products<Lanes, kTogether>(
                acc, [&](int r) { return Lanes::all(p[r * kStep]); },
                [&](int j) {
                    return Lanes::template columns<SOURCE, kTogether>(v + j * kSize, v + (j + kTogether - 1) * kSize);
                });
            prefetch<SOURCE>(next);
            if (J * kSize > 64) prefetch<SOURCE>(next + 64);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) Lanes::store(part + r * stride + Lanes::kCount * j, acc[r][j]);
    }
}

template <class Lanes, int N, int SOURCE>
void add_values(const Rows& rows, const StepData& data, int row, int low, int high, const float* factor) {
    constexpr int J = Lanes::template kVectors<N, SOURCE>;
    int column = 0;
    for (; column + Lanes::kCount * J <= rows.wide; column += Lanes::kCount * J) {
        add_columns<Lanes, N, J, SOURCE>(rows, data, row, column, low, high, factor);
    }
    constexpr int kFewer = J > 2 ? J / 2 : J;
    if (column + Lanes::kCount * kFewer <= rows.wide) {
        add_columns<Lanes, N, kFewer, SOURCE>(rows, data, row, column, low, high, factor);
        column += Lanes::kCount * kFewer;
    }
    for (; column < rows.wide; column += 8) {
        add_columns<Eight, N, 1, SOURCE>(rows, data, row, column, low, high, factor);
    }
}

// Rows of a tile go together over the tokens that all of them see, and alone before and after: to each it is one chain
// of ascending tokens, and p = 0 never meets the value of a token that a row does not see.
template <class Lanes, int N, int SOURCE>
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
        add_values<Lanes, 1, SOURCE>(rows, data, row + r, seen[r].first, end, factor + r);
        factor[r] = 1;
    }
    if (!together) return;
    add_values<Lanes, N, SOURCE>(rows, data, row, low, high, factor);
    const float one = 1;
    for (int r = 0; r < N; ++r) {
        if (high < seen[r].end) add_values<Lanes, 1, SOURCE>(rows, data, row + r, high, seen[r].end, &one);
    }
}

// A tile's functions by its number of rows.
struct TileFns {
    void (*dot)(const Rows&, const StepData&, int row, int low, int high);
    void (*add)(const Rows&, const StepData&, int row, const Seen*, float* factor);
};

template <class Lanes, int SOURCE, int N>
constexpr TileFns kTile = {dot_step<Lanes, N, SOURCE>, add_step<Lanes, N, SOURCE>};

// The last two stand only where the lanes have tiles of so many rows.
template <class L, int SOURCE>
constexpr TileFns kTiles[] = {
    kTile<L, SOURCE, 1>,
    kTile<L, SOURCE, 2>,
    kTile<L, SOURCE, 3>,
    kTile<L, SOURCE, 4>,
    kTile<L, SOURCE, 5>,
    kTile<L, SOURCE, 6>,
    kTile<L, SOURCE, at_most(7, L::kTileRows)>,
    kTile<L, SOURCE, at_most(8, L::kTileRows)>,
};

}  // namespace
