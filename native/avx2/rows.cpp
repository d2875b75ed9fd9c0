// Work on single rows: norms, activation functions, and the integer forms of activations. Every sum over a row has one
// order: eight lanes of ascending elements, then a fixed tree.
#include <math.h>

#include "../kernels.h"
#include "simd.h"

namespace {

using namespace octavo;

// x - mean, and 0 beyond the end of the row.
inline __m256 centered(const float* x, int left, __m256 mean) {
    const __m256 v = _mm256_sub_ps(load_some(x, left), mean);
    return left >= 8 ? v : _mm256_and_ps(v, _mm256_castsi256_ps(tail_mask(left)));
}

// The sum of (x - mean)^2; the mean is 0 or the row's.
inline float sum_squares(const float* x, int width, __m256 mean) {
    __m256 squares = _mm256_setzero_ps();
    for (int i = 0; i < width; i += 8) {
        const __m256 v = centered(x + i, width - i, mean);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    return sum_lanes(squares);
}

inline float mean_of(const float* x, int width) {
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < width; i += 8) sum = _mm256_add_ps(load_some(x + i, width - i), sum);
    return sum_lanes(sum) / static_cast<float>(width);
}

void norm(const float* x, const NormTerms& terms, int width, float* out) {
    const __m256 mean = _mm256_set1_ps(terms.center ? mean_of(x, width) : 0.0f);
    const float squares = sum_squares(x, width, mean) / static_cast<float>(width);
    const __m256 factor = _mm256_set1_ps(1.0f / sqrtf(squares + terms.eps));
    for (int i = 0; i < width; i += 8) {
        const int left = width - i;
        __m256 v = _mm256_mul_ps(_mm256_mul_ps(centered(x + i, left, mean), factor), load_some(terms.weight + i, left));
        if (terms.bias != nullptr) v = _mm256_add_ps(v, load_some(terms.bias + i, left));
        if (terms.residual != nullptr) v = _mm256_add_ps(v, load_some(terms.residual + i, left));
        store_some(out + i, left, v);
    }
}

void finish(const float* x, int width, const float* bias, float scale, const float* residual, float* out) {
    const __m256 factor = _mm256_set1_ps(scale);
    for (int i = 0; i < width; i += 8) {
        const int left = width - i;
        __m256 v = load_some(x + i, left);
        if (bias != nullptr) v = _mm256_add_ps(v, load_some(bias + i, left));
        v = _mm256_mul_ps(v, factor);
        if (residual != nullptr) v = _mm256_add_ps(v, load_some(residual + i, left));
        store_some(out + i, left, v);
    }
}

// x / (1 + e^-s).
inline __m256 times_sigmoid(__m256 x, __m256 s) {
    const __m256 e = exp_ps(_mm256_xor_ps(s, _mm256_set1_ps(-0.0f)));
    return _mm256_div_ps(x, _mm256_add_ps(e, _mm256_set1_ps(1.0f)));
}

// x Phi(x) = x erfc(-x / sqrt 2) / 2. For z >= 0, erfc(z) = t P(t) e^(-z^2) with t = 1 / (1 + 0.48 z) and a polynomial
// fitted for the smallest relative error, 4e-8 (the form is that of Hastings, "Approximations for digital computers",
// 1955); below zero, erfc(-z) = 2 - erfc(z).
inline __m256 gelu_erf(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(size, _mm256_set1_ps(0.48f * 0.707106781f), one));
    __m256 p = _mm256_set1_ps(-0.0515561323f);
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(0.276868936f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(-0.54518638f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(0.406341907f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(-0.0901919356f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(0.231194629f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(0.229993637f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(0.27176452f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(0.270770851f));
    const __m256 e = exp_ps(_mm256_mul_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(-0.5f)));
    const __m256 tail = _mm256_mul_ps(_mm256_mul_ps(p, t), _mm256_mul_ps(e, _mm256_set1_ps(0.5f)));
    return _mm256_mul_ps(x, _mm256_blendv_ps(_mm256_sub_ps(one, tail), tail, x));  // by the sign of x
}

// (p, n, beta, eps): p x^2 + beta x for x > 0, otherwise n (e^min(x, eps) - 1 - x) + beta x. Near zero e^x - 1 comes
// from tanh, e^x - 1 = 2 t / (1 - t) with t = tanh(x / 2), where the difference would cancel.
inline __m256 xielu(__m256 x, const float* parameters) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 low = _mm256_min_ps(_mm256_set1_ps(parameters[3]), x);
    const __m256 t = tanh_ps(_mm256_mul_ps(low, _mm256_set1_ps(0.5f)));
    const __m256 less = _mm256_div_ps(_mm256_add_ps(t, t), _mm256_sub_ps(one, t));
    const __m256 negative = _mm256_mul_ps(_mm256_set1_ps(parameters[1]), _mm256_sub_ps(less, x));
    const __m256 positive = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(parameters[0]), x), x);
    const __m256 above = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ);
    return _mm256_fmadd_ps(_mm256_set1_ps(parameters[2]), x, _mm256_blendv_ps(negative, positive, above));
}

inline __m256 activation_of(__m256 x, int activation, const float* parameters) {
    switch (activation) {
        case SILU:
            return times_sigmoid(x, x);
        case GELU_TANH: {
            // 0.5 (1 + tanh(u)) = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
            const __m256 cubic = _mm256_fmadd_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(0.044715f), _mm256_set1_ps(1.0f));
            return times_sigmoid(x, _mm256_mul_ps(_mm256_mul_ps(x, cubic), _mm256_set1_ps(1.59576912f)));
        }
        case GELU:
            return gelu_erf(x);
        case RELU2: {
            const __m256 positive = _mm256_max_ps(_mm256_setzero_ps(), x);
            return _mm256_mul_ps(positive, positive);
        }
        case TANH:
            return tanh_ps(x);
        case IDENTITY:
            return x;
        case XIELU:
            return xielu(x, parameters);
        case SWIGLU_OAI:
            return times_sigmoid(x, _mm256_mul_ps(x, _mm256_set1_ps(1.702f)));
        default:
            return _mm256_max_ps(_mm256_setzero_ps(), x);  // the second operand is returned for NaN
    }
}

