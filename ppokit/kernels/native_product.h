/* A product of matrices, included by native_scan.h once for each instruction set and real type.
 *
 * c = a b, or c += a b. A block of c stays in registers while a column of a and a row of b are
 * multiplied for each k (Goto & van de Geijn, 2008, section 4). Libraries for large matrices reach
 * half of this speed where a has 8 rows, as a few sequences have at one time step.
 */

#define ROWS_AT_ONCE 6
#define DEPTH 512 /* so much of b and a at a time stays in the cache */

#if LANES > 1
typedef REAL NAME(loose) __attribute__((vector_size(LANES * BITS / 8), aligned(BITS / 8), may_alias));
#define VECTORS (LANES * BITS == 512 ? 4 : 2) /* 24 or 12 of the registers hold sums */

static ALWAYS_INLINE void NAME(product_block)(
    const Product *p, const int rows, const int vectors, int64_t i, int64_t j, int64_t from, int64_t to, int add)
{
    const REAL *a = (const REAL *)p->a + i * p->a_row, *b = (const REAL *)p->b + j;
    REAL *c = (REAL *)p->c + i * p->columns + j;
    V sum[ROWS_AT_ONCE][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[r][v] = add ? (V)*(const NAME(loose) *)(c + r * p->columns + v * LANES) : ALL(0);
    for (int64_t k = from; k < to; k++) {
        const NAME(loose) *of_b = (const NAME(loose) *)(b + k * p->columns);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const V of_a = ALL(a[r * p->a_row + k * p->a_next]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[r][v] += of_a * of_b[v];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            *(NAME(loose) *)(c + r * p->columns + v * LANES) = sum[r][v];
}

static ALWAYS_INLINE void NAME(product_columns)(
    const Product *p, const int vectors, int64_t j, int64_t from, int64_t to, int add)
{
    int64_t i = 0;
    for (; i + ROWS_AT_ONCE <= p->rows; i += ROWS_AT_ONCE)
        NAME(product_block)(p, ROWS_AT_ONCE, vectors, i, j, from, to, add);
    switch (p->rows - i) {
    case 5: NAME(product_block)(p, 5, vectors, i, j, from, to, add); break;
    case 4: NAME(product_block)(p, 4, vectors, i, j, from, to, add); break;
    case 3: NAME(product_block)(p, 3, vectors, i, j, from, to, add); break;
    case 2: NAME(product_block)(p, 2, vectors, i, j, from, to, add); break;
    case 1: NAME(product_block)(p, 1, vectors, i, j, from, to, add); break;
    }
}
#endif

static void NAME(product)(const Product *p)
{
    for (int64_t from = 0; from < p->depth; from += DEPTH) {
        const int64_t to = from + DEPTH < p->depth ? from + DEPTH : p->depth;
        const int add = p->add || from;
        int64_t j = 0;
#if LANES > 1
        for (; j + VECTORS * LANES <= p->columns; j += VECTORS * LANES)
            NAME(product_columns)(p, VECTORS, j, from, to, add);
        for (; j + LANES <= p->columns; j += LANES)
            NAME(product_columns)(p, 1, j, from, to, add);
#endif
        for (; j < p->columns; j++)
            for (int64_t i = 0; i < p->rows; i++) {
                REAL *c = (REAL *)p->c + i * p->columns + j, sum = add ? *c : 0;
                for (int64_t k = from; k < to; k++)
                    sum += ((const REAL *)p->a)[i * p->a_row + k * p->a_next] * ((const REAL *)p->b)[k * p->columns + j];
                *c = sum;
            }
    }
}

/* c [rows, columns], in one piece, = or += a [rows, depth] b [depth, columns], in one piece. */
static void NAME(multiply)(
    int64_t rows, int64_t depth, int64_t columns, const REAL *a, const REAL *b, REAL *c, int add)
{
    const Product p = {rows, depth, columns, a, depth, 1, b, c, add};
    NAME(product)(&p);
}

#undef ROWS_AT_ONCE
#undef DEPTH
#undef VECTORS
