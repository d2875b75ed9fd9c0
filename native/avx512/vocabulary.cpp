// Scans over the scores of a row whose arithmetic gains from wider vectors (see ../avx2/vocabulary.cpp).
#include "../kernels.h"
#include "simd.h"

namespace {

using namespace octavo;

inline __m512i mix(__m512i z) {
    const auto factor = [](int n) { return _mm512_set1_epi64(static_cast<int64_t>(kNoiseFactors[n])); };
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), factor(0));
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), factor(1));
    return _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
}

// Here the exponent of ~b as a float may be one more than floor(log2 ~b), and of 0 it is minus infinity.
int64_t noisy(const float* scores, int64_t n, uint64_t key, float least, int32_t* ids) {
    const __m512i lane = _mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8);
    const __m512i noise_step = _mm512_set1_epi64(static_cast<int64_t>(kNoiseStep));
    __m512i lower =
        _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(key)), _mm512_mullo_epi64(lane, noise_step));
    __m512i upper = _mm512_add_epi64(lower, _mm512_slli_epi64(noise_step, 3));
    const __m512i step = _mm512_slli_epi64(noise_step, 4);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const int left = n - i < 16 ? static_cast<int>(n - i) : 16;
        const __m512i bits = _mm512_permutex2var_epi32(mix(lower), odd, mix(upper));
        const __m512i rest = _mm512_xor_si512(bits, _mm512_set1_epi32(-1));
        const __m512 exponent = _mm512_getexp_ps(_mm512_cvtepu32_ps(rest));
        const __m512 most = (all<__m512>(34.0f) - exponent) * all<__m512>(0.6931472f);
        const __m512 reached = load<__m512>(scores + i, left) + most;
        unsigned mask = _mm512_mask_cmp_ps_mask(first_lanes(left), reached, all<__m512>(least), _CMP_GE_OQ);
        for (; mask != 0; mask &= mask - 1) ids[count++] = static_cast<int32_t>(i + __builtin_ctz(mask));
        lower = _mm512_add_epi64(lower, step);
        upper = _mm512_add_epi64(upper, step);
    }
    return count;
}

}  // namespace

void octavo::fill_vocabulary_avx512(Kernels& table) { table.noisy = noisy; }
