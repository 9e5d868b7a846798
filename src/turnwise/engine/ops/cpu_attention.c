/* Attention over many queries, float32, on the CPU: training's forward and backward over runs of a packed forest.
 *
 * One unit of work is one KV head of one sequence with the query heads that read it: its keys and values are packed
 * once into panels, then MR query rows at a time meet blocks of keys, so that scores never leave L1 or L2. With few
 * sequences a unit is split over its queries; each part then sums key and value gradients of its own, added in order at
 * the end.
 * Rows hold D floats in sequence; everything else may be strided.
 */
#include "cpu_kernels.h"
#include "cpu_tiles.h"

enum {
    KEY_BLOCK = 384, /* a multiple of every tile's rows and of a panel's width */
    QUERY_BLOCK = 48, /* rows whose key and value gradients are summed at once */
    MAX_D = 512,
    SCORE_STRIDE = MAX_D + 16, /* of rows that hold a query, or the scores of KEY_BLOCK keys and a tile's rest */
};
DEFINE_TILES(row_tile, step, 1, 0)
DEFINE_TILES(col_tile, 1, step, 0)

/* [batch, heads, tokens, D] floats, or [batch, heads, tokens]. */
typedef struct {
    float *data;
    int64_t batch, head, token;
} Side;

typedef struct {
    Side query, key, value, out, logsumexp;
    Side grad_out, grad_query, grad_key, grad_value; /* backward alone */
    int64_t batch, heads, kv_heads, queries, keys, D;
    int64_t window; /* keys that a causal query sees, its own included; 0: all before it */
    float scale, softcap; /* scores become softcap tanh(score / softcap); 0: they stay */
    int is_causal, is_added;
} Attention;

INLINE float *row_of(const Side *side, int64_t b, int64_t h, int64_t t) {
    return side->data + b * side->batch + h * side->head + t * side->token;
}

INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Panels of keys (or values), block by block. Turned: [D] deep, a key per column. As they lie: keys deep, D columns. */
static void pack_turned(const Side *side, const Attention *at, int64_t b, int64_t kv_head, float *panels) {
    for (int64_t k = 0; k < at->keys; k += KEY_BLOCK) {
        Matrix m = {row_of(side, b, kv_head, k), 1, side->token};
        pack(&m, at->D, min_of(KEY_BLOCK, at->keys - k), panels + k * at->D);
    }
}
static void pack_straight(const Side *side, const Attention *at, int64_t b, int64_t head, int64_t start, int64_t rows,
                          float *panels) {
    int64_t room = round_up(at->D, LANES);
    for (int64_t k = 0; k < rows; k += KEY_BLOCK) {
        Matrix m = {row_of(side, b, head, start + k), side->token, 1};
        pack(&m, min_of(KEY_BLOCK, rows - k), at->D, panels + k * room);
    }
}

/* to[rows][width..] (+)= a[rows][depth] times `cols` columns of panels that were packed `packed` deep. */
INLINE void times_panels(Tile *choose(int64_t, int64_t), int64_t rows, const float *a, const float *panels,
                         int64_t packed, int64_t depth, int64_t cols, int64_t all_cols, float alpha, float *to,
                         int64_t stride, int is_added) {
    for (int64_t start = 0, width; start < cols; start += width) {
        width = panel_width(all_cols - start);
        Strip strip = {a, SCORE_STRIDE, depth, 0};
        choose(rows, width)(&strip, 1, panels + start * packed, alpha, to + start, stride, is_added);
    }
}

static void copy_side(const Side *side, const Attention *at, int64_t b, int64_t h, int64_t t, int64_t rows, float *to) {
    for (int64_t r = 0; r < rows; r++)
        memcpy(to + r * SCORE_STRIDE, row_of(side, b, h, t + r), sizeof(float) * at->D);
}

/* The key of a causal query row: the last query stands at the last key. */
INLINE int64_t own_key(const Attention *at, int64_t t) { return t + at->keys - at->queries; }

/* The first key that query row `t` sees. */
INLINE int64_t first_key(const Attention *at, int64_t t) {
    int64_t first = at->window ? own_key(at, t) + 1 - at->window : 0;
    return first < 0 ? 0 : first;
}

