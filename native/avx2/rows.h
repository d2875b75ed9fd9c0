// Work on single rows: norms, activation functions, and the integer forms of activations, for vectors of any width.
// Every sum over a row has one order: 32 lanes of ascending elements, then a fixed tree. Everything is local to the
// unit that includes it.
#pragma once

#include <math.h>

#include "../kernels.h"
#include "elementary.h"

namespace {

using namespace octavo;

constexpr int kSumLanes = 32;

template <class V>
struct Sums {
    static constexpr int kVectors = kSumLanes / kLanes<V>;
    V part[kVectors] = {};
};

// x - mean, and 0 beyond the end of the row.
template <class V>
inline V centered(const float* x, int left, V mean) {
    const V v = load<V>(x, left) - mean;
    return left >= kLanes<V> ? v : first_of(left, v);
}

// The sum over vectors of the row: term(at, left, sums) adds what the elements at `at` give, of which `left` are in the
// row; what is beyond gives 0.
template <class V, class Term>
inline float sum_over(const float* x, int width, const Term& term) {
    Sums<V> sums;
    int i = 0;
    for (; i + kSumLanes <= width; i += kSumLanes) {
#pragma GCC unroll 4
        for (int j = 0; j < Sums<V>::kVectors; ++j) sums.part[j] = term(x + i + j * kLanes<V>, kSumLanes, sums.part[j]);
    }
    for (int j = 0; i < width; ++j, i += kLanes<V>) sums.part[j] = term(x + i, width - i, sums.part[j]);
    return sum_lanes(sums.part);
}

// The sum of (x - mean)^2; the mean is 0 or the row's.
template <class V>
inline float sum_squares(const float* x, int width, V mean) {
    return sum_over<V>(x, width, [&](const float* at, int left, V sums) {
        const V v = centered(at, left, mean);
        return fma(v, v, sums);
    });
}

template <class V>
inline float mean_of(const float* x, int width) {
    const auto add = [](const float* at, int left, V sums) { return load<V>(at, left) + sums; };
    return sum_over<V>(x, width, add) / static_cast<float>(width);
}

template <class V>
void norm(const float* x, const NormTerms& terms, int width, float* out) {
    const V mean = all<V>(terms.center ? mean_of<V>(x, width) : 0.0f);
    const float squares = sum_squares(x, width, mean) / static_cast<float>(width);
    const V factor = all<V>(1.0f / sqrtf(squares + terms.eps));
    for (int i = 0; i < width; i += kLanes<V>) {
        const int left = width - i;
        V v = centered(x + i, left, mean) * factor * load<V>(terms.weight + i, left);
        if (terms.bias != nullptr) v = v + load<V>(terms.bias + i, left);
        if (terms.residual != nullptr) v = v + load<V>(terms.residual + i, left);
        store(out + i, left, v);
    }
}

template <class V>
void finish(const float* x, int width, const float* bias, float scale, const float* residual, float* out) {
    const V factor = all<V>(scale);
    for (int i = 0; i < width; i += kLanes<V>) {
        const int left = width - i;
        V v = load<V>(x + i, left);
        if (bias != nullptr) v = v + load<V>(bias + i, left);
        v = v * factor;
        if (residual != nullptr) v = v + load<V>(residual + i, left);
        store(out + i, left, v);
    }
}

// x / (1 + e^-s).
template <class V>
inline V times_sigmoid(V x, V s) {
    const V e = exp_ps(negative(s));
    return x / (e + all<V>(1.0f));
}

// x Phi(x) = x erfc(-x / sqrt 2) / 2. For z >= 0, erfc(z) = t P(t) e^(-z^2) with t = 1 / (1 + 0.48 z) and a polynomial
// fitted for the smallest relative error, 4e-8 (the form is that of Hastings, "Approximations for digital computers",
// 1955); below zero, erfc(-z) = 2 - erfc(z).
template <class V>
inline V gelu_erf(V x) {
    const V one = all<V>(1.0f);
    const V size = magnitude(x);
    const V t = one / fma(size, all<V>(0.48f * 0.707106781f), one);
    V p = all<V>(-0.0515561323f);
    p = fma(p, t, all<V>(0.276868936f));
    p = fma(p, t, all<V>(-0.54518638f));
    p = fma(p, t, all<V>(0.406341907f));
    p = fma(p, t, all<V>(-0.0901919356f));
    p = fma(p, t, all<V>(0.231194629f));
    p = fma(p, t, all<V>(0.229993637f));
    p = fma(p, t, all<V>(0.27176452f));
    p = fma(p, t, all<V>(0.270770851f));
    const V e = exp_ps((x * x) * all<V>(-0.5f));
    const V tail = (p * t) * (e * all<V>(0.5f));
    return x * pick(is_minus(x), tail, one - tail);  // by the sign of x
}

// (p, n, beta, eps): p x^2 + beta x for x > 0, otherwise n (e^min(x, eps) - 1 - x) + beta x. Near zero e^x - 1 comes
// from tanh, e^x - 1 = 2 t / (1 - t) with t = tanh(x / 2), where the difference would cancel.
template <class V>
inline V xielu(V x, const float* parameters) {
    const V one = all<V>(1.0f);
    const V low = smallest(all<V>(parameters[3]), x);
    const V t = tanh_ps(low * all<V>(0.5f));
    const V less = (t + t) / (one - t);
    const V below = all<V>(parameters[1]) * (less - x);
    const V above = all<V>(parameters[0]) * x * x;
    return fma(all<V>(parameters[2]), x, pick(is_less(all<V>(0.0f), x), above, below));
}

template <class V>
inline V activation_of(V x, int activation, const float* parameters) {
    switch (activation) {
        case SILU:
            return times_sigmoid(x, x);
        case GELU_TANH: {
            // 0.5 (1 + tanh(u)) = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
            const V cubic = fma(x * x, all<V>(0.044715f), all<V>(1.0f));
            return times_sigmoid(x, (x * cubic) * all<V>(1.59576912f));
        }
        case GELU:
            return gelu_erf(x);
        case RELU2: {
            const V positive = largest(all<V>(0.0f), x);
            return positive * positive;
        }
        case TANH:
            return tanh_ps(x);
        case IDENTITY:
            return x;
        case XIELU:
            return xielu(x, parameters);
        case SWIGLU_OAI:
            return times_sigmoid(x, x * all<V>(1.702f));
        default:
            return largest(all<V>(0.0f), x);  // the second operand is returned for NaN
    }
}

template <class V>
void gate(const float* gates, const float* ups, const GateTerms& terms, int width, float* out) {
    const V limit = all<V>(terms.limit);
    const V least = all<V>(-terms.limit);
    for (int i = 0; i < width; i += kLanes<V>) {
        const int left = width - i;
        V g = load<V>(gates + i, left);
        V u = load<V>(ups + i, left);
        if (terms.gate_bias != nullptr) {
            g = g + load<V>(terms.gate_bias + i, left);
            u = u + load<V>(terms.up_bias + i, left);
        }
        if (terms.limit > 0) {  // the second operand is returned for NaN
            g = smallest(limit, g);
            u = largest(least, smallest(limit, u));
        }
        if (terms.activation == SWIGLU_OAI) u = u + all<V>(1.0f);
        store(out + i, left, activation_of(g, terms.activation, nullptr) * u);
    }
}

template <class V>
void activate(const float* x, int activation, const float* parameters, const float* times, int width, float* out) {
    for (int i = 0; i < width; i += kLanes<V>) {
        const int left = width - i;
        V v = activation_of(load<V>(x + i, left), activation, parameters);
        if (times != nullptr) v = v * load<V>(times + i, left);
        store(out + i, left, v);
    }
}

template <class V>
void add(const float* x, const float* y, float scale, int width, float* out) {
    const V factor = all<V>(scale);
    for (int i = 0; i < width; i += kLanes<V>) {
        const int left = width - i;
        store(out + i, left, (load<V>(x + i, left) + load<V>(y + i, left)) * factor);
    }
}

template <class V>
void add_scaled(const float* x, float factor, int width, float* out) {
    for (int i = 0; i < width; i += kLanes<V>) {
        const int left = width - i;
        const V sum = fma(all<V>(factor), load<V>(x + i, left), load<V>(out + i, left));
        store(out + i, left, sum);
    }
}

template <class V>
void blend(const float* x, float gate, const float* residual, int width, float* out) {
    for (int i = 0; i < width; i += kLanes<V>) {
        const int left = width - i;
        V v = times_sigmoid(load<V>(x + i, left), all<V>(gate));
        if (residual != nullptr) v = v + load<V>(residual + i, left);
        store(out + i, left, v);
    }
}

template <class V>
void match_rms(const float* x, const float* like, float eps, int width, float* out) {
    const float n = static_cast<float>(width);
    const float own = sum_squares(x, width, all<V>(0.0f)) / n;
    const float wanted = sum_squares(like, width, all<V>(0.0f)) / n;
    // Written so that NaN stays.
    const V factor = all<V>(sqrtf(wanted / (own < eps ? eps : own)));
    for (int i = 0; i < width; i += kLanes<V>) {
        store(out + i, width - i, load<V>(x + i, width - i) * factor);
    }
}

template <class V>
void keep_top(const float* x, float deviations, int width, float* out) {
    const float mean = mean_of<V>(x, width);
    const float variance = sum_squares(x, width, all<V>(mean)) / static_cast<float>(width);
    const V cut = all<V>(mean + deviations * sqrtf(variance));
    for (int i = 0; i < width; i += kLanes<V>) {
        // The second operand is returned for NaN.
        const V above = largest(all<V>(0.0f), load<V>(x + i, width - i) - cut);
        store(out + i, width - i, above);
    }
}

template <class V>
void cap(float* x, int64_t width, float softcap) {
    const V most = all<V>(softcap);
    for (int64_t i = 0; i < width; i += kLanes<V>) {
        const int left = static_cast<int>(width - i < kLanes<V> ? width - i : kLanes<V>);
        store(x + i, left, most * tanh_ps(load<V>(x + i, left) / most));
    }
}

// The largest magnitude of n values, a multiple of 32, as its bits, by which NaN is above all others.
template <class V>
inline uint32_t largest_bits(const float* x, int n) {
    Sums<V> found;
    for (int i = 0; i < n; i += kSumLanes) {
#pragma GCC unroll 4
        for (int j = 0; j < Sums<V>::kVectors; ++j) {
            found.part[j] = higher_bits(found.part[j], magnitude(load<V>(x + i + j * kLanes<V>, kLanes<V>)));
        }
    }
    return highest(found.part);
}

// The scale of integers up to `most` for values whose largest magnitude has these bits, and what values are multiplied
// by. The scale is NaN where a value is not finite, as integers cannot carry that on.
struct IntegerScale {
    float scale;
    float inverse;
};

inline IntegerScale integer_scale(uint32_t bits, float most) {
    if (bits >= 0x7f800000) return {__builtin_nanf(""), 0};
    float largest;
    __builtin_memcpy(&largest, &bits, sizeof(largest));
    return {largest / most, largest > 0 ? most / largest : 0};
}

template <class V>
void pack_int8(const float* x, int width, const Act8& out, int64_t row) {
    for (int group = 0; group < width / kCell; ++group, x += kCell) {
        const IntegerScale by = integer_scale(largest_bits<V>(x, kCell), 127);
        const int64_t index = group * out.rows + row;
        const __m256i bytes = to_int8(x, all<V>(by.inverse));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.q + index * kCell), bytes);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
        __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
        sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
        const int32_t first = _mm256_cvtsi256_si32(sums);
        const int32_t second = _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
        out.scale[index] = by.scale;
        out.sum[index] = by.scale * static_cast<float>(first + second);
        out.halves[index] = static_cast<int32_t>((static_cast<uint32_t>(second) << 16) | (first & 0xffff));
    }
}

