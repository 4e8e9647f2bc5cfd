/* A walk over the memory of tensors, block by block, on one thread or several. */

#define PARALLEL_ELEMENTS 500000 /* below it, waking a thread costs more than it brings */

typedef struct {
    int64_t size, stride[OPERANDS];
} Dim;

typedef struct {
    Block block;
    Kernel kernel;
    int dims, spread; /* the outer dimensions, and the one that runs over a block's rows or columns */
    Dim dim[DIMS + 1];
    int operands, itemsize[OPERANDS];
} Walk;

/* Lay out operands of one shape; those of `timeless` (a bit each) lack dimension `time`. */
static void make_walk(Walk *walk, const Tensor *operands, int count, unsigned timeless, int time, Layouts layouts)
{
    walk->dims = 0;
    walk->block.sum = walk->block.square = 0;
    walk->block.steps = operands[0].shape[time];
    for (int k = 0; k < count; k++) {
        walk->block.data[k] = operands[k].data;
        walk->itemsize[k] = operands[k].bits / 8;
        walk->block.time[k] = timeless >> k & 1 ? 0 : operands[k].strides[time];
    }
    for (int d = 0; d < operands[0].ndim; d++) {
        Dim *dim = &walk->dim[walk->dims];
        if (d == time || operands[0].shape[d] == 1)
            continue;
        dim->size = operands[0].shape[d];
        int merges = walk->dims > 0;
        for (int k = 0; k < count; k++) {
            dim->stride[k] = operands[k].strides ? operands[k].strides[d - (timeless >> k & 1 && d > time)] : 0;
            merges &= walk->dims > 0 && dim[-1].stride[k] == dim->stride[k] * dim->size;
        }
        if (merges) {
            dim->size *= dim[-1].size;
            dim[-1] = *dim;
        } else {
            walk->dims++;
        }
    }
    if (!walk->dims)
        walk->dim[walk->dims++] = (Dim){.size = 1};

    int rows = 1;
    for (int k = 0; k < count; k++)
        rows &= timeless >> k & 1 || walk->block.steps == 1 || walk->block.time[k] == 1;
    walk->kernel = rows ? layouts.rows : layouts.columns;
    walk->spread = -1;
    for (int d = 0; d < walk->dims; d++) {
        int columns = 1;
        for (int k = 0; k < count; k++)
            columns &= !walk->block.data[k] || walk->dim[d].stride[k] == 1;
        if ((rows || columns) && (walk->spread < 0 || walk->dim[d].size > walk->dim[walk->spread].size))
            walk->spread = d;
    }
    if (walk->spread < 0) { /* no two columns are neighbours: one at a time */
        walk->spread = walk->dims;
        walk->dim[walk->dims++] = (Dim){.size = 1};
    }
    for (int k = 0; k < count; k++)
        walk->block.next[k] = walk->dim[walk->spread].stride[k];
    walk->operands = count;
}

static void advance(Walk *walk, int d, int64_t by)
{
    for (int k = 0; k < walk->operands; k++)
        if (walk->block.data[k])
            walk->block.data[k] = (char *)walk->block.data[k] + by * walk->dim[d].stride[k] * walk->itemsize[k];
}

/* Run the kernel on every block of a walk. */
static void work(Walk *walk)
{
    int64_t index[DIMS + 1] = {0};
    walk->block.count = walk->dim[walk->spread].size;
    for (int d = 0; d >= 0;) {
        walk->kernel(&walk->block);
        for (d = walk->dims - 1; d >= 0; d--) {
            if (d == walk->spread)
                continue;
            advance(walk, d, 1);
            if (++index[d] < walk->dim[d].size)
                break;
            advance(walk, d, -walk->dim[d].size);
            index[d] = 0;
        }
    }
}

static void do_part(const void *walk)
{
    work((Walk *)walk);
}

/* Split the widest dimension over threads. */
static void work_in_parallel(Walk *walk, int64_t threads)
{
    Walk parts[MAX_THREADS];
    Task tasks[MAX_THREADS];
    int widest = 0;
    for (int d = 1; d < walk->dims; d++)
        if (walk->dim[d].size > walk->dim[widest].size)
            widest = d;
    const int64_t size = walk->dim[widest].size;
    threads = threads < size ? threads : size;
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    for (int64_t i = 0; i < threads; i++) {
        const int64_t from = size * i / threads, to = size * (i + 1) / threads;
        parts[i] = *walk;
        advance(&parts[i], widest, from);
        parts[i].dim[widest].size = to - from;
        tasks[i] = (Task){do_part, &parts[i]};
    }
    do_all(tasks, threads);
    for (int64_t i = 0; i < threads; i++) {
        walk->block.sum += parts[i].block.sum;
        walk->block.square += parts[i].block.square;
    }
}

/* Return the number of elements, or -1 on an error. */
static int64_t run(Walk *walk)
{
    int64_t elements = walk->block.steps, threads = 1;
    for (int d = 0; d < walk->dims; d++)
        elements *= walk->dim[d].size;
    if (elements >= PARALLEL_ELEMENTS) {
        PyObject *number = PyObject_CallObject(get_num_threads, NULL);
        if (!number)
            return -1;
        threads = PyLong_AsLongLong(number);
        Py_DECREF(number);
    }
    if (elements < PARALLEL_ELEMENTS / 10) { /* sooner done than the lock is given back */
        work(walk);
        return elements;
    }
    Py_BEGIN_ALLOW_THREADS
    if (threads > 1)
        work_in_parallel(walk, threads);
    else
        work(walk);
    Py_END_ALLOW_THREADS
    return elements;
}

