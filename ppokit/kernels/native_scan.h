/* The scans themselves, included by native.c once for each instruction set and real type.
 *
 * y_t = x_t + a_t y_{t-1} is associative in its maps, so a vector of LANES neighbouring steps is
 * scanned in the register: doubling step k adds a_t times the neighbour k lanes away, and only the
 * last carry goes from one vector to the next (Hillis & Steele, 1986, "Data parallel algorithms").
 * A step that ends an episode is "dead": nothing crosses it, not even a NaN, so products are
 * dropped there and not multiplied by 0.
 *
 * To be defined by native.c, and undefined here at the end: BITS (32 or 64), LANES (1: no vectors)
 * and NAME(f), the name of f in this instance.
 */

#if BITS == 32
#define REAL float
#define INT int32_t
#else
#define REAL double
#define INT int64_t
#endif

#if LANES > 1
typedef REAL NAME(vec) __attribute__((vector_size(LANES * BITS / 8)));
typedef INT NAME(ints) __attribute__((vector_size(LANES * BITS / 8)));
#define V NAME(vec)
#define I NAME(ints)
#define LOAD(v, p) memcpy(&(v), (p), sizeof(v))
#define STORE(p, v) memcpy((p), &(v), sizeof(v))
#define ALL(x) ((REAL)(x) - (V){0})

#if LANES * BITS == 512 /* AVX-512: dead steps are the bits of an integer */
typedef unsigned NAME(dead);
#if BITS == 32
#define CAST(x) _mm512_castps_si512(x)
#define TO_LOWER(x, fill, k) _mm512_castsi512_ps(_mm512_alignr_epi32(CAST(fill), CAST(x), k))
#define TO_UPPER(x, fill, k) _mm512_castsi512_ps(_mm512_alignr_epi32(CAST(x), CAST(fill), 16 - k))
#define ADD_PRODUCT(x, a, y, dead) _mm512_mask3_fmadd_ps(a, y, x, (__mmask16)~(dead))
#define ZEROS(x) _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ)
#else
#define CAST(x) _mm512_castpd_si512(x)
#define TO_LOWER(x, fill, k) _mm512_castsi512_pd(_mm512_alignr_epi64(CAST(fill), CAST(x), k))
#define TO_UPPER(x, fill, k) _mm512_castsi512_pd(_mm512_alignr_epi64(CAST(x), CAST(fill), 8 - k))
#define ADD_PRODUCT(x, a, y, dead) _mm512_mask3_fmadd_pd(a, y, x, (__mmask8)~(dead))
#define ZEROS(x) _mm512_cmp_pd_mask(x, _mm512_setzero_pd(), _CMP_EQ_OQ)
#endif
#define ADD_SCALED ADD_PRODUCT
#define DEAD_TO_LOWER(dead, k) ((dead) >> (k))
#define DEAD_TO_UPPER(dead, k) ((dead) << (k))
static inline unsigned NAME(flags)(const uint8_t *p)
{
    __m128i b = LANES == 16 ? _mm_loadu_si128((const __m128i *)p) : _mm_loadl_epi64((const __m128i *)p);
    return _mm_test_epi8_mask(b, b);
}

#else /* dead steps are lanes of ones */
typedef I NAME(dead);
#define TO_LOWER(x, fill, k) SHUFFLE(x, fill, I, k)
#define TO_UPPER(x, fill, k) SHUFFLE(fill, x, I, LANES - (k))
#define ADD_PRODUCT(x, a, y, dead) ((x) + (V)((I)((a) * (y)) & ~(dead)))
#define ADD_SCALED(x, c, y, dead) ((x) + (c) * (V)((I)(y) & ~(dead))) /* a finite c: a fused add */
#define ZEROS(x) ((I)((x) == 0))
#define DEAD_TO_LOWER(dead, k) TO_LOWER(dead, (I){0}, k)
#define DEAD_TO_UPPER(dead, k) TO_UPPER(dead, (I){0}, k)
static inline I NAME(flags)(const uint8_t *p)
{
#if LANES * BITS == 256
    __m128i b = LANES == 8 ? _mm_loadl_epi64((const __m128i *)p) : _mm_loadu_si32(p);
    return (I)(LANES == 8 ? _mm256_cvtepu8_epi32(b) : _mm256_cvtepu8_epi64(b)) != 0;
#elif BITS == 32 /* every lane takes all the flags, and keeps its own byte */
    uint32_t flags;
    const I own = {0xFF, 0xFF00, 0xFF0000, (INT)0xFF000000};
#else
    uint16_t flags;
    const I own = {0xFF, 0xFF00};
#endif
#if LANES * BITS == 128
    LOAD(flags, p);
    return (((INT)flags - (I){0}) & own) != 0;
#endif
}
#endif
#define DEAD NAME(dead)