/* Keys of the block at `start`, of `count`, that query row `t` sees: [unseen, visible). */
INLINE int64_t visible(const Attention *at, int64_t t, int64_t start, int64_t count) {
    if (!at->is_causal) return count;
    int64_t own = own_key(at, t);
    return own < start ? 0 : min_of(count, own + 1 - start);
}
INLINE int64_t unseen(const Attention *at, int64_t t, int64_t start, int64_t count) {
    int64_t first = first_key(at, t);
    return first < start ? 0 : min_of(count, first - start);
}

/* Where the keys of rows [t, t + rows) begin, at the edge of a block, and where they end. */
INLINE int64_t first_block(const Attention *at, int64_t t) { return first_key(at, t) / KEY_BLOCK * KEY_BLOCK; }
INLINE int64_t key_limit(const Attention *at, int64_t t, int64_t rows) {
    return at->is_causal ? min_of(at->keys, own_key(at, t + rows)) : at->keys;
}

static void cap_scores(float *scores, int64_t count, float softcap) {
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, tanh_vec(load(scores + i) / softcap) * softcap);
}

/* ---- Forward ---------------------------------------------------------------------------------------------------- */

/* scores -> exp(scores - maximum), 0 outside [from, seen); the running maximum, sum and output follow. */
INLINE void soften(float *scores, int64_t from, int64_t seen, int64_t count, float *maximum, float *sum, float *out,
                   int64_t size) {
    int64_t end = round_up(count, LANES);
    if (from >= seen) { /* a row whose window begins after this block, or that stands before it */
        memset(scores, 0, sizeof(float) * end);
        return;
    }
    for (int64_t i = 0; i < from; i++) scores[i] = -INFINITY;
    for (int64_t i = seen; i < end; i++) scores[i] = -INFINITY;
    vec top = splat(*maximum), total = {0};
    for (int64_t i = 0; i < end; i += LANES) top = max_vec(load(scores + i), top);
    float new_maximum = max_of_vec(top);
    for (int64_t i = 0; i < end; i += LANES) {
        vec p = exp_vec(load(scores + i) - new_maximum);
        store(scores + i, p);
        total += p;
    }
    if (new_maximum > *maximum && *sum > 0) {
        float shrink = expf(*maximum - new_maximum);
        *sum *= shrink;
        for (int64_t i = 0; i < size; i += LANES) store(out + i, load(out + i) * shrink);
    }
    *maximum = new_maximum;
    *sum += sum_lanes(total);
}

/* Rows [t, t + rows) of one query head, rows <= MR. */
static void forward_rows(const Attention *at, int64_t b, int64_t h, int64_t t, int64_t rows, const float *keys,
                         const float *values) {
    float query[MR * SCORE_STRIDE], scores[MR * SCORE_STRIDE], out[MR * (MAX_D + NR)], maximum[MR], sum[MR];
    int64_t room = round_up(at->D, LANES), limit = key_limit(at, t, rows);
    copy_side(&at->query, at, b, h, t, rows, query);
    memset(out, 0, sizeof(float) * MR * room);
    for (int64_t r = 0; r < rows; r++) {
        maximum[r] = -INFINITY, sum[r] = 0;
        if (!at->is_added) continue;
        maximum[r] = *row_of(&at->logsumexp, b, h, t + r), sum[r] = 1;
        memcpy(out + r * room, row_of(&at->out, b, h, t + r), sizeof(float) * at->D);
    }
    for (int64_t k = first_block(at, t); k < limit; k += KEY_BLOCK) {
        int64_t block = min_of(KEY_BLOCK, at->keys - k), count = min_of(block, limit - k);
        times_panels(row_tile, rows, query, keys + k * at->D, at->D, at->D, count, block, at->scale, scores,
                     SCORE_STRIDE, 0);
        for (int64_t r = 0; r < rows; r++) {
            if (at->softcap) cap_scores(scores + r * SCORE_STRIDE, count, at->softcap);
            soften(scores + r * SCORE_STRIDE, unseen(at, t + r, k, count), visible(at, t + r, k, count), count,
                   maximum + r, sum + r, out + r * room, room);
        }
        times_panels(row_tile, rows, scores, values + k * room, block, count, at->D, at->D, 1, out, room, 1);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *to = row_of(&at->out, b, h, t + r), inverse = 1 / sum[r];
        for (int64_t d = 0; d < at->D; d++) to[d] = out[r * room + d] * inverse;
        *row_of(&at->logsumexp, b, h, t + r) = maximum[r] + logf(sum[r]);
    }
}

