/* A sampler's pass through decoder blocks in one call, float32 with weights in float32 or bfloat16.
 *
 * The blocks run the kernels of the other files, in the order of `engine/model/body.py`, over the same sizes: the
 * numbers are those of calling the kernels one by one, to the last bit. A step that decodes some sequences has hundreds
 * of such calls, and from Python each of them takes longer than a norm.
 */
#include "cpu_kernels.h"
#include "cpu_vectors.h"

enum { MAX_FEW_ROWS = 384 }; /* the same in cpu_products.py */

/* The tensors of a block; biases and the norms of heads may be NULL. */
typedef struct {
    const float *input_norm;
    const void *qkv;
    const float *qkv_bias, *query_norm, *key_norm;
    float *keys, *values; /* of the KV cache */
    const void *out;
    const float *out_bias, *inner_norm;
    const void *gate_up;
    const float *gate_up_bias;
    const void *down;
    const float *down_bias;
} Block;

/* A pass: its sizes, what its tokens are, and room for what stands between the steps. */
typedef struct {
    int64_t rows, num_decode; /* tokens; the first of them decode, the others are prompts */
    int64_t hidden, heads, kv_heads, D, inner;
    int64_t num_positions, cache_blocks, block_size, max_blocks, num_prompts, window, num_wanted, is_paired;
    const float *cos, *sin;
    const int64_t *positions, *slots;
    const int32_t *block_table, *contexts;
    const int64_t *prompts, *prompt_blocks; /* as `tw_attend_cache` reads them */
    const int64_t *wanted; /* the rows, in order, that the last block goes on with after its attention */
    float *h, *normed, *rstd, *qkv, *query, *key, *mixed, *logsumexp, *gate_up, *act, *delta;
    float *linear_scratch, *product_scratch;
    double eps, scale;
} Pass;

/* out = x weight^T + bias, by the kernel that `cpu_products.linear` takes for so many rows. */
static void project(const Pass *p, float *x, int64_t M, int64_t K, const void *weight, const float *bias, int64_t N,
                    float *out, int threads) {
    if (M <= MAX_FEW_ROWS) {
        if (p->is_paired) tw_linear_pairs(x, M, K, weight, N, bias, out, p->linear_scratch, threads);
        else tw_linear(x, M, K, weight, N, bias, out, p->linear_scratch, threads);
        return;
    }
    float *data[] = {x, (float *)weight, out, out, out};
    int64_t strides[] = {K, 1, 1, K, N, 1, N, 1, N, 1}, sizes[] = {M, N, K, 0};
    tw_product(data, strides, sizes, 1, 0, 0, (int)p->is_paired, p->product_scratch, threads);
    if (!bias) return;
#pragma omp parallel for num_threads(team_of(threads)) schedule(static)
    for (int64_t row = 0; row < M; row++)
        for (int64_t i = 0; i < N; i++) out[row * N + i] += bias[i];
}

/* Attention of decode rows over their blocks, and of prompts. Returns what the kernels return. */
static int attend(const Pass *p, const Block *b, int threads) {
    int64_t width = p->heads * p->D, token = p->kv_heads * p->D, stride = p->block_size * token;
    int64_t new = p->rows - p->num_decode, skip = p->num_decode * width;
    if (p->num_decode && tw_paged_decode(p->query, width, b->keys, stride, b->values, stride, p->block_table,
                                         p->contexts, p->mixed, p->num_decode, p->heads, p->kv_heads, p->D,
                                         p->cache_blocks, p->block_size, p->max_blocks, (float)p->scale, 0, p->window,
                                         NULL, threads))
        return 2;
    if (!p->num_prompts) return 0;
    void *data[] = {p->query + skip, p->mixed + skip, p->logsumexp, b->keys, b->values};
    int64_t strides[] = {p->D, width, p->D, width, new, 1, stride, stride};
    int64_t sizes[] = {p->num_prompts, p->heads, p->kv_heads, p->D, p->cache_blocks, p->block_size, p->window};
    return tw_attend_cache(data, strides, sizes, p->prompts, p->prompt_blocks, (float)p->scale, 0, threads);
}

/* The wanted rows move to the front. */
static void keep_wanted(const Pass *p, float *rows, int64_t width) {
    for (int64_t i = 0; i < p->num_wanted; i++)
        memmove(rows + i * width, rows + p->wanted[i] * width, sizeof(float) * width);
}

/* Blocks `blocks` [count]. The residual stream is `h`, and `delta` what the block before has added to it, where there
 * was one. With `last_norm` the last of these blocks is the model's, and `normed` ends as its normed output.
 * Returns 0; 1 without memory, 2 if a position, a slot, a context or a block of the cache does not exist. */
int tw_run_blocks(const Pass *p, const Block *blocks, int64_t count, int has_delta, const float *last_norm,
                  int threads) {
    int64_t H = p->hidden, width = p->heads * p->D, joined = width + 2 * p->kv_heads * p->D, rows = p->rows;
    float eps = (float)p->eps;
    for (const Block *b = blocks; b < blocks + count; b++, has_delta = 1) {
        tw_add_norm(p->h, has_delta ? p->delta : NULL, b->input_norm, eps, p->h, p->normed, p->rstd, rows, H, threads);
        project(p, p->normed, rows, H, b->qkv, b->qkv_bias, joined, p->qkv, threads);
        if (tw_rotate(p->qkv, p->cos, p->sin, p->positions, p->num_positions, b->query_norm, b->key_norm, eps, p->query,
                      p->key, b->keys, b->values, p->slots, p->cache_blocks * p->block_size, rows, p->heads,
                      p->kv_heads, p->D, threads))
            return 2;
        int failed = attend(p, b, threads);
        if (failed) return failed;
        if (last_norm && b == blocks + count - 1 && p->num_wanted) {
            keep_wanted(p, p->mixed, width);
            keep_wanted(p, p->h, H);
            rows = p->num_wanted;
        }
        project(p, p->mixed, rows, width, b->out, b->out_bias, H, p->delta, threads);
        tw_add_norm(p->h, p->delta, b->inner_norm, eps, p->h, p->normed, p->rstd, rows, H, threads);
        project(p, p->normed, rows, H, b->gate_up, b->gate_up_bias, 2 * p->inner, p->gate_up, threads);
        tw_swiglu(p->gate_up, 2 * p->inner, p->act, rows, p->inner, threads);
        project(p, p->act, rows, p->inner, b->down, b->down_bias, H, p->delta, threads);
    }
    if (last_norm) tw_add_norm(p->h, p->delta, last_norm, eps, p->h, p->normed, p->rstd, rows, H, threads);
    return 0;
}
