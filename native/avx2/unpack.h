// Cells of panels as their exact float32 values. Local to the unit that includes it.
#pragma once

#include "cells.h"
#include "float8.h"

namespace {

using namespace octavo;

// The normal float and the 4-bit float of bitsandbytes, as octavo/quant/codebook.py has them.
alignas(32) constexpr float kNormalFloat[16] = {-1.0f,
                                                -0.6961928009986877f,
                                                -0.5250730514526367f,
                                                -0.39491748809814453f,
                                                -0.28444138169288635f,
                                                -0.18477343022823334f,
                                                -0.09105003625154495f,
                                                0.0f,
                                                0.07958029955625534f,
                                                0.16093020141124725f,
                                                0.24611230194568634f,
                                                0.33791524171829224f,
                                                0.44070982933044434f,
                                                0.5626170039176941f,
                                                0.7229568362236023f,
                                                1.0f};
alignas(32) constexpr float kFloat4[16] = {0.0f, 1.0f / 192,  2.0f / 3,  1.0f,  1.0f / 3,  0.5f,  1.0f / 6,  0.25f,
                                           0.0f, -1.0f / 192, -2.0f / 3, -1.0f, -1.0f / 3, -0.5f, -1.0f / 6, -0.25f};

inline __m256 look_up(const float* values, __m256i codes) {
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(values), codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(values + 8), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

template <int KIND>
inline void unpack_cell(const uint8_t* panel, int cell, float* out, int64_t stride) {
    constexpr KindInfo info = kKinds[KIND];
    const CellPlace at = place_of<KIND>(panel, cell);
    const uint8_t* planes = at.cell + info.meta_bytes;
    __m256 scale[2], minimum[2] = {};
    for (int half = 0; half < (has_halves(KIND) ? 2 : 1); ++half) {
        scale[half] = scale_of<KIND>(at, half);
        if constexpr (has_minimum(KIND)) minimum[half] = minimum_of<KIND>(at, half);
    }
    const auto store = [&](int k, __m256 number) {
        const int half = has_halves(KIND) ? k / 16 : 0;
        __m256 value = _mm256_mul_ps(number, scale[half]);
        if constexpr (has_minimum(KIND)) value = _mm256_add_ps(value, minimum[half]);
        _mm256_storeu_ps(out + k * stride, value);
    };
    if constexpr (info.planes == PAIRS) {
        for (int pair = 0; pair < 16; ++pair) {
            const __m256i v =
                _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(planes + pair * 16)));
            store(2 * pair, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 16), 16)));
            store(2 * pair + 1, _mm256_cvtepi32_ps(_mm256_srai_epi32(v, 16)));
        }
    } else if constexpr (info.planes == BYTES) {
        constexpr Float8 format = KIND == F8_E4M3_32 ? E4M3 : E5M2;
        const __m256 unit = _mm256_set1_ps(kFloat8Unit<format>);
        for (int k = 0; k < kCell; ++k) store(k, _mm256_mul_ps(from_float8<format>(planes + 8 * k), unit));
    } else {
        const __m256i zero = _mm256_set1_epi32(zero_point(KIND));
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; ++quad) {
            const __m256i q = quad_of<KIND>(at.cell, quad);
            for (int j = 0; j < 4; ++j) {
                __m256i v = _mm256_and_si256(_mm256_srl_epi32(q, _mm_cvtsi32_si128(8 * j)), _mm256_set1_epi32(255));
                if constexpr (KIND == NF4_32 || KIND == FP4_32) {
                    store(4 * quad + j, look_up(KIND == NF4_32 ? kNormalFloat : kFloat4, v));
                } else {
                    if constexpr (zero_point(KIND) != 0) v = _mm256_sub_epi32(v, zero);
                    store(4 * quad + j, _mm256_cvtepi32_ps(v));
                }
            }
        }
    }
}

// Cells [first, first + cells) of a panel to out[k * stride + column].
template <int KIND>
void unpack(const uint8_t* panel, int first, int cells, float* out, int64_t stride) {
    for (int c = 0; c < cells; ++c, out += kCell * stride) {
        if constexpr (is_quantized(KIND)) {
            unpack_cell<KIND>(panel, first + c, out, stride);
        } else {
            const uint8_t* at = panel + int64_t{first + c} * kKinds[KIND].cell_bytes();
            for (int k = 0; k < kCell; k += 2) {
                __m256 values[2];
                if constexpr (KIND == BF16) {
                    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + k * 16));
                    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
                    values[0] = _mm256_castsi256_ps(_mm256_and_si256(pairs, upper));
                    values[1] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
                } else {
                    for (int i = 0; i < 2; ++i) {
                        values[i] = KIND == F32 ? load_floats(at + (k + i) * 32) : load_halves(at + (k + i) * 16);
                    }
                }
                for (int i = 0; i < 2; ++i) _mm256_storeu_ps(out + (k + i) * stride, values[i]);
            }
        }
    }
}

}  // namespace
