// Scans over the logits of a row.
#include "../kernels.h"
#include "elementary.h"

namespace {

using namespace octavo;

constexpr int64_t kTile = 1024;

inline int count_of(int64_t left) { return left < 8 ? static_cast<int>(left) : 8; }

// Values at p, and `fill` beyond n.
inline __m256 load_filled(const float* p, int64_t left, float fill) {
    if (left >= 8) return _mm256_loadu_ps(p);
    const __m256i mask = tail_mask(static_cast<int>(left));
    return _mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
}

float maximum(const float* x, int64_t n) {
    __m256 largest = _mm256_set1_ps(-__builtin_inff());
    __m256 unordered = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 v = load_filled(x + i, n - i, -__builtin_inff());
        largest = _mm256_max_ps(v, largest);
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
    return _mm256_movemask_ps(unordered) != 0 ? __builtin_nanf("") : max_lanes(largest);
}

int64_t first_equal(const float* x, int64_t n, float value) {
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 same =
            _mm256_cmp_ps(load_filled(x + i, n - i, __builtin_nanf("")), _mm256_set1_ps(value), _CMP_EQ_OQ);
        const int mask = _mm256_movemask_ps(same);
        if (mask != 0) return i + __builtin_ctz(mask);
    }
    return n;
}

double sum_exp(const float* x, int64_t n, float top) {
    double total = 0;
    for (int64_t tile = 0; tile < n; tile += kTile) {
        const int64_t end = tile + kTile < n ? tile + kTile : n;
        __m256 sum = _mm256_setzero_ps();
        for (int64_t i = tile; i < end; i += 8) {
            const __m256 v = load_filled(x + i, end - i, -__builtin_inff());
            sum = _mm256_add_ps(sum, exp_ps(_mm256_sub_ps(v, _mm256_set1_ps(top))));
        }
        total += sum_lanes(sum);
    }
    return total;
}

int64_t count_greater(const float* x, int64_t n, float value) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 v = load_filled(x + i, n - i, -__builtin_inff());
        count += __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(value), _CMP_GT_OQ)));
    }
    return count;
}

int64_t at_least(const float* x, int64_t n, float value, int32_t* ids) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 v = load_filled(x + i, n - i, __builtin_nanf(""));
        unsigned mask = _mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(value), _CMP_GE_OQ));
        for (; mask != 0; mask &= mask - 1) ids[count++] = static_cast<int32_t>(i + __builtin_ctz(mask));
    }
    return count;
}

void exp_all(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 8) store_some(out + i, count_of(n - i), exp_ps(load_some(x + i, count_of(n - i))));
}

}  // namespace

void octavo::fill_vocabulary_avx2(Kernels& table) {
    table.maximum = maximum;
    table.first_equal = first_equal;
    table.sum_exp = sum_exp;
    table.count_greater = count_greater;
    table.at_least = at_least;
    table.exp = exp_all;
}
