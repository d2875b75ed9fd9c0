// What this machine can do at most, for the roofs of a plot: prints GB/s that all threads read together, and operations
// (a multiplication or an addition each) per second of float32 and of 8-bit integers, in GOP/s.
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 256 << 20, LOOPS = 20000000, CHAINS = 12, RUNS = 5 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static volatile int64_t sink;

// Makes a result one that is needed.
static void keep(const void *sum) {
    int64_t first;
    memcpy(&first, sum, sizeof first);
    sink += first;
}

#if defined(__AVX512F__)
typedef __m512i ints;
typedef __m512 floats;
#define LOAD _mm512_load_si512
#define ADD _mm512_add_epi64
#define FMA _mm512_fmadd_ps
#define SET_FLOATS _mm512_set1_ps
#define SET_INTS _mm512_set1_epi32
#define KEPT "+v" // in a register, of which there are 32
#else
typedef __m256i ints;
typedef __m256 floats;
#define LOAD _mm256_load_si256
#define ADD _mm256_add_epi64
#define FMA _mm256_fmadd_ps
#define SET_FLOATS _mm256_set1_ps
#define SET_INTS _mm256_set1_epi32
#define KEPT "+x"
#endif

// Sums of products of 8-bit integers: one instruction where the machine has it, three where not.
static inline ints dots(ints sum, ints a, ints b) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return _mm512_dpbusd_epi32(sum, a, b);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, a, b);
#elif defined(__AVX512BW__)
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}

static void *reading(void *data) {
    const ints *p = data, *end = p + BYTES / sizeof(ints);
    ints sum[8];
    memset(sum, 0, sizeof sum);
    for (; p < end; p += 8)
        for (int i = 0; i < 8; i++) sum[i] = ADD(sum[i], LOAD(p + i));
    for (int i = 1; i < 8; i++) sum[0] = ADD(sum[0], sum[i]);
    keep(&sum[0]);
    return NULL;
}

// Independent sums, all of which must stay in registers: hence the loops that are unrolled to the end.
static void *float_products(void *data) {
    floats sum[CHAINS], a = SET_FLOATS(1.0f), b = SET_FLOATS(1e-9f);
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) sum[i] = SET_FLOATS((float)i);
    for (int n = 0; n < LOOPS; n++)
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) {
            sum[i] = FMA(sum[i], a, b);
            __asm__ volatile("" : KEPT(sum[i]));
        }
#pragma GCC unroll 16
    for (int i = 1; i < CHAINS; i++) sum[0] = FMA(sum[0], a, sum[i]);
    keep(&sum[0]);
    return data;
}

static void *byte_products(void *data) {
    ints sum[CHAINS], a = SET_INTS(0x01020102), b = SET_INTS(0x01010101);
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) sum[i] = SET_INTS(i);
    for (int n = 0; n < LOOPS; n++)
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) {
            sum[i] = dots(sum[i], a, b);
            __asm__ volatile("" : KEPT(sum[i]));
        }
#pragma GCC unroll 16
    for (int i = 1; i < CHAINS; i++) sum[0] = ADD(sum[0], sum[i]);
    keep(&sum[0]);
    return data;
}

// The shortest of some runs of `work` on all threads at once.
static double seconds(void *(*work)(void *), char *memory, int threads) {
    double best = 1e9;
    pthread_t thread[256];
    for (int run = 0; run < RUNS; run++) {
        double begun = now();
        for (int t = 0; t < threads; t++) pthread_create(&thread[t], NULL, work, memory + (size_t)t * BYTES);
        for (int t = 0; t < threads; t++) pthread_join(thread[t], NULL);
        double taken = now() - begun;
        if (taken < best) best = taken;
    }
    return best;
}

int main(int count, char **words) {
    int threads = count > 1 ? atoi(words[1]) : 1;
    if (threads < 1 || threads > 256) return 2;
    char *memory = aligned_alloc(4096, (size_t)threads * BYTES);
    if (!memory) return 1;
    memset(memory, 1, (size_t)threads * BYTES);
    double read = 1e-9 * threads * BYTES / seconds(reading, memory, threads);
    double chains = 1e-9 * 2 * threads * LOOPS * CHAINS;
    double f32 = chains * (sizeof(floats) / 4) / seconds(float_products, memory, threads);
    double i8 = chains * sizeof(ints) / seconds(byte_products, memory, threads);
    printf("{\"read_gb_s\": %.1f, \"float32_gop_s\": %.0f, \"int8_gop_s\": %.0f}\n", read, f32, i8);
    return 0;
}
