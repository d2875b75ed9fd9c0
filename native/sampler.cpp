#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace octavo {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * kNoiseFactors[0];
    z = (z ^ (z >> 27)) * kNoiseFactors[1];
    return z ^ (z >> 31);
}

float gumbel(uint32_t bits) {
    const double u = (bits + 0.5) / 4294967296.0;
    return static_cast<float>(-std::log(-std::log(u)));
}

// No less than gumbel(bits): with v = 1 - u, g = -log(-log(1 - v)) <= -log v, and v >= 2^-(leading zeros + 1). One more
// ln 2 covers the half of (bits + 0.5) and rounding.
float gumbel_bound(uint32_t bits) { return 0.6931472f * static_cast<float>(std::countl_zero(~bits) + 2); }

struct Row {
    const Sampling& s;
    int r;
};

// The logits after penalties, bias and allow list, in `out`.
void adjust(const float* logits, int vocab, const Row& row, float* out) {
    const Sampling& s = row.s;
    const int r = row.r;
    std::memcpy(out, logits, sizeof(float) * vocab);
    for (int i = s.seen_ptr[r]; i < s.seen_ptr[r + 1]; ++i) {
        float value = out[s.seen_ids[i]];
        value = value > 0 ? value / s.repetition[r] : value * s.repetition[r];
        if (s.seen_counts[i] > 0) {
            const float repeated = s.frequency[r] * static_cast<float>(s.seen_counts[i]);
            value = value - repeated - s.presence[r];
        }
        out[s.seen_ids[i]] = value;
    }
    for (int i = s.bias_ptr[r]; i < s.bias_ptr[r + 1]; ++i) out[s.bias_ids[i]] += s.bias_values[i];
}

// Bans what is not in the row's allow list, when it has one. `kept` has room for the list.
void allow_only(const Row& row, int vocab, float* scores, float* kept) {
    const int32_t* ids = row.s.allow_ids + row.s.allow_ptr[row.r];
    const int count = row.s.allow_ptr[row.r + 1] - row.s.allow_ptr[row.r];
    if (count == 0) return;
    for (int i = 0; i < count; ++i) kept[i] = scores[ids[i]];
    std::fill_n(scores, vocab, -kInfinity);
    for (int i = 0; i < count; ++i) scores[ids[i]] = kept[i];
}

bool touched(const Row& row) {
    const Sampling& s = row.s;
    const auto any = [&](const int32_t* ptr) { return ptr[row.r + 1] > ptr[row.r]; };
    return any(s.seen_ptr) || any(s.bias_ptr) || any(s.allow_ptr);
}

// The id with the largest score + noise among `count` ids and `start`.
int draw_noise(const float* scores, const int32_t* ids, int64_t count, uint64_t key, int start) {
    int best = start;
    float best_value = scores[start] + gumbel(noise_bits(key, start));
    for (int64_t i = 0; i < count; ++i) {
        const int id = ids[i];
        const uint32_t bits = noise_bits(key, id);
        if (scores[id] + gumbel_bound(bits) < best_value) continue;
        const float value = scores[id] + gumbel(bits);
        if (value > best_value || (value == best_value && id < best)) {
            best = id;
            best_value = value;
        }
    }
    return best;
}

// Probability descending, id ascending.
struct Before {
    const float* scores;
    bool operator()(int32_t a, int32_t b) const { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); }
};

// The shortest front part of `count` ids, in the order of Before, that brings `reached` up to `target`, in front of
// `ids`; returns how many. Halves without the end of it are not sorted.
int64_t reach(const float* scores, const float* mass, int32_t* ids, int64_t count, double reached, double target) {
    constexpr int64_t kFew = 128;
    const Before before{scores};
    int64_t done = 0;
    if (!std::is_sorted(ids, ids + count, before)) {
        int64_t end = count;
        while (end - done > kFew) {
            const int64_t middle = done + (end - done) / 2;
            std::nth_element(ids + done, ids + middle, ids + end, before);
            double part = 0;
            for (int64_t i = done; i < middle; ++i) part += mass[ids[i]];
            if (reached + part >= target) {
                end = middle;
            } else {
                reached += part;
                done = middle;
            }
        }
        std::sort(ids + done, ids + end, before);
        count = end;
    }
    for (; done < count; ++done) {
        reached += mass[ids[done]];
        if (reached >= target) return done + 1;
    }
    return count;
}

