// Rows of attention against a chunk of keys and values: scores, softmax, sums of values. Everything is local to the
// unit that includes it (see ../kernels.h).
#pragma once

#include "../kernels.h"
#include "elementary.h"
#include "lanes.h"

namespace {

using namespace octavo;

// Tokens whose keys, or values, all rows take together: copies, or in place, in runs that may lie in different blocks.
constexpr int kStep = 64;
constexpr int kRun = 16;
constexpr int kStepRuns = kStep / kRun;

constexpr int kInPlaceRows = 16;  // so many rows at most read the cache in place; for more, a copy to float32 pays
constexpr float kLog2E = 1.44269504f;
const float kMinusInfinity = -__builtin_inff();

constexpr int at_least(int a, int b) { return a > b ? a : b; }
constexpr int at_most(int a, int b) { return a < b ? a : b; }

// A softmax over a part of the context, for every row. Scores are logarithms to base 2.
struct Partial {
    float* sum_v;    // [count][wide]: sum of 2^(score - largest) * v
    float* largest;  // [count]
    float* sum;      // [count]: sum of 2^(score - largest)
};

// The rows of an item (token-major, then query head) with their running sums.
struct Rows {
    int count;
    int group;      // query heads per KV head
    int depth;      // elements of a key
    int padded;     // the same rounded up to 8
    int width;      // elements of a value
    int wide;       // the same rounded up to 8
    float* k;       // [depth][kStep] of the current step, where keys are copied
    float* v;       // [kStep][wide] of the current step
    float* q;       // [count][padded]
    float* score;   // [count][kChunkTokens]: of the current chunk, and then the powers of 2
    float* slope;   // [count], or null: what a score loses for each token between the row and the key
    int* position;  // [count], ascending
    int* begin;     // [count], ascending: the first token it sees
    Partial part;   // of the current chunk
    Partial total;
};

// Tokens of a chunk, relative to its start.
struct Seen {
    int first;
    int end;
};

// Tokens of the chunk at `chunk` that the row sees; none where first >= end.
inline Seen seen_by(const Rows& rows, int row, int chunk) {
    return {at_least(rows.begin[row] - chunk, 0), at_most(rows.position[row] + 1 - chunk, kChunkTokens)};
}

// Keys, or values, of a step. Those that no row sees may be any that can be read.
struct StepData {
    int64_t stride;           // bytes from one element of the keys to the next; from one token's values to the next
    const char* const* at;    // in place, of each run; the first alone of copies
    const char* const* next;  // in place, of the step to come
};

// Scales of the keys and values of a chunk that have their own: they multiply scores and weights, not elements, so
// that few rows cost little.
struct ChunkScales {
    alignas(64) float k[kChunkTokens];
    alignas(64) float v[kChunkTokens];
};

// What the elements that load_eight gives are to be multiplied by, beside the scales of head and token.
constexpr float element_unit(int type) { return type == CACHE_E4M3 ? kFloat8Unit<E4M3> : 1.0f; }

// To the second-level cache, for the first has too few places for lines that are on their way from memory.
template <int SOURCE>
inline void prefetch(const char* p) {
    if (SOURCE != COPIED) _mm_prefetch(p, _MM_HINT_T1);
}

// 2^x for x <= 0: x = n + r with |r| <= 1/2, a polynomial of degree 5 for 2^r, and n added to the exponent. Relative
// error below 2e-7; 0 below -126 where denormals are zero, NaN stays NaN, and 0 gives exactly 1.
template <class Lanes>
inline typename Lanes::Vector power_of_two(typename Lanes::Vector x) {
    using Vector = typename Lanes::Vector;
    const Vector shift = Lanes::all(12582912.0f);  // 1.5 * 2^23: a sum has the nearest integer in its low bits
    // x where that is NaN. Of -127, r is 0 and nothing is left of the exponent of 1: exactly 0.
    const Vector clamped = Lanes::largest(Lanes::all(-127.0f), x);
    const Vector shifted = clamped + shift;
    const Vector r = clamped - (shifted - shift);
    Vector p = Lanes::all(1.32647273e-3f);
    p = Lanes::fma(p, r, Lanes::all(9.67151299e-3f));
    p = Lanes::fma(p, r, Lanes::all(5.55073358e-2f));
    p = Lanes::fma(p, r, Lanes::all(0.240222424f));
    p = Lanes::fma(p, r, Lanes::all(0.693147004f));
    p = Lanes::fma(p, r, Lanes::all(1.0f));
    return Lanes::raise(p, shifted);
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

// Scores of N rows against J vectors of keys of the chunk from `token`: one fma chain per score, ascending element.
template <class Lanes, int N, int J, int SOURCE>
inline void dot_keys(const Rows& rows, const StepData& keys, int row, int token) {
    typename Lanes::Vector acc[N][J];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) acc[r][j] = Lanes::all(0.0f);
    }
    constexpr int kTogether = Lanes::template kAtOnce<SOURCE, J>;
    constexpr int kOfRun = kRun / Lanes::kCount;
    constexpr int kRuns = J / kOfRun;
    constexpr int kSize = Lanes::kCount * kBytes<SOURCE>;
    const int64_t stride = rows.padded;
    const float* q = rows.q + row * stride;
    const int first = token % kStep / kRun;
    const char* k[kRuns];
    const char* next[kRuns] = {};
#pragma GCC unroll 4
    for (int run = 0; run < kRuns; ++run) {
        if constexpr (SOURCE == COPIED) {
            k[run] = keys.at[0] + (first + run) * kRun * kBytes<SOURCE>;
        } else {
            k[run] = keys.at[first + run];
            next[run] = keys.next[first + run];
        }
    }
    const auto place = [&](int j) { return k[j / kOfRun] + j % kOfRun * kSize; };
    for (int i = 0; i < rows.depth; ++i, ++q) {
        add_products<Lanes, kTogether>(
            acc, [&](int r) { return Lanes::all(q[r * stride]); },
            [&](int j) { return Lanes::template columns<SOURCE, kTogether>(place(j), place(j + kTogether - 1)); });
#pragma GCC unroll 4
        for (int run = 0; run < kRuns; ++run) {
            prefetch<SOURCE>(next[run]);
            k[run] += keys.stride;
            next[run] += keys.stride;
        }
    }
    float* score = rows.score + row * kChunkTokens + token;
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) Lanes::store(score + r * kChunkTokens + Lanes::kCount * j, acc[r][j]);
    }
}