void gate(const float* gates, const float* ups, const GateTerms& terms, int width, float* out) {
    const __m256 limit = _mm256_set1_ps(terms.limit);
    const __m256 negative = _mm256_set1_ps(-terms.limit);
    for (int i = 0; i < width; i += 8) {
        const int left = width - i;
        __m256 g = load_some(gates + i, left);
        __m256 u = load_some(ups + i, left);
        if (terms.gate_bias != nullptr) {
            g = _mm256_add_ps(g, load_some(terms.gate_bias + i, left));
            u = _mm256_add_ps(u, load_some(terms.up_bias + i, left));
        }
        if (terms.limit > 0) {  // the second operand is returned for NaN
            g = _mm256_min_ps(limit, g);
            u = _mm256_max_ps(negative, _mm256_min_ps(limit, u));
        }
        if (terms.activation == SWIGLU_OAI) u = _mm256_add_ps(u, _mm256_set1_ps(1.0f));
        store_some(out + i, left, _mm256_mul_ps(activation_of(g, terms.activation, nullptr), u));
    }
}

void activate(const float* x, int activation, const float* parameters, const float* times, int width, float* out) {
    for (int i = 0; i < width; i += 8) {
        const int left = width - i;
        __m256 v = activation_of(load_some(x + i, left), activation, parameters);
        if (times != nullptr) v = _mm256_mul_ps(v, load_some(times + i, left));
        store_some(out + i, left, v);
    }
}

void add(const float* x, const float* y, float scale, int width, float* out) {
    const __m256 factor = _mm256_set1_ps(scale);
    for (int i = 0; i < width; i += 8) {
        const int left = width - i;
        store_some(out + i, left, _mm256_mul_ps(_mm256_add_ps(load_some(x + i, left), load_some(y + i, left)), factor));
    }
}

void add_scaled(const float* x, float factor, int width, float* out) {
    for (int i = 0; i < width; i += 8) {
        const int left = width - i;
        const __m256 sum = _mm256_fmadd_ps(_mm256_set1_ps(factor), load_some(x + i, left), load_some(out + i, left));
        store_some(out + i, left, sum);
    }
}

void blend(const float* x, float gate, const float* residual, int width, float* out) {
    for (int i = 0; i < width; i += 8) {
        const int left = width - i;
        __m256 v = times_sigmoid(load_some(x + i, left), _mm256_set1_ps(gate));
        if (residual != nullptr) v = _mm256_add_ps(v, load_some(residual + i, left));
        store_some(out + i, left, v);
    }
}