template <class V>
void pack_int16(const float* x, int width, const Act16& out, int64_t row) {
    const IntegerScale by = integer_scale(largest_bits<V>(x, width), 32767);
    const V inverse = all<V>(by.inverse);
    for (int group = 0; group < width / kCell; ++group, x += kCell) {
        const int64_t index = group * out.rows + row;
        out.sum[index] = static_cast<float>(to_int16(x, inverse, out.q + index * kCell));
    }
    out.scale[row] = by.scale;
}

// As the products of this unit read them: float32.
template <class V>
void pack_bfloat16(const float* x, int width, float* row, int first) {
    for (int i = 0; i < width; i += kLanes<V>) {
        store(row + first + i, width - i, to_bfloat16(load<V>(x + i, width - i)));
    }
}

template <class V>
void fill_rows(Kernels& table) {
    table.norm = norm<V>;
    table.finish = finish<V>;
    table.gate = gate<V>;
    table.activate = activate<V>;
    table.add = add<V>;
    table.add_scaled = add_scaled<V>;
    table.blend = blend<V>;
    table.match_rms = match_rms<V>;
    table.keep_top = keep_top<V>;
    table.cap = cap<V>;
    table.pack_int8 = pack_int8<V>;
    table.pack_int16 = pack_int16<V>;
    table.pack_bfloat16 = pack_bfloat16<V>;
}

}  // namespace
