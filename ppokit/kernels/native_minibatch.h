/* From Python to the terms of PPO's loss: what the caller passes, checked and described. */

#include <float.h>
#include <stdlib.h>

#define LOG_2 0.6931471805599453
#define HALF_LOG_2PI 0.9189385332046727

/* Rows of features; noise, values and slopes in one piece, the first index running slowest. */
typedef struct {
    int64_t rows, features, samples, parameters, next[3];
    const void *data[3], *noise; /* loc, scale, action; or logits, action */
    double middle, half_width, log_half_width;
    int squashed;
    void *values, *slopes; /* [2, rows]: log-probability, entropy; [2, parameters, rows, features] */
} PolicyTerms;

enum { LOG_PROB, ENTROPY, OLD_LOG_PROB, ADVANTAGE, VALUE, TARGET, OLD_VALUE, N_INPUTS };
enum { L1, L2, SMOOTH_L1 };
/* In the order of `loss_terms` in native.pyi. */
enum {
    LOSS_OBJECTIVE, LOSS_ENTROPY, LOSS_CRITIC, LOSS_KL, MEAN_ENTROPY, VALUE_CLIP_FRACTION,
    EXPLAINED_VARIANCE, KL_APPROX, CLIP_FRACTION, ESS, MAX_RATIO, MEAN_RATIO, KL,
    DUAL_CLIP_FRACTION, N_RESULTS
};
typedef struct {
    int64_t rows;
    const void *data[N_INPUTS];
    double log_low, log_high, log_dual, clip_value, loss_clip; /* the first bound the log-ratio */
    double entropy_coeff, critic_coeff, kl_coeff, weight;
    int kind;
    void *slopes, *out; /* [4, rows]: objective, entropy, critic, KL; [N_RESULTS] */
} LossTerms;

#define REAL float
#define FUNCTION(name) name##f
#define NAME(f) f##_float32
#define EDGE (1 - 1e-6f)
#define SMALLEST_STEP FLT_EPSILON
#define LARGEST FLT_MAX
#include "native_losses.h"
#define REAL double
#define FUNCTION(name) name
#define NAME(f) f##_float64
#define EDGE (1 - 1e-15)
#define SMALLEST_STEP DBL_EPSILON
#define LARGEST DBL_MAX
#include "native_losses.h"

static int in_one_piece(const Tensor *tensor, int64_t elements)
{
    int64_t expected = 1;
    for (int d = tensor->ndim - 1; d >= 0; expected *= tensor->shape[d--])
        if (tensor->shape[d] != 1 && tensor->strides[d] != expected)
            return 0;
    return expected == elements;
}

/* The stride from row to row of [*B, features], or -1 where there is no such number. */
static int64_t row_stride(const Tensor *tensor)
{
    const int last = tensor->ndim - 1;
    int64_t stride = -1, expected = -1;
    if (tensor->shape[last] != 1 && tensor->strides[last] != 1)
        return -1;
    for (int d = last - 1; d >= 0; d--) {
        if (tensor->shape[d] == 1)
            continue;
        if (stride < 0)
            stride = expected = tensor->strides[d];
        else if (tensor->strides[d] != expected)
            return -1;
        expected *= tensor->shape[d];
    }
    return stride < 0 ? 0 : stride;
}

static int describe_rows(PyObject *object, Tensor *tensor, PolicyTerms *terms, int k)
{
    if (!borrow(object, tensor) || tensor->ndim < 1 || (terms->next[k] = row_stride(tensor)) < 0)
        return 0;
    terms->data[k] = tensor->data;
    return 1;
}

static int read_shape(const Tensor *tensor, PolicyTerms *terms)
{
    terms->features = tensor->shape[tensor->ndim - 1];
    terms->rows = 1;
    for (int d = 0; d < tensor->ndim - 1; d++)
        terms->rows *= tensor->shape[d];
    return terms->rows * terms->features > 0 && tensor->bits >= 32;
}

/* Describe loc, scale, action, noise and numbers. Return 0 if they are not what they should be. */
static int read_normal(PyObject *const *args, PolicyTerms *terms, int *bits)
{
    Tensor operands[3], noise;
    for (int k = 0; k < 3; k++)
        if (!describe_rows(args[k], &operands[k], terms, k) || !same_shape(&operands[k], operands)
            || !is_dtype(&operands[k], FLOAT, operands[0].bits))
            return 0;
    *bits = operands[0].bits;
    terms->parameters = 2;
    if (!read_shape(operands, terms) || !are_plain(args, 3))
        return 0;
    if ((terms->squashed = args[3] != Py_None) && borrow(args[3], &noise)) { /* not if it is empty */
        if (noise.ndim < 1 || !is_dtype(&noise, FLOAT, *bits)
            || !in_one_piece(&noise, noise.shape[0] * terms->rows * terms->features))
            return 0;
        terms->noise = noise.data;
        terms->samples = noise.shape[0];
    }
    terms->middle = PyFloat_AsDouble(args[4]);
    terms->half_width = PyFloat_AsDouble(args[5]);
    terms->log_half_width = PyFloat_AsDouble(args[6]);
    return !PyErr_Occurred();
}

