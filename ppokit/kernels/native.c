/* Linear recurrences in time on the CPU, float32 and float64.
 *
 * Tensors are [outer, steps, inner], contiguous. With inner == 1 the steps of a row are neighbours, and
 * LANES steps are computed together. With inner > 1 the columns are neighbours, and the compiler makes
 * vectors of them. This file includes itself, once for each real type.
 */

#ifndef REAL

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <math.h>
#include <stdint.h>

#define LANES (int64_t)(32 / sizeof(REAL)) /* steps of a row at a time */
#define COLUMNS 64
#define LARGE 50000 /* numbers that take longer than another thread waits for the lock of Python */

#define ALWAYS_INLINE inline __attribute__((always_inline))
/* The loader chooses the instruction set. The sanitizers cannot follow it there. */
#if defined(__x86_64__) && defined(__gnu_linux__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(ONE_TARGET)
#define FOR_EACH_TARGET __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_TARGET
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, INDICES(__VA_ARGS__))
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (NAME(Bits)){INDICES(__VA_ARGS__)})
#endif

typedef struct {
    int64_t outer, steps, inner;
} Sizes;

#define REAL double
#define INDICES(a, b, c, d, ...) a, b, c, d
#define UINT uint64_t
#define NAME(f) f##_64
#include "native.c"
#undef REAL
#undef INDICES
#undef UINT
#undef NAME
#define REAL float
#define INDICES(...) __VA_ARGS__
#define UINT uint32_t
#define NAME(f) f##_32
#include "native.c"

/* -- the Python functions ------------------------------------------------------------------- */

/* DLTensor and DLPackExchangeAPI of dlpack.h, version 1: they describe a tensor in 20 ns, and its attributes
 * in 400. */
