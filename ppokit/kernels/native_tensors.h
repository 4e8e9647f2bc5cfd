/* Tensors as DLPack 1 describes them (dmlc.github.io/dlpack), taken through its C exchange table, and
 * what is asked of them before a kernel may read their memory. */

#define DIMS 16

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
enum { SIGNED = 0, FLOAT = 2, BOOL = 6 };

typedef struct Owned {
    uint32_t major, minor;
    void *context;
    void (*release)(struct Owned *);
    uint64_t flags;
    Tensor tensor;
} Owned;

typedef struct {
    struct {
        uint32_t major, minor;
        void *older;
    } header;
    void *allocator, *from_object;
    int (*to_object)(Owned *, PyObject **);
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

static void release(Owned *owned)
{
    free(owned);
}

/* A new tensor of this shape and `bits` a number, whose memory is then `data`; NULL on an error. */
static PyObject *new_tensor(int bits, int ndim, const int64_t *shape, void **data)
{
    const size_t line = 64;
    PyObject *object = NULL;
    int64_t elements = 1;
    for (int d = 0; d < ndim; d++)
        elements *= shape[d];
    const size_t head = (sizeof(Owned) + 2 * DIMS * sizeof(int64_t) + 2 * line) / line * line;
    char *memory = ndim <= DIMS ? malloc(head + (size_t)(elements * (bits / 8)) + 1) : NULL;
    if (!memory)
        return PyErr_NoMemory();
    Owned *owned = (Owned *)memory;
    int64_t *sizes = (int64_t *)(memory + sizeof(Owned)), *strides = sizes + DIMS, stride = 1;
    for (int d = ndim - 1; d >= 0; stride *= shape[d--]) {
        sizes[d] = shape[d];
        strides[d] = stride;
    }
    *data = (char *)(((uintptr_t)memory + head - 1) / line * line);
    *owned = (Owned){1, 0, NULL, release, 0, {*data, CPU, 0, ndim, FLOAT, (uint8_t)bits, 1, sizes, strides, 0}};
    if (table->to_object(owned, &object) != 0) {
        free(memory);
        return NULL;
    }
    return object;
}

static int is_dtype(const Tensor *tensor, int code, int bits)
{
    return tensor->code == code && tensor->bits == bits;
}

static int same_shape(const Tensor *a, const Tensor *b)
{
    return a->ndim == b->ndim && !memcmp(a->shape, b->shape, sizeof(int64_t) * (size_t)a->ndim);
}

/* Whether the tensor's numbers are what lies in memory; a negative view's are not. */
static int is_as_stored(PyObject *object)
{
    PyObject *negative = PyObject_CallMethodObjArgs(object, is_neg_name, NULL);
    const int stored = negative == Py_False;
    Py_XDECREF(negative);
    PyErr_Clear();
    return stored;
}

/* Whether the tensors' numbers are what lies in memory, and no gradient is to be recorded. */
static int are_plain(PyObject *const *objects, int count)
{
    int plain = 1, recorded = 0;
    for (int i = 0; plain && i < count; i++) {
        PyObject *flag = PyObject_GetAttr(objects[i], requires_grad_name);
        recorded |= flag == Py_True;
        plain = flag && is_as_stored(objects[i]);
        Py_XDECREF(flag);
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
static int read_initial(PyObject *object, Tensor *initial, const Tensor *like, int bits, int time)
{
    if (object == Py_None)
        return 1;
    if (!borrow(object, initial) || initial->ndim != like->ndim - 1 || !is_dtype(initial, FLOAT, bits))
        return 0;
    for (int d = 0; d < initial->ndim; d++)
        if (initial->shape[d] != like->shape[d + (d >= time)])
            return 0;
    return are_plain(&object, 1);
}

/* A new tensor like `object`, also described in `tensor`; NULL on an error. `options` are keywords. */
static PyObject *output_like(PyObject *object, PyObject *options, Tensor *tensor)
{
    PyObject *arguments = PyTuple_Pack(1, object);
    PyObject *output = arguments ? PyObject_Call(empty_like, arguments, options) : NULL;
    Py_XDECREF(arguments);
    if (output && !borrow(output, tensor)) {
        PyErr_SetString(PyExc_RuntimeError, "torch.empty_like did not return a plain CPU tensor.");
        Py_CLEAR(output);
    }
    return output;
}
