#include "../avx2/attention.h"

#include "lanes.h"

void octavo::fill_attention_avx512(Kernels& table) { fill<Sixteen>(table); }
