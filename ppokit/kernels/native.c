/* Linear recurrences in time on the CPU, float32 and float64, over contiguous memory.
 *
 * Tensors are [outer, steps, inner] and come as addresses. With inner == 1 the steps of a row are
 * neighbours, and ROWS rows are computed side by side: each waits for its own last step only. With
 * inner > 1 the columns are neighbours, and the compiler makes vectors of them. The Python functions
 * in fused.py check the tensors. This file includes itself, once for each real type.
 */

#ifndef REAL

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <math.h>
#include <stdint.h>

#define ROWS 8
#define COLUMNS 64
#define PIECE 256 /* steps of a row at a time, or PIECE * ROWS / COLUMNS of columns */
#define PITCH (PIECE + 16) /* from row to row of a piece; powers of 2 would share lines of the cache */
#define LARGE 50000 /* numbers that take longer than another thread waits for the lock of Python */

#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE inline
#endif
/* The loader chooses the instruction set. The sanitizers cannot follow it there. */
#if defined(__x86_64__) && defined(__gnu_linux__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(ONE_TARGET)
#define FOR_EACH_TARGET __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_TARGET
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

typedef struct {
    int64_t outer, steps, inner;
} Sizes;

/* `count` recurrences side by side, from element `at` on, the first of them the `chain`-th. The
 * next one is `next` elements away, and the next step `time`. */
typedef struct {
    int64_t count, next, time, at, chain;
} Block;

/* Call a function for each block, with constants that it is compiled for. */
#define FOR_EACH_BLOCK(function, ...) \
    do { \
        int64_t row = 0; \
        if (sizes.inner == 1) { \
            for (; row + ROWS <= sizes.outer; row += ROWS) \
                function((Block){ROWS, sizes.steps, 1, row * sizes.steps, row}, sizes.steps, __VA_ARGS__); \
            for (; row < sizes.outer; row++) \
                function((Block){1, sizes.steps, 1, row * sizes.steps, row}, sizes.steps, __VA_ARGS__); \
            break; \
        } \
        for (; row < sizes.outer; row++) \
            for (int64_t i = 0; i < sizes.inner; i += COLUMNS) { \
                const int64_t left = sizes.inner - i, count = left < COLUMNS ? left : COLUMNS; \
                function((Block){count, 1, sizes.inner, row * sizes.steps * sizes.inner + i, row * sizes.inner + i}, \
                         sizes.steps, __VA_ARGS__); \
            } \
    } while (0)

#define EACH(i) (int64_t i = 0; i < block.count; i++)

/* For each element of a piece of time: k, where it is in the tensors, and m, in the piece. */
#define FOR_EACH_ELEMENT(...) \
    do { \
        if (block.time == 1) { \
            for EACH(i) { \
                INDEPENDENT \
                for (int64_t t = start; t < end; t++) { \
                    const int64_t k = i * block.next + t, m = i * PITCH + t - start; \
                    __VA_ARGS__ \
                } \
            } \
        } else { \
            for (int64_t t = start; t < end; t++) { \
                INDEPENDENT \
                for EACH(i) { \
                    const int64_t k = i + t * block.time, m = i + (t - start) * COLUMNS; \
                    __VA_ARGS__ \
                } \
            } \
        } \
    } while (0)

#define REAL double
#define UINT uint64_t
#define NAME(f) f##_64
#include "native.c"
#undef REAL
#undef UINT
#undef NAME
#define REAL float
#define UINT uint32_t
#define NAME(f) f##_32
#include "native.c"

/* -- the Python functions ------------------------------------------------------------------- */

#define ADDRESSES 7

typedef struct {
    Sizes sizes;
    int is_double;
    char *data[ADDRESSES];
    double numbers[2];
} Arguments;

/* Read is_double, outer, steps, inner, `addresses` addresses (0: there is no such tensor) and
 * `numbers` floats. Return 0 with an exception where they are something else. */
static int parse(PyObject *const *args, Py_ssize_t nargs, int addresses, int numbers, Arguments *into)
{
    if (nargs != 4 + addresses + numbers) {
        PyErr_Format(PyExc_TypeError, "%d arguments are needed, got %zd.", 4 + addresses + numbers, nargs);
        return 0;
    }
    into->is_double = PyObject_IsTrue(args[0]);
    into->sizes.outer = PyLong_AsLongLong(args[1]);
    into->sizes.steps = PyLong_AsLongLong(args[2]);
    into->sizes.inner = PyLong_AsLongLong(args[3]);
    for (int k = 0; k < addresses; k++)
        into->data[k] = PyLong_AsVoidPtr(args[4 + k]);
    for (int k = 0; k < numbers; k++)
        into->numbers[k] = PyFloat_AsDouble(args[4 + addresses + k]);
    return !PyErr_Occurred();
}

/* Run a function for the real type, without the lock of Python where that pays. */
#define RUN(function, a, ...) \
    do { \
        PyThreadState *state = NULL; \
        if ((a).sizes.outer * (a).sizes.steps * (a).sizes.inner > LARGE) \
            state = PyEval_SaveThread(); \
        if ((a).is_double) \
            function##_64((a).sizes, __VA_ARGS__); \
        else \
            function##_32((a).sizes, __VA_ARGS__); \
        if (state) \
            PyEval_RestoreThread(state); \
    } while (0)

static PyObject *native_gae(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Arguments a;
    if (!parse(args, nargs, 7, 2, &a))
        return NULL;
    RUN(gae, a, a.data, a.numbers[0], a.numbers[1]);
    return Py_NewRef(Py_None);
}

