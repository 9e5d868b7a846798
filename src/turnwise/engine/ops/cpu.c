/* Sampling kernels for the CPU, float32: paged decode attention, token sampling.
 *
 * Decoding a handful of sequences reads the whole KV cache once per token, so it is streamed exactly once, in memory
 * order, and everything else is kept in registers or in L2.
 *
 * Every entry point takes the number of threads; without OpenMP the pragmas vanish and one thread does the work.
 */
#include "cpu_kernels.h"
#include "cpu_vectors.h"

/* ---- Paged decode attention ---------------------------------------------------------------------------------------
 *
 * One query token per sequence against its context, which lies scattered in blocks of the KV cache. The context is
 * walked in small tiles of tokens; each tile serves all query heads before the next one, so that the cache is read once
 * and, where one thread has all KV heads of a sequence, in memory order. Softmax is online: a running maximum and sum
 * per query head, the weighted sum of values in `out`, rescaled when the maximum moves.
 */

enum {
    KEY_TILE = 32, /* small, so that the first tile of a sequence, which nobody fetched ahead, is short */
    MAX_HEADS = 1024,
};
#if defined(__AVX512VL__)
enum { HEAD_TILE = 4 }; /* heads x 4 keys accumulators must fit the registers */
#else
enum { HEAD_TILE = 2 };
#endif

/* Addresses of up to KEY_TILE context tokens: their first KV head. Padded to a multiple of 8 with the last one. */
typedef struct {
    const float *key[KEY_TILE], *value[KEY_TILE];
    int64_t count;
} TokenTile;

/* How scores become attention in one layer. */
typedef struct {
    float scale, softcap; /* scores become softcap tanh(score / softcap); 0: they stay */
    int64_t window; /* tokens that a query sees, its own included; 0: all before it */
    const float *sinks; /* per query head a score without a value, or NULL */
} Rule;

INLINE int64_t first_seen(const Rule *rule, int64_t context) {
    return rule->window && context > rule->window ? context - rule->window : 0;
}

typedef struct {
    const float *keys, *values;
    int64_t key_stride, value_stride; /* floats from one block to the next */
    int64_t block_size, kv_heads, D;
} Cache;

static void locate_tokens(const Cache *cache, const int32_t *blocks, int64_t start, int64_t context, TokenTile *tile) {
    tile->count = min_of(KEY_TILE, context - start);
    for (int64_t t = 0; t < tile->count; t++) {
        int64_t block = blocks[(start + t) / cache->block_size];
        int64_t within = (start + t) % cache->block_size * cache->kv_heads * cache->D;
        tile->key[t] = cache->keys + block * cache->key_stride + within;
        tile->value[t] = cache->values + block * cache->value_stride + within;
    }
    for (int64_t t = tile->count; t % 8; t++) tile->key[t] = tile->key[tile->count - 1];
}

/* Ask for floats that the next tile will need: spread over the work on this one, they never queue up. */
INLINE void fetch(const float *start, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(start + i, 0, 2);
}

/* dst[0..3] = scale * horizontal sums of four vectors. */
INLINE void store_sums(float *dst, const vec8 *v, float scale) {
#if defined(__AVX2__)
    __m256 low = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), high = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
    __m256 both = _mm256_hadd_ps(low, high);
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    _mm_storeu_ps(dst, _mm_mul_ps(sums, _mm_set1_ps(scale)));
#else
    for (int i = 0; i < 4; i++) dst[i] = sum8(v[i]) * scale;
#endif
}

