/* From Python to recurrent networks over packed rows, and to the gradients of their weights. */

#define MIN_WORK 20000000 /* multiplications a thread, which takes 20 us to start */

/* Read a matrix in one piece of `rows` and `columns`; -1 where any number will do. Return its rows, or
 * -1 if it is none. */
static int64_t read_matrix(PyObject *object, int64_t rows, int64_t columns, int bits, void **data)
{
    Tensor tensor;
    if (!borrow(object, &tensor) || tensor.ndim != 2 || !is_dtype(&tensor, FLOAT, bits)
        || (rows >= 0 && tensor.shape[0] != rows) || (columns >= 0 && tensor.shape[1] != columns)
        || !in_one_piece(&tensor, elements_of(&tensor)) || !is_as_stored(object))
        return -1;
    *data = tensor.data;
    return tensor.shape[0];
}

/* Bits of the numbers of a matrix, and its columns; 0 if it is none. */
static int describe(PyObject *object, int64_t *columns)
{
    Tensor tensor;
    if (!borrow(object, &tensor) || tensor.ndim != 2 || tensor.code != FLOAT || tensor.bits < 32)
        return 0;
    *columns = tensor.shape[1];
    return tensor.bits;
}

/* Read how many rows there are at each step, falling numbers; 0 if they are none. */
static int read_sizes(PyObject *list, Recurrence *net)
{
    net->steps = PyList_Check(list) ? PyList_Size(list) : 0;
    net->sizes = net->steps ? malloc(sizeof(int64_t) * (size_t)net->steps) : NULL;
    net->frames = 0;
    for (int64_t t = 0; net->sizes && t < net->steps; t++) {
        net->sizes[t] = PyLong_AsLongLong(PyList_GetItem(list, t));
        if (net->sizes[t] < 1 || (t && net->sizes[t] > net->sizes[t - 1])) {
            PyErr_Clear();
            return 0;
        }
        net->frames += net->sizes[t];
    }
    return net->sizes != NULL;
}

/* How many threads so many multiplications are worth; -1 on an error. */
static int64_t threads_for(double multiplications, int64_t parts)
{
    int64_t threads = (int64_t)(multiplications / MIN_WORK);
    if (threads <= 1)
        return 1;
    PyObject *number = PyObject_CallObject(get_num_threads, NULL);
    const int64_t allowed = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    threads = threads < allowed ? threads : allowed;
    threads = threads < parts ? threads : parts;
    return threads < MAX_THREADS ? threads : MAX_THREADS;
}

