// Reading the cells of quantized panels (layout: ../kinds.h). Local to the unit that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../kernels.h"

namespace {

using octavo::kKinds;

constexpr bool is_quantized(int kind) { return kKinds[kind].scales != octavo::NO_SCALES; }
// Values are integers times scales (and minima); the rest are floats that only the float path reads.
constexpr bool has_integers(int kind) {
    return is_quantized(kind) && kKinds[kind].planes != octavo::BYTES && kind != octavo::NF4_32 &&
           kind != octavo::FP4_32;
}
// Integers of at most 6 bits, which products with int8 activations take.
constexpr bool has_small_integers(int kind) {
    return has_integers(kind) && kKinds[kind].planes != octavo::PAIRS && kind != octavo::IQ4_NL &&
           kind != octavo::IQ4_XS && kind != octavo::IQ1_CODES && kind != octavo::IQ2_CODES &&
           kind != octavo::IQ3_CODES;
}
// value = scale * q + minimum (else scale * (q - zero)).
constexpr bool has_minimum(int kind) {
    const octavo::Scales scales = kKinds[kind].scales;
    return scales == octavo::HALF_MIN || scales == octavo::FLOAT_MIN || scales == octavo::SUB8_MIN ||
           scales == octavo::SUB4_MIN_2;
}
// The halves of a cell (16 elements of K) have scales of their own.
constexpr bool has_halves(int kind) {
    const octavo::Scales scales = kKinds[kind].scales;
    return scales == octavo::FLOAT_2 || scales == octavo::SUB8_2 || scales == octavo::SUB4_MIN_2;
}
// These scales are integers, and multiply one of the unit.
constexpr bool has_integer_halves(int kind) {
    return kKinds[kind].scales == octavo::SUB8_2 || kKinds[kind].scales == octavo::SUB4_MIN_2;
}
constexpr int zero_point(int kind) {
    switch (kind) {
        case octavo::Q3_K:
            return 4;
        case octavo::Q4_0:
            return 8;
        case octavo::IQ1_CODES:
            return 9;
        case octavo::MXFP4:
        case octavo::E2M1_16:
            return 12;
        case octavo::Q5_0:
            return 16;
        case octavo::Q6_K:
            return 32;
        case octavo::IQ2_CODES:
            return 43;
        case octavo::IQ3_CODES:
            return 62;
        case octavo::IQ4_NL:
        case octavo::IQ4_XS:
            return 128;
        default:
            return 0;
    }
}

// The activations of one group from some row on. By value: stores of results could alias those behind a reference.
struct Group8 {
    const int8_t* q;
    const float* scale;
    const float* sum;
    const int32_t* halves;

    Group8(const octavo::Act8& x, int64_t index)
        : q(x.q + index * octavo::kCell), scale(x.scale + index), sum(x.sum + index), halves(x.halves + index) {}
};

// Where a cell and the head of its unit are.
struct CellPlace {
    const uint8_t* head;
    const uint8_t* cell;
};

template <int KIND>
inline CellPlace place_of(const uint8_t* panel, int cell) {
    constexpr octavo::KindInfo info = kKinds[KIND];
    if constexpr (info.unit_cells > 1) {
        const uint8_t* unit = panel + int64_t{cell / info.unit_cells} * info.unit_bytes();
        return {unit, unit + info.head_bytes + cell % info.unit_cells * info.cell_bytes()};
    } else {
        const uint8_t* at = panel + int64_t{cell} * info.cell_bytes();
        return {at, at};
    }
}

// Asks for the bytes `ahead` of a cell. With few rows a product waits for memory: a tile has several panels, each too
// short for the hardware to see a stream in time, so that asking for the next tile makes it 1.5 times as fast. A tile
// of 8-bit weights is too large to wait in the first-level cache. Always inlined, as the compiler takes a function that
// does nothing else for one without effect and drops the call.
template <int KIND>
inline __attribute__((always_inline)) void fetch_ahead(const uint8_t* cell, int64_t ahead) {
#pragma GCC unroll 5
    for (int i = 0; i < kKinds[KIND].cell_bytes() + kKinds[KIND].head_bytes; i += 64) {  // heads lie between cells
        if constexpr (kKinds[KIND].planes == octavo::PAIRS) {
            _mm_prefetch(cell + ahead + i, _MM_HINT_T1);
        } else {
            _mm_prefetch(cell + ahead + i, _MM_HINT_T0);
        }
    }
}

inline __m256 load_halves(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline __m256 load_floats(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }

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

// Scale of the eight columns of a cell, or of half of it.
template <int KIND>
inline __m256 scale_of(CellPlace at, int half = 0) {
    constexpr octavo::Scales scales = kKinds[KIND].scales;
    if constexpr (scales == octavo::POWER) return half_powers(at.cell);
    if constexpr (scales == octavo::FLOAT || scales == octavo::FLOAT_MIN) return load_floats(at.head);
    if constexpr (scales == octavo::FLOAT_2) {
        const __m256 d = load_floats(at.cell + 32 * half);
        // The integers of E2M1 are twice its values.
        return KIND == octavo::E2M1_16 ? _mm256_mul_ps(d, _mm256_set1_ps(0.5f)) : d;
    }
    const __m256 d = load_halves(at.head);
    if constexpr (scales == octavo::SUB8 || scales == octavo::SUB8_2) {
        return _mm256_mul_ps(d, _mm256_cvtepi32_ps(load_bytes_s(at.cell + 8 * half)));
    } else if constexpr (scales == octavo::SUB8_MIN) {
        return _mm256_mul_ps(d, _mm256_cvtepi32_ps(load_bytes_u(at.cell)));
    } else if constexpr (scales == octavo::SUB4_MIN_2) {
        const __m256i s = _mm256_and_si256(load_bytes_u(at.cell + 8 * half), _mm256_set1_epi32(15));
        return _mm256_mul_ps(d, _mm256_cvtepi32_ps(s));
    }
    return d;
}

template <int KIND>
inline __m256 minimum_of(CellPlace at, int half = 0) {
    constexpr octavo::Scales scales = kKinds[KIND].scales;
    if constexpr (scales == octavo::FLOAT_MIN) return load_floats(at.head + 32);
    const __m256 m = load_halves(at.head + 16);
    if constexpr (scales == octavo::HALF_MIN) return m;
    const __m256i t =
        scales == octavo::SUB8_MIN ? load_bytes_u(at.cell + 8) : _mm256_srli_epi32(load_bytes_u(at.cell + 8 * half), 4);
    return _mm256_xor_ps(_mm256_mul_ps(m, _mm256_cvtepi32_ps(t)), _mm256_set1_ps(-0.0f));
}

// The planes of a cell as vectors: operations on bytes and 16-bit words that quad_of() needs, in one width. Wider units
// have such a type of their own, for the cells of several panels side by side.
struct CellPlanes {
    const uint8_t* first;

    __m256i load(int offset) const { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + offset)); }
    static __m256i all(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }
    static __m256i left(__m256i words, int bits) { return _mm256_slli_epi16(words, bits); }
    static __m256i right(__m256i words, int bits) { return _mm256_srli_epi16(words, bits); }
    static __m256i look_up(__m128i values, __m256i codes) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), codes);
    }
};