// Scores from `token` on up to at least `end`, and of no more than those of J vectors.
template <class Lanes, int N, int J, int SOURCE>
inline void dot_some(const Rows& rows, const StepData& keys, int row, int token, int end) {
    constexpr int kFewer = J / 2;
    if constexpr (kFewer * Lanes::kCount >= kRun) {
        if (end - token <= kFewer * Lanes::kCount)
            return dot_some<Lanes, N, kFewer, SOURCE>(rows, keys, row, token, end);
    }
    dot_keys<Lanes, N, J, SOURCE>(rows, keys, row, token);
}

// Scores of the rows of a tile for tokens of the chunk that lie in one step.
template <class Lanes, int N, int SOURCE>
void dot_step(const Rows& rows, const StepData& keys, int row, Seen tokens) {
    constexpr int J = at_most(Lanes::template kVectors<N, SOURCE>, kStep / Lanes::kCount);
    constexpr int kTokens = Lanes::kCount * J;
    for (int token = tokens.first / kTokens * kTokens; token < tokens.end; token += kTokens) {
        dot_some<Lanes, N, J, SOURCE>(rows, keys, row, token, tokens.end);
    }
}

// The row's scores for tokens of the chunk, capped and less for those far away, in place.
__attribute__((noinline)) void bend_scores(const Rows& rows, int row, const HeadShape& shape, int chunk, Seen seen,
                                           const float* token_scales) {
    float* score = rows.score + row * kChunkTokens;
    for (int j = seen.first / 8 * 8; j < seen.end; j += 8) {
        __m256 s = _mm256_loadu_ps(score + j);
        if (token_scales != nullptr) s = _mm256_mul_ps(s, _mm256_load_ps(token_scales + j));
        if (shape.softcap > 0) {
            const __m256 cap = _mm256_set1_ps(shape.softcap);
            s = _mm256_mul_ps(cap, tanh_ps(_mm256_div_ps(s, cap)));
        }
        if (rows.slope != nullptr) {
            const __m256i away = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                                  _mm256_set1_epi32(chunk + j - rows.position[row]));
            s = _mm256_fmadd_ps(_mm256_set1_ps(rows.slope[row]), _mm256_cvtepi32_ps(away), s);
        }
        _mm256_storeu_ps(score + j, _mm256_mul_ps(s, _mm256_set1_ps(kLog2E)));
    }
}

constexpr bool is_bent(const HeadShape& shape, const float* slopes) { return shape.softcap > 0 || slopes != nullptr; }

// What of the scores of a chunk is looked at for the row: whole lots of 16 tokens.
inline Seen lots_of(Seen seen) { return {seen.first / 16 * 16, (seen.end + 15) / 16 * 16}; }

// The largest of a row's scores for the chunk at `chunk`, which get the scales of their keys where there are such;
// those of tokens that the row does not see become -inf.
template <class Lanes>
void find_largest(const Rows& rows, int row, const HeadShape& shape, int chunk, const ChunkScales* scales) {
    const Seen seen = seen_by(rows, row, chunk);
    if (seen.first >= seen.end) return;
    const Seen lots = lots_of(seen);
    float* score = rows.score + row * kChunkTokens;
    const float* keys = scales == nullptr ? nullptr : scales->k;
    if (is_bent(shape, rows.slope)) {
        bend_scores(rows, row, shape, chunk, seen, keys);
    } else if (keys != nullptr) {
        for (int t = lots.first; t < lots.end; t += Lanes::kCount) {
            Lanes::store(score + t, Lanes::load(score + t) * Lanes::load(keys + t));
        }
    }
    for (int t = lots.first; t < seen.first; ++t) score[t] = kMinusInfinity;
    for (int t = seen.end; t < lots.end; ++t) score[t] = kMinusInfinity;
    typename Lanes::Vector largest = Lanes::all(kMinusInfinity);
    for (int t = lots.first; t < lots.end; t += Lanes::kCount) {
        largest = Lanes::largest(largest, Lanes::load(score + t));
    }
    rows.part.largest[row] = Lanes::largest_of(largest);
}

