/* The scans themselves, included by native.c once for each instruction set and real type.
 *
 * To be defined before, and undefined here at the end: BITS (32 or 64), LANES (1: no vectors) and
 * NAME(f), the name of f in this instance. Steps that do not fill a vector are taken one by one.
 */

#if BITS == 32
#define REAL float
#define INT int32_t
#else
#define REAL double
#define INT int64_t
#endif
#include "native_vectors.h"

/* -- generalised advantage estimation: time contiguous --------------------------------------- */

static void NAME(gae_rows)(Block *block)
{
    const int64_t steps = block->steps;
    const REAL gamma = (REAL)block->gamma, decay = (REAL)(block->gamma * block->lmbda);
#if LANES > 1
    const V gammas = ALL(gamma);
    V power[4], reach;
    NAME(powers)(block->gamma * block->lmbda, power, &reach, 1);
#endif
    for (int64_t row = 0; row < block->count; row++) {
        const REAL *reward = ROW(const REAL, 0), *value = ROW(const REAL, 1);
        const REAL *next_value = ROW(const REAL, 2);
        const uint8_t *done = ROW(const uint8_t, 3), *terminated = ROW(const uint8_t, 4);
        REAL *advantage = ROW(REAL, 5), *target = ROW(REAL, 6);
        REAL carry = 0;
        int64_t t = steps;
        while (t % LANES || (LANES == 1 && t)) {
            t--;
            REAL delta = reward[t] - value[t];
            if (!terminated[t])
                delta += gamma * next_value[t];
            carry = done[t] | terminated[t] ? delta : delta + decay * carry;
            advantage[t] = carry;
            target[t] = carry + value[t];
        }
#if LANES > 1
        V carries = ALL(carry);
        while (t) {
            V x, v, next;
            t -= LANES;
            LOAD(x, reward + t);
            LOAD(v, value + t);
            LOAD(next, next_value + t);
            DEAD last = NAME(flags)(terminated + t);
            DEAD dead = NAME(flags)(done + t) | last;
            x = ADD_SCALED(x - v, gammas, next, last);
            SCAN(TO_LOWER)
            x = ADD_SCALED(x, reach, carries, dead);
            carries = ALL(x[0]);
            v += x;
            STORE(advantage + t, x);
            STORE(target + t, v);
        }
#endif
    }
}

/* -- ... and time strided, columns contiguous ------------------------------------------------- */

static void NAME(gae_columns)(Block *block)
{
    const REAL gamma = (REAL)block->gamma, decay = (REAL)(block->gamma * block->lmbda);
    for (int64_t start = 0; start < block->count; start += COLUMNS) {
        const int64_t count = block->count - start < COLUMNS ? block->count - start : COLUMNS;
        REAL carry[COLUMNS] = {0};
        for (int64_t t = block->steps - 1; t >= 0; t--) {
            const REAL *restrict reward = AT(const REAL, 0), *restrict value = AT(const REAL, 1);
            const REAL *restrict next_value = AT(const REAL, 2);
            const uint8_t *restrict done = AT(const uint8_t, 3);
            const uint8_t *restrict terminated = AT(const uint8_t, 4);
            REAL *restrict advantage = AT(REAL, 5), *restrict target = AT(REAL, 6);
            for (int64_t i = 0; i < count; i++) {
                REAL next = terminated[i] ? 0 : next_value[i];
                REAL kept = done[i] | terminated[i] ? 0 : carry[i];
                carry[i] = reward[i] - value[i] + gamma * next + decay * kept;
                advantage[i] = carry[i];
                target[i] = carry[i] + value[i];
            }
        }
    }
}

/* -- discounted returns, forward in time ------------------------------------------------------- */

/* `narrow`: the rewards are float32 although REAL is not. `summed`: instead of writing the returns,
 * add up their deviations from block->shift, and the squares of those. */
#if LANES > 1
typedef float NAME(floats) __attribute__((vector_size(LANES * 4)));
#endif
#define REWARD(i) (narrow ? (REAL)((const float *)reward)[i] : ((const REAL *)reward)[i])

static ALWAYS_INLINE void NAME(returns_rows)(Block *block, const int narrow, const int summed)
{
    const int64_t steps = block->steps, size = narrow ? 4 : sizeof(REAL);
    const REAL gamma = (REAL)block->gamma, shift = (REAL)block->shift;
    REAL sum = 0, square = 0;
#if LANES > 1
    V power[4], reach, sums = {0}, squares = {0};
    NAME(powers)(block->gamma, power, &reach, 0);
#endif
    for (int64_t row = 0; row < block->count; row++) {
        const char *reward = (char *)block->data[0] + row * block->next[0] * size;
        const uint8_t *done = ROW(const uint8_t, 1);
        const REAL *initial = block->data[2];
        REAL *returns = summed ? NULL : ROW(REAL, 4);
        REAL carry = initial ? initial[row * block->next[2]] : 0;
        int64_t t = 0;
        do { /* at least the first step, which has no done before it */
            carry = t && done[t - 1] ? REWARD(t) : REWARD(t) + gamma * carry;
            if (summed) {
                sum += carry - shift;
                square += (carry - shift) * (carry - shift);
            } else {
                returns[t] = carry;
            }
            t++;
        } while ((steps - t) % LANES || (LANES == 1 && t < steps));
#if LANES > 1
        V carries = ALL(carry);
        for (; t < steps; t += LANES) {
            V x;
            if (narrow) {
                NAME(floats) floats;
                LOAD(floats, reward + t * size);
                x = __builtin_convertvector(floats, V);
            } else {
                LOAD(x, reward + t * size);
            }
            DEAD dead = NAME(flags)(done + t - 1);
            SCAN(TO_UPPER)
            x = ADD_SCALED(x, reach, carries, dead);
            carries = ALL(x[LANES - 1]);
            if (summed) {
                x -= ALL(shift);
                sums += x;
                squares += x * x;
            } else {
                STORE(returns + t, x);
            }
        }
        carry = carries[0];
#endif
        *ROW(REAL, 3) = done[steps - 1] ? 0 : carry;
    }
#if LANES > 1
    for (int i = 0; i < LANES; i++) {
        sum += sums[i];
        square += squares[i];
    }
#endif
    block->sum += sum;
    block->square += square;
}