// What the codes of a kind stand for, plus its zero point; the formats are told in octavo/quant.
template <int KIND, class Cells>
inline auto from_codes(decltype(Cells::all(0)) q) {
    __m128i values;
    if constexpr (KIND == octavo::MXFP4 || KIND == octavo::E2M1_16) {  // twice the values
        values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    } else if constexpr (KIND == octavo::IQ4_NL || KIND == octavo::IQ4_XS) {
        constexpr auto byte = [](int value) { return static_cast<char>(value + 128); };
        values = _mm_setr_epi8(byte(-127), byte(-104), byte(-83), byte(-65), byte(-49), byte(-35), byte(-22), byte(-10),
                               byte(1), byte(13), byte(25), byte(38), byte(53), byte(69), byte(89), byte(113));
    } else if constexpr (KIND == octavo::IQ1_CODES) {
        values = _mm_setr_epi8(0, 2, 8, 10, 16, 18, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9);
    } else if constexpr (KIND == octavo::IQ2_CODES) {
        values = _mm_setr_epi8(51, 68, 86, 35, 18, 0, 43, 43, 43, 43, 43, 43, 43, 43, 43, 43);
    } else if constexpr (KIND == octavo::IQ3_CODES) {
        values = _mm_setr_epi8(66, 74, 82, 90, 98, 106, 114, 124, 58, 50, 42, 34, 26, 18, 10, 0);
    } else {
        return q;
    }
    return Cells::look_up(values, q);
}

// Quad `index` of a cell as unsigned bytes [column][k in quad], from which the zero point is not yet taken.
template <int KIND, class Cells>
inline auto quad_of(Cells cells, int index) {
    constexpr octavo::Planes planes = kKinds[KIND].planes;
    constexpr bool nibbles = planes == octavo::N4 || planes == octavo::N4_B1 || planes == octavo::N4_B2;
    constexpr bool twos = planes == octavo::N4_B2 || planes == octavo::B2 || planes == octavo::B2_B1;
    constexpr bool ones = planes == octavo::N4_B1 || planes == octavo::B2_B1;
    constexpr int low = nibbles ? 4 : 0;                    // bits below those of the plane of twos
    constexpr int below = planes == octavo::N4_B1 ? 4 : 2;  // and of ones
    const auto moved = [](auto v, int left) { return left >= 0 ? Cells::left(v, left) : Cells::right(v, -left); };
    auto q = Cells::all(0);
    if constexpr (nibbles) {
        q = cells.load(index % 4 * 32);
        if (index >= 4) q = Cells::right(q, 4);
        q = from_codes<KIND, Cells>(q & Cells::all(15));
    }
    if constexpr (twos) {
        q |= moved(cells.load((nibbles ? 128 : 0) + index / 4 * 32), low - index % 4 * 2) & Cells::all(3 << low);
    }
    if constexpr (ones) {
        q |= moved(cells.load(nibbles ? 128 : 64), below - index) & Cells::all(1 << below);
    }
    return q;
}

template <int KIND>
inline __m256i quad_of(const uint8_t* cell, int index) {
    return quad_of<KIND>(CellPlanes{cell + kKinds[KIND].meta_bytes}, index);
}

// The sum of 16 activations.
inline float sum_of_half(const int16_t* a) {
    const __m256i pairs =
        _mm256_madd_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)), _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
    return static_cast<float>(_mm_cvtsi128_si32(sum));
}

}  // namespace
