/* Which sequences share a minibatch: `draw` of ppokit/sequences/order.py in one call. */

/* One more than the last step that is true, 1 where none is; and how many are, to `count`. */
static int64_t last_and_count(const uint8_t *steps, int64_t width, int64_t *count)
{
    int64_t last = 1, total = 0;
    for (int64_t t = 0; t < width; t++)
        total += steps[t] != 0;
    for (int64_t t = width; t > 1 && last == 1; t--)
        last = steps[t - 1] ? t : 1;
    *count = total;
    return last;
}

/* Sort the sequences of a pool by length, as they were among those of one length. */
static void sort_pool(const int64_t *shuffled, int64_t size, const int64_t *length, int64_t longest, int falling,
                      int64_t *places, int64_t *sorted)
{
    memset(places, 0, (size_t)(longest + 2) * sizeof(int64_t));
    for (int64_t i = 0; i < size; i++) {
        const int64_t rank = falling ? longest - length[shuffled[i]] : length[shuffled[i]];
        places[rank + 1]++;
    }
    for (int64_t rank = 0; rank < longest; rank++)
        places[rank + 1] += places[rank];
    for (int64_t i = 0; i < size; i++) {
        const int64_t rank = falling ? longest - length[shuffled[i]] : length[shuffled[i]];
        sorted[places[rank]++] = shuffled[i];
    }
}

/* Where minibatches end so that each has as many frames; each has a sequence. */
static void cut_evenly(const int64_t *order, int64_t count, const int64_t *frames, int64_t n, int64_t *bounds)
{
    int64_t total = 0, end = 0, row = 0;
    for (int64_t i = 0; i < count; i++)
        total += frames[i];
    bounds[0] = 0;
    for (int64_t k = 1; k < n; k++) {
        /* the first whose middle is not before the bound */
        for (; row < count && 2 * end + frames[order[row]] < 2 * total * k / n; row++)
            end += frames[order[row]];
        bounds[k] = row > bounds[k - 1] ? row : bounds[k - 1] + 1;
        bounds[k] = bounds[k] < count - n + k ? bounds[k] : count - n + k;
    }
    bounds[n] = count;
}

static int read_numbers(PyObject *object, int code, int bits, int ndim, Tensor *tensor)
{
    return borrow(object, tensor) && tensor->ndim == ndim && is_dtype(tensor, code, bits)
        && in_one_piece(tensor, elements_of(tensor));
}

/* args: frames that count and real ones [N, L], bool; shuffled sequences [N], in which order the
 * minibatches come [n], and the result [N], int64; minibatches of a pool. Return the minibatches' sizes
 * and widths. */
static PyObject *native_deal(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Tensor counted, real, shuffled, turns, result;
    (void)module;
    if (nargs != 6 || !read_numbers(args[0], BOOL, 8, 2, &counted) || !read_numbers(args[1], BOOL, 8, 2, &real)
        || !same_shape(&counted, &real) || !read_numbers(args[2], SIGNED, 64, 1, &shuffled)
        || !read_numbers(args[3], SIGNED, 64, 1, &turns) || !read_numbers(args[4], SIGNED, 64, 1, &result))
        DECLINE;
    const int64_t count = counted.shape[0], width = counted.shape[1], n = turns.shape[0];
    const int64_t buckets = PyLong_AsLongLong(args[5]);
    if (shuffled.shape[0] != count || result.shape[0] != count || n > count || buckets < 1)
        DECLINE;
    for (int64_t i = 0; i < count; i++)
        if (((int64_t *)shuffled.data)[i] < 0 || ((int64_t *)shuffled.data)[i] >= count)
            DECLINE;
    int64_t *memory = malloc(sizeof(int64_t) * (size_t)(4 * count + n + 1 + width + 2));
    PyObject *sizes = PyList_New(n), *widths = PyList_New(n);
    if (!memory || !sizes || !widths) {
        free(memory);
        Py_XDECREF(sizes);
        Py_XDECREF(widths);
        return PyErr_NoMemory();
    }
    int64_t *frames = memory, *length = frames + count, *end = length + count, *order = end + count;
    int64_t *bounds = order + count, *places = bounds + n + 1, *out = result.data, unused;
    const uint8_t *counts = counted.data, *reals = real.data;
    for (int64_t i = 0; i < count; i++) {
        length[i] = last_and_count(counts + i * width, width, &frames[i]);
        end[i] = counts == reals ? length[i] : last_and_count(reals + i * width, width, &unused);
    }
    const int64_t pools = buckets > 1 ? (n + buckets - 1) / buckets : 1;
    if (buckets == 1)
        memcpy(order, shuffled.data, (size_t)count * sizeof(int64_t));
    for (int64_t p = 0, from = 0; buckets > 1 && p < pools; p++) {
        const int64_t to = ((p + 1) * count + pools - 1) / pools; /* of those with i * pools / count = p */
        sort_pool((int64_t *)shuffled.data + from, to - from, length, width, p % 2, places, order + from);
        from = to;
    }
    cut_evenly(order, count, frames, n, bounds);
    int valid = 1;
    for (int64_t k = 0; k < n; k++) {
        const int64_t part = ((int64_t *)turns.data)[k];
        if (part < 0 || part >= n) {
            valid = 0;
            break;
        }
        const int64_t size = bounds[part + 1] - bounds[part];
        int64_t widest = 1;
        for (int64_t i = bounds[part]; i < bounds[part + 1]; i++) {
            widest = end[order[i]] > widest ? end[order[i]] : widest;
            *out++ = order[i];
        }
        PyList_SetItem(sizes, k, PyLong_FromLongLong(size));
        PyList_SetItem(widths, k, PyLong_FromLongLong(widest));
    }
    free(memory);
    if (valid)
        return pair(sizes, widths);
    Py_DECREF(sizes);
    Py_DECREF(widths);
    DECLINE;
}