/* scores[h][t] = scale * query[h] . key[t], and -inf in the padding. `offset` leads from a token to its KV head. */
INLINE void score_keys(const int heads, const TokenTile *tile, const TokenTile *next, int64_t offset, int64_t D,
                       const float *query, float scale, float (*scores)[KEY_TILE]) {
    for (int64_t t = 0; t < tile->count; t += 4) {
        vec8 acc[HEAD_TILE][4];
        UNROLL for (int h = 0; h < heads; h++) UNROLL for (int i = 0; i < 4; i++) acc[h][i] = (vec8){0};
        const float *key[4];
        UNROLL for (int i = 0; i < 4; i++) {
            key[i] = tile->key[t + i] + offset;
            if (t + i < next->count) fetch(next->key[t + i] + offset, D);
        }
        for (int64_t d = 0; d < D; d += 8) {
            vec8 k[4];
            UNROLL for (int i = 0; i < 4; i++) k[i] = load8(key[i] + d);
            UNROLL for (int h = 0; h < heads; h++) {
                vec8 q = load8(query + h * D + d);
                UNROLL for (int i = 0; i < 4; i++) acc[h][i] += q * k[i];
            }
        }
        UNROLL for (int h = 0; h < heads; h++) store_sums(scores[h] + t, acc[h], scale);
    }
    UNROLL for (int h = 0; h < heads; h++)
        for (int64_t t = tile->count; t % 8; t++) scores[h][t] = -INFINITY;
}

/* scores -> exp(scores - maximum) in place; brings the running maximum, sum and output of one head to the new scale. */
INLINE void update_softmax(float *scores, int64_t count, int64_t D, float *maximum, float *sum, float *out) {
    vec8 top = splat8(*maximum), total = splat8(0);
    for (int64_t t = 0; t < count; t += 8) top = max8(load8(scores + t), top);
    float new_maximum = max_of_lanes(top);
    for (int64_t t = 0; t < count; t += 8) {
        vec8 p = exp8(load8(scores + t) - new_maximum);
        store8(scores + t, p);
        total += p;
    }
    if (new_maximum > *maximum) {
        float shrink = exp8(splat8(*maximum - new_maximum))[0];
        *sum *= shrink;
        for (int64_t d = 0; d < D; d += 8) store8(out + d, load8(out + d) * shrink);
        *maximum = new_maximum;
    }
    *sum += sum8(total);
}

/* out[h][d..] += sum over t of weights[h][t] * value[t][d..], `num` vectors at once. */
INLINE void add_values(const int heads, const int num, const TokenTile *tile, const TokenTile *next, int64_t offset,
                       int64_t D, float (*weights)[KEY_TILE], float *out) {
    vec8 acc[HEAD_TILE][4];
    UNROLL for (int h = 0; h < heads; h++) UNROLL for (int j = 0; j < num; j++)
        acc[h][j] = load8(out + h * D + 8 * j);
    for (int64_t t = 0; t < tile->count; t++) {
        vec8 v[4];
        if (t < next->count) fetch(next->value[t] + offset, 8 * num);
        UNROLL for (int j = 0; j < num; j++) v[j] = load8(tile->value[t] + offset + 8 * j);
        UNROLL for (int h = 0; h < heads; h++) UNROLL for (int j = 0; j < num; j++) acc[h][j] += weights[h][t] * v[j];
    }
    UNROLL for (int h = 0; h < heads; h++) UNROLL for (int j = 0; j < num; j++)
        store8(out + h * D + 8 * j, acc[h][j]);
}

INLINE void attend_heads(const int heads, const TokenTile *tile, const TokenTile *next, int64_t offset, int64_t D,
                         const float *query, const Rule *rule, float *maximum, float *sum, float *out) {
    float scores[HEAD_TILE][KEY_TILE];
    score_keys(heads, tile, next, offset, D, query, rule->scale, scores);
    for (int h = 0; h < heads && rule->softcap; h++)
        for (int64_t t = 0; t < tile->count; t += 8) /* the padding of -inf becomes -softcap: back to -inf */
            store8(scores[h] + t, tanh8(load8(scores[h] + t) / rule->softcap) * rule->softcap);
    for (int h = 0; h < heads && rule->softcap; h++)
        for (int64_t t = tile->count; t % 8; t++) scores[h][t] = -INFINITY;
    for (int h = 0; h < heads; h++) update_softmax(scores[h], tile->count, D, maximum + h, sum + h, out + h * D);
    int64_t d = 0;
    for (; d + 32 <= D; d += 32) add_values(heads, 4, tile, next, offset + d, D, scores, out + d);
    for (; d < D; d += 8) add_values(heads, 1, tile, next, offset + d, D, scores, out + d);
}

