/* From tensors to blocks of work: how their memory is walked through, on one thread or several. */

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
} Plan;

/* Lay out operands of one shape; those of `timeless` (a bit each) lack dimension `time`. */
static void make_plan(Plan *plan, const Tensor *operands, int count, unsigned timeless, int time, Layouts layouts)
{
    plan->dims = 0;
    plan->block.sum = plan->block.square = 0;
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

/* Do the work of a plan, block by block. */
static void work(Plan *plan)
{
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
}

static void do_part(const void *plan)
{
    work((Plan *)plan);
}

/* Split the widest dimension over threads. */
static void work_in_parallel(Plan *plan, int64_t threads)
{
    Plan parts[MAX_THREADS];
    Task tasks[MAX_THREADS];
    int widest = 0;
    for (int d = 1; d < plan->dims; d++)
        if (plan->dim[d].size > plan->dim[widest].size)
            widest = d;
    const int64_t size = plan->dim[widest].size;
    threads = threads < size ? threads : size;
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    for (int64_t i = 0; i < threads; i++) {
        const int64_t from = size * i / threads, to = size * (i + 1) / threads;
        parts[i] = *plan;
        advance(&parts[i], widest, from);
        parts[i].dim[widest].size = to - from;
        tasks[i] = (Task){do_part, &parts[i]};
    }
    do_all(tasks, threads);
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