/* Doubling steps with a constant coefficient c; power[] holds c, c^2, c^4, c^8. */
#define DOUBLE(SHIFT, k, n) \
    if (k < LANES) { \
        x = ADD_SCALED(x, power[n], SHIFT(x, (V){0}, (k) % LANES), dead); \
        dead |= DEAD_##SHIFT(dead, (k) % LANES); \
    }
#define SCAN(SHIFT) DOUBLE(SHIFT, 1, 0) DOUBLE(SHIFT, 2, 1) DOUBLE(SHIFT, 4, 2) DOUBLE(SHIFT, 8, 3)

/* The same with a coefficient for each step. */
#define DOUBLE_OWN(SHIFT, k) \
    if (k < LANES) { \
        x = ADD_PRODUCT(x, a, SHIFT(x, (V){0}, (k) % LANES), dead); \
        a *= SHIFT(a, ALL(1), (k) % LANES); \
        dead |= DEAD_##SHIFT(dead, (k) % LANES); \
    }
#define SCAN_OWN(SHIFT) DOUBLE_OWN(SHIFT, 1) DOUBLE_OWN(SHIFT, 2) DOUBLE_OWN(SHIFT, 4) DOUBLE_OWN(SHIFT, 8)

/* What the steps of a vector multiply the carry by: c^1 .. c^LANES in the order of the scan. */
static inline void NAME(powers)(double c, V *power, V *reach, int reverse)
{
    REAL lanes[LANES];
    double p = c;
    for (int i = 0; i < LANES; i++, p *= c)
        lanes[reverse ? LANES - 1 - i : i] = (REAL)p;
    LOAD(*reach, lanes);
    for (int n = 0; n < 4; n++, c *= c)
        power[n] = ALL(c);
}
#endif

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

static void NAME(returns_rows)(Block *block)
{
    const int64_t steps = block->steps;
    const REAL gamma = (REAL)block->gamma;
#if LANES > 1
    V power[4], reach;
    NAME(powers)(block->gamma, power, &reach, 0);
#endif
    for (int64_t row = 0; row < block->count; row++) {
        const REAL *reward = ROW(const REAL, 0);
        const uint8_t *done = ROW(const uint8_t, 1);
        const REAL *initial = block->data[2];
        REAL *returns = ROW(REAL, 3), *final = ROW(REAL, 4);
        REAL carry = initial ? initial[row * block->next[2]] : 0;
        int64_t t = 0;
        do { /* at least the first step, which has no done before it */
            carry = t && done[t - 1] ? reward[t] : reward[t] + gamma * carry;
            returns[t++] = carry;
        } while ((steps - t) % LANES || (LANES == 1 && t < steps));
#if LANES > 1
        V carries = ALL(carry);
        for (; t < steps; t += LANES) {
            V x;
            LOAD(x, reward + t);
            DEAD dead = NAME(flags)(done + t - 1);
            SCAN(TO_UPPER)
            x = ADD_SCALED(x, reach, carries, dead);
            carries = ALL(x[LANES - 1]);
            STORE(returns + t, x);
        }
        carry = carries[0];
#endif
        *final = done[steps - 1] ? 0 : carry;
    }
}

static void NAME(returns_columns)(Block *block)
{
    const REAL gamma = (REAL)block->gamma;
    for (int64_t start = 0; start < block->count; start += COLUMNS) {
        const int64_t count = block->count - start < COLUMNS ? block->count - start : COLUMNS;
        REAL carry[COLUMNS] = {0};
        int64_t t = 0;
        if (block->data[2])
            memcpy(carry, AT(const REAL, 2), (size_t)count * sizeof(REAL));
        for (t = 0; t < block->steps; t++) {
            const REAL *restrict reward = AT(const REAL, 0);
            const uint8_t *restrict done = AT(const uint8_t, 1);
            REAL *restrict returns = AT(REAL, 3);
            for (int64_t i = 0; i < count; i++) {
                returns[i] = reward[i] + gamma * carry[i];
                carry[i] = done[i] ? 0 : returns[i];
            }
        }
        memcpy(AT(REAL, 4), carry, (size_t)count * sizeof(REAL));
    }
}

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

static void NAME(scan_rows_forward)(Block *block) { NAME(scan_rows)(block, 0); }
static void NAME(scan_rows_reverse)(Block *block) { NAME(scan_rows)(block, 1); }

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

/* -- moments of the discounted returns, which are not written: float64 sums of any rewards ------ */

