/* Softmax over a large vocabulary for training, float32, on the CPU: the logits are read once for their log-sum-exp and
 * once more to become gradients in place. */
#include "cpu_vectors.h"

enum { CHUNK = 1024 }; /* floats whose maximum is taken before their exponentials: read from L1 the second time */

/* Maximum, sum of exp(x - maximum) and sum of (x - maximum) exp(x - maximum) of x = logit / T in one chunk. */
typedef struct {
    float maximum, sum, weighted;
} ChunkStats;

INLINE ChunkStats chunk_stats(const float *logits, float inverse_temperature) {
    ChunkStats stats = {-INFINITY, 0, 0};
    vec top[4], sum[2] = {{0}, {0}}, weighted[2] = {{0}, {0}};
    UNROLL for (int j = 0; j < 4; j++) top[j] = splat(-INFINITY);
    for (int i = 0; i < CHUNK; i += 4 * LANES)
        UNROLL for (int j = 0; j < 4; j++) top[j] = max_vec(load(logits + i + j * LANES), top[j]);
    stats.maximum = max_of_vec(max_vec(max_vec(top[0], top[1]), max_vec(top[2], top[3])));
    if (stats.maximum == -INFINITY) { /* all masked, unless a NaN, which no comparison sees, is among them */
        for (int i = 0; i < CHUNK; i++)
            if (isnan(logits[i])) return (ChunkStats){0, NAN, NAN};
        return stats;
    }
    for (int i = 0; i < CHUNK; i += 2 * LANES) {
        UNROLL for (int j = 0; j < 2; j++) {
            vec gap = (load(logits + i + j * LANES) - stats.maximum) * inverse_temperature;
            vec e = exp_vec(gap);
            sum[j] += e;
            /* A masked logit has no mass, and -inf times its 0 would be NaN. */
            weighted[j] += max_vec(splat(-FLT_MAX), gap) * e;
        }
    }
    stats.sum = sum_lanes(sum[0] + sum[1]), stats.weighted = sum_lanes(weighted[0] + weighted[1]);
    return stats;
}

/* Log-sum-exp and mean of logits / temperature under their softmax. Rows with a NaN or +inf give NaN. */
void tw_row_stats(const float *logits, const float *temperature, float *logsumexps, float *means, int64_t rows,
                  int64_t vocab, int threads) {
    if (rows * vocab < SERIAL_FLOATS) threads = 1;
#pragma omp parallel for num_threads(team_of(threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = logits + row * vocab;
        float inverse = 1 / temperature[row], tail[CHUNK];
        double maximum = -INFINITY, sum = 0, weighted = 0; /* weighted: of x - maximum */
        for (int64_t start = 0; start < vocab; start += CHUNK) {
            const float *chunk = from + start;
            if (vocab - start < CHUNK) {
                for (int64_t i = 0; i < CHUNK; i++) tail[i] = start + i < vocab ? chunk[i] : -INFINITY;
                chunk = tail;
            }
            ChunkStats stats = chunk_stats(chunk, inverse);
            if (stats.maximum == -INFINITY) continue;
            double top = (double)stats.maximum * inverse, more = stats.sum, more_weighted = stats.weighted;
            if (top > maximum) { /* bring what is there to the new maximum */
                double gap = maximum - top, fade = exp(gap);
                weighted = sum > 0 ? fade * (weighted + gap * sum) : 0;
                sum *= fade;
                maximum = top;
            } else {
                double gap = top - maximum, fade = exp(gap);
                more_weighted = fade * (more_weighted + gap * more);
                more *= fade;
            }
            sum += more;
            weighted += more_weighted;
        }
        logsumexps[row] = (float)(maximum + log(sum));
        means[row] = (float)(maximum + weighted / sum);
    }
}

/* logits = -p (grad + grad_entropy (log p + H)) / T in place, with p = exp(logit / T - logsumexp); `entropies` and
 * `grad_entropies` are NULL where the loss does not look at the entropy. */
void tw_row_gradients(float *logits, const float *temperature, const float *logsumexps, const float *grads,
                      const float *entropies, const float *grad_entropies, int64_t rows, int64_t vocab, int threads) {
    if (rows * vocab < SERIAL_FLOATS) threads = 1;
#pragma omp parallel for num_threads(team_of(threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *at = logits + row * vocab;
        float inverse = 1 / temperature[row], lse = logsumexps[row];
        float slope = -grads[row] * inverse;
        float entropy_slope = grad_entropies ? -grad_entropies[row] * inverse : 0;
        float entropy = grad_entropies ? entropies[row] : 0;
        for (int64_t i = 0; i < vocab; i += LANES) {
            int64_t count = min_of(LANES, vocab - i);
            vec x = count == LANES ? load(at + i) : load_part(at + i, count, 0);
            vec logprob = x * inverse - lse;
            vec p = exp_vec(logprob);
            vec grad = p * slope;
            if (grad_entropies) grad += p * (entropy_slope * (max_vec(splat(-FLT_MAX), logprob) + entropy));
            if (count == LANES) store(at + i, grad);
            else store_part(at + i, grad, count);
        }
    }
}
