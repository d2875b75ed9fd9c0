#include "experts.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

namespace octavo {

namespace {

constexpr float kLowest = -FLT_MAX;  // below every score; what was taken already is below this
constexpr float kTaken = -std::numeric_limits<float>::infinity();

// Scores to be compared: NaN, which compares with nothing, is the lowest.
void make_comparable(float* x, int n) {
    for (int i = 0; i < n; ++i) x[i] = x[i] > kLowest ? x[i] : kLowest;
}

// The index of the largest of n values, the lower one of equals; it is then taken.
int take_largest(const Kernels& kernels, float* x, int n) {
    const int largest = static_cast<int>(kernels.first_equal(x, n, kernels.maximum(x, n)));
    x[largest] = kTaken;
    return largest;
}

void softmax(const Kernels& kernels, const float* logits, int n, float* out) {
    const float top = kernels.maximum(logits, n);  // NaN when there is one: then all are
    for (int e = 0; e < n; ++e) out[e] = logits[e] - top;
    kernels.exp(out, n, out);
    double total = 0;
    for (int e = 0; e < n; ++e) total += out[e];
    const float sum = static_cast<float>(total);
    for (int e = 0; e < n; ++e) out[e] /= sum;
}

void sigmoid(const Kernels& kernels, const float* logits, int n, float* out) {
    for (int e = 0; e < n; ++e) out[e] = -logits[e];
    kernels.exp(out, n, out);
    for (int e = 0; e < n; ++e) out[e] = 1.0f / (1.0f + out[e]);
}

// Leaves the experts of the best groups; `best` holds `groups` floats.
void keep_groups(const Kernels& kernels, const Router& router, float* choice, float* best) {
    const int size = router.experts / router.groups;
    for (int g = 0; g < router.groups; ++g) {
        float first = kTaken;
        float second = kTaken;
        for (int e = g * size; e < (g + 1) * size; ++e) {
            second = std::max(second, std::min(first, choice[e]));
            first = std::max(first, choice[e]);
        }
        best[g] = router.two_largest ? first + second : first;
    }
    make_comparable(best, router.groups);
    for (int i = 0; i < router.top_groups; ++i) take_largest(kernels, best, router.groups);
    for (int e = 0; e < router.experts; ++e) {
        if (best[e / size] != kTaken) choice[e] = kLowest;
    }
}

void sparsemixer(const Kernels& kernels, const Router& router, const float* logits, float* left, float* share,
                 int32_t* chosen, float* weights) {
    const int n = router.experts;
    std::copy_n(logits, n, left);
    make_comparable(left, n);
    const bool wrong = std::isnan(kernels.maximum(logits, n));
    for (int j = 0; j < router.top_k; ++j) {
        const float top = kernels.maximum(left, n);
        const int expert = static_cast<int>(kernels.first_equal(left, n, top));
        for (int e = 0; e < n; ++e) {
            const bool far = (top - logits[e]) / std::max(std::fabs(logits[e]), top) > 2 * router.jitter;
            share[e] = far ? kTaken : left[e] - top;
        }
        kernels.exp(share, n, share);
        double total = 0;
        for (int e = 0; e < n; ++e) total += share[e];
        chosen[j] = expert;
        weights[j] = wrong ? std::numeric_limits<float>::quiet_NaN() : share[expert] / static_cast<float>(total);
        left[expert] = kTaken;
    }
}

}  // namespace

int64_t route_scratch(const Router& router) { return int64_t{2} * router.experts + router.groups; }

void route(const Kernels& kernels, const Router& router, const float* logits, const float* correction, float* scratch,
           int32_t* chosen, float* weights) {
    const int n = router.experts;
    float* scores = scratch;
    float* choice = scores + n;
    if (router.scoring == SCORE_SPARSEMIXER) {
        sparsemixer(kernels, router, logits, scores, choice, chosen, weights);
        return;
    }
    (router.scoring == SCORE_SOFTMAX ? softmax : sigmoid)(kernels, logits, n, scores);
    for (int e = 0; e < n; ++e) choice[e] = correction == nullptr ? scores[e] : scores[e] + correction[e];
    make_comparable(choice, n);
    if (router.groups > 1) keep_groups(kernels, router, choice, choice + n);
    float total = 0;
    for (int j = 0; j < router.top_k; ++j) {
        chosen[j] = take_largest(kernels, choice, n);
        weights[j] = scores[chosen[j]];
        total += weights[j];
    }
    total += router.eps;
    if (total < router.floor) total = router.floor;  // NaN stays
    for (int j = 0; j < router.top_k; ++j) {
        if (router.renormalize) weights[j] /= total;
        weights[j] *= router.scale;
    }
}

void Routes::reserve(int pairs, int experts) {
    const auto grow = [](auto& values, size_t size) { values.resize(std::max(values.size(), size)); };
    grow(chosen, pairs);
    grow(weights, pairs);
    grow(order, pairs);
    grow(place, pairs);
    grow(next, experts);
    tasks.reserve(pairs);  // none is empty
}

void Routes::group(int pairs, int experts, int task_rows) {
    std::fill_n(next.begin(), experts, 0);
    for (int p = 0; p < pairs; ++p) ++next[chosen[p]];
    tasks.clear();
    int begin = 0;
    for (int e = 0; e < experts; ++e) {
        const int rows = next[e];
        next[e] = begin;
        // Blocks of nearly equal size: one of a few rows would read the weights for little.
        const int blocks = (rows + task_rows - 1) / task_rows;
        for (int b = 0; b < blocks; ++b) {
            const int first = static_cast<int>(int64_t{rows} * b / blocks);
            const int end = static_cast<int>(int64_t{rows} * (b + 1) / blocks);
            tasks.push_back({e, begin + first, end - first});
        }
        begin += rows;
    }
    for (int p = 0; p < pairs; ++p) {
        place[p] = next[chosen[p]]++;
        order[place[p]] = p;
    }
}

}  // namespace octavo
