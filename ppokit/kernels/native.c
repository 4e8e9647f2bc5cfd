/* Scans and loss terms on the CPU, for float32 and float64 tensors as they lie in memory.
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

#include "native_kernels.h"
#include "native_tensors.h"
#include "native_threads.h"
#include "native_walk.h"

#define DECLINE return Py_NewRef(Py_NotImplemented)

#include "native_minibatch.h"
#include "native_norm.h"

static const Kernels *kernels_for(const Tensor *tensor)
{
    return tensor->bits == 32 ? chosen->for_float32 : chosen->for_float64;
}

static PyObject *pair(PyObject *first, PyObject *second)
{
    PyObject *result = first && second ? PyTuple_Pack(2, first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return result;
}


static PyObject *native_gae(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Tensor operands[OPERANDS];
    Walk walk;
    if (nargs != 8)
        DECLINE;
    for (int k = 0; k < 5; k++) {
        if (!borrow(args[k], &operands[k]) || !same_shape(&operands[k], &operands[0]))
            DECLINE;
        if (k < 3 ? !is_dtype(&operands[k], FLOAT, operands[0].bits) : !is_dtype(&operands[k], BOOL, 8))
            DECLINE;
    }
    const int time = time_dimension(&operands[0], args[7]);
    if (operands[0].bits < 32 || time < 0 || !read_discount(args[5], &walk.block.gamma)
        || !read_discount(args[6], &walk.block.lmbda) || !are_plain(args, 3))
        DECLINE;
    PyObject *advantage = output_like(args[0], NULL, &operands[5]);
    PyObject *target = advantage ? output_like(args[0], NULL, &operands[6]) : NULL;
    if (target) {
        make_walk(&walk, operands, 7, 0, time, kernels_for(operands)->gae);
        if (run(&walk) < 0)
            Py_CLEAR(target);
    }
    return pair(advantage, target);
}

/* Describe reward, done, initial and dim of the two functions of returns. Return the dimension of
 * time, or -1. The initial is to have the reward's dtype, or `bits`. */
static int read_returns(PyObject *const *args, Py_ssize_t nargs, Tensor *operands, Walk *walk, int bits)
{
    if (nargs != 5 || !borrow(args[0], &operands[0]) || !borrow(args[1], &operands[1])
        || !same_shape(&operands[1], &operands[0]) || !is_dtype(&operands[1], BOOL, 8)
        || !is_dtype(&operands[0], FLOAT, operands[0].bits) || operands[0].bits < 32
        || !read_discount(args[2], &walk->block.gamma) || !are_plain(args, 1))
        return -1;
    const int time = time_dimension(&operands[0], args[4]);
    bits = bits ? bits : operands[0].bits;
    return time >= 0 && read_initial(args[3], &operands[2], &operands[0], bits, time) ? time : -1;
}

/* A new tensor like `object` without its dimension `time`, also described in `tensor`. */
static PyObject *output_without_time(PyObject *object, int time, PyObject *options, Tensor *tensor)
{
    PyObject *first = PyObject_CallMethod(object, "select", "ii", time, 0);
    PyObject *output = first ? output_like(first, options, tensor) : NULL;
    Py_XDECREF(first);
    return output;
}

static PyObject *native_returns(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Tensor operands[OPERANDS] = {{0}};
    Walk walk;
    const int time = read_returns(args, nargs, operands, &walk, 0);
    if (time < 0)
        DECLINE;
    PyObject *carry = output_without_time(args[0], time, NULL, &operands[3]);
    PyObject *returns = carry ? output_like(args[0], NULL, &operands[4]) : NULL;
    if (returns) {
        make_walk(&walk, operands, 5, 1u << 2 | 1u << 3, time, kernels_for(operands)->returns);
        if (run(&walk) < 0)
            Py_CLEAR(returns);
    }
    return pair(returns, carry);
}

/* Mean and sum of squared deviations of the returns, and the carry, in float64. Declines also what
 * is not finite. */
static PyObject *native_return_moments(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Tensor operands[OPERANDS] = {{0}};
    Walk walk;
    const int time = read_returns(args, nargs, operands, &walk, 64);
    if (time < 0)
        DECLINE;
    PyObject *carry = output_without_time(args[0], time, as_float64, &operands[3]);
    if (!carry)
        return NULL;
    const int is_float32 = operands[0].bits == 32;
    const Kernels *kernels = chosen->for_float64;
    /* Deviations from the first reward, not from 0: squares of large numbers would cancel. */
    walk.block.shift = is_float32 ? *(float *)operands[0].data : *(double *)operands[0].data;
    make_walk(&walk, operands, 4, 1u << 2 | 1u << 3, time,
              is_float32 ? kernels->moments_of_float32 : kernels->moments);
    const int64_t count = run(&walk);
    const double mean = walk.block.sum / (double)count, m2 = walk.block.square - walk.block.sum * mean;
    if (count > 0 && isfinite(mean) && isfinite(m2))
        return Py_BuildValue("ddN", walk.block.shift + mean, m2 > 0 ? m2 : 0, carry);
    Py_DECREF(carry);
    if (count < 0)
        return NULL;
    DECLINE;
}

static PyObject *native_scan(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Tensor operands[OPERANDS] = {{0}};
    Walk walk;
    if (nargs != 5 || !borrow(args[0], &operands[0]) || !borrow(args[1], &operands[1])
        || !same_shape(&operands[1], &operands[0]) || operands[0].bits < 32)
        DECLINE;
    for (int k = 0; k < 2; k++)
        if (!is_dtype(&operands[k], FLOAT, operands[0].bits))
            DECLINE;
    const int time = time_dimension(&operands[0], args[4]);
    if (time < 0 || !are_plain(args, 2) || !read_initial(args[2], &operands[2], operands, operands[0].bits, time))
        DECLINE;
    PyObject *output = output_like(args[0], NULL, &operands[3]);
    if (output) {
        const Kernels *kernels = kernels_for(operands);
        walk.block.reverse = args[3] == Py_True;
        make_walk(&walk, operands, 4, 1u << 2, time, walk.block.reverse ? kernels->scan_reverse : kernels->scan);
        if (run(&walk) < 0)
            Py_CLEAR(output);
    }
    return output;
}

static PyObject *native_instruction_sets(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *names = PyList_New(0);
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

static PyObject *native_use_instruction_set(PyObject *Py_UNUSED(module), PyObject *name)
{
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
    {"reversed_discounted_returns", (PyCFunction)(void (*)(void))native_returns, METH_FASTCALL, NULL},
    {"return_moments", (PyCFunction)(void (*)(void))native_return_moments, METH_FASTCALL, NULL},
    {"linear_scan", (PyCFunction)(void (*)(void))native_scan, METH_FASTCALL, NULL},
    {"categorical_loss_terms", (PyCFunction)(void (*)(void))native_categorical_loss_terms, METH_FASTCALL, NULL},
    {"normal_loss_terms", (PyCFunction)(void (*)(void))native_normal_loss_terms, METH_FASTCALL, NULL},
    {"weighted_slopes", (PyCFunction)(void (*)(void))native_weighted_slopes, METH_FASTCALL, NULL},
    {"sum_of_squares", (PyCFunction)(void (*)(void))native_sum_of_squares, METH_FASTCALL, NULL},
    {"instruction_sets", native_instruction_sets, METH_NOARGS, NULL},
    {"use_instruction_set", native_use_instruction_set, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

/* Take from torch what the functions need; ImportError where it has no exchange table. */
static int prepare(PyObject *Py_UNUSED(module))
{
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
    if (!table || table->header.major != 1 || !table->borrow || !table->to_object) {
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