#if BITS == 64
#if LANES > 1
typedef float NAME(floats) __attribute__((vector_size(LANES * 4)));
#endif
#define REWARD(i) (single ? (double)((const float *)reward)[i] : ((const double *)reward)[i])

static ALWAYS_INLINE void NAME(moments_rows)(Block *block, const int single)
{
    const int64_t steps = block->steps;
    const double gamma = block->gamma, shift = block->shift;
    double sum = 0, square = 0;
#if LANES > 1
    V power[4], reach, sums = {0}, squares = {0};
    NAME(powers)(gamma, power, &reach, 0);
#endif
    for (int64_t row = 0; row < block->count; row++) {
        const char *reward = (char *)block->data[0] + row * block->next[0] * (single ? 4 : 8);
        const uint8_t *done = ROW(const uint8_t, 1);
        const double *initial = block->data[2];
        double carry = initial ? initial[row * block->next[2]] : 0;
        int64_t t = 0;
        do {
            carry = t && done[t - 1] ? REWARD(t) : REWARD(t) + gamma * carry;
            sum += carry - shift;
            square += (carry - shift) * (carry - shift);
            t++;
        } while ((steps - t) % LANES || (LANES == 1 && t < steps));
#if LANES > 1
        V carries = ALL(carry);
        for (; t < steps; t += LANES) {
            V x;
            if (single) {
                NAME(floats) narrow;
                LOAD(narrow, reward + 4 * t);
                x = __builtin_convertvector(narrow, V);
            } else {
                LOAD(x, reward + 8 * t);
            }
            DEAD dead = NAME(flags)(done + t - 1);
            SCAN(TO_UPPER)
            x = ADD_SCALED(x, reach, carries, dead);
            carries = ALL(x[LANES - 1]);
            x -= ALL(shift);
            sums += x;
            squares += x * x;
        }
        carry = carries[0];
#endif
        *ROW(double, 3) = done[steps - 1] ? 0 : carry;
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

static ALWAYS_INLINE void NAME(moments_columns)(Block *block, const int single)
{
    const double gamma = block->gamma, shift = block->shift;
    for (int64_t start = 0; start < block->count; start += COLUMNS) {
        const int64_t count = block->count - start < COLUMNS ? block->count - start : COLUMNS;
        double carry[COLUMNS] = {0}, sum[COLUMNS] = {0}, square[COLUMNS] = {0};
        int64_t t = 0;
        if (block->data[2])
            memcpy(carry, AT(const double, 2), (size_t)count * sizeof(double));
        for (t = 0; t < block->steps; t++) {
            const char *restrict reward = (char *)block->data[0] + (start + t * block->time[0]) * (single ? 4 : 8);
            const uint8_t *restrict done = AT(const uint8_t, 1);
            for (int64_t i = 0; i < count; i++) {
                double total = REWARD(i) + gamma * carry[i];
                sum[i] += total - shift;
                square[i] += (total - shift) * (total - shift);
                carry[i] = done[i] ? 0 : total;
            }
        }
        memcpy(AT(double, 3), carry, (size_t)count * sizeof(double));
        for (int64_t i = 0; i < count; i++) {
            block->sum += sum[i];
            block->square += square[i];
        }
    }
}
#undef REWARD

static void NAME(moments_rows_single)(Block *block) { NAME(moments_rows)(block, 1); }
static void NAME(moments_rows_double)(Block *block) { NAME(moments_rows)(block, 0); }
static void NAME(moments_columns_single)(Block *block) { NAME(moments_columns)(block, 1); }
static void NAME(moments_columns_double)(Block *block) { NAME(moments_columns)(block, 0); }
#endif

static const Kernels NAME(kernels) = {
    .gae = {NAME(gae_rows), NAME(gae_columns)},
    .returns = {NAME(returns_rows), NAME(returns_columns)},
    .scan = {NAME(scan_rows_forward), NAME(scan_columns)},
    .scan_reverse = {NAME(scan_rows_reverse), NAME(scan_columns)},
#if BITS == 64
    .moments_of_single = {NAME(moments_rows_single), NAME(moments_columns_single)},
    .moments_of_double = {NAME(moments_rows_double), NAME(moments_columns_double)},
#endif
};

#undef V
#undef I
#undef LOAD
#undef STORE
#undef ALL
#undef CAST
#undef TO_LOWER
#undef TO_UPPER
#undef ADD_PRODUCT
#undef ADD_SCALED
#undef ZEROS
#undef DEAD
#undef DEAD_TO_LOWER
#undef DEAD_TO_UPPER
#undef DOUBLE
#undef SCAN
#undef DOUBLE_OWN
#undef SCAN_OWN
#undef REAL
#undef INT
#undef BITS
#undef LANES
#undef NAME
