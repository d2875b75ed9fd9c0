// Paged attention: K and V are read from the cache only. A partial softmax starts anew at every absolute 256-token
// chunk, from all scores of the chunk, and partials are combined in ascending order. What a row computes depends on its
// position and the cache, not on the other rows of the item, nor on which items a context was cut into (Dao et al.,
// FlashAttention, 2022, for the softmax of parts; split contexts as in Dao et al., Flash-Decoding, 2023).
#pragma once

#include <string.h>

#include "attention_tiles.h"

namespace {

using namespace octavo;

Partial lay_out_partial(float* at, int count, int wide) {
    float* largest = at + int64_t{count} * wide;
    return {at, largest, largest + count};
}

Rows lay_out(const AttendItem& item, const HeadShape& shape) {
    Rows rows;
    rows.group = shape.heads / shape.kv_heads;
    rows.count = item.tokens * rows.group;
    rows.depth = shape.head_dim;
    rows.padded = (rows.depth + 7) / 8 * 8;
    rows.width = attend_width(shape);
    rows.wide = (rows.width + 7) / 8 * 8;
    const int64_t partial = attend_partial(rows.count, rows.width);
    rows.k = item.scratch;
    rows.v = rows.k + int64_t{kStep} * rows.padded;
    rows.score = rows.v + int64_t{kStep} * rows.wide;
    rows.q = rows.score + int64_t{kChunkTokens} * rows.count;
    float* each = rows.q + int64_t{rows.count} * rows.padded;
    rows.slope = item.slopes == nullptr ? nullptr : each;
    rows.position = reinterpret_cast<int*>(each + rows.count);
    rows.begin = rows.position + rows.count;
    float* partials = each + 3 * rows.count;
    rows.part = lay_out_partial(partials, rows.count, rows.wide);
    rows.total = lay_out_partial(partials + partial, rows.count, rows.wide);
    return rows;
}

void clear(const Rows& rows, const Partial& partial) {
    memset(partial.sum_v, 0, sizeof(float) * rows.count * rows.wide);
    for (int r = 0; r < rows.count; ++r) {
        partial.largest[r] = kMinusInfinity;
        partial.sum[r] = 0;
    }
}

// Where the keys of a token's block begin, and its values.
struct Cached {
    const char* keys;
    const char* values;
    int offset;  // of the token in the block
};

Cached find(const AttendItem& item, const HeadShape& shape, int token) {
    const char* block =
        reinterpret_cast<const char*>(item.cache.data) + item.table[token / shape.block_size] * item.cache.block_stride;
    return {block + item.kv_head * shape.head_bytes, block + (shape.kv_heads + item.kv_head) * shape.head_bytes,
            token % shape.block_size};
}

// What to fetch ahead: the token, or where the item ends before its step, as much of the first step of the item that
// follows; `at` where there is nothing.
Cached find_ahead(const AttendItem& item, const HeadShape& shape, int token, const Cached& at) {
    const int end = item.position + item.tokens;
    if (token < end) return find(item, shape, token);
    if (item.following == nullptr) return at;
    const AttendItem& next = *item.following;
    const int begin = attend_begin(shape, next.position);
    token += begin / kStep * kStep - (end + kStep - 1) / kStep * kStep;
    return token + kRun > begin && token < next.position + next.tokens ? find(next, shape, token) : at;
}

// Calls work(where the block is, where what is to be fetched meanwhile is, first token) for each run of consecutive
// tokens of the step at `start` that has one of [low, high). Only blocks with a token in the range are touched: entries
// of the table before it may be stale.
template <class Work>
void each_run(const AttendItem& item, const HeadShape& shape, int start, int low, int high, const Work& work) {
    const int run = at_most(kStep, shape.block_size);
    for (int first = start; first < start + kStep; first += run) {
        if (first >= high || first + run <= low) continue;
        const Cached at = find(item, shape, first);
        work(at, find_ahead(item, shape, first + kStep, at), first);
    }
}

// Keys of the step at `start` to float32. Those of other runs than of [low, high) are of no row, and stay as they are.
template <class Lanes, int TYPE>
void copy_keys(const AttendItem& item, const HeadShape& shape, int start, int low, int high, const Rows& rows) {
    const int size = shape.block_size;
    const int run = at_most(kStep, size);
    each_run(item, shape, start, low, high, [&](const Cached& at, const Cached& ahead, int first) {
        float* k = rows.k + (first - start);
        const char* keys = at.keys + at.offset * kBytes<TYPE>;
        const int64_t further = ahead.keys + ahead.offset * kBytes<TYPE> - keys;
        for (int i = 0; i < rows.depth; ++i, k += kStep, keys += size * kBytes<TYPE>) {
            for (int t = 0; t < run; t += Lanes::kCount) {
                prefetch<TYPE>(keys + further + t * kBytes<TYPE>);
                Lanes::store(k + t, Lanes::template load_as<TYPE>(keys + t * kBytes<TYPE>));
            }
        }
    });
}

// Values of the tokens [low, high) of the step at `start` to float32.
template <class Lanes, int TYPE>
void copy_values(const AttendItem& item, const HeadShape& shape, int start, int low, int high, const Rows& rows) {
    constexpr int bytes = kBytes<TYPE>;
    each_run(item, shape, start, low, high, [&](const Cached& at, const Cached& ahead, int first) {
        const int64_t further = ahead.values - at.values + int64_t{ahead.offset - at.offset} * rows.depth * bytes;
        for (int t = at_least(first, low); t < at_most(first + shape.block_size, high); ++t) {
            float* v = rows.v + (t - start) * rows.wide;
            const char* values = at.values + int64_t{at.offset + t - first} * rows.depth * bytes;
            int i = 0;
            for (; i + Lanes::kCount <= rows.depth; i += Lanes::kCount) {
                prefetch<TYPE>(values + further + i * bytes);
                Lanes::store(v + i, Lanes::template load_as<TYPE>(values + i * bytes));
            }
            for (; i + 8 <= rows.depth; i += 8) _mm256_storeu_ps(v + i, load_eight<TYPE>(values + i * bytes));
            if (i < rows.depth) {
                char rest[8 * bytes] = {};
                memcpy(rest, values + i * bytes, (rows.depth - i) * bytes);
                _mm256_storeu_ps(v + i, load_eight<TYPE>(rest));
            }
        }
    });
}

// The same where values are the first elements of the keys.
template <int TYPE>
void copy_latent(const AttendItem& item, const HeadShape& shape, int start, int low, int high, const Rows& rows) {
    const int size = shape.block_size;
    const int run = at_most(kStep, size);
    each_run(item, shape, start, low, high, [&](const Cached& at, const Cached&, int first) {
        for (int i = 0; i < rows.width; i += 8) {
            for (int t = 0; t < run; t += 8) {
                __m256 keys[8];
                for (int j = 0; j < 8; ++j) {
                    const char* key = at.keys + (int64_t{i + j} * size + at.offset + t) * kBytes<TYPE>;
                    keys[j] = i + j < rows.width ? load_eight<TYPE>(key) : _mm256_setzero_ps();
                }
                transpose(keys);
                float* v = rows.v + int64_t{first - start + t} * rows.wide + i;
                for (int j = 0; j < 8; ++j) _mm256_storeu_ps(v + int64_t{j} * rows.wide, keys[j]);
            }
        }
    });
}

// Scales of the chunk at `chunk`, in runs of 16 tokens that have one of [low, high).
ChunkScales scales_of(const AttendItem& item, const HeadShape& shape, int chunk, int low, int high) {
    const int64_t elements = int64_t{shape.head_dim} * shape.block_size * kCacheTypes[shape.type].bytes;
    ChunkScales scales;
    for (int token = low / 16 * 16; token < high; token += 16) {
        const Cached at = find(item, shape, token);
        const int64_t from = elements + at.offset * sizeof(float);
        memcpy(scales.k + token - chunk, at.keys + from, 16 * sizeof(float));
        memcpy(scales.v + token - chunk, (shape.latent > 0 ? at.keys : at.values) + from, 16 * sizeof(float));
    }
    return scales;
}

// Where the keys and values of a chunk are that are read in place, by run, and of the step after those of the chunk.
struct Places {
    const char* keys[kChunkTokens / kRun + kStepRuns];
    const char* values[kChunkTokens / kRun + kStepRuns];
};

// Those of the tokens [low, high) of the chunk at `chunk`. For a run of the same step that no row sees, and whose block
// need not exist, stands another. What comes after is of the next chunk, or of the item that follows.
void find_places(const AttendItem& item, const HeadShape& shape, int chunk, int low, int high, Places& places) {
    const int64_t element = kCacheTypes[shape.type].bytes;
    const auto put = [&](int run, const Cached& at) {
        places.keys[run] = at.keys + at.offset * element;
        places.values[run] = at.values + at.offset * shape.head_dim * element;
    };
    const int first = (low - chunk) / kRun;
    const int last = (high - 1 - chunk) / kRun;
    const int after = (last / kStepRuns + 1) * kStepRuns;
    const Cached earliest = find(item, shape, chunk + first * kRun);
    const Cached latest = find(item, shape, chunk + last * kRun);
    for (int run = first / kStepRuns * kStepRuns; run < first; ++run) put(run, earliest);
    for (int run = first; run <= last; ++run) put(run, find(item, shape, chunk + run * kRun));
    for (int run = last + 1; run < after; ++run) put(run, latest);
    for (int run = after; run < after + kStepRuns; ++run) {
        put(run, find_ahead(item, shape, chunk + run * kRun, latest));
    }
}

// Keys (or, with VALUES, values) of the step at `start`, relative to its chunk, as they are in the cache.
template <bool VALUES>
StepData in_place(const Places& places, const HeadShape& shape, int start) {
    const int64_t element = kCacheTypes[shape.type].bytes;
    const char* const* runs = (VALUES ? places.values : places.keys) + start / kRun;
    return {(VALUES ? shape.head_dim : shape.block_size) * element, runs, runs + kStepRuns};
}

using CopyFn = void (*)(const AttendItem&, const HeadShape&, int start, int low, int high, const Rows&);

struct OfType {
    const TileFns* tiles;
    CopyFn copy_keys;
    CopyFn copy_values;
    CopyFn copy_latent;
};

template <class Lanes, int TYPE>
constexpr OfType kOneType = {kTiles<Lanes, TYPE>, copy_keys<Lanes, TYPE>, copy_values<Lanes, TYPE>, copy_latent<TYPE>};

template <class L>
constexpr OfType kOfType[CACHE_TYPES] = {kOneType<L, CACHE_FLOAT32>, kOneType<L, CACHE_FLOAT16>,
                                         kOneType<L, CACHE_E4M3>, kOneType<L, CACHE_E5M2>, kOneType<L, CACHE_INT8>};

// Calls work(first row, count) for tiles of nearly equally many rows.
template <int MOST, class Work>
void each_tile(int rows, const Work& work) {
    const int tiles = (rows + MOST - 1) / MOST;
    for (int tile = 0, row = 0; tile < tiles; ++tile) {
        const int count = (rows - row + tiles - tile - 1) / (tiles - tile);
        work(row, count);
        row += count;
    }
}

// Attention over the tokens of one chunk, into rows.part. All rows take the keys of a step, and later its values, so
// that these stay in the first-level cache.
template <class Lanes>
void attend_chunk(const AttendItem& item, const HeadShape& shape, const Rows& rows, int chunk) {
    clear(rows, rows.part);
    const int low = at_least(chunk, attend_begin(shape, item.position));
    const int high = at_most(item.position + item.tokens, chunk + kChunkTokens);
    const bool copy = rows.count > kInPlaceRows || rows.depth % 8 != 0;
    const bool copy_v = copy || shape.latent > 0;  // keys that are the values too have their tokens side by side
    const OfType& of = kOfType<Lanes>[shape.type];
    Places places;
    if (!copy) find_places(item, shape, chunk, low, high, places);
    const char* const copies[] = {reinterpret_cast<const char*>(rows.k), reinterpret_cast<const char*>(rows.v)};
    // Calls work(start, first token, token after the last) for each step, and then(first row, count, tokens of the
    // chunk) for the tiles that see something of it; `copied` tells what they read.
    const auto each_step = [&](bool copied, const auto& work, const auto& then) {
        const TileFns* fns = copied ? kTiles<Lanes, COPIED> : of.tiles;
        for (int start = low / kStep * kStep; start < high; start += kStep) {
            const int first = at_least(start, low);
            const int end = at_most(start + kStep, high);
            const StepData data = work(start, first, end);
            each_tile<Lanes::kTileRows>(rows.count, [&](int row, int count) {
                const Seen seen = {at_least(first, rows.begin[row]) - chunk,
                                   at_most(end, rows.position[row + count - 1] + 1) - chunk};
                if (seen.first < seen.end) then(fns[count - 1], data, row, seen);
            });
        }
    };
    each_step(
        copy,
        [&](int start, int first, int end) {
            if (!copy) return in_place<false>(places, shape, start - chunk);
            of.copy_keys(item, shape, start, first, end, rows);
            return StepData{kStep * int64_t{sizeof(float)}, &copies[0], nullptr};
        },
        [&](const TileFns& tile, const StepData& keys, int row, Seen seen) { tile.dot(rows, keys, row, seen); });
    ChunkScales own;
    const ChunkScales* scales = nullptr;
    if (kCacheTypes[shape.type].scale_bytes > 0) {
        own = scales_of(item, shape, chunk, low, high);
        scales = &own;
    }
    // Some rows at a time, so that nothing waits for the largest of one.
    each_tile<Lanes::kTileRows>(rows.count, [&](int row, int count) {
        for (int r = row; r < row + count; ++r) find_largest<Lanes>(rows, r, shape, chunk, scales);
        for (int r = row; r < row + count; ++r) raise_scores<Lanes>(rows, r, chunk, scales);
    });
    each_step(
        copy_v,
        [&](int start, int first, int end) {
            if (!copy_v) return in_place<true>(places, shape, start - chunk);
            (shape.latent > 0 ? of.copy_latent : of.copy_values)(item, shape, start, first, end, rows);
            return StepData{rows.wide * int64_t{sizeof(float)}, &copies[1], nullptr};
        },
        [&](const TileFns& tile, const StepData& values, int row, Seen seen) {
            tile.add(rows, values, row, chunk, seen);
        });
}

// Adds the chunk's partial of each row that saw a token of it to the row's total.
template <class Lanes>
void end_chunk(const Rows& rows) {
    for (int r = 0; r < rows.count; ++r) {
        if (rows.part.largest[r] == kMinusInfinity && rows.part.sum[r] == 0) continue;
        const float before = rows.total.largest[r];
        const float now = rows.part.largest[r];
        const float maximum = now > before || now != now ? now : before;
        const float old_factor =
            before == kMinusInfinity ? 0.0f : _mm256_cvtss_f32(power_of_two<Eight>(_mm256_set1_ps(before - maximum)));
        const float new_factor = _mm256_cvtss_f32(power_of_two<Eight>(_mm256_set1_ps(now - maximum)));
        rows.total.largest[r] = maximum;
        rows.total.sum[r] = __builtin_fmaf(rows.total.sum[r], old_factor, rows.part.sum[r] * new_factor);
        float* total = rows.total.sum_v + int64_t{r} * rows.wide;
        const float* part = rows.part.sum_v + int64_t{r} * rows.wide;
        const auto add = [&]<class L>(int i, L) {
            const auto added = L::load(part + i) * L::all(new_factor);
            L::store(total + i, L::fma(L::load(total + i), L::all(old_factor), added));
        };
        int i = 0;
        for (; i + Lanes::kCount <= rows.wide; i += Lanes::kCount) add(i, Lanes());
        for (; i < rows.wide; i += 8) add(i, Eight());
    }
}

// The queries are multiplied by what all keys of the head are and by the scale of scores, so that products are scores:
// logarithms to base 2 at once, unless they are bent first.
void load_queries(const AttendItem& item, const HeadShape& shape, const Rows& rows) {
    const int64_t width = int64_t{shape.heads} * shape.head_dim;
    const float unit = is_bent(shape, rows.slope) ? shape.scale : shape.scale * kLog2E;
    const __m256 factor = _mm256_set1_ps(item.cache.k_scales[item.kv_head] * element_unit(shape.type) * unit);
    for (int r = 0; r < rows.count; ++r) {
        const int64_t from = r / rows.group * width + (item.kv_head * rows.group + r % rows.group) * rows.depth;
        float* q = rows.q + int64_t{r} * rows.padded;
        for (int i = 0; i < rows.depth; i += 8) {
            _mm256_storeu_ps(q + i, _mm256_mul_ps(load_some(item.q + from + i, rows.depth - i), factor));
        }
        rows.position[r] = item.position + r / rows.group;
        rows.begin[r] = attend_begin(shape, rows.position[r]);
        if (rows.slope != nullptr) rows.slope[r] = item.slopes[item.kv_head * rows.group + r % rows.group];
    }
}

// The sink takes its share of the row's softmax.
void add_sink(const Rows& rows, int r, float logit) {
    const float sink = logit * kLog2E;
    const float before = rows.total.largest[r];
    const float maximum = sink > before || sink != sink ? sink : before;
    const __m256 factor = power_of_two<Eight>(_mm256_set1_ps(before - maximum));
    const float own = _mm256_cvtss_f32(power_of_two<Eight>(_mm256_set1_ps(sink - maximum)));
    rows.total.sum[r] = __builtin_fmaf(rows.total.sum[r], _mm256_cvtss_f32(factor), own);
    float* total = rows.total.sum_v + int64_t{r} * rows.wide;
    for (int i = 0; i < rows.wide; i += 8) {
        _mm256_storeu_ps(total + i, _mm256_mul_ps(_mm256_loadu_ps(total + i), factor));
    }
}

void store_rows(const AttendItem& item, const HeadShape& shape, const Rows& rows) {
    const int64_t width = int64_t{shape.heads} * rows.width;
    const __m256 factor = _mm256_set1_ps(item.cache.v_scales[item.kv_head] * element_unit(shape.type));
    for (int r = 0; r < rows.count; ++r) {
        const int head = item.kv_head * rows.group + r % rows.group;
        float* out = item.out + r / rows.group * width + head * rows.width;
        if (item.sinks != nullptr) add_sink(rows, r, item.sinks[head]);
        const __m256 sum = _mm256_set1_ps(rows.total.sum[r]);
        for (int i = 0; i < rows.width; i += 8) {
            const __m256 total = _mm256_loadu_ps(rows.total.sum_v + int64_t{r} * rows.wide + i);
            store_some(out + i, rows.width - i, _mm256_mul_ps(_mm256_div_ps(total, sum), factor));
        }
    }
}

template <class Lanes>
void attend(const AttendItem& item, const HeadShape& shape) {
    const Rows rows = lay_out(item, shape);
    load_queries(item, shape, rows);
    clear(rows, rows.total);
    const int end = item.position + item.tokens;
    for (int chunk = attend_begin(shape, item.position) / kChunkTokens * kChunkTokens; chunk < end;
         chunk += kChunkTokens) {
        attend_chunk<Lanes>(item, shape, rows, chunk);
        end_chunk<Lanes>(rows);
    }
    store_rows(item, shape, rows);
}

template <class Lanes>
void attend_part(const AttendItem& item, const HeadShape& shape, int first, int count, float* partials) {
    Rows rows = lay_out(item, shape);
    load_queries(item, shape, rows);
    const int64_t partial = attend_partial(rows.count, rows.width);
    for (int i = 0; i < count; ++i) {
        rows.part = lay_out_partial(partials + i * partial, rows.count, rows.wide);
        attend_chunk<Lanes>(item, shape, rows, (first + i) * kChunkTokens);
    }
}

template <class Lanes>
void attend_join(const AttendItem& item, const HeadShape& shape, int count, float* partials) {
    Rows rows = lay_out(item, shape);
    clear(rows, rows.total);
    const int64_t partial = attend_partial(rows.count, rows.width);
    for (int i = 0; i < count; ++i) {
        rows.part = lay_out_partial(partials + i * partial, rows.count, rows.wide);
        end_chunk<Lanes>(rows);
    }
    store_rows(item, shape, rows);
}

template <class Lanes>
void fill(Kernels& table) {
    table.attend = attend<Lanes>;
    table.attend_part = attend_part<Lanes>;
    table.attend_join = attend_join<Lanes>;
}

}  // namespace