/* How many parts each unit's queries are split into, so that threads do not run short of work. */
static int64_t count_parts(const Attention *at, int64_t block, int threads) {
    int64_t units = at->batch * at->kv_heads, blocks = (at->queries + block - 1) / block;
    int64_t wanted = threads == 1 ? 1 : (4 * threads + units - 1) / units;
    return wanted < 1 ? 1 : min_of(wanted, blocks);
}

static Attention describe(void *const *data, const int64_t *strides, const int64_t *sizes, float scale, float softcap,
                          int is_causal, int is_added) {
    Attention at = {.batch = sizes[0], .heads = sizes[1], .kv_heads = sizes[2], .queries = sizes[3], .keys = sizes[4],
                    .D = sizes[5], .window = sizes[6], .scale = scale, .softcap = softcap, .is_causal = is_causal,
                    .is_added = is_added};
    Side *sides[] = {&at.query, &at.key, &at.value, &at.out, &at.logsumexp, &at.grad_out, &at.grad_query, &at.grad_key,
                     &at.grad_value};
    for (int i = 0; i < 9; i++)
        *sides[i] = (Side){data[i], strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
    return at;
}

static int threads_for(const Attention *at, int threads) {
    return at->batch * at->heads * at->queries * at->keys < SERIAL_FLOATS ? 1 : threads;
}

/* out and logsumexp of softmax(scale query key') value; added: of this and of what they hold, as one softmax.
 * data, strides: query, key, value, out, logsumexp and 4 unused; 3 strides each. sizes: batch, heads, KV heads,
 * queries, keys, D <= MAX_D, window (0: none). Causal: at least as many keys as queries, the last query stands at the
 * last key. Returns 0, or 1 without memory. */
int tw_attend(void *const *data, const int64_t *strides, const int64_t *sizes, float scale, float softcap,
              int is_causal, int is_added, int threads) {
    const Attention at = describe(data, strides, sizes, scale, softcap, is_causal, is_added);
    threads = threads_for(&at, threads);
    int64_t group = at.heads / at.kv_heads, room = round_up(at.D, LANES), keys = round_up(at.keys, NR);
    int64_t parts = count_parts(&at, MR, threads), blocks = (at.queries + MR - 1) / MR;
    int failed = 0;
#pragma omp parallel num_threads(team_of(threads))
    {
        float *panels = malloc(sizeof(float) * keys * (at.D + room));
        if (!panels) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < at.batch * at.kv_heads * parts; item++) {
            int64_t part = item % parts, kv_head = item / parts % at.kv_heads, b = item / parts / at.kv_heads;
            if (!panels) continue;
            pack_turned(&at.key, &at, b, kv_head, panels);
            pack_straight(&at.value, &at, b, kv_head, 0, at.keys, panels + keys * at.D);
            for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
                for (int64_t block = part; block < blocks; block += parts)
                    forward_rows(&at, b, h, block * MR, min_of(MR, at.queries - block * MR), panels,
                                 panels + keys * at.D);
        }
        free(panels);
    }
    return failed;
}

/* ---- Prompts over the KV cache ----------------------------------------------------------------------------------- */

/* New tokens of one sequence: rows [row, row + rows) of the queries. They see `keys` tokens from position `first` on, of
 * which they are the last; the sequence's blocks begin at `block` of the list. */
typedef struct {
    int64_t row, rows, first, keys, block;
} Prompt;

/* `count` tokens of one KV head from position `first` on, one behind the other. */
static void collect(const Side *cache, const int64_t *blocks, int64_t block_size, int64_t kv_head, int64_t first,
                    int64_t count, int64_t D, float *to) {
    for (int64_t t = first; t < first + count; t++, to += D)
        memcpy(to, row_of(cache, blocks[t / block_size], kv_head, t % block_size), sizeof(float) * D);
}

/* What one thread works with: a KV head's keys and values, and the panels of both. */
static float *open_room(int64_t keys, int64_t D) {
    int64_t padded = round_up(keys, NR);
    return malloc(sizeof(float) * (2 * keys * D + padded * (D + round_up(D, LANES))));
}

static int have_blocks(const Prompt *prompts, int64_t num, const int64_t *blocks, int64_t block_size,
                       int64_t num_blocks) {
    for (const Prompt *p = prompts; p < prompts + num; p++)
        for (int64_t i = p->first / block_size; i * block_size < p->first + p->keys; i++)
            if (blocks[p->block + i] < 0 || blocks[p->block + i] >= num_blocks) return 0;
    return 1;
}