/* KV heads [first, last) of one sequence, `group` query heads each; query and out start at the first of those.
 * `after` is what this thread is likely to read next: fetched during the last tile. */
static void attend(const Cache *cache, const int32_t *blocks, int64_t context, int64_t first, int64_t last,
                   int64_t group, const float *query, const Rule *rule, float *out, const TokenTile *after) {
    int64_t D = cache->D, heads = (last - first) * group, from = first_seen(rule, context);
    float maximum[MAX_HEADS], sum[MAX_HEADS];
    for (int64_t h = 0; h < heads; h++) {
        maximum[h] = rule->sinks ? rule->sinks[first * group + h] : -INFINITY;
        sum[h] = rule->sinks ? 1 : 0;
    }
    memset(out, 0, sizeof(float) * heads * D);
    TokenTile tiles[2];
    locate_tokens(cache, blocks, from, context, &tiles[0]);
    for (int64_t start = from, turn = 0; start < context; start += KEY_TILE, turn ^= 1) {
        const TokenTile *tile = &tiles[turn], *next = after;
        if (start + KEY_TILE < context) {
            locate_tokens(cache, blocks, start + KEY_TILE, context, &tiles[turn ^ 1]);
            next = &tiles[turn ^ 1];
        }
        for (int64_t h = 0, size; h < heads; h += size) {
            /* A register tile of heads stays within one KV head. */
            size = min_of(HEAD_TILE, group - h % group);
            int64_t offset = (first + h / group) * D;
            const float *q = query + h * D;
            float *o = out + h * D;
            switch (size) {
            case 1: attend_heads(1, tile, next, offset, D, q, rule, maximum + h, sum + h, o); break;
            case 2: attend_heads(2, tile, next, offset, D, q, rule, maximum + h, sum + h, o); break;
#if defined(__AVX512VL__)
            case 3: attend_heads(3, tile, next, offset, D, q, rule, maximum + h, sum + h, o); break;
            case 4: attend_heads(4, tile, next, offset, D, q, rule, maximum + h, sum + h, o); break;
#endif
            }
        }
    }
    for (int64_t h = 0; h < heads && context > 0; h++)
        for (int64_t d = 0; d < D; d++) out[h * D + d] /= sum[h];
}

/* window, softcap: 0 for none; sinks: [heads] or NULL. Blocks before a window are not looked at.
 * Returns 0, or 1 if a context is negative or longer than its row of the table, or a block in use does not exist. */
