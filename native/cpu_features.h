// What the running CPU offers. Compiled for the baseline: it must run anywhere.
#pragma once

#include <string>

namespace octavo {

struct CpuFeatures {
    bool avx2 = false;    // AVX2, FMA, F16C and BMI2, and an operating system that saves the ymm registers
    std::string missing;  // names of what is missing of these, for the error message
};

CpuFeatures detect_cpu();

}  // namespace octavo