/* Output and logsumexp of new tokens that attend to their sequence in the KV cache, themselves included.
 * data: query, out, logsumexp, keys and values of the cache. strides: (head, token) of query, out and logsumexp, then
 * the blocks of keys and of values. sizes: prompts, heads, KV heads, D <= MAX_D, blocks of the cache, tokens in a block,
 * window (0: none). chunks: five numbers of each prompt, as in `Prompt`. Returns 0, 1 without memory, 2 if a block does
 * not exist. */
int tw_attend_cache(void *const *data, const int64_t *strides, const int64_t *sizes, const int64_t *chunks,
                    const int64_t *blocks, float scale, float softcap, int threads) {
    const Prompt *prompts = (const Prompt *)chunks;
    int64_t num = sizes[0], heads = sizes[1], kv_heads = sizes[2], D = sizes[3], block_size = sizes[5], most = 0;
    int64_t group = heads / kv_heads, pairs = 0, longest = 0;
    const Side keys = {data[3], strides[6], D, kv_heads * D}, values = {data[4], strides[7], D, kv_heads * D};
    if (!have_blocks(prompts, num, blocks, block_size, sizes[4])) return 2;
    for (const Prompt *p = prompts; p < prompts + num; p++) {
        most = p->keys > most ? p->keys : most, longest = p->rows > longest ? p->rows : longest;
        pairs += heads * p->rows * p->keys;
    }
    if (pairs < SERIAL_FLOATS) threads = 1;
    const Attention like = {.batch = num, .kv_heads = kv_heads, .queries = longest};
    int64_t parts = count_parts(&like, MR, threads), failed = 0;
#pragma omp parallel num_threads(team_of(threads))
    {
        float *room = open_room(most, D);
        if (!room) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < num * kv_heads * parts; item++) {
            int64_t part = item % parts, kv_head = item / parts % kv_heads;
            const Prompt *p = prompts + item / parts / kv_heads;
            if (!room || part * MR >= p->rows) continue;
            float *own_keys = room, *own_values = room + most * D, *panels = room + 2 * most * D;
            float *value_panels = panels + round_up(p->keys, NR) * D;
            const Attention at = {
                .query = {(float *)data[0] + p->row * strides[1], 0, strides[0], strides[1]},
                .out = {(float *)data[1] + p->row * strides[3], 0, strides[2], strides[3]},
                .logsumexp = {(float *)data[2] + p->row * strides[5], 0, strides[4], strides[5]},
                .key = {own_keys, 0, 0, D}, .value = {own_values, 0, 0, D}, .batch = 1, .heads = heads,
                .kv_heads = kv_heads, .queries = p->rows, .keys = p->keys, .D = D, .window = sizes[6], .scale = scale,
                .softcap = softcap, .is_causal = 1};
            collect(&keys, blocks + p->block, block_size, kv_head, p->first, p->keys, D, own_keys);
            collect(&values, blocks + p->block, block_size, kv_head, p->first, p->keys, D, own_values);
            pack_turned(&at.key, &at, 0, 0, panels);
            pack_straight(&at.value, &at, 0, 0, 0, p->keys, value_panels);
            for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
                for (int64_t t = part * MR; t < p->rows; t += parts * MR)
                    forward_rows(&at, 0, h, t, min_of(MR, p->rows - t), panels, value_panels);
        }
        free(room);
    }
    return (int)failed;
}

/* ---- Backward --------------------------------------------------------------------------------------------------- */

/* What one thread works with. */
typedef struct {
    float *keys_turned, *values_turned, *keys; /* panels of a whole KV head */
    float *query_panels, *grad_panels; /* of QUERY_BLOCK rows */
    float *query, *grad_out, *probs, *grads; /* [QUERY_BLOCK][SCORE_STRIDE] */
    float *grad_query; /* [QUERY_BLOCK][room] */
} Workspace;

