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

/* An LSTM (Hochreiter & Schmidhuber, 1997; forget gates: Gers et al., 2000): c = f c' + i g and
 * h = o tanh(c). */
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

/* A gated recurrent unit (Cho et al., 2014, as in torch): n = tanh(x_n + r h_n) and h = n + z (h' - n). */
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

/* A layer of LSTM cells, which have four gates, or of GRU cells, which have three, and of which what the
 * state before adds to the gates is kept: the gradient needs h_n. */
static ALWAYS_INLINE void NAME(layer_forward)(const Recurrence *net, const int n_gates)
{
    const int64_t size = net->size, from = net->from, wide = n_gates * size;
    const int is_lstm = n_gates == 4, biased = net->bias != NULL;
    const REAL *h = (REAL *)net->hidden + from * size, *c = is_lstm ? (REAL *)net->cell + from * size : NULL;
    for (int64_t t = 0, frame = 0; t < net->steps; frame += net->sizes[t++]) {
        const int64_t rows = ROWS_OF(t), first = frame + from;
        REAL *gates = (REAL *)net->gates + first * wide, *hidden = (REAL *)net->hiddens + first * size;
        REAL *of_h = is_lstm ? gates : (REAL *)net->of_hidden + first * wide;
        REAL *cell = is_lstm ? (REAL *)net->cells + first * size : NULL;
        if (rows <= 0)
            break;
        for (int64_t row = 0; biased && row < rows; row++) {
            memcpy(of_h + row * wide, net->bias_h, (size_t)wide * sizeof(REAL));
            if (is_lstm)
                NAME(add_row)(wide, net->bias, gates + row * wide);
            else
                memcpy(gates + row * wide, net->bias, (size_t)wide * sizeof(REAL));
        }
        NAME(multiply)(rows, net->inputs, wide, (REAL *)net->x + first * net->inputs, net->weight_x, gates, biased);
        NAME(multiply)(rows, size, wide, h, net->weight_h, of_h, is_lstm || biased);
        for (int64_t row = 0; row < rows; row++) {
            REAL *in = gates + row * wide, *h_in = of_h + row * wide;
            if (is_lstm)
                NAME(lstm_forward_row)(size, in, in + size, in + 2 * size, in + 3 * size, c + row * size,
                                       cell + row * size, hidden + row * size);
            else
                NAME(gru_forward_row)(size, in, in + size, in + 2 * size, h_in, h_in + size, h_in + 2 * size,
                                      h + row * size, hidden + row * size);
        }
        h = hidden;
        c = cell;
    }
}

/* The gradients of what x and the state before add to the gates, which is the same for an LSTM, of x, and of
 * the first states. */
static ALWAYS_INLINE void NAME(layer_backward)(const Recurrence *net, const int n_gates)
{
    const int64_t size = net->size, from = net->from, wide = n_gates * size;
    const int is_lstm = n_gates == 4;
    const REAL *states = is_lstm ? net->cells : net->hiddens, *state = is_lstm ? net->cell : net->hidden;
    REAL *by_h = (REAL *)net->by_hidden + from * size, *by_c = is_lstm ? (REAL *)net->by_cell + from * size : NULL;
    for (int64_t t = net->steps - 1, frame = net->frames; t >= 0; t--) {
        const int64_t rows = ROWS_OF(t), first = (frame -= net->sizes[t]) + from;
        const REAL *gates = (REAL *)net->gates + first * wide, *cell = states + first * size;
        const REAL *of_h = is_lstm ? NULL : (REAL *)net->of_hidden + first * wide;
        const REAL *before = t ? states + (first - net->sizes[t - 1]) * size : state + from * size;
        REAL *by_gates = (REAL *)net->by_gates + first * wide, *by_of_h = (REAL *)net->by_of_hidden + first * wide;
        if (rows <= 0)
            continue;
        NAME(add_row)(rows * size, (REAL *)net->by_hiddens + first * size, by_h);
        if (is_lstm && net->by_cells)
            NAME(add_row)(rows * size, (REAL *)net->by_cells + first * size, by_c);
        for (int64_t row = 0; row < rows; row++) {
            const REAL *in = gates + row * wide, *was = before + row * size;
            REAL *by = by_gates + row * wide, *h_by = by_of_h + row * wide, *by_state = by_h + row * size;
            if (is_lstm)
                NAME(lstm_backward_row)(size, in, in + size, in + 2 * size, in + 3 * size, was, cell + row * size,
                                        by_state, by_c + row * size, by, by + size, by + 2 * size, by + 3 * size);
            else
                NAME(gru_backward_row)(size, in, in + size, in + 2 * size, of_h + row * wide + 2 * size, was, by_state,
                                       by, by + size, by + 2 * size, h_by, h_by + size, h_by + 2 * size);
        }
        NAME(multiply)(rows, wide, size, by_of_h, net->weight_h, by_h, !is_lstm);
        if (net->by_x)
            NAME(multiply)(rows, wide, net->inputs, by_gates, net->weight_x,
                           (REAL *)net->by_x + first * net->inputs, 0);
    }
}

static void NAME(lstm_forward)(const Recurrence *net) { NAME(layer_forward)(net, 4); }
static void NAME(lstm_backward)(const Recurrence *net) { NAME(layer_backward)(net, 4); }
static void NAME(gru_forward)(const Recurrence *net) { NAME(layer_forward)(net, 3); }
static void NAME(gru_backward)(const Recurrence *net) { NAME(layer_backward)(net, 3); }
#undef ROWS_OF