// A row's scores to 2^(score - largest), and their sum in 16 lanes, by token, in every width. With `scales`, they get
// those of the values when they have been added up.
template <class Lanes>
void raise_scores(const Rows& rows, int row, int chunk, const ChunkScales* scales) {
    constexpr int kVectors = 16 / Lanes::kCount;
    const Seen lots = lots_of(seen_by(rows, row, chunk));
    float* score = rows.score + row * kChunkTokens;
    const auto largest = Lanes::all(rows.part.largest[row]);
    typename Lanes::Vector sum[kVectors];
    for (int j = 0; j < kVectors; ++j) sum[j] = Lanes::all(0.0f);
    for (int t = lots.first; t < lots.end; t += 16) {
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) {
            float* at = score + t + Lanes::kCount * j;
            const auto power = power_of_two<Lanes>(Lanes::load(at) - largest);
            Lanes::store(at, scales == nullptr ? power : power * Lanes::load(scales->v + t + Lanes::kCount * j));
            sum[j] = sum[j] + power;
        }
    }
    rows.part.sum[row] = Lanes::sum_of(sum);
}

// sum_v += sum over `tokens`, which lie in one step, of p * v, ascending, for N rows and J vectors of columns.
template <class Lanes, int N, int J, int SOURCE>
inline void add_columns(const Rows& rows, const StepData& values, int row, int column, Seen tokens) {
    constexpr int kTogether = Lanes::template kAtOnce<SOURCE, J>;
    constexpr int kSize = Lanes::kCount * kBytes<SOURCE>;
    const int64_t stride = rows.wide;
    float* part = rows.part.sum_v + row * stride + column;
    typename Lanes::Vector acc[N][J];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) acc[r][j] = Lanes::load(part + r * stride + Lanes::kCount * j);
    }
    const float* p = rows.score + row * kChunkTokens + tokens.first;
    const int start = tokens.first / kStep * kStep;
    for (int t = tokens.first - start; t < tokens.end - start;) {
        const int run = SOURCE == COPIED ? 0 : t / kRun;
        const int end = SOURCE == COPIED ? tokens.end - start : at_most(tokens.end - start, (run + 1) * kRun);
        const int64_t from = (t - run * kRun) * values.stride + column * kBytes<SOURCE>;
        const char* v = values.at[run] + from;
        const char* next = values.next[run] + from;
        for (; t < end; ++t, ++p, v += values.stride, next += values.stride) {
            add_products<Lanes, kTogether>(
                acc, [&](int r) { return Lanes::all(p[r * kChunkTokens]); },
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
void add_values(const Rows& rows, const StepData& values, int row, Seen tokens) {
    constexpr int J = Lanes::template kVectors<N, SOURCE>;
    int column = 0;
    for (; column + Lanes::kCount * J <= rows.wide; column += Lanes::kCount * J) {
        add_columns<Lanes, N, J, SOURCE>(rows, values, row, column, tokens);
    }
    constexpr int kFewer = J > 2 ? J / 2 : J;
    if (column + Lanes::kCount * kFewer <= rows.wide) {
        add_columns<Lanes, N, kFewer, SOURCE>(rows, values, row, column, tokens);
        column += Lanes::kCount * kFewer;
    }
    for (; column < rows.wide; column += 8) add_columns<Eight, N, 1, SOURCE>(rows, values, row, column, tokens);
}

// Rows of a tile go together over the tokens of the step that all of them see, and alone before and after: to each it
// is one chain of ascending tokens, and p = 0 never meets the value of a token that a row does not see.
template <class Lanes, int N, int SOURCE>
void add_step(const Rows& rows, const StepData& values, int row, int chunk, Seen tokens) {
    const auto seen = [&](int r, Seen of) {
        const Seen all = seen_by(rows, row + r, chunk);
        return Seen{at_least(of.first, all.first), at_most(of.end, all.end)};
    };
    Seen together = {seen(N - 1, tokens).first, seen(0, tokens).end};
    if (together.first >= together.end) together = {tokens.end, tokens.end};
    const auto alone = [&](Seen some) {
        for (int r = 0; r < N; ++r) {
            const Seen own = seen(r, some);
            if (own.first < own.end) add_values<Lanes, 1, SOURCE>(rows, values, row + r, own);
        }
    };
    if (tokens.first < together.first) alone({tokens.first, together.first});
    if (together.first < together.end) add_values<Lanes, N, SOURCE>(rows, values, row, together);
    if (together.end < tokens.end) alone({together.end, tokens.end});
}

// A tile's functions by its number of rows.
struct TileFns {
    void (*dot)(const Rows&, const StepData& keys, int row, Seen tokens);
    void (*add)(const Rows&, const StepData& values, int row, int chunk, Seen tokens);
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
