// Vectors of float32 that attention computes with. The templates of attention.h take such a type, so that they are the
// same in every width; each gives the same bits. Everything is local to the unit that includes it.
#pragma once

#include "../kernels.h"
#include "float8.h"
#include "simd.h"

namespace {

using namespace octavo;

// Where the keys and values of a step are: in the KV cache itself, by its CacheType, or float32 copies of the elements
// in the first-level cache. From the KV cache, the same places of the next step are fetched meanwhile: blocks are small
// and anywhere, which no processor foresees.
constexpr int COPIED = CACHE_TYPES;

constexpr int source_bytes(int source) { return source == COPIED ? 4 : kCacheTypes[source].bytes; }

template <int SOURCE>
constexpr int kBytes = source_bytes(SOURCE);

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

template <int SOURCE>
constexpr Float8 kFormat = SOURCE == CACHE_E4M3 ? E4M3 : E5M2;

// Vectors of columns that are loaded together.
template <class Vector, int COUNT>
struct Columns {
    Vector column[COUNT];
};

struct Eight {
    using Vector = __m256;
    static constexpr int kCount = 8;
    static constexpr int kTileRows =
        6;  // 6 rows x 16 columns are 12 registers; 2 for the columns, 1 for a row are left
    // Of columns that a tile of N rows takes at once: eight chains at least hide the latency of an fma, and three rows
    // of float8 six, whose conversion takes longer.
    template <int N, int SOURCE>
    static constexpr int kVectors = N == 1                             ? 8
                                    : N <= (is_float8(SOURCE) ? 2 : 3) ? 4
                                                                       : 2;
    // Of these, that are loaded together: floats of 8 bits are taken apart sixteen at a time, which costs half; for
    // others, one at a time leaves more registers.
    template <int SOURCE, int J>
    static constexpr int kAtOnce = J > 1 && is_float8(SOURCE) ? 2 : 1;

    static Vector all(float value) { return _mm256_set1_ps(value); }
    static Vector load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
    static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
    static Vector largest(Vector a, Vector b) { return _mm256_max_ps(a, b); }  // b where one is NaN
    static float largest_of(Vector v) { return max_lanes(v); }
    static float sum_of(const Vector (&v)[2]) { return sum_lanes(v[0] + v[1]); }
    template <int SOURCE>
    static Vector load_as(const char* p) {
        return load_eight<SOURCE>(p);
    }
    // One vector of columns, or two: in this width, the second is always next to the first.
    template <int SOURCE, int COUNT>
    static Columns<Vector, COUNT> columns(const char* p, const char*) {
        if constexpr (COUNT == 1) {
            return {load_as<SOURCE>(p)};
        } else {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
            const __m256i halves = halves_of_float8<kFormat<SOURCE>>(bytes);
            return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
        }
    }
    // v * 2^n, where n is in the low bits of `power`.
    static Vector raise(Vector v, Vector power) {
        const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(power), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), shifted));
    }
};

}  // namespace
