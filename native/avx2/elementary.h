// Elementary functions of vectors of any width. Everything is local to the unit that includes it.
#pragma once

#include "simd.h"

namespace {

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial of degree 7 for e^r, and n added to the exponent. Relative
// error below 2e-7 on [-87.3, 88.3]; 0 below, +inf above, NaN stays NaN, and exp(0) is exactly 1.
template <class V>
inline V exp_ps(V x) {
    const V low = all<V>(-87.33654f);
    const V high = all<V>(88.37626f);
    const V clamped = smallest(high, largest(low, x));  // NaN stays
    const V n = nearest(clamped * all<V>(1.44269504f));
    V r = fnma(n, all<V>(0.693359375f), clamped);
    r = fnma(n, all<V>(-2.12194440e-4f), r);
    V p = all<V>(1.0f / 5040);
    p = fma(p, r, all<V>(1.0f / 720));
    p = fma(p, r, all<V>(1.0f / 120));
    p = fma(p, r, all<V>(1.0f / 24));
    p = fma(p, r, all<V>(1.0f / 6));
    p = fma(p, r, all<V>(0.5f));
    p = fma(p, r, all<V>(1.0f));
    p = fma(p, r, all<V>(1.0f));
    V y = p * power_of_two(n);
    y = pick(is_less(x, low), all<V>(0.0f), y);
    y = pick(is_less(high, x), all<V>(__builtin_inff()), y);
    return pick(is_nan(x), x, y);
}

// tanh: an odd polynomial (Cephes, S. Moshier) near zero, 1 - 2 / (e^2x + 1) elsewhere.
template <class V>
inline V tanh_ps(V x) {
    const V one = all<V>(1.0f);
    const V z = x * x;
    V p = all<V>(-5.70498872745e-3f);
    p = fma(p, z, all<V>(2.06390887954e-2f));
    p = fma(p, z, all<V>(-5.37397155531e-2f));
    p = fma(p, z, all<V>(1.33314422036e-1f));
    p = fma(p, z, all<V>(-3.33332819422e-1f));
    const V near_zero = fma(p * z, x, x);
    const V e = exp_ps(x + x);
    const V far = one - all<V>(2.0f) / (e + one);
    return pick(is_less(magnitude(x), all<V>(0.625f)), near_zero, far);
}

}  // namespace
