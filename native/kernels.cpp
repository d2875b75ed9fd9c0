#include "kernels.h"

#include <stdexcept>

#include "cpu_features.h"

namespace octavo {

namespace {

Kernels select() {
    const CpuFeatures cpu = detect_cpu();
    if (!cpu.avx2) {
        throw std::runtime_error("this CPU lacks " + cpu.missing +
                                 ", which the native kernels need; choose the reference device instead");
    }
    Kernels table{};
    fill_linear_float_avx2(table);
    fill_linear_int8_avx2(table);
    fill_linear_int16_avx2(table);
    fill_rows_avx2(table);
    fill_attention_avx2(table);
    fill_vocabulary_avx2(table);
    return table;
}

}  // namespace

const Kernels& kernels() {
    static const Kernels table = select();
    return table;
}

// The rows (tokens x query heads of a KV head) of an item share one pass over K and V; 64 keep scratch in L2.
int attend_tokens(const HeadShape& shape) {
    const int group = shape.heads / shape.kv_heads;
    return group >= 64 ? 1 : 64 / group;
}

int64_t attend_scratch(const HeadShape& shape) {
    const int64_t rows = int64_t{attend_tokens(shape)} * (shape.heads / shape.kv_heads);
    const int64_t padded = (shape.head_dim + 7) / 8 * 8;
    return 2 * 32 * padded + rows * (3 * padded + 32 + 8);
}

}  // namespace octavo
