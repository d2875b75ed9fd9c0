#include "cpu_features.h"

#include <cpuid.h>
#include <cstdlib>
#include <stdexcept>

namespace octavo {

namespace {

// Bits of XCR0.
constexpr uint32_t kYmm = 0x06;  // the lower 128 bits and the upper ones
constexpr uint32_t kZmm = 0xe0;  // mask registers, upper halves, and registers 16 to 31

}  // namespace

CpuWords read_cpu() {
    CpuWords cpu{};
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(0, &a, &b, &c, &d)) cpu.leaf0_ebx = b;
    if (__get_cpuid(1, &a, &b, &c, &d)) cpu.leaf1_ecx = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        cpu.leaf7_ebx = b;
        cpu.leaf7_ecx = c;
    }
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu.leaf7_1_eax = a;
    if (cpu.leaf1_ecx & bit_OSXSAVE) {  // xgetbv exists only there
        uint32_t low = 0, high = 0;
        asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        cpu.xcr0 = low;
    }
    return cpu;
}

std::string missing_for(Tier tier, const CpuWords& cpu) {
    std::string missing;
    const auto need = [&](bool present, const char* name) {
        if (present) return;
        if (!missing.empty()) missing += ", ";
        missing += name;
    };
    need(cpu.leaf7_ebx & bit_AVX2, "AVX2");
    need(cpu.leaf1_ecx & bit_FMA, "FMA");
    need(cpu.leaf1_ecx & bit_F16C, "F16C");
    need(cpu.leaf7_ebx & bit_BMI2, "BMI2");
    need((cpu.xcr0 & kYmm) == kYmm, "operating-system support for AVX");
    if (tier == TIER_AVX2) return missing;
    need(cpu.leaf7_ebx & bit_AVX512F, "AVX-512 F");
    need(cpu.leaf7_ebx & bit_AVX512BW, "AVX-512 BW");
    need(cpu.leaf7_ebx & bit_AVX512VL, "AVX-512 VL");
    need(cpu.leaf7_ebx & bit_AVX512DQ, "AVX-512 DQ");
    need(cpu.leaf7_ecx & bit_AVX512VNNI, "AVX-512 VNNI");
    need((cpu.xcr0 & kZmm) == kZmm, "operating-system support for AVX-512");
    if (tier == TIER_AVX512) return missing;
    need(cpu.leaf7_1_eax & bit_AVX512BF16, "AVX-512 BF16");
    return missing;
}

Tier choose_tier(const CpuWords& cpu, const std::string& wanted) {
    if (wanted.empty()) {
        for (int tier = TIER_COUNT - 1; tier > TIER_AVX2; --tier) {
            if (tier == TIER_AVX512BF16 && cpu.leaf0_ebx != signature_AMD_ebx) continue;
            if (missing_for(static_cast<Tier>(tier), cpu).empty()) return static_cast<Tier>(tier);
        }
    }
    int tier = TIER_AVX2;
    while (!wanted.empty() && tier < TIER_COUNT && wanted != kTierNames[tier]) ++tier;
    if (tier == TIER_COUNT) {
        std::string known;
        for (const char* name : kTierNames) known += (known.empty() ? "" : ", ") + std::string(name);
        throw std::runtime_error("there are no kernels called '" + wanted + "'; there are " + known);
    }
    const std::string missing = missing_for(static_cast<Tier>(tier), cpu);
    if (!missing.empty()) {
        throw std::runtime_error("this CPU lacks " + missing + ", which the kernels called " + kTierNames[tier] +
                                 " need");
    }
    return static_cast<Tier>(tier);
}

namespace {

Tier select() {
    const char* wanted = std::getenv("OCTAVO_CPU_KERNELS");
    try {
        return choose_tier(read_cpu(), wanted == nullptr ? "" : wanted);
    } catch (const std::runtime_error& error) {
        if (wanted == nullptr || *wanted == 0) throw;
        throw std::runtime_error("OCTAVO_CPU_KERNELS=" + std::string(wanted) + " cannot be used: " + error.what());
    }
}

}  // namespace

Tier kernel_tier() {
    static const Tier tier = select();
    return tier;
}

}  // namespace octavo
