/* Recurrent networks over packed rows, included by native_scan.h once for each instruction set and
 * real type: gates one row at a time, and the way through time of the rows from..to.
 *
 * What belongs to several gates is [.., gates * size], one gate after the other.
 */

#if BITS == 32
/* 2^n e^r with |r| <= log(2) / 2 (Cephes, expf). Adding 1.5 * 2^23 rounds to n, in the lowest bits. */
static ALWAYS_INLINE float NAME(exponential)(float x)
{
    const float rounder = 12582912;
    int32_t bits;
    x = x > 88 ? 88 : x < -87 ? -87 : x;
    const float shifted = x * 1.44269504088896341f + rounder, n = shifted - rounder;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float sum = 1.9875691500e-4f * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    sum = sum * r * r + r + 1;
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (int32_t)((uint32_t)(bits - 0x4B400000 + 127) << 23);
    float power;
    memcpy(&power, &bits, sizeof(power));
    return sum * power;
}

/* Cephes, tanhf: a series near 0, where the quotient would cancel. */
static ALWAYS_INLINE float NAME(hyperbolic)(float x)
{
    const float size = x < 0 ? -x : x, z = x * x;
    float series = -5.70498872745e-3f * z + 2.06390887954e-2f;
    series = series * z - 5.37397155531e-2f;
    series = series * z + 1.33314422036e-1f;
    series = series * z - 3.33332819422e-1f;
    const float quotient = 1 - 2 / (NAME(exponential)(2 * size) + 1);
    return size < 0.625f ? series * z * x + x : x < 0 ? -quotient : quotient;
}
#else
static ALWAYS_INLINE double NAME(exponential)(double x) { return exp(x); }
static ALWAYS_INLINE double NAME(hyperbolic)(double x) { return tanh(x); }
#endif

static ALWAYS_INLINE REAL NAME(logistic)(REAL x) { return 1 / (1 + NAME(exponential)(-x)); }

/* How many of the rows from..to have a frame at a step. */
#define ROWS_OF(t) ((net->sizes[t] < net->to ? net->sizes[t] : net->to) - net->from)

/* Compilers vectorise what is done to parameters that are `restrict`, in a function of its own. */
static NEVER_INLINE void NAME(add_row)(int64_t size, const REAL *restrict x, REAL *restrict sum)
{
    for (int64_t j = 0; j < size; j++)
        sum[j] += x[j];
}

static NEVER_INLINE void NAME(lstm_forward_row)(
    int64_t size, REAL *restrict in, REAL *restrict forget, REAL *restrict candidate, REAL *restrict out,
    const REAL *restrict before, REAL *restrict cell, REAL *restrict hidden)
{
    for (int64_t j = 0; j < size; j++) {
        const REAL i = NAME(logistic)(in[j]), f = NAME(logistic)(forget[j]);
        const REAL g = NAME(hyperbolic)(candidate[j]), o = NAME(logistic)(out[j]);
        const REAL c = f * before[j] + i * g;
        in[j] = i;
        forget[j] = f;
        candidate[j] = g;
        out[j] = o;
        cell[j] = c;
        hidden[j] = o * NAME(hyperbolic)(c);
    }
}

/* A layer of an LSTM (Hochreiter & Schmidhuber, 1997; forget gates: Gers et al., 2000):
 * c = f c' + i g and h = o tanh(c). */
static void NAME(lstm_forward)(const Recurrence *net)
{
    const int64_t size = net->size, inputs = net->inputs;
    const REAL *h = net->hidden, *c = net->cell, *bias = net->bias;
    for (int64_t t = 0, frame = 0; t < net->steps; frame += net->sizes[t++]) {
        const int64_t from = net->from, rows = ROWS_OF(t), first = frame + from;
        REAL *gates = (REAL *)net->gates + first * 4 * size;
        REAL *hidden = (REAL *)net->hiddens + first * size, *cell = (REAL *)net->cells + first * size;
        if (rows <= 0)
            break;
        for (int64_t row = 0; bias && row < rows; row++) {
            memcpy(gates + row * 4 * size, bias, (size_t)(4 * size) * sizeof(REAL));
            NAME(add_row)(4 * size, net->bias_h, gates + row * 4 * size);
        }
        NAME(multiply)(rows, inputs, 4 * size, (REAL *)net->x + first * inputs, net->weight_x, gates, bias != NULL);
        NAME(multiply)(rows, size, 4 * size, h + from * size, net->weight_h, gates, 1);
        for (int64_t row = 0; row < rows; row++) {
            REAL *of_row = gates + row * 4 * size;
            NAME(lstm_forward_row)(size, of_row, of_row + size, of_row + 2 * size, of_row + 3 * size,
                                   c + (from + row) * size, cell + row * size, hidden + row * size);
        }
        h = hidden - from * size;
        c = cell - from * size;
    }
}

