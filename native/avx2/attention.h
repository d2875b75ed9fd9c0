// Paged attention: K and V are read from the cache only. A partial softmax starts anew at every absolute 256-token
// chunk and partials are combined in ascending order; inside, steps of 32 absolute tokens. What a row computes depends
// on its position and the cache, not on the other rows of the item, nor on which items a context was cut into (Dao et
// al., FlashAttention, 2022, for the running softmax; split contexts as in Dao et al., Flash-Decoding, 2023).
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
    rows.q = rows.score + int64_t{kStep} * rows.count;
    rows.factor = rows.q + int64_t{rows.count} * rows.padded;
    rows.slope = item.slopes == nullptr ? nullptr : rows.factor + rows.count;
    rows.position = reinterpret_cast<int*>(rows.factor + 2 * rows.count);
    rows.begin = rows.position + rows.count;
    float* partials = rows.factor + 4 * rows.count;
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

// Elements of K and V of tokens [low, high) of the step at `start` to float32. Only blocks with a token in the range
// are touched: entries of the table before it may be stale.
template <int TYPE>
void copy_step(const AttendItem& item, const HeadShape& shape, int start, int low, int high, const Rows& rows) {
    constexpr int bytes = kBytes<TYPE>;
    const int size = shape.block_size;
    const int run = at_most(kStep, size);
    for (int first = start; first < start + kStep; first += run) {
        if (first >= high || first + run <= low) continue;  // the keys left there are those of no row
        const Cached at = find(item, shape, first);
        float* k = rows.k + (first - start);
        for (int i = 0; i < rows.depth; ++i, k += kStep) {
            const char* keys = at.keys + (int64_t{i} * size + at.offset) * bytes;
            for (int t = 0; t < run; t += 8) _mm256_storeu_ps(k + t, load_eight<TYPE>(keys + t * bytes));
        }
        for (int t = at_least(first, low); t < at_most(first + run, high); ++t) {
            float* v = rows.v + (t - start) * rows.wide;
            const char* values = at.values + int64_t{at.offset + t - first} * rows.depth * bytes;
            int i = 0;
            for (; i + 8 <= rows.depth; i += 8) _mm256_storeu_ps(v + i, load_eight<TYPE>(values + i * bytes));
            if (i < rows.depth) {
                char rest[8 * bytes] = {};
                memcpy(rest, values + i * bytes, (rows.depth - i) * bytes);
                _mm256_storeu_ps(v + i, load_eight<TYPE>(rest));
            }
        }
    }
}

inline void transpose(__m256 (&rows)[8]) {
    __m256 pairs[8];
    for (int i = 0; i < 4; ++i) {
        pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    __m256 fours[8];
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
            const __m256 a = pairs[4 * i + j];
            const __m256 b = pairs[4 * i + 2 + j];
            fours[4 * i + 2 * j] = _mm256_shuffle_ps(a, b, 0x44);
            fours[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a, b, 0xee);
        }
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
        rows[4 + i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
    }
}

// The same where values are the first elements of the keys.
template <int TYPE>
void copy_latent(const AttendItem& item, const HeadShape& shape, int start, int low, int high, const Rows& rows) {
    const int size = shape.block_size;
    const int run = at_most(kStep, size);
    for (int first = start; first < start + kStep; first += run) {
        if (first >= high || first + run <= low) continue;
        const Cached at = find(item, shape, first);
        for (int i = 0; i < rows.depth; i += 8) {
            for (int t = 0; t < run; t += 8) {
                __m256 keys[8];
                for (int j = 0; j < 8; ++j) {
                    keys[j] = _mm256_setzero_ps();
                    if (i + j >= rows.depth) continue;
                    keys[j] = load_eight<TYPE>(at.keys + (int64_t{i + j} * size + at.offset + t) * kBytes<TYPE>);
                    _mm256_storeu_ps(rows.k + int64_t{i + j} * kStep + (first - start + t), keys[j]);
                }
                if (i >= rows.width) continue;
                for (int j = rows.width - i; j < 8; ++j) keys[j] = _mm256_setzero_ps();
                transpose(keys);
                float* v = rows.v + int64_t{first - start + t} * rows.wide + i;
                for (int j = 0; j < 8; ++j) _mm256_storeu_ps(v + int64_t{j} * rows.wide, keys[j]);
            }
        }
    }
}

StepData copied(const Rows& rows) {
    const char* k = reinterpret_cast<const char*>(rows.k);
    const char* v = reinterpret_cast<const char*>(rows.v);
    const int64_t value_bytes = sizeof(float) * rows.wide;
    const char* const later_k = k + 16 * sizeof(float);
    const char* const later_v = v + 16 * value_bytes;
    return {{k, later_k}, {v, later_v}, {k, later_k}, {v, later_v}, sizeof(float) * kStep, value_bytes};
}

