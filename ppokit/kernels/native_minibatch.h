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
/* In the order of ppokit/objectives/native.py. */
enum {
    LOSS_OBJECTIVE, LOSS_ENTROPY, LOSS_KL, LOSS_CRITIC, MEAN_ENTROPY, VALUE_CLIP_FRACTION,
    EXPLAINED_VARIANCE, KL_APPROX, CLIP_FRACTION, ESS, MAX_RATIO, MEAN_RATIO, KL,
    DUAL_CLIP_FRACTION, N_RESULTS
};
typedef struct {
    int64_t rows;
    const void *data[N_INPUTS];
    double log_low, log_high, log_dual, clip_value, loss_clip; /* the first bound the log-ratio */
    double entropy_coeff, critic_coeff, kl_coeff, weight;
    int kind;
    void *slopes; /* [4, rows]: of the losses, in their order */
    double *results;
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

static int64_t elements_of(const Tensor *tensor)
{
    int64_t elements = 1;
    for (int d = 0; d < tensor->ndim; d++)
        elements *= tensor->shape[d];
    return elements;
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

/* Whether the tensor is [*B], or with `trailing` [*B, 1], for the B of the first `dims` of `like`, and
 * in one piece. */
static int is_one_a_row(const Tensor *tensor, const Tensor *like, int dims, int trailing)
{
    int64_t rows = 1;
    if (tensor->ndim != dims + trailing || (trailing && tensor->shape[dims] != 1))
        return 0;
    for (int d = 0; d < dims; rows *= tensor->shape[d++])
        if (tensor->shape[d] != like->shape[d])
            return 0;
    return in_one_piece(tensor, rows);
}

static int describe_rows(PyObject *object, Tensor *tensor, PolicyTerms *terms, int k)
{
    if (!borrow(object, tensor) || tensor->ndim < 1 || (terms->next[k] = row_stride(tensor)) < 0)
        return 0;
    terms->data[k] = tensor->data;
    return is_as_stored(object);
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
static int read_normal(PyObject *const *args, PolicyTerms *terms, Tensor *loc)
{
    Tensor operands[3], noise;
    for (int k = 0; k < 3; k++)
        if (!describe_rows(args[k], &operands[k], terms, k) || !same_shape(&operands[k], operands)
            || !is_dtype(&operands[k], FLOAT, operands[0].bits))
            return 0;
    *loc = operands[0];
    terms->parameters = 2;
    if (!read_shape(loc, terms))
        return 0;
    if ((terms->squashed = args[3] != Py_None) && borrow(args[3], &noise)) { /* not if it is empty */
        if (noise.ndim < 1 || !is_dtype(&noise, FLOAT, loc->bits)
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
static int read_categorical(PyObject *const *args, PolicyTerms *terms, Tensor *logits)
{
    Tensor action;
    if (!describe_rows(args[0], logits, terms, 0) || logits->code != FLOAT || !borrow(args[1], &action)
        || !is_dtype(&action, SIGNED, 64) || !read_shape(logits, terms)
        || !is_one_a_row(&action, logits, logits->ndim - 1, 0))
        return 0;
    for (int64_t row = 0; row < terms->rows; row++) {
        const int64_t chosen_one = ((int64_t *)action.data)[row];
        if (chosen_one < 0 || chosen_one >= terms->features)
            return 0;
    }
    terms->data[1] = action.data;
    terms->parameters = 1;
    return 1;
}

/* Describe the inputs beside the policy, each of one number a row of `like`, and the numbers. Return 0
 * if they are not what they should be. */
static int read_losses(PyObject *const *args, LossTerms *terms, const Tensor *like)
{
    Tensor operand;
    for (int k = OLD_LOG_PROB; k < N_INPUTS; k++, args++) {
        if (k >= VALUE && *args == Py_None)
            continue;
        if (!borrow(*args, &operand) || !is_dtype(&operand, FLOAT, like->bits)
            || !is_one_a_row(&operand, like, like->ndim - 1, k != OLD_LOG_PROB) || !is_as_stored(*args))
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

/* A tensor of the shape of `like` behind `dims` more dimensions; NULL on an error. */
static PyObject *stacked(const Tensor *like, int dims, const int64_t *more, void **data)
{
    int64_t shape[DIMS];
    memcpy(shape, more, sizeof(int64_t) * (size_t)dims);
    memcpy(shape + dims, like->shape, sizeof(int64_t) * (size_t)like->ndim);
    return new_tensor(like->bits, dims + like->ndim, shape, data);
}

/* Number k of the results as a tensor: the explained variance of shape [1], as torchrl has it. */
static PyObject *result_tensor(const double *results, int bits, int k)
{
    void *data;
    const int64_t one = 1;
    PyObject *tensor = new_tensor(bits, k == EXPLAINED_VARIANCE, &one, &data);
    if (!tensor)
        return NULL;
    if (bits == 32)
        *(float *)data = (float)results[k];
    else
        *(double *)data = results[k];
    return tensor;
}

/* By name the losses and diagnostics that have one; and the slopes, which this takes over. */
static PyObject *all_results(const double *results, int bits, PyObject *names, PyObject *slopes, PyObject *value_slopes)
{
    PyObject *outputs = PyDict_New();
    for (int k = 0; outputs && k < N_RESULTS; k++) {
        PyObject *name = PyTuple_GetItem(names, k), *tensor = NULL;
        if (name == Py_None)
            continue;
        if (!name || !(tensor = result_tensor(results, bits, k)) || PyDict_SetItem(outputs, name, tensor) < 0)
            Py_CLEAR(outputs);
        Py_XDECREF(tensor);
    }
    if (outputs)
        return Py_BuildValue("NNN", outputs, slopes, value_slopes);
    Py_DECREF(slopes);
    Py_DECREF(value_slopes);
    return NULL;
}

/* The terms of the loss, and their slopes in the policy's parameters. args: after the policy's own. */
static PyObject *policy_loss_terms(PolicyTerms *policy, PyObject *const *args, const Tensor *like)
{
    const int bits = like->bits;
    const int64_t kinds[2] = {3, policy->parameters}, one[2] = {1, 1};
    LossTerms terms = {.rows = policy->rows};
    double results[N_RESULTS];
    Tensor value;
    void *value_slopes_data = NULL;
    if (like->ndim + 2 > DIMS || !read_losses(args, &terms, like))
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
    char *scratch = malloc((size_t)(6 * policy->rows * (bits / 8)));
    if (!scratch)
        return PyErr_NoMemory();
    PyObject *slopes = stacked(like, 2, kinds, &policy->slopes);
    PyObject *value_slopes = !borrow(args[2], &value) ? Py_NewRef(Py_None)
                                                      : stacked(&value, 2, one, &value_slopes_data);
    if (slopes && value_slopes) {
        policy->values = scratch;
        terms.data[LOG_PROB] = scratch;
        terms.data[ENTROPY] = scratch + policy->rows * (bits / 8);
        terms.slopes = scratch + 2 * policy->rows * (bits / 8);
        terms.results = results;
        bits == 32 ? policy_losses_float32(policy, &terms, value_slopes_data)
                   : policy_losses_float64(policy, &terms, value_slopes_data);
    }
    free(scratch);
    if (slopes && value_slopes)
        return all_results(results, bits, args[7], slopes, value_slopes);
    Py_XDECREF(slopes);
    Py_XDECREF(value_slopes);
    return NULL;
}

static PyObject *native_normal_loss_terms(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PolicyTerms policy = {0};
    Tensor loc;
    (void)module;
    if (nargs == 15 && read_normal(args, &policy, &loc))
        return policy_loss_terms(&policy, args + 7, &loc);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
}

static PyObject *native_categorical_loss_terms(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PolicyTerms policy = {0};
    Tensor logits;
    (void)module;
    if (nargs == 10 && read_categorical(args, &policy, &logits))
        return policy_loss_terms(&policy, args + 2, &logits);
    DECLINE;
}

/* args: slopes [K, P, ...], gradients of K results or None. Return P sums over the results. */
static PyObject *native_weighted_slopes(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { MOST = 4 };
    Tensor slopes, gradient, like;
    double weights[MOST] = {0};
    (void)module;
    if (nargs != 2 || !borrow(args[0], &slopes) || slopes.ndim < 2 || slopes.shape[0] > MOST
        || !in_one_piece(&slopes, elements_of(&slopes)) || PyTuple_Size(args[1]) != slopes.shape[0])
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
    int used[MOST], n_used = 0;
    for (int k = 0; k < slopes.shape[0]; k++) {
        PyObject *given = PyTuple_GetItem(args[1], k);
        if (given == Py_None)
            continue;
        if (!borrow(given, &gradient) || !is_dtype(&gradient, FLOAT, slopes.bits) || !in_one_piece(&gradient, 1)
            || !is_as_stored(given))
            DECLINE;
        weights[k] = slopes.bits == 32 ? *(float *)gradient.data : *(double *)gradient.data;
        used[n_used++] = k;
    }
    like = slopes;
    like.ndim -= 2;
    like.shape += 2;
    const int64_t size = elements_of(&like), parameters = slopes.shape[1];
    PyObject *sums = PyTuple_New(parameters);
    for (int64_t p = 0; sums && p < parameters; p++) {
        void *data = NULL;
        PyObject *sum = n_used ? stacked(&like, 0, like.shape, &data) : Py_NewRef(Py_None);
        if (sum && n_used)
            slopes.bits == 32 ? weighted_float32(slopes.data, data, p * size, parameters * size, size, weights, used, n_used)
                              : weighted_float64(slopes.data, data, p * size, parameters * size, size, weights, used, n_used);
        if (!sum || PyTuple_SetItem(sums, p, sum) < 0)
            Py_CLEAR(sums);
    }
    return sums;
}
