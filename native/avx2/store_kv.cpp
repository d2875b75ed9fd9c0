#include "store_kv.h"

void octavo::fill_store_kv_avx2(Kernels& table) { fill_store_kv<__m256>(table); }