void match_rms(const float* x, const float* like, float eps, int width, float* out) {
    const float n = static_cast<float>(width);
    const float own = sum_squares(x, width, _mm256_setzero_ps()) / n;
    const float wanted = sum_squares(like, width, _mm256_setzero_ps()) / n;
    // Written so that NaN stays.
    const __m256 factor = _mm256_set1_ps(sqrtf(wanted / (own < eps ? eps : own)));
    for (int i = 0; i < width; i += 8) {
        store_some(out + i, width - i, _mm256_mul_ps(load_some(x + i, width - i), factor));
    }
}

void keep_top(const float* x, float deviations, int width, float* out) {
    const float mean = mean_of(x, width);
    const float variance = sum_squares(x, width, _mm256_set1_ps(mean)) / static_cast<float>(width);
    const __m256 cut = _mm256_set1_ps(mean + deviations * sqrtf(variance));
    for (int i = 0; i < width; i += 8) {
        // The second operand is returned for NaN.
        const __m256 above = _mm256_max_ps(_mm256_setzero_ps(), _mm256_sub_ps(load_some(x + i, width - i), cut));
        store_some(out + i, width - i, above);
    }
}

void cap(float* x, int64_t width, float softcap) {
    const __m256 most = _mm256_set1_ps(softcap);
    for (int64_t i = 0; i < width; i += 8) {
        const int left = width - i < 8 ? static_cast<int>(width - i) : 8;
        store_some(x + i, left, _mm256_mul_ps(most, tanh_ps(_mm256_div_ps(load_some(x + i, left), most))));
    }
}

// Largest magnitude of n values (a multiple of 8), and 0, or NaN when one is not finite: integers cannot carry NaN on,
// so the scale has to.
struct Range {
    float largest;
    float poison;
};

inline Range range_of(const float* x, int n) {
    __m256 largest = _mm256_setzero_ps();
    __m256 poison = _mm256_setzero_ps();
    for (int i = 0; i < n; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        largest = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), largest);
        poison = _mm256_fmadd_ps(v, _mm256_setzero_ps(), poison);
    }
    return {max_lanes(largest), sum_lanes(poison)};
}

inline int32_t sum_lanes(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

void pack_int8(const float* x, int width, const Act8& out, int64_t row) {
    for (int group = 0; group < width / kCell; ++group) {
        const float* values = x + group * kCell;
        const Range range = range_of(values, kCell);
        const int64_t index = group * out.rows + row;
        const __m256 inverse = _mm256_set1_ps(range.largest > 0 ? 127.0f / range.largest : 0.0f);
        int32_t sums[2];
        for (int half = 0; half < 2; ++half) {
            const float* from = values + 16 * half;
            const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from), inverse));
            const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8), inverse));
            sums[half] = sum_lanes(_mm256_add_epi32(a, b));
            const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
            const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out.q + index * kCell + 16 * half), bytes);
        }
        const float scale = range.largest / 127.0f + range.poison;
        out.scale[index] = scale;
        out.sum[index] = scale * static_cast<float>(sums[0] + sums[1]);
        out.halves[index] = static_cast<int32_t>((static_cast<uint32_t>(sums[1]) << 16) | (sums[0] & 0xffff));
    }
}

void pack_int16(const float* x, int width, const Act16& out, int64_t row) {
    const Range range = range_of(x, width);
    const __m256 inverse = _mm256_set1_ps(range.largest > 0 ? 32767.0f / range.largest : 0.0f);
    for (int group = 0; group < width / kCell; ++group) {
        const int64_t index = group * out.rows + row;
        __m256i sum = _mm256_setzero_si256();
        for (int i = 0; i < kCell; i += 16) {
            const float* from = x + group * kCell + i;
            const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from), inverse));
            const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8), inverse));
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
            const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.q + index * kCell + i), words);
        }
        out.sum[index] = static_cast<float>(sum_lanes(sum));
    }
    out.scale[row] = range.largest / 32767.0f + range.poison;
}

}  // namespace

void octavo::fill_rows_avx2(Kernels& table) {
    table.norm = norm;
    table.finish = finish;
    table.gate = gate;
    table.activate = activate;
    table.add = add;
    table.add_scaled = add_scaled;
    table.blend = blend;
    table.match_rms = match_rms;
    table.keep_top = keep_top;
    table.cap = cap;
    table.pack_int8 = pack_int8;
    table.pack_int16 = pack_int16;
}
