/* Where the runs of a batch are: `pack` of ppokit/recurrent/packing.py in one call. */

/* Flags [B, T] as they lie in memory. */
typedef struct {
    const uint8_t *data;
    int64_t rows, steps, next_row, next_step;
} Flags;

static int read_flags(PyObject *object, Flags *flags)
{
    Tensor tensor;
    if (!borrow(object, &tensor) || tensor.ndim != 2 || !is_dtype(&tensor, BOOL, 8))
        return 0;
    *flags = (Flags){tensor.data, tensor.shape[0], tensor.shape[1], tensor.strides[0], tensor.strides[1]};
    return 1;
}

static int flag_at(const Flags *flags, int64_t row, int64_t step)
{
    return flags->data[row * flags->next_row + step * flags->next_step];
}

/* Note the runs in the order of their rows: where they start in the flattened batch, and how long they
 * are. Return how many there are. */
static int64_t find_runs(const Flags *begins, const Flags *valid, int64_t *starts, int64_t *lengths)
{
    int64_t runs = 0;
    for (int64_t row = 0; row < begins->rows; row++) {
        int64_t end = begins->steps;
        while (valid && end && !flag_at(valid, row, end - 1))
            end--;
        for (int64_t t = 0; t < end; t++) {
            if (!t || flag_at(begins, row, t)) {
                starts[runs] = row * begins->steps + t;
                lengths[runs++] = 0;
            }
            lengths[runs - 1]++;
        }
    }
    return runs;
}

/* args: bool [B, T], or None for the second; for the result two int64 [B T]. Return how many frames and
 * runs there are, and how many runs have a frame at each step. */
static PyObject *native_pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Flags begins, valid;
    Tensor frames, starts;
    (void)module;
    if (nargs != 4 || !read_flags(args[0], &begins) || !read_numbers(args[2], SIGNED, 64, 1, &frames)
        || !read_numbers(args[3], SIGNED, 64, 1, &starts))
        DECLINE;
    const int64_t size = begins.rows * begins.steps;
    const int masked = args[1] != Py_None;
    if ((masked && (!read_flags(args[1], &valid) || valid.rows != begins.rows || valid.steps != begins.steps))
        || frames.shape[0] != size || starts.shape[0] != size)
        DECLINE;
    int64_t *first = malloc(sizeof(int64_t) * (size_t)(2 * size + begins.steps + 2));
    if (!first)
        return PyErr_NoMemory();
    int64_t *length = first + size, *count = length + size, *frame = frames.data, *start = starts.data;
    const int64_t runs = find_runs(&begins, masked ? &valid : NULL, first, length);
    /* count[n]: how many are longer than n, which is also where those of n steps begin, sorted */
    memset(count, 0, sizeof(int64_t) * (size_t)(begins.steps + 2));
    for (int64_t i = 0; i < runs; i++)
        count[length[i] - 1]++;
    for (int64_t n = begins.steps - 1; n >= 0; n--)
        count[n] += count[n + 1];
    PyObject *sizes = PyList_New(0);
    for (int64_t t = 0; sizes && t < begins.steps && count[t]; t++) {
        PyObject *number = PyLong_FromLongLong(count[t]);
        if (!number || PyList_Append(sizes, number) < 0)
            Py_CLEAR(sizes);
        Py_XDECREF(number);
    }
    const int64_t longest = sizes ? PyList_Size(sizes) : 0;
    for (int64_t i = 0; i < runs; i++)
        start[count[length[i]]++] = first[i];
    /* and now count[n + 1] is how many are longer than n */
    for (int64_t t = 0; t < longest; t++)
        for (int64_t i = 0; i < count[t + 1]; i++)
            *frame++ = start[i] + t;
    free(first);
    return sizes ? Py_BuildValue("LLN", (long long)(frame - (int64_t *)frames.data), (long long)runs, sizes) : NULL;
}