typedef struct {
    char *data;
    int32_t device, device_id, rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct Exchange {
    uint32_t major, minor;
    const struct Exchange *previous;
    void *of_managed_tensors[3];
    int (*describe)(PyObject *, Tensor *);
} Exchange;

enum { CPU = 1, FLOAT = 2, BOOL = 6 }; /* DLDeviceType and DLDataTypeCode */

/* The tuple that __init__.py passes. */
enum { TYPE, EXCHANGE, IS_NEG, REQUIRES_GRAD, CONTIGUOUS, EMPTY_LIKE };

static int is_true(PyObject *reference)
{
    const int found = reference == NULL || PyObject_IsTrue(reference);
    Py_XDECREF(reference);
    return found;
}

static int is_contiguous(const Tensor *x)
{
    int64_t size = 1;
    for (int32_t k = x->rank - 1; k >= 0; size *= x->shape[k--])
        if (x->shape[k] != 1 && x->strides[k] != size)
            return 0;
    return 1;
}

/* Return whether x has the shape of another tensor, without its dimension `without`. */
static int has_shape(const Tensor *x, const Tensor *like, const int64_t without)
{
    int32_t at = 0;
    for (int32_t k = 0; k < like->rank; k++)
        if (k != without && (at == x->rank || x->shape[at++] != like->shape[k]))
            return 0;
    return at == x->rank;
}

/* Return the sizes before, at and behind a dimension, with no steps if x does not have it. */
static Sizes sizes_of(const Tensor *x, const int64_t dim)
{
    Sizes sizes = {1, 0, 1};
    for (int32_t k = 0; k < x->rank; k++)
        if (k == dim)
            sizes.steps = x->shape[k];
        else
            *(k < dim ? &sizes.outer : &sizes.inner) *= x->shape[k];
    return sizes;
}

/* Describe a tensor, and return a new reference to it or to a contiguous copy. Return NULL for one that a
 * kernel does not take. Fake tensors, and the zeros of a derivative, have no memory. */
static PyObject *take(PyObject *const *torch, const Exchange *exchange, PyObject *x, const int code, const int records,
                      Tensor *into)
{
    if ((PyObject *)Py_TYPE(x) != torch[TYPE] || exchange->describe(x, into) || !into->data)
        return NULL;
    if (into->device != CPU || into->code != code || into->lanes != 1)
        return NULL;
    if (code == FLOAT && (is_true(PyObject_CallFunctionObjArgs(torch[IS_NEG], x, NULL)) ||
                          (records && is_true(PyObject_GetAttr(x, torch[REQUIRES_GRAD])))))
        return NULL;
    if (is_contiguous(into))
        return Py_NewRef(x);
    PyObject *copy = PyObject_CallFunctionObjArgs(torch[CONTIGUOUS], x, NULL);
    if (copy && exchange->describe(copy, into))
        Py_CLEAR(copy);
    return copy;
}

/* Run a kernel. The arguments are the tuple, whether gradients are recorded, the dimension of time, two
 * numbers in [0, 1] and the tensors. Return the results, or None for arguments that it does not take. */
static PyObject *call(PyObject *const *args, const Py_ssize_t nargs, const int is_gae)
{
    const int inputs = is_gae ? 5 : 3, tensors = is_gae ? 7 : 4;
    if (nargs != 5 + inputs)
        return PyErr_Format(PyExc_TypeError, "%d arguments are needed, got %zd.", 5 + inputs, nargs);
    PyObject *torch[EMPTY_LIKE + 1], *held[7] = {NULL}, *result = NULL;
    for (int k = 0; k <= EMPTY_LIKE; k++)
        torch[k] = PyTuple_GetItem(args[0], k);
    const Exchange *exchange = PyCapsule_GetPointer(torch[EXCHANGE], "dlpack_exchange_api");
    while (exchange && exchange->major != 1)
        exchange = exchange->previous;
    const int records = PyObject_IsTrue(args[1]);
    const int64_t dim = PyLong_AsLongLong(args[2]);
    const double first = PyFloat_AsDouble(args[3]), second = PyFloat_AsDouble(args[4]);
    int good = exchange && !PyErr_Occurred() && first >= 0 && first <= 1 && second >= 0 && second <= 1;

    Tensor x[7];
    char *data[7] = {NULL};
    int64_t time = dim;
    Sizes sizes = {0};
    for (int k = 0; good && k < tensors; k++) {
        const int is_initial = !is_gae && k == 2;
        if (is_initial && args[5 + k] == Py_None)
            continue;
        if (k < inputs)
            held[k] = take(torch, exchange, args[5 + k], k < 3 ? FLOAT : BOOL, records, x + k);
        else
            held[k] = PyObject_CallFunctionObjArgs(torch[EMPTY_LIKE], held[0], NULL);
        good = held[k] && (k < inputs || !exchange->describe(held[k], x + k));
        if (good && k == 0) {
            time = dim < 0 ? dim + x->rank : dim;
            sizes = sizes_of(x, time);
            good = (x->bits == 32 || x->bits == 64) && sizes.outer * sizes.steps * sizes.inner > 0;
        }
        good = good && (x[k].bits == x->bits || x[k].code == BOOL) && has_shape(x + k, x, is_initial ? time : -1);
        data[k] = x[k].data;
    }
    if (good) {
        const int is_large = sizes.outer * sizes.steps * sizes.inner > LARGE;
        PyThreadState *state = is_large ? PyEval_SaveThread() : NULL;
        if (is_gae)
            (x->bits == 64 ? gae_64 : gae_32)(sizes, data, first, second);
        else
            (x->bits == 64 ? scan_64 : scan_32)(sizes, data, first != 0);
        if (state)
            PyEval_RestoreThread(state);
        result = is_gae ? PyTuple_Pack(2, held[5], held[6]) : Py_NewRef(held[3]);
    } else {
        PyErr_Clear(); /* the checks of the caller say what is wrong */
        result = Py_NewRef(Py_None);
    }
    for (int k = 0; k < tensors; k++)
        Py_XDECREF(held[k]);
    return result;
}

static PyObject *native_gae(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    return call(args, nargs, 1);
}

static PyObject *native_scan(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    return call(args, nargs, 0);
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

typedef REAL NAME(Lanes) __attribute__((vector_size(32)));
typedef UINT NAME(Bits) __attribute__((vector_size(32)));
typedef REAL NAME(Memory) __attribute__((vector_size(32), aligned(sizeof(REAL))));
typedef uint8_t NAME(Flags) __attribute__((vector_size(LANES), aligned(1)));

/* y_t = x_t + d_t y_{t-1}, or y_{t+1}. GAE is the recurrence of A_t = delta_t + gamma lambda A_{t+1}. */
typedef struct {
    char *const *data; /* x, d, initial or NULL, y; GAE: r, V, V', done, terminated, advantage, target */
    int is_gae, reverse;
    REAL gamma, decay;
} NAME(Recurrence);

#define NUMBERS(tensor) ((REAL *)r.data[tensor] + k)
#define FLAGS(tensor) ((const uint8_t *)r.data[tensor] + k)
#define DELTA(reward, value, next_value) ((reward) - (value) + r.gamma * (next_value))
#define ONLY_WHERE(flags, x) ((NAME(Lanes))((NAME(Bits))(x) & __builtin_convertvector(flags, NAME(Bits)))) /* else 0 */

/* Compute step k, and return its y. Nothing crosses a decay of 0, not even a NaN. */
static ALWAYS_INLINE REAL NAME(step)(const NAME(Recurrence) r, const int64_t k, const REAL before)
{
    if (!r.is_gae) {
        const REAL decay = *NUMBERS(1);
        return *NUMBERS(3) = *NUMBERS(0) + decay * (decay == 0 ? 0 : before);
    }
    const int terminated = *FLAGS(4) != 0, is_end = terminated | (*FLAGS(3) != 0) | (r.decay == 0);
    const REAL reward = *NUMBERS(0), value = *NUMBERS(1), next_value = *NUMBERS(2);
    const REAL y = DELTA(reward, value, terminated ? 0 : next_value) + r.decay * (is_end ? 0 : before);
    *NUMBERS(5) = y;
    *NUMBERS(6) = y + value;
    return y;
}

/* Each lane becomes the one n steps before it in the order of the recurrence, or that of `rest`. */
#define SHIFT_1(x, rest) \
    (r.reverse ? SHUFFLE(x, rest, 1, 2, 3, 4, 5, 6, 7, 8) : SHUFFLE(x, rest, LANES, 0, 1, 2, 3, 4, 5, 6))
#define SHIFT_2(x, rest) \
    (r.reverse ? SHUFFLE(x, rest, 2, 3, 4, 5, 6, 7, 8, 8) : SHUFFLE(x, rest, LANES, LANES, 0, 1, 2, 3, 4, 5))
#define SHIFT_4(x, rest) \
    (r.reverse ? SHUFFLE(x, rest, 4, 5, 6, 7, 8, 8, 8, 8) : SHUFFLE(x, rest, LANES, LANES, LANES, LANES, 0, 1, 2, 3))

/* Compute LANES steps of a row from k on, and return the last y: a scan in log2(LANES) rounds (Hillis and
 * Steele, 1986, "Data Parallel Algorithms"). A NaN crosses a decay of 0 here, and sums of some steps may
 * overflow; `spoilt` becomes NaN where a y is not finite. */
static ALWAYS_INLINE REAL NAME(steps)(const NAME(Recurrence) r, const int64_t k, const REAL before,
                                       NAME(Lanes) *spoilt)
{
    const NAME(Lanes) zero = {0}, one = zero + 1;
    NAME(Lanes) x = *(NAME(Memory) *)NUMBERS(0), decay, value = *(NAME(Memory) *)NUMBERS(1);
    if (r.is_gae) {
        const NAME(Flags) terminated = *(NAME(Flags) *)FLAGS(4), done = *(NAME(Flags) *)FLAGS(3) | terminated;
        x = DELTA(x, value, ONLY_WHERE(terminated == 0, *(NAME(Memory) *)NUMBERS(2)));
        decay = ONLY_WHERE(done == 0, zero + r.decay);
    } else
        decay = value;
    x += decay * SHIFT_1(x, zero);
    decay *= SHIFT_1(decay, one);
    x += decay * SHIFT_2(x, zero);
    decay *= SHIFT_2(decay, one);
    if (LANES > 4) {
        x += decay * SHIFT_4(x, zero);
        decay *= SHIFT_4(decay, one);
    }
    const NAME(Lanes) y = x + decay * before;
    *spoilt += y - y;
    *(NAME(Memory) *)NUMBERS(r.is_gae ? 5 : 3) = y;
    if (r.is_gae)
        *(NAME(Memory) *)NUMBERS(6) = y + value;
    return y[r.reverse ? 0 : LANES - 1];
}

/* Compute a row, the first `together` of its steps in groups of LANES. */
static ALWAYS_INLINE void NAME(row)(const NAME(Recurrence) r, const int64_t steps, const int64_t row,
                                    const int64_t together, NAME(Lanes) *spoilt)
{
    const REAL *initial = r.is_gae ? NULL : (const REAL *)r.data[2];
    REAL y = initial ? initial[row] : 0;
    int64_t t = 0;
    for (; t < together; t += LANES)
        y = NAME(steps)(r, row * steps + (r.reverse ? steps - LANES - t : t), y, spoilt);
    for (; t < steps; t++)
        y = NAME(step)(r, row * steps + (r.reverse ? steps - 1 - t : t), y);
}

/* Compute `count` columns side by side, from column `first` of a row of tensors on. */
static ALWAYS_INLINE void NAME(columns)(const NAME(Recurrence) r, const Sizes sizes, const int64_t row,
                                        const int64_t first, const int64_t count)
{
    const REAL *initial = r.is_gae ? NULL : (const REAL *)r.data[2];
    REAL y[COLUMNS];
    for (int64_t i = 0; i < count; i++)
        y[i] = initial ? initial[row * sizes.inner + first + i] : 0;
    for (int64_t t = 0; t < sizes.steps; t++) {
        const int64_t k = (row * sizes.steps + (r.reverse ? sizes.steps - 1 - t : t)) * sizes.inner + first;
        INDEPENDENT
        for (int64_t i = 0; i < count; i++)
            y[i] = NAME(step)(r, k + i, y[i]);
    }
}

/* Compute all rows, in the order of their steps: the processor fetches memory ahead in one direction. */
static ALWAYS_INLINE void NAME(run)(const NAME(Recurrence) r, const Sizes sizes)
{
    NAME(Lanes) spoilt = {0};
    for (int64_t n = 0; n < sizes.outer; n++) {
        const int64_t row = r.reverse ? sizes.outer - 1 - n : n;
        if (sizes.inner == 1)
            NAME(row)(r, sizes.steps, row, sizes.steps / LANES * LANES, &spoilt);
        else
            for (int64_t i = 0; i < sizes.inner; i += COLUMNS) {
                const int64_t left = sizes.inner - i;
                NAME(columns)(r, sizes, row, i, left < COLUMNS ? left : COLUMNS);
            }
    }
    for (int64_t i = 1; i < LANES; i++)
        spoilt[0] += spoilt[i];
    for (int64_t row = 0; row < sizes.outer && spoilt[0] != 0; row++)
        NAME(row)(r, sizes.steps, row, 0, &spoilt);
}

FOR_EACH_TARGET
static void NAME(gae)(const Sizes sizes, char *const *data, double gamma, double lmbda)
{
    NAME(run)((NAME(Recurrence)){data, 1, 1, (REAL)gamma, (REAL)(gamma * lmbda)}, sizes);
}

FOR_EACH_TARGET
static void NAME(scan)(const Sizes sizes, char *const *data, int reverse)
{
    if (reverse)
        NAME(run)((NAME(Recurrence)){data, 0, 1, 0, 0}, sizes);
    else
        NAME(run)((NAME(Recurrence)){data, 0, 0, 0, 0}, sizes);
}

#endif
