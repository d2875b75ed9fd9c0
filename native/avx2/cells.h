// Reading the cells of quantized panels (layout: ../kinds.h). Local to the unit that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../kinds.h"

namespace {

using octavo::kKinds;

constexpr bool is_quantized(int kind) { return kind >= octavo::Q4_0; }
constexpr bool is_k_kind(int kind) { return kind >= octavo::Q4_K; }
// value = scale * q + minimum (else scale * (q - zero)).
constexpr bool has_minimum(int kind) {
    return kind == octavo::Q4_1 || kind == octavo::Q5_1 || kind == octavo::Q4_K || kind == octavo::Q5_K;
}
constexpr int zero_point(int kind) {
    return kind == octavo::Q4_0    ? 8
           : kind == octavo::MXFP4 ? 12
           : kind == octavo::Q5_0  ? 16
           : kind == octavo::Q6_K  ? 32
                                   : 0;
}
constexpr int extra_bits(int kind) {
    return kind == octavo::Q6_K ? 2 : kind == octavo::Q5_0 || kind == octavo::Q5_1 || kind == octavo::Q5_K ? 1 : 0;
}
constexpr int planes_offset(int kind) {
    return kind == octavo::Q4_1 || kind == octavo::Q5_1 ? 32 : kind == octavo::MXFP4 ? 8 : 16;
}

// Where a cell and the head of its unit are.
struct CellPlace {
    const uint8_t* head;
    const uint8_t* cell;
};

template <int KIND>
inline CellPlace place_of(const uint8_t* panel, int cell) {
    constexpr octavo::KindInfo info = kKinds[KIND];
    if constexpr (is_k_kind(KIND)) {
        const uint8_t* unit =
            panel + int64_t{cell / info.unit_cells} * (info.head_bytes + info.unit_cells * info.cell_bytes);
        return {unit, unit + info.head_bytes + cell % info.unit_cells * info.cell_bytes};
    } else {
        const uint8_t* at = panel + int64_t{cell} * info.cell_bytes;
        return {at, at};
    }
}

// Asks for the bytes 2 KB behind a cell. With few rows a product waits for memory, and the hardware, which starts anew
// at every page, asks too late: this makes one thread's stream 1.4 times as fast.
template <int KIND>
inline void fetch_ahead(const uint8_t* cell) {
#pragma GCC unroll 5
    for (int i = 0; i < kKinds[KIND].cell_bytes; i += 64) _mm_prefetch(cell + 2048 + i, _MM_HINT_T0);
}

inline __m256 load_halves(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline __m256i load_bytes_u(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

inline __m256i load_bytes_s(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

// 2^(e - 128) of eight bytes e. The two smallest are denormal.
inline __m256 half_powers(const uint8_t* p) {
    const __m256i e = load_bytes_u(p);
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(e, one)));
}

// Scale of the eight columns of a cell. Q6_K has one per half of the cell.
template <int KIND>
inline __m256 scale_of(CellPlace at, int half = 0) {
    if constexpr (KIND == octavo::MXFP4) return half_powers(at.cell);
    const __m256 d = load_halves(at.head);
    if constexpr (KIND == octavo::Q6_K) return _mm256_mul_ps(d, _mm256_cvtepi32_ps(load_bytes_s(at.cell + 8 * half)));
    if constexpr (is_k_kind(KIND)) return _mm256_mul_ps(d, _mm256_cvtepi32_ps(load_bytes_u(at.cell)));
    return d;
}

template <int KIND>
inline __m256 minimum_of(CellPlace at) {
    const __m256 m = load_halves(at.head + 16);
    if constexpr (!is_k_kind(KIND)) return m;
    const __m256 product = _mm256_mul_ps(m, _mm256_cvtepi32_ps(load_bytes_u(at.cell + 8)));
    return _mm256_xor_ps(product, _mm256_set1_ps(-0.0f));
}

// Quad `index` of a cell as unsigned bytes [column][k in quad], from which the zero point is not yet taken.
template <int KIND>
inline __m256i quad_of(const uint8_t* cell, int index) {
    const uint8_t* planes = cell + planes_offset(KIND);
    const auto load = [&](int offset) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes + offset)); };
    __m256i q = load(index % 4 * 32);
    if (index >= 4) q = _mm256_srli_epi16(q, 4);
    q = _mm256_and_si256(q, _mm256_set1_epi8(15));
    if constexpr (KIND == octavo::MXFP4) {  // codes of floats: twice their values, plus 12
        const __m128i values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        q = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), q);
    }
    if constexpr (extra_bits(KIND) == 1) {
        const __m256i bits = load(128);
        const __m256i moved = index < 4 ? _mm256_slli_epi16(bits, 4 - index) : _mm256_srli_epi16(bits, index - 4);
        q = _mm256_or_si256(q, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
    }
    if constexpr (extra_bits(KIND) == 2) {
        const __m256i bits = load(128 + index / 4 * 32);
        const int shift = 4 - index % 4 * 2;
        const __m256i moved = shift >= 0 ? _mm256_slli_epi16(bits, shift) : _mm256_srli_epi16(bits, -shift);
        q = _mm256_or_si256(q, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
    }
    return q;
}

}  // namespace