// First token of half a step. For a half that no row sees, and whose block need not exist, stands the other.
int half_begin(int start, int half, int low, int high) {
    return at_most(at_least(start + 16 * half, low / 16 * 16), (high - 1) / 16 * 16);
}

StepScales scales_of(const AttendItem& item, const HeadShape& shape, int start, int low, int high) {
    const int64_t elements = int64_t{shape.head_dim} * shape.block_size * kCacheTypes[shape.type].bytes;
    StepScales scales;
    for (int half = 0; half < 2; ++half) {
        const Cached at = find(item, shape, half_begin(start, half, low, high));
        const int64_t from = elements + at.offset * sizeof(float);
        memcpy(scales.k + 16 * half, at.keys + from, 16 * sizeof(float));
        memcpy(scales.v + 16 * half, (shape.latent > 0 ? at.keys : at.values) + from, 16 * sizeof(float));
        const int later = start + kStep + 16 * half;
        if (later >= item.position + item.tokens) continue;
        const Cached next = find(item, shape, later);
        const int64_t ahead = elements + next.offset * sizeof(float);
        _mm_prefetch(next.keys + ahead, _MM_HINT_T0);
        if (shape.latent == 0) _mm_prefetch(next.values + ahead, _MM_HINT_T0);
    }
    return scales;
}

// Asks for the first lines of what few rows read three steps later. The rest of a block follows by itself: memory that
// is read line after line is fetched ahead, but only from its second line on and never into another block.
void begin_blocks(const AttendItem& item, const HeadShape& shape, int start) {
    constexpr int kLines = 4;
    const int end = at_most(start + 4 * kStep, item.position + item.tokens);
    for (int token = start + 3 * kStep; token < end; token += 16) {
        const Cached at = find(item, shape, token);
        for (int i = 0; i < kLines * 64; i += 64) {
            _mm_prefetch(at.keys + i, _MM_HINT_T1);
            _mm_prefetch(at.values + i, _MM_HINT_T1);
        }
    }
}

StepData in_place(const AttendItem& item, const HeadShape& shape, int start, int low, int high) {
    const int64_t element = kCacheTypes[shape.type].bytes;
    StepData data;
    data.key_bytes = shape.block_size * element;
    data.value_bytes = shape.head_dim * element;
    const int end = item.position + item.tokens;
    for (int half = 0; half < 2; ++half) {
        const int token = half_begin(start, half, low, high);
        const int later = start + kStep + 16 * half;
        const Cached at = find(item, shape, token);
        const Cached next = later < end ? find(item, shape, later) : at;
        data.k[half] = at.keys + at.offset * element;
        data.v[half] = at.values + at.offset * data.value_bytes;
        data.next_k[half] = next.keys + next.offset * element;
        data.next_v[half] = next.values + next.offset * data.value_bytes;
    }
    return data;
}

using CopyFn = void (*)(const AttendItem&, const HeadShape&, int start, int low, int high, const Rows&);

struct OfType {
    const TileFns* tiles;
    CopyFn copy;
    CopyFn copy_latent;
};

template <class Lanes, int TYPE>
constexpr OfType kOneType = {kTiles<Lanes, TYPE>, copy_step<TYPE>, copy_latent<TYPE>};

template <class L>
constexpr OfType kOfType[CACHE_TYPES] = {kOneType<L, CACHE_FLOAT32>, kOneType<L, CACHE_FLOAT16>,
                                         kOneType<L, CACHE_E4M3>, kOneType<L, CACHE_E5M2>, kOneType<L, CACHE_INT8>};

