// Queries, keys and values into the cache (see ../avx2/store_kv.h), sixteen lanes at a time.
#include "../avx2/float8.h"
#include "../kernels.h"
#include "simd.h"

namespace {

using namespace octavo;

template <int TYPE>
inline void encode(__m512 x, uint8_t* out) {
    if constexpr (TYPE == CACHE_FLOAT32) {
        _mm512_storeu_ps(out, x);
    } else if constexpr (TYPE == CACHE_FLOAT16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    } else if constexpr (TYPE == CACHE_INT8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
    } else {
        constexpr Float8 format = TYPE == CACHE_E4M3 ? E4M3 : E5M2;
        const __m128i first = to_float8<format>(_mm512_castps512_ps256(x));
        const __m128i second = to_float8<format>(_mm512_extractf32x8_ps(x, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi64(first, second));
    }
}

}  // namespace

#include "../avx2/store_kv.h"

void octavo::fill_store_kv_avx512(Kernels& table) { fill_store_kv<__m512>(table); }