static NEVER_INLINE void NAME(lstm_backward_row)(
    int64_t size, const REAL *restrict in, const REAL *restrict forget, const REAL *restrict candidate,
    const REAL *restrict out, const REAL *restrict before, const REAL *restrict cell,
    const REAL *restrict by_hidden, REAL *restrict by_cell, REAL *restrict by_in, REAL *restrict by_forget,
    REAL *restrict by_candidate, REAL *restrict by_out)
{
    for (int64_t j = 0; j < size; j++) {
        const REAL i = in[j], f = forget[j], g = candidate[j], o = out[j];
        const REAL tanh_c = NAME(hyperbolic)(cell[j]), by_h = by_hidden[j];
        const REAL by_c = by_cell[j] + by_h * o * (1 - tanh_c * tanh_c);
        by_in[j] = by_c * g * i * (1 - i);
        by_forget[j] = by_c * before[j] * f * (1 - f);
        by_candidate[j] = by_c * i * (1 - g * g);
        by_out[j] = by_h * tanh_c * o * (1 - o);
        by_cell[j] = by_c * f;
    }
}

/* The gradients of what goes into the gates, of x, and of the first states. */
static void NAME(lstm_backward)(const Recurrence *net)
{
    const int64_t size = net->size, inputs = net->inputs, from = net->from;
    REAL *by_h = (REAL *)net->by_hidden + from * size, *by_c = (REAL *)net->by_cell + from * size;
    for (int64_t t = net->steps - 1, frame = net->frames; t >= 0; t--) {
        const int64_t rows = ROWS_OF(t), first = (frame -= net->sizes[t]) + from;
        const REAL *gates = (REAL *)net->gates + first * 4 * size, *cell = (REAL *)net->cells + first * size;
        const REAL *before = t ? cell - net->sizes[t - 1] * size : (REAL *)net->cell + from * size;
        REAL *by_gates = (REAL *)net->by_gates + first * 4 * size;
        if (rows <= 0)
            continue;
        NAME(add_row)(rows * size, (REAL *)net->by_hiddens + first * size, by_h);
        if (net->by_cells)
            NAME(add_row)(rows * size, (REAL *)net->by_cells + first * size, by_c);
        for (int64_t row = 0; row < rows; row++) {
            const REAL *of_row = gates + row * 4 * size;
            REAL *by_row = by_gates + row * 4 * size;
            NAME(lstm_backward_row)(size, of_row, of_row + size, of_row + 2 * size, of_row + 3 * size,
                                    before + row * size, cell + row * size, by_h + row * size, by_c + row * size,
                                    by_row, by_row + size, by_row + 2 * size, by_row + 3 * size);
        }
        NAME(multiply)(rows, 4 * size, size, by_gates, net->weight_h, by_h, 0);
        if (net->by_x)
            NAME(multiply)(rows, 4 * size, inputs, by_gates, net->weight_x, (REAL *)net->by_x + first * inputs, 0);
    }
}

static NEVER_INLINE void NAME(gru_forward_row)(
    int64_t size, REAL *restrict reset, REAL *restrict update, REAL *restrict candidate,
    const REAL *restrict h_reset, const REAL *restrict h_update, const REAL *restrict h_candidate,
    const REAL *restrict before, REAL *restrict hidden)
{
    for (int64_t j = 0; j < size; j++) {
        const REAL r = NAME(logistic)(reset[j] + h_reset[j]), z = NAME(logistic)(update[j] + h_update[j]);
        const REAL n = NAME(hyperbolic)(candidate[j] + r * h_candidate[j]);
        reset[j] = r;
        update[j] = z;
        candidate[j] = n;
        hidden[j] = n + z * (before[j] - n);
    }
}

/* A layer of gated recurrent units (Cho et al., 2014, as in torch): n = tanh(x_n + r h_n) and
 * h = n + z (h' - n). What h' adds to the gates is kept: the gradient needs h_n. */