// Tokens [low, high) of the step at `start`. All rows take the keys and then all take the values, so that these stay in
// the first-level cache.
template <class Lanes>
void step(const AttendItem& item, const HeadShape& shape, const Rows& rows, int start, int low, int high) {
    const bool copy = rows.count > kInPlaceRows || rows.depth % 8 != 0 || shape.latent > 0;
    const OfType& of = kOfType<Lanes>[shape.type];
    const TileFns* fns = copy ? kTiles<Lanes, COPIED> : of.tiles;
    if (copy) (shape.latent > 0 ? of.copy_latent : of.copy)(item, shape, start, low, high, rows);
    StepScales own;
    const StepScales* scales = nullptr;
    if (kCacheTypes[shape.type].scale_bytes > 0) {
        own = scales_of(item, shape, start, low, high);
        scales = &own;
    }
    if (!copy) begin_blocks(item, shape, start);
    const StepData data = copy ? copied(rows) : in_place(item, shape, start, low, high);
    const int tiles = (rows.count + Lanes::kTileRows - 1) / Lanes::kTileRows;
    const auto each_tile = [&](const auto& work) {
        for (int tile = 0, row = 0; tile < tiles; ++tile) {
            const int count = (rows.count - row + tiles - tile - 1) / (tiles - tile);
            Seen seen[Lanes::kTileRows];
            Seen all = {kStep, 0};
            for (int r = 0; r < count; ++r) {
                seen[r] = {at_least(low, rows.begin[row + r]) - start,
                           at_most(high, rows.position[row + r] + 1) - start};
                if (seen[r].first >= seen[r].end) continue;
                all = {at_most(all.first, seen[r].first), at_least(all.end, seen[r].end)};
            }
            if (all.first < all.end) work(row, count, seen, all);
            row += count;
        }
    };
    each_tile([&](int row, int count, const Seen* seen, Seen all) {
        fns[count - 1].dot(rows, data, row, all.first, all.end);
        soften<Lanes>(rows, row, count, start, seen, shape, scales);
    });
    each_tile([&](int row, int count, const Seen* seen, Seen) {
        fns[count - 1].add(rows, data, row, seen, rows.factor + row);
    });
}

// Adds the chunk's partial of each row that saw a token of it to the row's total.
void end_chunk(const Rows& rows) {
    for (int r = 0; r < rows.count; ++r) {
        if (rows.part.largest[r] == kMinusInfinity && rows.part.sum[r] == 0) continue;
        const float before = rows.total.largest[r];
        const float now = rows.part.largest[r];
        const float maximum = now > before || now != now ? now : before;
        const float old_factor =
            before == kMinusInfinity ? 0.0f : _mm256_cvtss_f32(exp_down<Eight>(_mm256_set1_ps(before - maximum)));
        const float new_factor = _mm256_cvtss_f32(exp_down<Eight>(_mm256_set1_ps(now - maximum)));
        rows.total.largest[r] = maximum;
        rows.total.sum[r] = __builtin_fmaf(rows.total.sum[r], old_factor, rows.part.sum[r] * new_factor);
        float* total = rows.total.sum_v + int64_t{r} * rows.wide;
        const float* part = rows.part.sum_v + int64_t{r} * rows.wide;
        for (int i = 0; i < rows.wide; i += 8) {
            const __m256 added = _mm256_mul_ps(_mm256_loadu_ps(part + i), _mm256_set1_ps(new_factor));
            _mm256_storeu_ps(total + i, _mm256_fmadd_ps(_mm256_loadu_ps(total + i), _mm256_set1_ps(old_factor), added));
        }
    }
}

// Attention over the tokens [begin, end) of one chunk, into rows.part.
template <class Lanes>
void attend_chunk(const AttendItem& item, const HeadShape& shape, const Rows& rows, int chunk) {
    const int end = at_most(item.position + item.tokens, chunk + kChunkTokens);
    const int begin = attend_begin(shape, item.position);
    clear(rows, rows.part);
    for (int start = chunk; start < end; start += kStep) {
        const int low = at_least(start, begin);
        const int high = at_most(start + kStep, end);
        if (low < high) step<Lanes>(item, shape, rows, start, low, high);
    }
}

// The queries are multiplied by what all keys of the head are, so that scores are those of whole keys.
void load_queries(const AttendItem& item, const HeadShape& shape, const Rows& rows) {
    const int64_t width = int64_t{shape.heads} * shape.head_dim;
    const __m256 factor = _mm256_set1_ps(item.cache.k_scales[item.kv_head] * element_unit(shape.type));
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
void add_sink(const Rows& rows, int r, float sink) {
    const float before = rows.total.largest[r];
    const float maximum = sink > before || sink != sink ? sink : before;
    const __m256 factor = exp_down<Eight>(_mm256_set1_ps(before - maximum));
    const float own = _mm256_cvtss_f32(exp_down<Eight>(_mm256_set1_ps(sink - maximum)));
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
        end_chunk(rows);
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

void attend_join(const AttendItem& item, const HeadShape& shape, int count, float* partials) {
    Rows rows = lay_out(item, shape);
    clear(rows, rows.total);
    const int64_t partial = attend_partial(rows.count, rows.width);
    for (int i = 0; i < count; ++i) {
        rows.part = lay_out_partial(partials + i * partial, rows.count, rows.wide);
        end_chunk(rows);
    }
    store_rows(item, shape, rows);
}

template <class Lanes>
void fill(Kernels& table) {
    table.attend = attend<Lanes>;
    table.attend_part = attend_part<Lanes>;
    table.attend_join = attend_join;
}

}  // namespace
