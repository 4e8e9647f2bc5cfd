/* The norm of all gradients together, in one call. */

/* The sum of the squares of float32 numbers: few in a float, all in a double. */
static double squares_of(const float *x, int64_t size)
{
    enum { ACROSS = 32, DEEP = 64 };
    double total = 0;
    int64_t i = 0;
    while (i + ACROSS <= size) {
        float sums[ACROSS] = {0};
        for (int k = 0; k < DEEP && i + ACROSS <= size; k++, i += ACROSS)
            for (int j = 0; j < ACROSS; j++)
                sums[j] += x[i + j] * x[i + j];
        for (int j = 0; j < ACROSS; j++)
            total += sums[j];
    }
    for (; i < size; i++)
        total += (double)x[i] * x[i];
    return total;
}

/* args: float32 tensors. Return the sum of the squares of all their numbers. */
static PyObject *native_sum_of_squares(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    double total = 0;
    for (Py_ssize_t i = 0; i < nargs; i++) {
        Tensor tensor;
        if (!borrow(args[i], &tensor) || !is_dtype(&tensor, FLOAT, 32) || !in_one_piece(&tensor, elements_of(&tensor))
            || !is_as_stored(args[i]))
            DECLINE;
        total += squares_of(tensor.data, elements_of(&tensor));
    }
    return PyFloat_FromDouble(total);
}