static float *open_workspace(const Attention *at, Workspace *w) {
    int64_t room = round_up(at->D, LANES), keys = round_up(at->keys, NR), square = QUERY_BLOCK * SCORE_STRIDE;
    int64_t sizes[] = {keys * at->D, keys * at->D, keys * room, QUERY_BLOCK * room, QUERY_BLOCK * room, square, square,
                       square, square, QUERY_BLOCK * room};
    float **parts[] = {&w->keys_turned, &w->values_turned, &w->keys, &w->query_panels, &w->grad_panels, &w->query,
                       &w->grad_out, &w->probs, &w->grads, &w->grad_query};
    int64_t total = 0;
    for (int i = 0; i < 10; i++) total += sizes[i];
    float *memory = calloc(total, sizeof(float));
    float *next = memory;
    for (int i = 0; memory && i < 10; i++) *parts[i] = next, next += sizes[i];
    return memory;
}

/* Scores -> soft-capped scores, gradients of probabilities -> those less delta, times the slope of the cap. */
static void cap_backward(float *scores, float *grads, int64_t count, float softcap, float delta) {
    for (int64_t i = 0; i < count; i += LANES) {
        vec turned = tanh_vec(load(scores + i) / softcap);
        store(scores + i, turned * softcap);
        store(grads + i, (load(grads + i) - delta) * (1.0f - turned * turned));
    }
}

/* One row: scores -> probabilities, gradients of probabilities -> of scores; both 0 outside [from, seen). */
INLINE void soften_backward(float *probs, float *grads, int64_t from, int64_t seen, int64_t end, float logsumexp,
                            float delta, float scale) {
    int64_t full = round_up(seen, LANES);
    for (int64_t i = 0; i < from; i++) probs[i] = -INFINITY;
    for (int64_t i = seen; i < full; i++) probs[i] = -INFINITY;
    for (int64_t i = 0; i < full; i += LANES) {
        vec p = exp_vec(load(probs + i) - logsumexp);
        store(probs + i, p);
        store(grads + i, p * (load(grads + i) - delta) * scale);
    }
    for (int64_t i = full; i < end; i++) probs[i] = grads[i] = 0;
}

/* Query rows [t, t + rows) of one head, rows <= QUERY_BLOCK: their own gradient, and what they add to keys' and values'
 * ([keys][room] each). */