/* Describe logits and action. Return 0 if they are not what they should be. */
static int read_categorical(PyObject *const *args, PolicyTerms *terms, int *bits)
{
    Tensor logits, action;
    if (!describe_rows(args[0], &logits, terms, 0) || logits.code != FLOAT || !borrow(args[1], &action)
        || !is_dtype(&action, SIGNED, 64) || !read_shape(&logits, terms) || !in_one_piece(&action, terms->rows)
        || !are_plain(args, 1))
        return 0;
    for (int64_t row = 0; row < terms->rows; row++) {
        const int64_t chosen_one = ((int64_t *)action.data)[row];
        if (chosen_one < 0 || chosen_one >= terms->features)
            return 0;
    }
    terms->data[1] = action.data;
    terms->parameters = 1;
    *bits = logits.bits;
    return 1;
}

/* Describe the inputs from `first` on, each of one number a frame, and the numbers. Return 0 if they
 * are not what they should be. */
static int read_losses(PyObject *const *args, int first, LossTerms *terms, int bits)
{
    Tensor operand;
    for (int k = first; k < N_INPUTS; k++, args++) {
        if (k >= VALUE && *args == Py_None)
            continue;
        if (!borrow(*args, &operand) || !is_dtype(&operand, FLOAT, bits) || !in_one_piece(&operand, terms->rows)
            || !are_plain(args, 1))
            return 0;
        terms->data[k] = operand.data;
    }
    if (terms->data[VALUE] && !terms->data[TARGET])
        return 0;
    if (!PyArg_ParseTuple(args[0], "ddddddddd", &terms->log_low, &terms->log_high, &terms->log_dual, &terms->clip_value,
                          &terms->loss_clip, &terms->entropy_coeff, &terms->critic_coeff, &terms->kl_coeff,
                          &terms->weight))
        return 0;
    terms->kind = !PyUnicode_CompareWithASCIIString(args[1], "l1") ? L1
                : !PyUnicode_CompareWithASCIIString(args[1], "l2") ? L2
                                                                   : SMOOTH_L1;
    return 1;
}

/* The memory of an output of so many elements, or NULL. */
static void *memory_of(PyObject *object, int bits, int64_t elements)
{
    Tensor tensor;
    return borrow(object, &tensor) && is_dtype(&tensor, FLOAT, bits) && in_one_piece(&tensor, elements) ? tensor.data
                                                                                                       : NULL;
}

static PyObject *native_loss_terms(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Tensor like;
    LossTerms terms = {0};
    (void)module;
    if (nargs != 11 || !borrow(args[0], &like) || like.bits < 32 || like.ndim < 1 || like.shape[0] == 0)
        DECLINE;
    terms.rows = like.shape[0];
    const int fits = read_losses(args, LOG_PROB, &terms, like.bits);
    terms.slopes = memory_of(args[9], like.bits, 4 * terms.rows);
    terms.out = memory_of(args[10], like.bits, N_RESULTS);
    if (PyErr_Occurred())
        return NULL;
    if (!fits || !terms.slopes || !terms.out)
        DECLINE;
    like.bits == 32 ? losses_float32(&terms) : losses_float64(&terms);
    Py_RETURN_TRUE;
}

/* The terms of the loss, and their slopes in the policy's parameters. args: after the policy's own. */
static PyObject *policy_loss_terms(PolicyTerms *policy, PyObject *const *args, int bits)
{
    LossTerms terms = {.rows = policy->rows};
    const int64_t size = policy->parameters * policy->rows * policy->features;
    const int fits = read_losses(args, OLD_LOG_PROB, &terms, bits);
    policy->slopes = memory_of(args[7], bits, 3 * size);
    void *value_slopes = memory_of(args[8], bits, policy->rows);
    terms.out = memory_of(args[9], bits, N_RESULTS);
    if (PyErr_Occurred())
        return NULL;
    if (!fits || !policy->slopes || !value_slopes || !terms.out)
        DECLINE;
    char *scratch = malloc((size_t)(6 * policy->rows * (bits / 8)));
    if (!scratch)
        return PyErr_NoMemory();
    policy->values = scratch;
    terms.data[LOG_PROB] = scratch;
    terms.data[ENTROPY] = scratch + policy->rows * (bits / 8);
    terms.slopes = scratch + 2 * policy->rows * (bits / 8);
    bits == 32 ? policy_losses_float32(policy, &terms, value_slopes)
               : policy_losses_float64(policy, &terms, value_slopes);
    free(scratch);
    Py_RETURN_TRUE;
}

static PyObject *native_normal_loss_terms(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PolicyTerms policy = {0};
    int bits;
    (void)module;
    if (nargs == 17 && read_normal(args, &policy, &bits))
        return policy_loss_terms(&policy, args + 7, bits);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
}

static PyObject *native_categorical_loss_terms(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PolicyTerms policy = {0};
    int bits;
    (void)module;
    if (nargs == 12 && read_categorical(args, &policy, &bits))
        return policy_loss_terms(&policy, args + 2, bits);
    DECLINE;
}
