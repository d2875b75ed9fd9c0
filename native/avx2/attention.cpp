#include "attention.h"

void octavo::fill_attention_avx2(Kernels& table) { fill<Eight>(table); }