// Top-p of `count` ids, in front of `ids`; returns how many. Masses are added up in buckets of 1/64 of a logit, so that
// only the ids of the one bucket where the sum is reached have to be put in order.
int64_t cut_mass(float top, int32_t* ids, int64_t count, float top_p, SamplerScratch& scratch) {
    constexpr int kBuckets = 2048;
    const float* scores = scratch.scores.data();
    const float* mass = scratch.mass.data();
    double total = 0;
    for (int64_t i = 0; i < count; ++i) total += mass[ids[i]];
    const double target = double{top_p} * total;
    const auto bucket_of = [&](int32_t id) {
        return static_cast<int>(std::min((top - scores[id]) * 64, static_cast<float>(kBuckets - 1)));
    };
    double buckets[kBuckets] = {};
    for (int64_t i = 0; i < count; ++i) buckets[bucket_of(ids[i])] += mass[ids[i]];
    double reached = 0;
    int edge = 0;
    while (edge < kBuckets - 1 && reached + buckets[edge] < target) reached += buckets[edge++];
    int64_t kept = 0;
    int64_t at_edge = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int bucket = bucket_of(ids[i]);
        if (bucket < edge) ids[kept++] = ids[i];
        if (bucket == edge) scratch.edge[at_edge++] = ids[i];
    }
    at_edge = reach(scores, mass, scratch.edge.data(), at_edge, reached, target);
    std::copy_n(scratch.edge.data(), at_edge, ids + kept);
    return kept + at_edge;
}

// A value that at least `k` of the scores reach: the k-th largest maximum of blocks of scores. `maxima` is scratch.
float reached_by(const Kernels& kernels, const float* scores, int vocab, int k, float* maxima) {
    constexpr int kBlock = 64;
    const int blocks = (vocab + kBlock - 1) / kBlock;
    if (k > blocks) return -std::numeric_limits<float>::max();
    for (int b = 0; b < blocks; ++b) {
        maxima[b] = kernels.maximum(scores + b * kBlock, std::min(kBlock, vocab - b * kBlock));
    }
    std::nth_element(maxima, maxima + k - 1, maxima + blocks, std::greater<float>());
    return std::max(maxima[k - 1], -std::numeric_limits<float>::max());
}

int sample(const Kernels& kernels, int vocab, const Row& row, int best, SamplerScratch& scratch) {
    const Sampling& s = row.s;
    const int r = row.r;
    float* scores = scratch.scores.data();
    for (int i = 0; i < vocab; ++i) scores[i] /= s.temperature[r];
    const float top = scores[best];
    if (!std::isfinite(top)) return best;  // so small a temperature that it is greedy
    const uint64_t key = noise_key(s.seed[r], s.choice[r], s.position[r]);
    const bool whole = s.min_p[r] <= 0 && s.top_k[r] == 0 && s.top_p[r] >= 1;
    int32_t* ids = scratch.ids.data();
    if (whole) {
        const float least = top + gumbel(noise_bits(key, best));
        return draw_noise(scores, ids, kernels.noisy(scores, vocab, key, least, ids), key, best);
    }
    float* mass = scratch.mass.data();
    const float slack = 0.001f + 1e-6f * std::fabs(top);  // for rounding; the exact rule follows
    float floor = s.min_p[r] > 0 ? top + std::log(s.min_p[r]) - slack : -std::numeric_limits<float>::max();
    // Both rules keep a front part of one order, so neither needs to look below the other's bound.
    if (s.top_k[r] > 0) floor = std::max(floor, reached_by(kernels, scores, vocab, s.top_k[r], mass));
    int64_t count = kernels.at_least(scores, vocab, floor, ids);
    if (s.min_p[r] > 0) {
        const auto improbable = [&](int32_t id) {
            return std::exp(static_cast<double>(scores[id]) - top) < static_cast<double>(s.min_p[r]);
        };
        count = std::remove_if(ids, ids + count, improbable) - ids;
    }
    if (s.top_k[r] > 0 && s.top_k[r] < count) {
        std::nth_element(ids, ids + s.top_k[r] - 1, ids + count, Before{scores});
        count = s.top_k[r];
    }
    if (s.top_p[r] < 1) {
        for (int i = 0; i < vocab; ++i) mass[i] = scores[i] - top;
        kernels.exp(mass, vocab, mass);
        count = cut_mass(top, ids, count, s.top_p[r], scratch);
    }
    return draw_noise(scores, ids, count, key, best);
}