static void NAME(gru_forward)(const Recurrence *net)
{
    const int64_t size = net->size, inputs = net->inputs, from = net->from;
    const REAL *h = net->hidden;
    for (int64_t t = 0, frame = 0; t < net->steps; frame += net->sizes[t++]) {
        const int64_t rows = ROWS_OF(t), first = frame + from;
        REAL *gates = (REAL *)net->gates + first * 3 * size, *of_h = (REAL *)net->of_hidden + first * 3 * size;
        REAL *hidden = (REAL *)net->hiddens + first * size;
        if (rows <= 0)
            break;
        for (int64_t row = 0; net->bias && row < rows; row++) {
            memcpy(gates + row * 3 * size, net->bias, (size_t)(3 * size) * sizeof(REAL));
            memcpy(of_h + row * 3 * size, net->bias_h, (size_t)(3 * size) * sizeof(REAL));
        }
        NAME(multiply)(rows, inputs, 3 * size, (REAL *)net->x + first * inputs, net->weight_x, gates, net->bias != NULL);
        NAME(multiply)(rows, size, 3 * size, h + from * size, net->weight_h, of_h, net->bias != NULL);
        for (int64_t row = 0; row < rows; row++) {
            REAL *of_row = gates + row * 3 * size, *h_of_row = of_h + row * 3 * size;
            NAME(gru_forward_row)(size, of_row, of_row + size, of_row + 2 * size, h_of_row, h_of_row + size,
                                  h_of_row + 2 * size, h + (from + row) * size, hidden + row * size);
        }
        h = hidden - from * size;
    }
}

static NEVER_INLINE void NAME(gru_backward_row)(
    int64_t size, const REAL *restrict reset, const REAL *restrict update, const REAL *restrict candidate,
    const REAL *restrict h_candidate, const REAL *restrict before, REAL *restrict by_hidden,
    REAL *restrict by_x_reset, REAL *restrict by_x_update, REAL *restrict by_x_candidate,
    REAL *restrict by_h_reset, REAL *restrict by_h_update, REAL *restrict by_h_candidate)
{
    for (int64_t j = 0; j < size; j++) {
        const REAL r = reset[j], z = update[j], n = candidate[j], by = by_hidden[j];
        const REAL by_n = by * (1 - z) * (1 - n * n);
        by_x_reset[j] = by_h_reset[j] = by_n * h_candidate[j] * r * (1 - r);
        by_x_update[j] = by_h_update[j] = by * (before[j] - n) * z * (1 - z);
        by_x_candidate[j] = by_n;
        by_h_candidate[j] = by_n * r;
        by_hidden[j] = by * z;
    }
}

/* The gradients of what x and h' add to the gates, of x, and of the first state. */
static void NAME(gru_backward)(const Recurrence *net)
{
    const int64_t size = net->size, inputs = net->inputs, from = net->from;
    REAL *by_h = (REAL *)net->by_hidden + from * size;
    for (int64_t t = net->steps - 1, frame = net->frames; t >= 0; t--) {
        const int64_t rows = ROWS_OF(t), first = (frame -= net->sizes[t]) + from;
        const REAL *gates = (REAL *)net->gates + first * 3 * size, *of_h = (REAL *)net->of_hidden + first * 3 * size;
        const REAL *before = (REAL *)(t ? net->hiddens : net->hidden) + (t ? first - net->sizes[t - 1] : from) * size;
        REAL *by_gates = (REAL *)net->by_gates + first * 3 * size, *by_of_h = (REAL *)net->by_of_hidden + first * 3 * size;
        if (rows <= 0)
            continue;
        NAME(add_row)(rows * size, (REAL *)net->by_hiddens + first * size, by_h);
        for (int64_t row = 0; row < rows; row++) {
            const REAL *of_row = gates + row * 3 * size;
            REAL *by_row = by_gates + row * 3 * size, *by_h_row = by_of_h + row * 3 * size;
            NAME(gru_backward_row)(size, of_row, of_row + size, of_row + 2 * size, of_h + (row * 3 + 2) * size,
                                   before + row * size, by_h + row * size, by_row, by_row + size,
                                   by_row + 2 * size, by_h_row, by_h_row + size, by_h_row + 2 * size);
        }
        NAME(multiply)(rows, 3 * size, size, by_of_h, net->weight_h, by_h, 1);
        if (net->by_x)
            NAME(multiply)(rows, 3 * size, inputs, by_gates, net->weight_x, (REAL *)net->by_x + first * inputs, 0);
    }
}
#undef ROWS_OF
