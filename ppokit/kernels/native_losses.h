/* The terms of PPO's loss for a minibatch, each frame visited once or twice: included by native.c
 * once for each real type. A minibatch is small, so what counts is that nothing else is done.
 *
 * To be defined before, and undefined here at the end: REAL, its FUNCTION(f) of the mathematics
 * library, NAME(f), EDGE, which a tanh keeps within, SMALLEST_STEP from 1, and the LARGEST number.
 */

/* log(1 - tanh(x)^2), which does not cancel where tanh(x) is close to 1. */
static REAL NAME(log_slope_of_tanh)(REAL x)
{
    const REAL u = -2 * x;
    return 2 * ((REAL)LOG_2 - x - (u > 20 ? u : FUNCTION(log1p)(FUNCTION(exp)(u))));
}

static void NAME(normal)(const PolicyTerms *terms)
{
    const int64_t features = terms->features, size = terms->rows * features;
    const REAL *noise = terms->noise;
    const REAL middle = (REAL)terms->middle, half_width = (REAL)terms->half_width;
    const REAL log_width = (REAL)terms->log_half_width, share = terms->samples ? 1 / (REAL)terms->samples : 0;
    REAL *log_prob = terms->values, *entropy = log_prob + terms->rows;
    REAL *by_loc = terms->slopes, *by_scale = by_loc + size;
    REAL *entropy_by_loc = by_scale + size, *entropy_by_scale = entropy_by_loc + size;
    for (int64_t row = 0, at = 0; row < terms->rows; row++) {
        const REAL *loc = (REAL *)terms->data[0] + row * terms->next[0];
        const REAL *scale = (REAL *)terms->data[1] + row * terms->next[1];
        const REAL *action = (REAL *)terms->data[2] + row * terms->next[2];
        REAL likelihood = 0, spread = 0;
        for (int64_t i = 0; i < features; i++, at++) {
            const REAL inverse = 1 / scale[i], log_scale = FUNCTION(log)(scale[i]);
            REAL x = action[i], constant = log_scale + (REAL)HALF_LOG_2PI, by_l = 0, by_s = inverse;
            if (terms->squashed) {
                x = (x - middle) / half_width;
                x = x > EDGE ? EDGE : x < -EDGE ? -EDGE : x;
                x = FUNCTION(atanh)(x);
                likelihood -= NAME(log_slope_of_tanh)(x) + log_width;
                spread += constant + log_width;
                for (int64_t k = 0; k < terms->samples; k++) {
                    const REAL drawn = noise[k * size + at], inner = loc[i] + scale[i] * drawn;
                    const REAL slope = -2 * FUNCTION(tanh)(inner) * share;
                    spread += share * (drawn * drawn / 2 + NAME(log_slope_of_tanh)(inner));
                    by_l += slope;
                    by_s += slope * drawn;
                }
            } else {
                spread += constant + (REAL)0.5;
            }
            const REAL z = (x - loc[i]) * inverse;
            likelihood -= z * z / 2 + constant;
            by_loc[at] = z * inverse;
            by_scale[at] = (z * z - 1) * inverse;
            entropy_by_loc[at] = by_l;
            entropy_by_scale[at] = by_s;
        }
        log_prob[row] = likelihood;
        entropy[row] = spread;
    }
}

static void NAME(categorical)(const PolicyTerms *terms)
{
    const int64_t features = terms->features;
    const int64_t *action = terms->data[1];
    REAL *log_prob = terms->values, *entropy = log_prob + terms->rows;
    REAL *slope = terms->slopes, *entropy_slope = slope + terms->rows * features;
    for (int64_t row = 0; row < terms->rows; row++, slope += features, entropy_slope += features) {
        const REAL *logits = (REAL *)terms->data[0] + row * terms->next[0];
        REAL largest = logits[0], total = 0, spread = 0;
        for (int64_t i = 1; i < features; i++)
            largest = logits[i] > largest || logits[i] != logits[i] ? logits[i] : largest;
        for (int64_t i = 0; i < features; i++)
            total += FUNCTION(exp)(logits[i] - largest);
        total = largest + FUNCTION(log)(total);
        for (int64_t i = 0; i < features; i++) {
            /* what is impossible adds 0 to the entropy, not 0 * inf */
            const REAL log_p = logits[i] - total > -LARGEST ? logits[i] - total : -LARGEST;
            const REAL p = FUNCTION(exp)(log_p);
            spread -= p * log_p;
            slope[i] = (i == action[row]) - p;
            entropy_slope[i] = log_p;
        }
        for (int64_t i = 0; i < features; i++)
            entropy_slope[i] = -((i == action[row]) - slope[i]) * (entropy_slope[i] + spread);
        log_prob[row] = logits[action[row]] - total;
        entropy[row] = spread;
    }
}

