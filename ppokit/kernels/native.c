/* The scans on the CPU, for float32 and float64 tensors as they lie in memory.
 *
 * Tensors come in through DLPack's C exchange table (dmlc.github.io/dlpack, version 1), so there is
 * no torch header here and no torch ABI, and the limited Python API serves every Python. A function
 * returns NotImplemented for whatever it does not take (another dtype or device, a gradient to
 * record, shapes that differ): its caller then checks the arguments and says what is wrong, or
 * takes the torch kernel.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>
#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#endif

#define OPERANDS 7
#define DIMS 16
#define COLUMNS 64
#define MAX_THREADS 64
#define PARALLEL_ELEMENTS 500000 /* below it, waking a thread costs more than it brings */

/* -- a block of work, and the kernels that do it ----------------------------------------------- */

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
    Layouts gae, returns, scan, scan_reverse, moments_of_single, moments_of_double;
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

/* -- instruction sets --------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    const Kernels *single, *double_;
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

/* -- tensors, as DLPack 1 describes them -------------------------------------------------------- */

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;
enum { CPU = 1 };
enum { FLOAT = 2, BOOL = 6 };

typedef struct {
    struct {
        uint32_t major, minor;
        void *older;
    } header;
    void *allocator, *from_object, *to_object;
    int (*borrow)(PyObject *, Tensor *);
    void *current_stream;
} ExchangeTable;

static const ExchangeTable *table;
static PyObject *tensor_type, *empty_like, *is_grad_enabled, *get_num_threads;
static PyObject *requires_grad_name, *is_neg_name, *as_float64;