int tw_paged_decode(const float *query, int64_t query_stride, const float *keys, int64_t key_stride,
                    const float *values, int64_t value_stride, const int32_t *block_table, const int32_t *context_lens,
                    float *out, int64_t B, int64_t heads, int64_t kv_heads, int64_t D, int64_t num_blocks,
                    int64_t block_size, int64_t max_blocks, float scale, float softcap, int64_t window,
                    const float *sinks, int threads) {
    const Rule rule = {scale, softcap, window, sinks};
    const Cache cache = {keys, values, key_stride, value_stride, block_size, kv_heads, D};
    int64_t group = heads / kv_heads, tokens = 0;
    for (int64_t b = 0; b < B; b++) {
        if (context_lens[b] < 0 || context_lens[b] > max_blocks * block_size) return 1;
        int64_t from = first_seen(&rule, context_lens[b]);
        for (int64_t i = from / block_size; i * block_size < context_lens[b]; i++) {
            int32_t block = block_table[b * max_blocks + i];
            if (block < 0 || block >= num_blocks) return 1;
        }
        tokens += context_lens[b] - from;
    }
    if (tokens * kv_heads * D < SERIAL_FLOATS) threads = 1;
    /* All KV heads of a token lie together, so a whole sequence is the better item; a KV head is when those are few. */
    int64_t parts = B >= 4 * threads ? 1 : kv_heads;
    int64_t share = kv_heads / parts;
#pragma omp parallel for num_threads(team_of(threads)) schedule(dynamic, 1)
    for (int64_t item = 0; item < B * parts; item++) {
        int64_t b = item / parts, first = item % parts * share, head = first * group;
        TokenTile after = {.count = 0};
        if (parts == 1 && b + threads < B)
            locate_tokens(&cache, block_table + (b + threads) * max_blocks, first_seen(&rule, context_lens[b + threads]),
                          context_lens[b + threads], &after);
        attend(&cache, block_table + b * max_blocks, context_lens[b], first, first + share, group,
               query + b * query_stride + head * D, &rule, out + (b * heads + head) * D, &after);
    }
    return 0;
}

/* ---- Sampling -----------------------------------------------------------------------------------------------------
 *
 * One pass over the row: for each chunk of 256 logits its maximum and its sum of exponentials relative to that maximum.
 * A chunk's sum is short enough for float; across chunks everything is double, so the inverse CDF is good to about 1e-7
 * of the total mass whatever the vocabulary. Only the chunk that the draw falls into is looked at again.
 */

enum { CHUNK = 256 };

typedef struct {
    float maximum, sum; /* sum of exp((logit - maximum) / T) */
    double mass; /* the same relative to the maximum of the row */
} Chunk;

/* The logits of a chunk, padded with -inf where the row ends. */
static const float *chunk_logits(const float *logits, int64_t V, int64_t chunk, float *buffer) {
    int64_t start = chunk * CHUNK, count = V - start;
    if (count >= CHUNK) return logits + start;
    memcpy(buffer, logits + start, sizeof(float) * count);
    for (int64_t i = count; i < CHUNK; i++) buffer[i] = -INFINITY;
    return buffer;
}

/* Returns whether the chunk holds a NaN. */
static int scan_chunk(const float *logits, float inverse_temperature, Chunk *chunk) {
    vec8 top[4], total[4];
    bits8 nans = {0};
    UNROLL for (int j = 0; j < 4; j++) top[j] = splat8(-INFINITY), total[j] = splat8(0);
    for (int i = 0; i < CHUNK; i += 32) {
        UNROLL for (int j = 0; j < 4; j++) {
            vec8 v = load8(logits + i + 8 * j);
            nans |= (bits8)(v != v);
            top[j] = max8(v, top[j]);
        }
    }
    chunk->maximum = max_of_lanes(max8(max8(top[0], top[1]), max8(top[2], top[3])));
    chunk->sum = 0;
    for (int j = 0; j < 8; j++)
        if (nans[j]) return 1;
    if (!isfinite(chunk->maximum)) return 0; /* all masked, or +inf, which the caller rejects */
    for (int i = 0; i < CHUNK; i += 32)
        UNROLL for (int j = 0; j < 4; j++)
            total[j] += exp8((load8(logits + i + 8 * j) - chunk->maximum) * inverse_temperature);
    chunk->sum = sum8((total[0] + total[1]) + (total[2] + total[3]));
    return 0;
}