/* Run a layer, its rows spread over threads so that each has as many frames. Return None. */
static PyObject *run_recurrence(Recurrence *net, RecurrenceKernel kernel, int gates)
{
    Recurrence parts[MAX_THREADS];
    Task tasks[MAX_THREADS];
    const int64_t rows = net->sizes[0];
    const double each = (double)gates * (double)net->size * (double)(net->inputs + net->size);
    const int64_t threads = threads_for(each * (double)net->frames, rows);
    if (threads < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    int64_t row = 0, frames = 0, steps = net->steps;
    for (int64_t i = 0; i < threads; i++) {
        parts[i] = *net;
        parts[i].from = row;
        for (; row < rows && (i == threads - 1 || frames * threads < net->frames * (i + 1)); row++) {
            while (net->sizes[steps - 1] <= row)
                steps--; /* of this row */
            frames += steps;
        }
        parts[i].to = row;
        tasks[i] = (Task){(void (*)(const void *))kernel, &parts[i]};
    }
    do_all(tasks, threads);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

#define MATRIX(arg, rows, columns, field) (read_matrix(args[arg], rows, columns, bits, &net.field) >= 0)
#define MATRIX_IF_ANY(arg, rows, columns, field) (args[arg] == Py_None || MATRIX(arg, rows, columns, field))

#define RECURRENCE(name, n, n_gates, ...)                                                                           \
    static PyObject *native_##name(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)            \
    {                                                                                                               \
        Recurrence net = {0};                                                                                       \
        PyObject *result = Py_NotImplemented;                                                                       \
        const int64_t gates = n_gates;                                                                              \
        const int bits = nargs == n && describe(args[0], &net.inputs) ? describe(args[1], &net.size) : 0;           \
        if (bits && read_sizes(args[n - 1], &net) && (__VA_ARGS__))                                                 \
            result = run_recurrence(&net, (bits == 32 ? chosen->for_float32 : chosen->for_float64)->name, n_gates); \
        free(net.sizes);                                                                                            \
        return result == Py_NotImplemented ? Py_NewRef(result) : result;                                            \
    }
#define FRAMES net.frames
#define ROWS net.sizes[0]
#define SIZE net.size
#define INPUTS net.inputs

/* `extra` is what the gradient needs beside gates and states: an LSTM's cells, or what h adds to a GRU's gates. */
#define LAYER(kind, n_gates, extra, columns, has_cell)                                                          \
    RECURRENCE(kind##_forward, 11, n_gates,                                                                     \
               MATRIX(0, FRAMES, INPUTS, x) && MATRIX(1, ROWS, SIZE, hidden)                                    \
               && MATRIX_IF_ANY(2, ROWS, SIZE, cell) && MATRIX(3, INPUTS, gates * SIZE, weight_x)               \
               && MATRIX(4, SIZE, gates * SIZE, weight_h) && MATRIX_IF_ANY(5, 1, gates * SIZE, bias)            \
               && MATRIX_IF_ANY(6, 1, gates * SIZE, bias_h) && MATRIX(7, FRAMES, gates * SIZE, gates)           \
               && MATRIX(8, FRAMES, columns, extra) && MATRIX(9, FRAMES, SIZE, hiddens)                         \
               && (net.cell != NULL) == has_cell && !net.bias == !net.bias_h)                                   \
    RECURRENCE(kind##_backward, 15, n_gates,                                                                    \
               MATRIX(0, gates * SIZE, INPUTS, weight_x) && MATRIX(1, gates * SIZE, SIZE, weight_h)             \
               && MATRIX(2, ROWS, SIZE, hidden) && MATRIX_IF_ANY(3, ROWS, SIZE, cell)                           \
               && MATRIX(4, FRAMES, gates * SIZE, gates) && MATRIX(5, FRAMES, columns, extra)                   \
               && MATRIX(6, FRAMES, SIZE, hiddens) && MATRIX(7, FRAMES, SIZE, by_hiddens)                       \
               && MATRIX_IF_ANY(8, FRAMES, SIZE, by_cells) && MATRIX(9, FRAMES, gates * SIZE, by_gates)         \
               && MATRIX(10, FRAMES, gates * SIZE, by_of_hidden) && MATRIX(11, ROWS, SIZE, by_hidden)           \
               && MATRIX_IF_ANY(12, ROWS, SIZE, by_cell) && MATRIX_IF_ANY(13, FRAMES, INPUTS, by_x)             \
               && (net.cell != NULL) == has_cell && (net.by_cell != NULL) == has_cell)
LAYER(lstm, 4, cells, SIZE, 1)
LAYER(gru, 3, of_hidden, gates * SIZE, 0)

/* args: a, b and c of c = a^T b: the gradient of weights, from those of the gates and the inputs. */
static PyObject *native_transposed_product(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Product parts[MAX_THREADS], all = {.a_row = 1};
    Task tasks[MAX_THREADS];
    void *a, *b;
    const int bits = nargs == 3 ? describe(args[0], &all.rows) : 0;
    all.depth = bits ? read_matrix(args[0], -1, all.rows, bits, &a) : -1;
    if (all.depth < 0 || describe(args[1], &all.columns) != bits || read_matrix(args[1], all.depth, -1, bits, &b) < 0
        || read_matrix(args[2], all.rows, all.columns, bits, &all.c) < 0)
        DECLINE;
    const double work = (double)all.rows * (double)all.depth * (double)all.columns;
    const int64_t threads = threads_for(work, all.rows / 6 + 1);
    if (threads < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < threads; i++) {
        const int64_t from = all.rows * i / threads, to = all.rows * (i + 1) / threads;
        parts[i] = all;
        parts[i].rows = to - from;
        parts[i].a = (char *)a + from * (bits / 8);
        parts[i].a_next = all.rows;
        parts[i].b = b;
        parts[i].c = (char *)all.c + from * all.columns * (bits / 8);
        tasks[i] = (Task){(void (*)(const void *))(bits == 32 ? chosen->for_float32 : chosen->for_float64)->product, &parts[i]};
    }
    do_all(tasks, threads);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}
