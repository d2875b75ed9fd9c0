#include "cpu_features.h"

#include <cpuid.h>
#include <cstdint>

namespace octavo {

CpuFeatures detect_cpu() {
    CpuFeatures features;
    unsigned a = 0, b = 0, c = 0, d = 0, b7 = 0, c7 = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) c = 0;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) b7 = 0;

    bool saved = false;  // xgetbv exists only where OSXSAVE says so
    if (c & bit_OSXSAVE) {
        uint32_t low = 0, high = 0;
        asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        saved = (low & 6) == 6;
    }
    const auto need = [&](bool present, const char* name) {
        if (present) return;
        if (!features.missing.empty()) features.missing += ", ";
        features.missing += name;
    };
    need(b7 & bit_AVX2, "AVX2");
    need(c & bit_FMA, "FMA");
    need(c & bit_F16C, "F16C");
    need(b7 & bit_BMI2, "BMI2");
    need(saved, "operating-system support for AVX");
    features.avx2 = features.missing.empty();
    return features;
}

}  // namespace octavo
