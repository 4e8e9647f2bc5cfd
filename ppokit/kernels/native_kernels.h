/* The kernels there are, one set for each instruction set and real type, and the choice of them. */

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#endif

#define OPERANDS 7
#define COLUMNS 64 /* how many are scanned side by side */

/* Rows: time is contiguous, next[] leads from one row to the next. Columns: neighbouring columns
 * are contiguous (or there is one), time[] leads from one step to the next. Strides in elements. */
typedef struct {
    int64_t steps, count;
    void *data[OPERANDS];
    int64_t time[OPERANDS], next[OPERANDS];
    double gamma, lmbda;
    double shift, sum, square; /* of what is near the mean, and of deviations from it */
    int reverse;
} Block;

typedef void (*Kernel)(Block *);

typedef struct {
    Kernel rows, columns;
} Layouts;
typedef struct {
    Layouts gae, returns, moments, moments_of_float32, scan, scan_reverse;
} Kernels;

#define ROW(type, k) ((type *)block->data[k] + row * block->next[k])
#define AT(type, k) ((type *)block->data[k] + start + t * block->time[k])

#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE inline
#endif
#define LIST2(k) (k), (k) + 1
#define LIST4(k) LIST2(k), LIST2((k) + 2)
#define LIST8(k) LIST4(k), LIST4((k) + 4)
#define LIST_(n, k) LIST##n(k)
#define LIST(n, k) LIST_(n, k)
#if defined(__clang__)
#define SHUFFLE(x, y, I, k) __builtin_shufflevector(x, y, LIST(LANES, k))
#else
#define SHUFFLE(x, y, I, k) __builtin_shuffle(x, y, (I){LIST(LANES, k)})
#endif

/* 16-byte vectors are SSE2's and NEON's; a compiler without vectors gets the loops. */
#if defined(__GNUC__)
#define BITS 32
#define LANES 4
#define NAME(f) f##_generic_32
#include "native_scan.h"
#define BITS 64
#define LANES 2
#define NAME(f) f##_generic_64
#include "native_scan.h"
#else
#define BITS 32
#define LANES 1
#define NAME(f) f##_generic_32
#include "native_scan.h"
#define BITS 64
#define LANES 1
#define NAME(f) f##_generic_64
#include "native_scan.h"
#endif

#if X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define BITS 32
#define LANES 8
#define NAME(f) f##_avx2_32
#include "native_scan.h"
#define BITS 64
#define LANES 4
#define NAME(f) f##_avx2_64
#include "native_scan.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")
#endif
#define BITS 32
#define LANES 16
#define NAME(f) f##_avx512_32
#include "native_scan.h"
#define BITS 64
#define LANES 8
#define NAME(f) f##_avx512_64
#include "native_scan.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

typedef struct {
    const char *name;
    const Kernels *for_float32, *for_float64;
    int supported;
} InstructionSet;

static InstructionSet instruction_sets[] = { /* the fastest first */
#if X86
    {"avx512", &kernels_avx512_32, &kernels_avx512_64, 0},
    {"avx2", &kernels_avx2_32, &kernels_avx2_64, 0},
#endif
    {"generic", &kernels_generic_32, &kernels_generic_64, 1},
};
#define N_SETS (sizeof(instruction_sets) / sizeof(*instruction_sets))
static const InstructionSet *chosen;

static void choose_instruction_set(void)
{
#if X86
    __builtin_cpu_init();
    instruction_sets[0].supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    instruction_sets[1].supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    for (chosen = instruction_sets; !chosen->supported;)
        chosen++;
}