/* The critic's loss of one frame; its slope in the value is written to `slope`. */
static REAL NAME(distance)(REAL error, int kind, REAL *slope)
{
    const REAL size = FUNCTION(fabs)(error);
    if (kind == L1 || (kind == SMOOTH_L1 && size >= 1)) {
        *slope = (REAL)((error > 0) - (error < 0)); /* of a NaN 0, as torch has it */
        return kind == L1 ? size : size - (REAL)0.5;
    }
    *slope = kind == L2 ? 2 * error : error;
    return kind == L2 ? error * error : error * error / 2;
}

static REAL NAME(critic)(const LossTerms *terms, REAL value, REAL target, REAL old, REAL *slope)
{
    REAL loss = NAME(distance)(value - target, terms->kind, slope);
    if (terms->data[OLD_VALUE]) {
        const REAL width = (REAL)terms->clip_value, moved = value - old;
        const REAL near = moved > width ? width : moved < -width ? -width : moved;
        REAL unused;
        const REAL near_loss = NAME(distance)(old + near - target, terms->kind, &unused);
        if (near != moved && !(near_loss < loss)) { /* also where one is NaN */
            *slope = near_loss > loss ? 0 : *slope / 2;
            loss = near_loss;
        }
    }
    if (loss > (REAL)terms->loss_clip) {
        *slope = 0;
        loss = (REAL)terms->loss_clip;
    }
    return loss;
}

static double NAME(explained_variance)(const REAL *target, const REAL *value, int64_t rows)
{
    double mean = 0, mean_error = 0, variance = 0, error_variance = 0;
    for (int64_t i = 0; i < rows; i++) {
        mean += target[i];
        mean_error += (double)target[i] - value[i];
    }
    mean /= (double)rows;
    mean_error /= (double)rows;
    for (int64_t i = 0; i < rows; i++) {
        const double error = (double)target[i] - value[i] - mean_error;
        variance += (target[i] - mean) * (target[i] - mean);
        error_variance += error * error;
    }
    return 1 - error_variance / (variance + (double)rows * SMALLEST_STEP);
}