static PyObject *native_scan(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Arguments a;
    if (!parse(args, nargs, 4, 1, &a))
        return NULL;
    RUN(scan, a, a.data, a.numbers[0] != 0);
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"gae", (PyCFunction)(void (*)(void))native_gae, METH_FASTCALL, NULL},
    {"scan", (PyCFunction)(void (*)(void))native_scan, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "native", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit_native(void) { return PyModuleDef_Init(&definition); }

#else /* -- for one real type ------------------------------------------------------------------ */

/* y_t = x_t + d_t y_{t-1}, or y_{t+1}, for times 0 to steps. Neighbours are `next` apart, and steps
 * `time`. Nothing crosses a decay of 0, not even a NaN, with `cuts`; without, the last y is not finite
 * if a y before it is not. */
static ALWAYS_INLINE void NAME(recurrence)(const int64_t count, const int64_t next, const int64_t time, const int64_t steps,
                                           const int reverse, const int cuts, const REAL *x, const REAL *decay,
                                           REAL *y, REAL *carries)
{
    REAL carry[COLUMNS];
    for (int64_t i = 0; i < count; i++)
        carry[i] = carries[i];
    for (int64_t step = 0; step < steps; step++) {
        const int64_t t = reverse ? steps - 1 - step : step;
        INDEPENDENT
        for (int64_t i = 0; i < count; i++) {
            const int64_t k = i * next + t * time;
            const REAL kept = cuts && decay[k] == 0 ? 0 : carry[i];
            y[k] = carry[i] = x[k] + decay[k] * kept;
        }
    }
    for (int64_t i = 0; i < count; i++)
        carries[i] = carry[i];
}

static ALWAYS_INLINE int NAME(are_finite)(const int64_t count, const REAL *numbers)
{
    int finite = 1;
    for (int64_t i = 0; i < count; i++)
        finite &= isfinite(numbers[i]) != 0;
    return finite;
}

/* Return x where all bits are set, and 0 where none is: without a branch, so the compiler makes vectors. */
static ALWAYS_INLINE REAL NAME(only)(const UINT bits, const REAL x)
{
    union {
        REAL number;
        UINT bits;
    } both = {x};
    both.bits &= bits;
    return both.number;
}

/* A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V'_t - V_t */
static ALWAYS_INLINE int NAME(gae_pieces)(const Block block, const int64_t steps, char *const *data, const REAL gamma,
                                          const REAL decay, const int cuts)
{
    const REAL *reward = (const REAL *)data[0] + block.at, *value = (const REAL *)data[1] + block.at;
    const REAL *next_value = (const REAL *)data[2] + block.at;
    const uint8_t *done = (const uint8_t *)data[3] + block.at, *terminated = (const uint8_t *)data[4] + block.at;
    REAL *advantage = (REAL *)data[5] + block.at, *target = (REAL *)data[6] + block.at;
    const int is_row = block.time == 1;
    const int64_t most = is_row ? PIECE : PIECE * ROWS / COLUMNS;
    REAL deltas[ROWS * PITCH], decays[ROWS * PITCH], carry[COLUMNS] = {0};
    for (int64_t end = steps; end > 0; end -= most) {
        const int64_t start = end > most ? end - most : 0;
        FOR_EACH_ELEMENT({
            deltas[m] = reward[k] - value[k] + gamma * NAME(only)((UINT)(terminated[k] != 0) - 1, next_value[k]);
            decays[m] = NAME(only)((UINT)((done[k] | terminated[k]) != 0) - 1, decay);
        });
        NAME(recurrence)(block.count, is_row ? PITCH : 1, is_row ? 1 : COLUMNS, end - start, 1, cuts, deltas, decays,
                         deltas, carry);
        FOR_EACH_ELEMENT({
            advantage[k] = deltas[m];
            target[k] = deltas[m] + value[k];
        });
    }
    return NAME(are_finite)(block.count, carry);
}

static ALWAYS_INLINE void NAME(gae_block)(const Block block, const int64_t steps, char *const *data, const REAL gamma,
                                          const REAL decay)
{
    if (!NAME(gae_pieces)(block, steps, data, gamma, decay, 0))
        NAME(gae_pieces)(block, steps, data, gamma, decay, 1);
}

static ALWAYS_INLINE void NAME(scan_block)(const Block block, const int64_t steps, char *const *data, const int reverse)
{
    const REAL *initial = (const REAL *)data[2];
    for (int cuts = 0; cuts < 2; cuts++) {
        REAL carry[COLUMNS];
        for EACH(i)
            carry[i] = initial ? initial[block.chain + i] : 0;
        NAME(recurrence)(block.count, block.next, block.time, steps, reverse, cuts, (const REAL *)data[0] + block.at,
                         (const REAL *)data[1] + block.at, (REAL *)data[3] + block.at, carry);
        if (NAME(are_finite)(block.count, carry))
            return;
    }
}

FOR_EACH_TARGET
static void NAME(gae)(const Sizes sizes, char *const *data, double gamma, double lmbda)
{
    FOR_EACH_BLOCK(NAME(gae_block), data, (REAL)gamma, (REAL)(gamma * lmbda));
}

FOR_EACH_TARGET
static void NAME(scan)(const Sizes sizes, char *const *data, int reverse)
{
    FOR_EACH_BLOCK(NAME(scan_block), data, reverse);
}

#endif
