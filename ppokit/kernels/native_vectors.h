/* Vectors of LANES reals and how they are scanned, for one instruction set and real type.
 *
 * y_t = x_t + a_t y_{t-1} is associative in its maps, so a vector of LANES neighbouring steps is
 * scanned in the register: doubling step k adds a_t times the neighbour k lanes away, and only the
 * last carry goes from one vector to the next (Hillis & Steele, 1986, "Data parallel algorithms").
 * A step that ends an episode is "dead": nothing crosses it, not even a NaN, so products are
 * dropped there and not multiplied by 0.
 */

#undef V
#undef I
#undef DEAD
#undef LOAD
#undef STORE
#undef ALL
#undef CAST
#undef TO_LOWER
#undef TO_UPPER
#undef ADD_PRODUCT
#undef ADD_SCALED
#undef ZEROS
#undef DEAD_TO_LOWER
#undef DEAD_TO_UPPER
#undef DOUBLE
#undef SCAN
#undef DOUBLE_OWN
#undef SCAN_OWN

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