static ALWAYS_INLINE void NAME(returns_columns)(Block *block, const int narrow, const int summed)
{
    const int64_t size = narrow ? 4 : sizeof(REAL);
    const REAL gamma = (REAL)block->gamma, shift = (REAL)block->shift;
    for (int64_t start = 0; start < block->count; start += COLUMNS) {
        const int64_t count = block->count - start < COLUMNS ? block->count - start : COLUMNS;
        REAL carry[COLUMNS] = {0}, sum[COLUMNS] = {0}, square[COLUMNS] = {0};
        int64_t t = 0;
        if (block->data[2])
            memcpy(carry, AT(const REAL, 2), (size_t)count * sizeof(REAL));
        for (t = 0; t < block->steps; t++) {
            const char *restrict reward = (char *)block->data[0] + (start + t * block->time[0]) * size;
            const uint8_t *restrict done = AT(const uint8_t, 1);
            REAL *restrict returns = summed ? NULL : AT(REAL, 4);
            for (int64_t i = 0; i < count; i++) {
                const REAL total = REWARD(i) + gamma * carry[i];
                if (summed) {
                    sum[i] += total - shift;
                    square[i] += (total - shift) * (total - shift);
                } else {
                    returns[i] = total;
                }
                carry[i] = done[i] ? 0 : total;
            }
        }
        memcpy(AT(REAL, 3), carry, (size_t)count * sizeof(REAL));
        for (int64_t i = 0; i < count; i++) {
            block->sum += sum[i];
            block->square += square[i];
        }
    }
}
#undef REWARD

#define INSTANCE(kernel, name, ...) \
    static void NAME(kernel##_##name)(Block *block) { NAME(kernel)(block, __VA_ARGS__); }
INSTANCE(returns_rows, written, 0, 0)
INSTANCE(returns_columns, written, 0, 0)
#if BITS == 64 /* sums are float64's */
INSTANCE(returns_rows, summed, 0, 1)
INSTANCE(returns_columns, summed, 0, 1)
INSTANCE(returns_rows, narrow_summed, 1, 1)
INSTANCE(returns_columns, narrow_summed, 1, 1)
#endif

/* -- the linear recurrence itself, in either direction ----------------------------------------- */

static ALWAYS_INLINE void NAME(scan_rows)(Block *block, const int reverse)
{
    const int64_t steps = block->steps;
    for (int64_t row = 0; row < block->count; row++) {
        const REAL *input = ROW(const REAL, 0), *decay = ROW(const REAL, 1);
        const REAL *initial = block->data[2];
        REAL *output = ROW(REAL, 3);
        REAL carry = initial ? initial[row * block->next[2]] : 0;
        int64_t left = steps;
        while (left % LANES || (LANES == 1 && left)) {
            int64_t t = reverse ? left - 1 : steps - left;
            carry = decay[t] == 0 ? input[t] : input[t] + decay[t] * carry;
            output[t] = carry;
            left--;
        }
#if LANES > 1
        V carries = ALL(carry);
        for (; left; left -= LANES) {
            int64_t t = reverse ? left - LANES : steps - left;
            V x, a;
            LOAD(x, input + t);
            LOAD(a, decay + t);
            DEAD dead = ZEROS(a);
            if (reverse) {
                SCAN_OWN(TO_LOWER)
            } else {
                SCAN_OWN(TO_UPPER)
            }
            x = ADD_PRODUCT(x, a, carries, dead);
            carries = ALL(x[reverse ? 0 : LANES - 1]);
            STORE(output + t, x);
        }
#endif
    }
}

INSTANCE(scan_rows, forward, 0)
INSTANCE(scan_rows, reverse, 1)

static void NAME(scan_columns)(Block *block)
{
    for (int64_t start = 0; start < block->count; start += COLUMNS) {
        const int64_t count = block->count - start < COLUMNS ? block->count - start : COLUMNS;
        REAL carry[COLUMNS] = {0};
        int64_t t = 0;
        if (block->data[2])
            memcpy(carry, AT(const REAL, 2), (size_t)count * sizeof(REAL));
        for (int64_t step = 0; step < block->steps; step++) {
            t = block->reverse ? block->steps - 1 - step : step;
            const REAL *restrict input = AT(const REAL, 0), *restrict decay = AT(const REAL, 1);
            REAL *restrict output = AT(REAL, 3);
            for (int64_t i = 0; i < count; i++) {
                carry[i] = decay[i] == 0 ? input[i] : input[i] + decay[i] * carry[i];
                output[i] = carry[i];
            }
        }
    }
}

static const Kernels NAME(kernels) = {
    .gae = {NAME(gae_rows), NAME(gae_columns)},
    .returns = {NAME(returns_rows_written), NAME(returns_columns_written)},
#if BITS == 64
    .moments = {NAME(returns_rows_summed), NAME(returns_columns_summed)},
    .moments_of_float32 = {NAME(returns_rows_narrow_summed), NAME(returns_columns_narrow_summed)},
#endif
    .scan = {NAME(scan_rows_forward), NAME(scan_columns)},
    .scan_reverse = {NAME(scan_rows_reverse), NAME(scan_columns)},
};
#undef INSTANCE

#undef REAL
#undef INT
#undef BITS
#undef LANES
#undef NAME