static void NAME(losses)(const LossTerms *terms)
{
    const int64_t rows = terms->rows;
    const REAL *log_prob = terms->data[LOG_PROB], *old = terms->data[OLD_LOG_PROB];
    const REAL *advantage = terms->data[ADVANTAGE], *entropy = terms->data[ENTROPY];
    const REAL *value = terms->data[VALUE], *target = terms->data[TARGET];
    const REAL *old_value = terms->data[OLD_VALUE];
    const REAL low = (REAL)terms->log_low, high = (REAL)terms->log_high, bound = (REAL)terms->log_dual;
    const double weight = terms->weight, by_entropy = -terms->entropy_coeff * weight;
    const double by_value = terms->critic_coeff * weight, by_kl = terms->kl_coeff * weight;
    REAL *slopes = terms->slopes;
    double *sums = terms->results, largest = -INFINITY, ratios = 0, squares = 0;
    memset(sums, 0, N_RESULTS * sizeof(double));
    for (int64_t i = 0; i < rows; i++) {
        const REAL d = log_prob[i] - old[i];
        largest = d > largest || d != d ? d : largest;
    }
    for (int64_t i = 0; i < rows; i++) {
        const REAL d = log_prob[i] - old[i], a = advantage[i];
        REAL bounded = d > high ? high : d;
        if (a < 0) {
            bounded = d < low ? low : d;
            bounded = bounded > bound ? bound : bounded;
        }
        const REAL gain = FUNCTION(exp)(bounded) * a, growth = FUNCTION(expm1)(d);
        const double ratio = FUNCTION(exp)((REAL)(d - largest));
        slopes[i] = (REAL)(bounded == d || d != d ? -weight * gain : 0);
        sums[LOSS_OBJECTIVE] -= gain;
        sums[KL_APPROX] -= d;
        sums[KL] += growth - d;
        sums[CLIP_FRACTION] += !(d >= low && d <= high);
        sums[DUAL_CLIP_FRACTION] += a < 0 && d > bound;
        sums[MEAN_ENTROPY] += entropy[i];
        slopes[rows + i] = (REAL)by_entropy;
        slopes[2 * rows + i] = by_kl != 0 ? (REAL)(by_kl * growth) : 0;
        ratios += ratio;
        squares += ratio * ratio;
        if (value) {
            REAL slope;
            sums[LOSS_CRITIC] += NAME(critic)(terms, value[i], target[i], old_value ? old_value[i] : 0, &slope);
            slopes[3 * rows + i] = by_value != 0 ? (REAL)(by_value * slope) : 0;
            if (old_value)
                sums[VALUE_CLIP_FRACTION] += !(FUNCTION(fabs)(value[i] - old_value[i]) <= (REAL)terms->clip_value);
        }
    }
    for (int k = 0; k < N_RESULTS; k++)
        sums[k] /= (double)rows;
    const double frames = weight * (double)rows;
    sums[LOSS_OBJECTIVE] *= frames;
    /* a coefficient of 0 silences what is infinite, too */
    sums[LOSS_ENTROPY] = by_entropy != 0 ? by_entropy * (double)rows * sums[MEAN_ENTROPY] : 0;
    sums[LOSS_CRITIC] = by_value != 0 ? by_value * (double)rows * sums[LOSS_CRITIC] : 0;
    sums[LOSS_KL] = by_kl != 0 ? by_kl * (double)rows * sums[KL] : 0;
    sums[EXPLAINED_VARIANCE] = value ? NAME(explained_variance)(target, value, rows) : 0;
    sums[ESS] = ratios * ratios / squares / (double)rows;
    sums[MAX_RATIO] = exp(largest);
    sums[MEAN_RATIO] = sums[MAX_RATIO] * (isinf(largest) ? 1 : ratios / (double)rows);
}

/* The sum of the slopes of the used results, weighted; of one parameter, which begins at `start`. */
static void NAME(weighted)(const void *slopes, void *sum, int64_t start, int64_t stride, int64_t size,
                           const double *weights, const int *used, int n_used)
{
    REAL *total = sum;
    for (int n = 0; n < n_used; n++) {
        const REAL *slope = (const REAL *)slopes + used[n] * stride + start, weight = (REAL)weights[used[n]];
        for (int64_t i = 0; i < size; i++)
            total[i] = n ? total[i] + weight * slope[i] : weight * slope[i];
    }
}

/* The slopes of the losses of policy, entropy and KL in the policy's parameters, by the chain rule. */
static void NAME(policy_losses)(const PolicyTerms *policy, const LossTerms *terms, REAL *value_slopes)
{
    const int64_t rows = policy->rows, features = policy->features;
    const int64_t size = policy->parameters * rows * features;
    policy->parameters == 2 ? NAME(normal)(policy) : NAME(categorical)(policy);
    NAME(losses)(terms);
    const REAL *slopes = terms->slopes;
    REAL *objective = policy->slopes, *entropy = objective + size, *kl = entropy + size;
    for (int64_t at = 0, row = 0; at < size; row = (row + 1) % rows)
        for (int64_t i = 0; i < features; i++, at++) {
            kl[at] = slopes[2 * rows + row] * objective[at];
            objective[at] *= slopes[row];
            entropy[at] *= slopes[rows + row];
        }
    if (terms->data[VALUE])
        memcpy(value_slopes, slopes + 3 * rows, (size_t)rows * sizeof(REAL));
}

#undef REAL
#undef FUNCTION
#undef NAME
#undef EDGE
#undef SMALLEST_STEP
#undef LARGEST