/* Fill in the tensor and return 1, or 0 if it is not a plain one on the CPU. */
static int borrow(PyObject *object, Tensor *tensor)
{
    if ((PyObject *)Py_TYPE(object) != tensor_type)
        return 0;
    if (table->borrow(object, tensor) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (!tensor->data || tensor->device_type != CPU || tensor->lanes != 1 || tensor->ndim > DIMS)
        return 0; /* the data of an empty tensor, or of torch's symbolic zeros, is NULL */
    tensor->data = (char *)tensor->data + tensor->byte_offset;
    return 1;
}

static int is_dtype(const Tensor *tensor, int code, int bits)
{
    return tensor->code == code && tensor->bits == bits;
}

static int same_shape(const Tensor *a, const Tensor *b)
{
    return a->ndim == b->ndim && !memcmp(a->shape, b->shape, sizeof(int64_t) * (size_t)a->ndim);
}

/* Whether the tensors' numbers are what lies in memory (a negative view's are not), and no gradient
 * is to be recorded. */
static int are_plain(PyObject *const *objects, int count)
{
    int plain = 1, recorded = 0;
    for (int i = 0; plain && i < count; i++) {
        PyObject *flag = PyObject_GetAttr(objects[i], requires_grad_name);
        PyObject *negative = PyObject_CallMethodObjArgs(objects[i], is_neg_name, NULL);
        recorded |= flag == Py_True;
        plain = flag && negative == Py_False;
        Py_XDECREF(flag);
        Py_XDECREF(negative);
    }
    if (plain && recorded) {
        PyObject *enabled = PyObject_CallObject(is_grad_enabled, NULL);
        plain = enabled == Py_False;
        Py_XDECREF(enabled);
    }
    PyErr_Clear();
    return plain;
}

/* Read a discount: a number, or a tensor of one element. Return 0 if it is neither, or outside
 * [0, 1]. */
static int read_discount(PyObject *object, double *value)
{
    Tensor tensor;
    if (PyFloat_Check(object)) {
        *value = PyFloat_AsDouble(object);
    } else if (PyLong_Check(object)) {
        *value = PyLong_AsDouble(object);
    } else {
        if (!borrow(object, &tensor) || tensor.code != FLOAT)
            return 0;
        for (int i = 0; i < tensor.ndim; i++)
            if (tensor.shape[i] != 1)
                return 0;
        if (tensor.bits == 64)
            *value = *(double *)tensor.data;
        else if (tensor.bits == 32)
            *value = *(float *)tensor.data;
        else
            return 0;
        if (!are_plain(&object, 1))
            return 0;
    }
    if (PyErr_Occurred())
        PyErr_Clear();
    return *value >= 0 && *value <= 1;
}

/* -- from tensors to blocks of work ------------------------------------------------------------- */

typedef struct {
    int64_t size, stride[OPERANDS];
} Dim;

typedef struct {
    Block block;
    Kernel kernel;
    int dims, spread; /* the outer dimensions, and the one that runs over a block's rows or columns */
    Dim dim[DIMS + 1];
    int operands, itemsize[OPERANDS];
} Plan;

/* Lay out operands of one shape; those of `timeless` (a bit each) lack dimension `time`. */
static void make_plan(Plan *plan, const Tensor *operands, int count, unsigned timeless, int time, Layouts layouts)
{
    plan->dims = 0;
    plan->block.steps = operands[0].shape[time];
    for (int k = 0; k < count; k++) {
        plan->block.data[k] = operands[k].data;
        plan->itemsize[k] = operands[k].bits / 8;
        plan->block.time[k] = timeless >> k & 1 ? 0 : operands[k].strides[time];
    }
    for (int d = 0; d < operands[0].ndim; d++) {
        Dim *dim = &plan->dim[plan->dims];
        if (d == time || operands[0].shape[d] == 1)
            continue;
        dim->size = operands[0].shape[d];
        int merges = plan->dims > 0;
        for (int k = 0; k < count; k++) {
            dim->stride[k] = operands[k].strides ? operands[k].strides[d - (timeless >> k & 1 && d > time)] : 0;
            merges &= plan->dims > 0 && dim[-1].stride[k] == dim->stride[k] * dim->size;
        }
        if (merges) {
            dim->size *= dim[-1].size;
            dim[-1] = *dim;
        } else {
            plan->dims++;
        }
    }
    if (!plan->dims)
        plan->dim[plan->dims++] = (Dim){.size = 1};

    int rows = 1;
    for (int k = 0; k < count; k++)
        rows &= timeless >> k & 1 || plan->block.steps == 1 || plan->block.time[k] == 1;
    plan->kernel = rows ? layouts.rows : layouts.columns;
    plan->spread = -1;
    for (int d = 0; d < plan->dims; d++) {
        int columns = 1;
        for (int k = 0; k < count; k++)
            columns &= !plan->block.data[k] || plan->dim[d].stride[k] == 1;
        if ((rows || columns) && (plan->spread < 0 || plan->dim[d].size > plan->dim[plan->spread].size))
            plan->spread = d;
    }
    if (plan->spread < 0) { /* no two columns are neighbours: one at a time */
        plan->spread = plan->dims;
        plan->dim[plan->dims++] = (Dim){.size = 1};
    }
    for (int k = 0; k < count; k++)
        plan->block.next[k] = plan->dim[plan->spread].stride[k];
    plan->operands = count;
}

static void advance(Plan *plan, int d, int64_t by)
{
    for (int k = 0; k < plan->operands; k++)
        if (plan->block.data[k])
            plan->block.data[k] = (char *)plan->block.data[k] + by * plan->dim[d].stride[k] * plan->itemsize[k];
}

/* Do the work of a plan, block by block. Always returns NULL. */
static void *work(void *argument)
{
    Plan *plan = argument;
    int64_t index[DIMS + 1] = {0};
    plan->block.count = plan->dim[plan->spread].size;
    for (int d = 0; d >= 0;) {
        plan->kernel(&plan->block);
        for (d = plan->dims - 1; d >= 0; d--) {
            if (d == plan->spread)
                continue;
            advance(plan, d, 1);
            if (++index[d] < plan->dim[d].size)
                break;
            advance(plan, d, -plan->dim[d].size);
            index[d] = 0;
        }
    }
    return NULL;
}

/* Split the widest dimension over threads. They live for this call only: a pool would not survive a
 * fork, and beside this much work their start is nothing. */
static void work_in_parallel(Plan *plan, int64_t threads)
{
    Plan parts[MAX_THREADS];
    int widest = 0, started = 0;
    for (int d = 1; d < plan->dims; d++)
        if (plan->dim[d].size > plan->dim[widest].size)
            widest = d;
    const int64_t size = plan->dim[widest].size;
    threads = threads < size ? threads : size;
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
#if !defined(_WIN32)
    pthread_t handles[MAX_THREADS];
#else
    threads = 1;
#endif
    for (int64_t i = threads - 1; i >= 0; i--) {
        const int64_t from = size * i / threads, to = size * (i + 1) / threads;
        parts[i] = *plan;
        advance(&parts[i], widest, from);
        parts[i].dim[widest].size = to - from;
#if !defined(_WIN32)
        if (i && !pthread_create(&handles[started], NULL, work, &parts[i])) {
            started++;
            continue;
        }
#endif
        work(&parts[i]);
    }
#if !defined(_WIN32)
    while (started)
        pthread_join(handles[--started], NULL);
#endif
    for (int64_t i = 0; i < threads; i++) {
        plan->block.sum += parts[i].block.sum;
        plan->block.square += parts[i].block.square;
    }
}

/* Return the number of elements, or -1 on an error. */
static int64_t run(Plan *plan)
{
    int64_t elements = plan->block.steps, threads = 1;
    for (int d = 0; d < plan->dims; d++)
        elements *= plan->dim[d].size;
    if (elements >= PARALLEL_ELEMENTS) {
        PyObject *number = PyObject_CallObject(get_num_threads, NULL);
        if (!number)
            return -1;
        threads = PyLong_AsLongLong(number);
        Py_DECREF(number);
    }
    if (elements < PARALLEL_ELEMENTS / 10) { /* sooner done than the lock is given back */
        work(plan);
        return elements;
    }
    Py_BEGIN_ALLOW_THREADS
    if (threads > 1)
        work_in_parallel(plan, threads);
    else
        work(plan);
    Py_END_ALLOW_THREADS
    return elements;
}

/* -- the module --------------------------------------------------------------------------------- */

#define DECLINE return Py_NewRef(Py_NotImplemented)

static const Kernels *kernels_for(const Tensor *tensor)
{
    return tensor->bits == 32 ? chosen->single : chosen->double_;
}

/* Return the dimension of time, or -1 where the tensor has no such dimension, or is empty. */
static int time_dimension(const Tensor *tensor, PyObject *dim)
{
    const long asked = PyLong_AsLong(dim);
    const long time = asked < 0 ? asked + tensor->ndim : asked;
    if (PyErr_Occurred())
        PyErr_Clear();
    else if (time >= 0 && time < tensor->ndim) {
        for (int d = 0; d < tensor->ndim; d++)
            if (tensor->shape[d] == 0)
                return -1;
        return (int)time;
    }
    return -1;
}

/* Describe `initial`, None or of the shape of `like` without `time`. Return 0 if it is neither. */
static int read_initial(PyObject *object, Tensor *initial, const Tensor *like, int time)
{
    if (object == Py_None)
        return 1;
    if (!borrow(object, initial) || initial->ndim != like->ndim - 1 || !is_dtype(initial, FLOAT, like->bits))
        return 0;
    for (int d = 0; d < initial->ndim; d++)
        if (initial->shape[d] != like->shape[d + (d >= time)])
            return 0;
    return are_plain(&object, 1);
}

/* A new tensor like `object`, also described in `tensor`; NULL on an error. */
static PyObject *output_like(PyObject *object, Tensor *tensor)
{
    PyObject *output = PyObject_CallFunctionObjArgs(empty_like, object, NULL);
    if (output && !borrow(output, tensor)) {
        PyErr_SetString(PyExc_RuntimeError, "torch.empty_like did not return a plain CPU tensor.");
        Py_CLEAR(output);
    }
    return output;
}

static PyObject *pair(PyObject *first, PyObject *second)
{
    PyObject *result = first && second ? PyTuple_Pack(2, first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return result;
}

static PyObject *native_gae(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Tensor operands[OPERANDS];
    Plan plan;
    (void)module;
    if (nargs != 8)
        DECLINE;
    for (int k = 0; k < 5; k++) {
        if (!borrow(args[k], &operands[k]) || !same_shape(&operands[k], &operands[0]))
            DECLINE;
        if (k < 3 ? !is_dtype(&operands[k], FLOAT, operands[0].bits) : !is_dtype(&operands[k], BOOL, 8))
            DECLINE;
    }
    const int time = time_dimension(&operands[0], args[7]);
    if (operands[0].bits < 32 || time < 0 || !read_discount(args[5], &plan.block.gamma)
        || !read_discount(args[6], &plan.block.lmbda) || !are_plain(args, 3))
        DECLINE;
    PyObject *advantage = output_like(args[0], &operands[5]);
    PyObject *target = advantage ? output_like(args[0], &operands[6]) : NULL;
    if (target) {
        make_plan(&plan, operands, 7, 0, time, kernels_for(operands)->gae);
        if (run(&plan) < 0)
            Py_CLEAR(target);
    }
    return pair(advantage, target);
}

static PyObject *native_returns(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Tensor operands[OPERANDS] = {{0}};
    Plan plan;
    (void)module;
    if (nargs != 5 || !borrow(args[0], &operands[0]) || !borrow(args[1], &operands[1])
        || !same_shape(&operands[1], &operands[0]) || !is_dtype(&operands[1], BOOL, 8)
        || !is_dtype(&operands[0], FLOAT, operands[0].bits) || operands[0].bits < 32)
        DECLINE;
    const int time = time_dimension(&operands[0], args[4]);
    if (time < 0 || !read_discount(args[2], &plan.block.gamma) || !are_plain(args, 1)
        || !read_initial(args[3], &operands[2], &operands[0], time))
        DECLINE;
    PyObject *returns = output_like(args[0], &operands[3]), *carry = NULL;
    PyObject *first = returns ? PyObject_CallMethod(args[0], "select", "ii", time, 0) : NULL;
    if (first) {
        carry = output_like(first, &operands[4]);
        Py_DECREF(first);
    }
    if (carry) {
        make_plan(&plan, operands, 5, 1u << 2 | 1u << 4, time, kernels_for(operands)->returns);
        if (run(&plan) < 0)
            Py_CLEAR(carry);
    }
    return pair(returns, carry);
}

/* Mean and sum of squared deviations of the returns, and the carry, in float64. Declines also what
 * is not finite. */
static PyObject *native_return_moments(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Tensor operands[OPERANDS] = {{0}};
    Plan plan;
    (void)module;
    if (nargs != 5 || !borrow(args[0], &operands[0]) || !borrow(args[1], &operands[1])
        || !same_shape(&operands[1], &operands[0]) || !is_dtype(&operands[1], BOOL, 8)
        || !is_dtype(&operands[0], FLOAT, operands[0].bits) || operands[0].bits < 32)
        DECLINE;
    const int time = time_dimension(&operands[0], args[4]), single = operands[0].bits == 32;
    Tensor wide = operands[0];
    wide.bits = 64;
    if (time < 0 || !read_discount(args[2], &plan.block.gamma) || !are_plain(args, 1)
        || !read_initial(args[3], &operands[2], &wide, time))
        DECLINE;
    PyObject *first = PyObject_CallMethod(args[0], "select", "ii", time, 0);
    PyObject *one = first ? PyTuple_Pack(1, first) : NULL;
    PyObject *carry = one ? PyObject_Call(empty_like, one, as_float64) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(one);
    if (!carry || !borrow(carry, &operands[3]))
        return carry;
    const Kernels *kernels = chosen->double_;
    /* Deviations from the first reward, not from 0: squares of large numbers would cancel. */
    plan.block.shift = single ? *(float *)operands[0].data : *(double *)operands[0].data;
    plan.block.sum = plan.block.square = 0;
    make_plan(&plan, operands, 4, 1u << 2 | 1u << 3, time,
              single ? kernels->moments_of_single : kernels->moments_of_double);
    const int64_t count = run(&plan);
    const double mean = plan.block.sum / (double)count, m2 = plan.block.square - plan.block.sum * mean;
    if (count > 0 && isfinite(mean) && isfinite(m2))
        return Py_BuildValue("ddN", plan.block.shift + mean, m2 > 0 ? m2 : 0, carry);
    Py_DECREF(carry);
    if (count < 0)
        return NULL;
    DECLINE;
}

static PyObject *native_scan(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Tensor operands[OPERANDS] = {{0}};
    Plan plan;
    (void)module;
    if (nargs != 5 || !borrow(args[0], &operands[0]) || !borrow(args[1], &operands[1])
        || !same_shape(&operands[1], &operands[0]) || operands[0].bits < 32)
        DECLINE;
    for (int k = 0; k < 2; k++)
        if (!is_dtype(&operands[k], FLOAT, operands[0].bits))
            DECLINE;
    const int time = time_dimension(&operands[0], args[4]);
    if (time < 0 || !are_plain(args, 2) || !read_initial(args[2], &operands[2], &operands[0], time))
        DECLINE;
    PyObject *output = output_like(args[0], &operands[3]);
    if (output) {
        const Kernels *kernels = kernels_for(operands);
        plan.block.reverse = args[3] == Py_True;
        make_plan(&plan, operands, 4, 1u << 2, time, plan.block.reverse ? kernels->scan_reverse : kernels->scan);
        if (run(&plan) < 0)
            Py_CLEAR(output);
    }
    return output;
}

static PyObject *native_instruction_sets(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    PyObject *names = PyList_New(0);
    (void)module;
    for (size_t i = 0; names && i < N_SETS; i++) {
        PyObject *name = instruction_sets[i].supported ? PyUnicode_FromString(instruction_sets[i].name) : NULL;
        if (name && PyList_Append(names, name) < 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    PyObject *result = names ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    return result;
}

static PyObject *native_use_instruction_set(PyObject *module, PyObject *name)
{
    (void)module;
    for (size_t i = 0; i < N_SETS && PyUnicode_Check(name); i++)
        if (instruction_sets[i].supported && !PyUnicode_CompareWithASCIIString(name, instruction_sets[i].name)) {
            PyObject *before = PyUnicode_FromString(chosen->name);
            chosen = before ? &instruction_sets[i] : chosen;
            return before;
        }
    PyErr_Format(PyExc_ValueError, "%R is not one of this machine's instruction_sets().", name);
    return NULL;
}

static PyMethodDef methods[] = {
    {"gae", (PyCFunction)(void (*)(void))native_gae, METH_FASTCALL, NULL},
    {"discounted_returns", (PyCFunction)(void (*)(void))native_returns, METH_FASTCALL, NULL},
    {"return_moments", (PyCFunction)(void (*)(void))native_return_moments, METH_FASTCALL, NULL},
    {"linear_scan", (PyCFunction)(void (*)(void))native_scan, METH_FASTCALL, NULL},
    {"instruction_sets", native_instruction_sets, METH_NOARGS, NULL},
    {"use_instruction_set", native_use_instruction_set, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

/* Take from torch what the functions need; ImportError where it has no exchange table. */
static int prepare(PyObject *module)
{
    (void)module;
    PyObject *torch = PyImport_ImportModule("torch");
    if (!torch)
        return -1;
    tensor_type = PyObject_GetAttrString(torch, "Tensor");
    empty_like = PyObject_GetAttrString(torch, "empty_like");
    is_grad_enabled = PyObject_GetAttrString(torch, "is_grad_enabled");
    get_num_threads = PyObject_GetAttrString(torch, "get_num_threads");
    requires_grad_name = PyUnicode_InternFromString("requires_grad");
    is_neg_name = PyUnicode_InternFromString("is_neg");
    PyObject *dtype = PyObject_GetAttrString(torch, "float64");
    as_float64 = dtype ? Py_BuildValue("{s:N}", "dtype", dtype) : NULL;
    Py_DECREF(torch);
    if (!as_float64 || !tensor_type || !empty_like || !is_grad_enabled || !get_num_threads || !requires_grad_name || !is_neg_name)
        return -1;
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    table = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule); /* the table lives as long as torch */
    if (!table || table->header.major != 1 || !table->borrow) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ImportError, "this torch has no DLPack C exchange table of version 1.");
        return -1;
    }
    choose_instruction_set();
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "native", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit_native(void) { return PyModuleDef_Init(&definition); }