// The id for a row; -1 when it cannot be drawn.
int choose(const Kernels& kernels, const float* logits, int vocab, const Row& row, SamplerScratch& scratch) {
    const Sampling& s = row.s;
    float top = kernels.maximum(logits, vocab);
    if (!std::isfinite(top)) return -1;
    if (s.target[row.r] >= 0) return s.target[row.r];
    const bool greedy = s.temperature[row.r] == 0;
    float* scores = scratch.scores.data();
    if (touched(row)) {
        adjust(logits, vocab, row, scores);
        allow_only(row, vocab, scores, scratch.mass.data());
        top = kernels.maximum(scores, vocab);
        if (!std::isfinite(top)) return -1;
    } else if (greedy) {
        return static_cast<int>(kernels.first_equal(logits, vocab, top));
    } else {
        std::memcpy(scores, logits, sizeof(float) * vocab);
    }
    const int best = static_cast<int>(kernels.first_equal(scores, vocab, top));
    return greedy ? best : sample(kernels, vocab, row, best, scratch);
}

// Rank of `token` by logit, ties by lower id; the most probable is 1.
int32_t rank_of(const Kernels& kernels, const float* logits, int vocab, int token) {
    int64_t rank = 1 + kernels.count_greater(logits, vocab, logits[token]);
    for (int64_t at = 0; at < token; ++at) {
        at += kernels.first_equal(logits + at, token - at, logits[token]);
        if (at < token) ++rank;
    }
    return static_cast<int32_t>(rank);
}

void report_top(const float* logits, int vocab, int wanted, double norm, int row, int32_t* ids, const Drawn& drawn) {
    for (int i = 0; i < vocab; ++i) ids[i] = i;
    std::partial_sort(ids, ids + wanted, ids + vocab,
                      [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
    for (int i = 0; i < wanted; ++i) {
        drawn.top_ids[row * drawn.width + i] = ids[i];
        drawn.top_logprobs[row * drawn.width + i] = static_cast<float>(logits[ids[i]] - norm);
    }
}

// Logprobs by the raw logits: of `token` with its rank, of the most probable ids, of the ids asked for.
void report(const Kernels& kernels, const float* logits, int vocab, int token, const Row& row, SamplerScratch& scratch,
            const Drawn& drawn) {
    const Sampling& s = row.s;
    const int r = row.r;
    const bool asked = s.report_ptr != nullptr && s.report_ptr[r + 1] > s.report_ptr[r];
    if (s.logprobs[r] < 0 && !asked) return;
    const float top = kernels.maximum(logits, vocab);
    const double norm = top + std::log(kernels.sum_exp(logits, vocab, top));
    if (asked) {
        for (int i = s.report_ptr[r]; i < s.report_ptr[r + 1]; ++i) {
            drawn.report_logprobs[i] = static_cast<float>(logits[s.report_ids[i]] - norm);
        }
    }
    if (s.logprobs[r] < 0) return;
    drawn.logprob[r] = static_cast<float>(logits[token] - norm);
    drawn.rank[r] = rank_of(kernels, logits, vocab, token);
    if (s.logprobs[r] > 0)
        report_top(logits, vocab, std::min<int>(s.logprobs[r], vocab), norm, r, scratch.ids.data(), drawn);
}

}  // namespace

uint64_t noise_key(uint64_t seed, int64_t choice, int64_t position) {
    return mix(mix(seed + kNoiseStep * (static_cast<uint64_t>(choice) + 1)) ^ static_cast<uint64_t>(position));
}

uint32_t noise_bits(uint64_t key, uint64_t id) { return static_cast<uint32_t>(mix(key + kNoiseStep * (id + 1)) >> 32); }

void draw_row(const Kernels& kernels, const float* logits, int vocab, const Sampling& sampling, int r,
              SamplerScratch& scratch, const Drawn& drawn) {
    const Row row{sampling, r};
    const int token = choose(kernels, logits, vocab, row, scratch);
    drawn.token[r] = token;
    drawn.ok[r] = token >= 0;
    if (token >= 0) report(kernels, logits, vocab, token, row, scratch, drawn);
}

}  // namespace octavo
