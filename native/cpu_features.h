// What the running CPU offers, and which kernels it can run. Compiled for the baseline: it must run anywhere.
#pragma once

#include <cstdint>
#include <string>

namespace octavo {

// The sets of kernels, from the one that asks least of the CPU to the fastest.
enum Tier : int { TIER_AVX2, TIER_AVX512, TIER_AVX512BF16, TIER_COUNT };

constexpr const char* kTierNames[TIER_COUNT] = {"avx2", "avx512", "avx512bf16"};

// Registers as cpuid gives them, and extended control register 0: what the operating system saves of a thread.
struct CpuWords {
    uint32_t leaf0_ebx;  // the first letters of the maker's name
    uint32_t leaf1_ecx;
    uint32_t leaf7_ebx;
    uint32_t leaf7_ecx;
    uint32_t leaf7_1_eax;
    uint32_t xcr0;  // 0 where it cannot be read
};

CpuWords read_cpu();

// Names of what a tier needs and is not there, comma-separated; empty when the CPU can run it.
std::string missing_for(Tier tier, const CpuWords& cpu);

// The tier called `wanted`, or the fastest that the CPU can run where that is empty: multiply-adds of bfloat16 are
// twice as many as those of float32 on AMD's processors, and half as many on Intel's (Sapphire Rapids). Throws
// std::runtime_error for a name that is none, and for a tier, the lowest included, that the CPU cannot run.
Tier choose_tier(const CpuWords& cpu, const std::string& wanted);

// The tier of this process: chosen once, from the environment variable OCTAVO_CPU_KERNELS where that is set. Throws as
// choose_tier() does.
Tier kernel_tier();

}  // namespace octavo