static void backward_rows(const Attention *at, const Workspace *w, int64_t b, int64_t h, int64_t t, int64_t rows,
                          float *grad_keys, float *grad_values) {
    int64_t D = at->D, room = round_up(D, LANES), limit = key_limit(at, t, rows), begin = first_block(at, t);
    float delta[QUERY_BLOCK], logsumexp[QUERY_BLOCK];
    copy_side(&at->query, at, b, h, t, rows, w->query);
    copy_side(&at->grad_out, at, b, h, t, rows, w->grad_out);
    pack_straight(&at->query, at, b, h, t, rows, w->query_panels);
    pack_straight(&at->grad_out, at, b, h, t, rows, w->grad_panels);
    for (int64_t r = 0; r < rows; r++) {
        const float *out = row_of(&at->out, b, h, t + r), *grad = w->grad_out + r * SCORE_STRIDE;
        vec sum = {0};
        int64_t d = 0;
        for (; d + LANES <= D; d += LANES) sum += load(out + d) * load(grad + d);
        if (d < D) sum += load_part(out + d, D - d, 0) * load_part(grad + d, D - d, 0);
        delta[r] = sum_lanes(sum), logsumexp[r] = *row_of(&at->logsumexp, b, h, t + r);
    }
    for (int64_t k = begin; k < limit; k += KEY_BLOCK) {
        int64_t block = min_of(KEY_BLOCK, at->keys - k), count = min_of(block, limit - k);
        int64_t end = min_of(round_up(count, NR) + MR, SCORE_STRIDE);
        for (int64_t r = 0; r < rows; r += MR) {
            int64_t few = min_of(MR, rows - r), most = visible(at, t + r + few - 1, k, count);
            float *probs = w->probs + r * SCORE_STRIDE, *grads = w->grads + r * SCORE_STRIDE;
            times_panels(row_tile, few, w->query + r * SCORE_STRIDE, w->keys_turned + k * D, D, D, most, block,
                         at->scale, probs, SCORE_STRIDE, 0);
            times_panels(row_tile, few, w->grad_out + r * SCORE_STRIDE, w->values_turned + k * D, D, D, most, block, 1,
                         grads, SCORE_STRIDE, 0);
            for (int64_t i = 0; i < few; i++) {
                float *own = probs + i * SCORE_STRIDE, *own_grads = grads + i * SCORE_STRIDE, less = delta[r + i];
                int64_t row = t + r + i;
                if (at->softcap) cap_backward(own, own_grads, most, at->softcap, less), less = 0;
                soften_backward(own, own_grads, unseen(at, row, k, count), visible(at, row, k, count), end,
                                logsumexp[r + i], less, at->scale);
            }
            times_panels(row_tile, few, grads, w->keys + k * room, block, most, D, D, 1, w->grad_query + r * room, room,
                         k > begin);
        }
        for (int64_t key = 0; key < count; key += MR) {
            /* Rows before the first that sees this key have nothing to add. */
            int64_t gap = k + key - own_key(at, t), first = at->is_causal && gap > 0 ? gap : 0;
            int64_t few = min_of(MR, count - key);
            for (int64_t start = 0, width; start < D; start += width) {
                width = panel_width(D - start);
                Tile *tile = col_tile(few, width);
                int64_t panel = start * rows + first * width, to = (k + key) * room + start;
                int64_t from = first * SCORE_STRIDE + key;
                Strip probs = {w->probs + from, SCORE_STRIDE, rows - first, 0};
                Strip grads = {w->grads + from, SCORE_STRIDE, rows - first, 0};
                tile(&probs, 1, w->grad_panels + panel, 1, grad_values + to, room, 1);
                tile(&grads, 1, w->query_panels + panel, 1, grad_keys + to, room, 1);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        float *to = row_of(&at->grad_query, b, h, t + r);
        for (int64_t d = 0; d < D; d++) to[d] = w->grad_query[r * room + d] + (at->is_added ? to[d] : 0);
    }
}

/* Sum of every part's gradient into the strided result. */
static void gather(const Attention *at, const Side *side, const float *parts, int64_t num, int64_t stride, int64_t b,
                   int64_t kv_head) {
    int64_t room = round_up(at->D, LANES);
    for (int64_t k = 0; k < at->keys; k++) {
        float *to = row_of(side, b, kv_head, k);
        for (int64_t d = 0; d < at->D; d++) {
            float sum = at->is_added ? to[d] : 0;
            for (int64_t part = 0; part < num; part++) sum += parts[part * stride + k * room + d];
            to[d] = sum;
        }
    }
}

/* Gradients of query, key and value, written or added; `out` and `logsumexp` are those of whole rows, also where these
 * keys are only some of theirs. Arguments as in `tw_attend`; data goes on with grad_out, grad_query, grad_key and
 * grad_value. Returns 0, or 1 without memory. */
int tw_attend_backward(void *const *data, const int64_t *strides, const int64_t *sizes, float scale, float softcap,
                       int is_causal, int is_added, int threads) {
    const Attention at = describe(data, strides, sizes, scale, softcap, is_causal, is_added);
    threads = threads_for(&at, threads);
    int64_t group = at.heads / at.kv_heads, blocks = (at.queries + QUERY_BLOCK - 1) / QUERY_BLOCK;
    int64_t parts = count_parts(&at, QUERY_BLOCK, threads), units = at.batch * at.kv_heads;
    /* A tile may reach MR rows past the end. */
    int64_t side = (at.keys + MR) * round_up(at.D, LANES);
    float *sums = calloc(units * parts * 2 * side, sizeof(float));
    if (!sums) return 1;
    int failed = 0;
#pragma omp parallel num_threads(team_of(threads))
    {
        Workspace w;
        float *memory = open_workspace(&at, &w);
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < units * parts; item++) {
            int64_t part = item % parts, kv_head = item / parts % at.kv_heads, b = item / parts / at.kv_heads;
            float *own = sums + item * 2 * side;
            if (!memory) continue;
            pack_turned(&at.key, &at, b, kv_head, w.keys_turned);
            pack_turned(&at.value, &at, b, kv_head, w.values_turned);
            pack_straight(&at.key, &at, b, kv_head, 0, at.keys, w.keys);
            for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
                for (int64_t block = part; block < blocks; block += parts)
                    backward_rows(&at, &w, b, h, block * QUERY_BLOCK,
                                  min_of(QUERY_BLOCK, at.queries - block * QUERY_BLOCK), own, own + side);
        }
        free(memory);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; unit++) {
            const float *own = sums + unit * parts * 2 * side;
            gather(&at, &at.grad_key, own, parts, 2 * side, unit / at.kv_heads, unit % at.kv_heads);
            gather(&at, &at.grad_value, own + side, parts, 2 * side, unit / at.kv_heads, unit % at.kv_heads);
        }
    }
    free(sums);
    return failed;
}