/* First token whose cumulative mass exceeds `target`; a token without mass is never chosen. */
static int64_t inverse_cdf(const float *logits, int64_t V, const Chunk *chunks, int64_t num, float inverse_temperature,
                           double target) {
    double before = 0;
    int64_t chosen = -1;
    for (int64_t c = 0; c < num; c++) {
        if (chunks[c].mass == 0) continue;
        if (chosen >= 0) before += chunks[chosen].mass;
        chosen = c;
        if (before + chunks[c].mass > target) break;
    }
    float buffer[CHUNK], weights[CHUNK];
    const float *chunk = chunk_logits(logits, V, chosen, buffer);
    for (int i = 0; i < CHUNK; i += 8)
        store8(weights + i, exp8((load8(chunk + i) - chunks[chosen].maximum) * inverse_temperature));
    double unit = chunks[chosen].mass / chunks[chosen].sum, within = 0;
    int64_t token = 0; /* rounding may leave the target just past the end: then it is the last token with mass */
    for (int64_t i = 0; i < CHUNK; i++) {
        if (weights[i] == 0) continue;
        token = i;
        within += weights[i] * unit;
        if (before + within > target) break;
    }
    return chosen * CHUNK + token;
}

static int64_t first_maximum(const float *logits, const Chunk *chunks, float maximum) {
    int64_t c = 0;
    while (chunks[c].maximum != maximum) c++;
    int64_t token = c * CHUNK;
    while (logits[token] != maximum) token++;
    return token;
}

static void sample_row(const float *logits, int64_t V, float temperature, double uniform, Chunk *chunks, int64_t *token,
                       float *logprob) {
    int64_t num = (V + CHUNK - 1) / CHUNK;
    /* A subnormal temperature has no finite inverse, and 0 * inf at the maximum would be NaN. */
    float inverse_temperature = temperature == 0 ? 1 : fminf(1 / temperature, FLT_MAX);
    float maximum = -INFINITY, buffer[CHUNK];
    *token = -1, *logprob = NAN;
    for (int64_t c = 0; c < num; c++) {
        if (scan_chunk(chunk_logits(logits, V, c, buffer), inverse_temperature, chunks + c)) return;
        maximum = fmaxf(maximum, chunks[c].maximum);
    }
    if (!isfinite(maximum)) return;
    double total = 0;
    for (int64_t c = 0; c < num; c++) {
        double gap = (double)chunks[c].maximum - maximum;
        chunks[c].mass = chunks[c].sum > 0 ? chunks[c].sum * exp(gap * inverse_temperature) : 0;
        total += chunks[c].mass;
    }
    *token = temperature == 0 ? first_maximum(logits, chunks, maximum)
                              : inverse_cdf(logits, V, chunks, num, inverse_temperature, uniform * total);
    *logprob = (float)(((double)logits[*token] - maximum) * inverse_temperature - log(total));
}

/* Returns 0; 1 if a temperature is negative or not finite, or a uniform number is outside [0, 1); 2 without memory.
 * A row without a distribution (NaN, +inf, everything -inf) gets token -1 and logprob NaN. */
int tw_sample_rows(const float *logits, const float *temperature, const double *uniform, int64_t *tokens,
                   float *logprobs, int64_t B, int64_t V, int threads) {
    for (int64_t b = 0; b < B; b++) {
        if (!isfinite(temperature[b]) || temperature[b] < 0) return 1;
        if (!(uniform[b] >= 0 && uniform[b] < 1)) return 1;
    }
    if (B * V < SERIAL_FLOATS) threads = 1;
    int out_of_memory = 0;
#pragma omp parallel num_threads(team_of(threads))
    {
        Chunk *chunks = malloc(sizeof(Chunk) * (V / CHUNK + 1));
#pragma omp for schedule(dynamic, 1)
        for (int64_t b = 0; b < B; b++) {
            if (chunks) sample_row(logits + b * V, V, temperature[b], uniform[b], chunks, tokens + b, logprobs + b);
        }
        if (!chunks) {
#pragma omp atomic write
            out_of_memory = 1;
        }
        free(chunks);
    }
    return out_of_memory ? 2 : 0;
}

/* How many threads a call really gets. */
int tw_count_threads(int threads) {
    int count = 0;
#pragma omp parallel num_threads(threads) reduction(+ : count)
    count += 1;
    return count;
}
