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

// The lower halves of the products.
inline __m256i multiply(__m256i a, uint64_t b) {
    const __m256i low = _mm256_set1_epi64x(static_cast<int64_t>(b & 0xffffffff));
    const __m256i high = _mm256_set1_epi64x(static_cast<int64_t>(b >> 32));
    const __m256i crossed =
        _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), low), _mm256_mul_epu32(a, high));
    return _mm256_add_epi64(_mm256_mul_epu32(a, low), _mm256_slli_epi64(crossed, 32));
}

inline __m256i mix(__m256i z) {
    z = multiply(_mm256_xor_si256(z, _mm256_srli_epi64(z, 30)), kNoiseFactors[0]);
    z = multiply(_mm256_xor_si256(z, _mm256_srli_epi64(z, 27)), kNoiseFactors[1]);
    return _mm256_xor_si256(z, _mm256_srli_epi64(z, 31));
}

// The noise of upper bits b is at most ln 2 (33 - floor(log2 ~b)). The exponent of ~b / 2 as a float, which may have
// been rounded up, is no more than that logarithm.
int64_t noisy(const float* scores, int64_t n, uint64_t key, float least, int32_t* ids) {
    const auto keys = [&](uint64_t first) {
        return _mm256_setr_epi64x(
            static_cast<int64_t>(key + kNoiseStep * first), static_cast<int64_t>(key + kNoiseStep * (first + 1)),
            static_cast<int64_t>(key + kNoiseStep * (first + 2)), static_cast<int64_t>(key + kNoiseStep * (first + 3)));
    };
    __m256i lower = keys(1);
    __m256i upper = keys(5);
    const __m256i step = _mm256_set1_epi64x(static_cast<int64_t>(8 * kNoiseStep));
    const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i bits = _mm256_permutevar8x32_epi32(
            _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(mix(lower)), _mm256_castsi256_ps(mix(upper)),
                                                  _MM_SHUFFLE(3, 1, 3, 1))),
            order);
        const __m256i rest = _mm256_srli_epi32(_mm256_xor_si256(bits, _mm256_set1_epi32(-1)), 1);
        const __m256i exponent = _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(rest)), 23);
        const __m256 most = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(33 + 127), exponent)),
                                          _mm256_set1_ps(0.6931472f));
        const __m256 reached = _mm256_add_ps(load_filled(scores + i, n - i, __builtin_nanf("")), most);
        unsigned mask = _mm256_movemask_ps(_mm256_cmp_ps(reached, _mm256_set1_ps(least), _CMP_GE_OQ));
        for (; mask != 0; mask &= mask - 1) ids[count++] = static_cast<int32_t>(i + __builtin_ctz(mask));
        lower = _mm256_add_epi64(lower, step);
        upper = _mm256_add_epi64(upper, step);
    }
    return count;
}

}  // namespace

void octavo::fill_vocabulary_avx2(Kernels& table) {
    table.maximum = maximum;
    table.first_equal = first_equal;
    table.sum_exp = sum_exp;
    table.count_greater = count_greater;
    table.at_least = at_least;
    table.exp = exp_all;
    table.noisy = noisy;
}
