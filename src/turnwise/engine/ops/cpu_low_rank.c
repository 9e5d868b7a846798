/* Gradients of low-rank parts, float32, on the CPU: a large matrix met by a narrow one from both sides in one pass.
 *
 * MANY rows of the large x at a time are copied to L1. Each of their elements is broadcast once: times w's row it adds
 * to y = x w, times u's row to grad += x' u. Every thread sums a share of the rows, added in order at the end, so that
 * a result does not depend on their pace. The narrow side is cut into vectors, zeros behind its end.
 */
#include "cpu_tiles.h"

#if defined(__AVX512F__)
enum { MANY = 12 }; /* 12 accumulators and 12 rows of u, of 32 registers */
#else
enum { MANY = 4 }; /* of 16 registers */
#endif
enum { CHUNK = 512, CHUNK_STRIDE = CHUNK + 16 }; /* columns of x at a time; no multiple of 4 KiB */

typedef struct {
    Matrix x, u, grad, w, y; /* [M, I], [M, R], [I, R], [I, R], [M, R] */
    int64_t M, I, R;
    float scale;
} LowRank;

/* One vector of the narrow side: w and sums [cols][LANES], u and y [MANY][LANES]. */
static void add_vector(const float *rows, int64_t cols, const float *u, const float *w, float *sums, float *y) {
    vec own[MANY], dots[MANY];
    UNROLL for (int r = 0; r < MANY; r++) own[r] = load(u + r * LANES), dots[r] = load(y + r * LANES);
    for (int64_t i = 0; i < cols; i++) {
        vec weight = load(w + i * LANES), sum = load(sums + i * LANES), more = {0};
        UNROLL for (int r = 0; r < MANY; r += 2) {
            vec a = splat(rows[r * CHUNK_STRIDE + i]), b = splat(rows[(r + 1) * CHUNK_STRIDE + i]);
            dots[r] += a * weight, dots[r + 1] += b * weight;
            sum += a * own[r], more += b * own[r + 1];
        }
        store(sums + i * LANES, sum + more);
    }
    UNROLL for (int r = 0; r < MANY; r++) store(y + r * LANES, dots[r]);
}

/* Rows [row, row + MANY) or fewer. `w` and `sums` hold a [I][LANES] for each of `vectors`, `y` two [MANY][LANES]. */
static void add_rows(const LowRank *p, int64_t row, int64_t vectors, const float *w, float *sums, float *y) {
    float rows[MANY * CHUNK_STRIDE], *u = y + vectors * MANY * LANES;
    int64_t present = min_of(MANY, p->M - row);
    memset(y, 0, sizeof(float) * 2 * vectors * MANY * LANES);
    if (present < MANY) memset(rows, 0, sizeof(rows));
    for (int64_t r = 0; r < present; r++)
        for (int64_t j = 0; j < p->R; j++)
            u[(j / LANES * MANY + r) * LANES + j % LANES] = p->u.data[(row + r) * p->u.row + j * p->u.col];
    for (int64_t col = 0; col < p->I; col += CHUNK) {
        int64_t cols = min_of(CHUNK, p->I - col);
        for (int64_t r = 0; r < present; r++)
            memcpy(rows + r * CHUNK_STRIDE, p->x.data + (row + r) * p->x.row + col, sizeof(float) * cols);
        for (int64_t v = 0; v < vectors; v++) {
            int64_t at = (v * p->I + col) * LANES, own = v * MANY * LANES;
            add_vector(rows, cols, u + own, w + at, sums + at, y + own);
        }
    }
    for (int64_t r = 0; r < present; r++)
        for (int64_t j = 0; j < p->R; j++)
            p->y.data[(row + r) * p->y.row + j * p->y.col] = p->scale * y[(j / LANES * MANY + r) * LANES + j % LANES];
}

/* Where a part begins when `count` items are split evenly and the first parts take what is left over. */
static int64_t first_of(int64_t part, int64_t count, int64_t parts) {
    return part * (count / parts) + min_of(part, count % parts);
}

/* Row i of the gradient gets what each of the `parts` has summed. */
static void add_sums(const LowRank *p, int64_t i, const float *sums, int64_t side, int64_t parts) {
    for (int64_t j = 0, count; j < p->R; j += count) {
        count = min_of(LANES, p->R - j);
        float lanes[LANES], *to = p->grad.data + i * p->grad.row + j * p->grad.col;
        vec sum = {0};
        for (int64_t t = 0; t < parts; t++) sum += load(sums + t * side + (j / LANES * p->I + i) * LANES);
        if (count == LANES && p->grad.col == 1) {
            store(to, load(to) + sum * p->scale);
            continue;
        }
        store(lanes, sum * p->scale);
        for (int64_t k = 0; k < count; k++) to[k * p->grad.col] += lanes[k];
    }
}

/* grad += scale x' u and y = scale x w. `strides` are (row, column) in floats of x, u, grad, w and y; x is dense in its
 * rows. `sizes` are M, I and R, none of them 0. Returns 0, or 1 without memory. */
int tw_low_rank_gradients(float *const *data, const int64_t *strides, const int64_t *sizes, float scale, int threads) {
    Matrix sides[5];
    for (int i = 0; i < 5; i++) sides[i] = (Matrix){data[i], strides[2 * i], strides[2 * i + 1]};
    const LowRank p = {.x = sides[0], .u = sides[1], .grad = sides[2], .w = sides[3], .y = sides[4], .M = sizes[0],
                       .I = sizes[1], .R = sizes[2], .scale = scale};
    if (p.M * p.I * p.R < (int64_t)SERIAL_FLOATS * 32) threads = 1;
    int64_t vectors = (p.R + LANES - 1) / LANES, side = vectors * p.I * LANES, small = vectors * MANY * LANES;
    float *memory = calloc((threads + 1) * side + 2 * threads * small, sizeof(float));
    if (!memory) return 1;
    float *sums = memory + side, *narrow = sums + threads * side;
    int64_t tiles = (p.M + MANY - 1) / MANY;
#pragma omp parallel num_threads(team_of(threads))
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.I; i++)
            for (int64_t j = 0; j < p.R; j++)
                memory[(j / LANES * p.I + i) * LANES + j % LANES] = p.w.data[i * p.w.row + j * p.w.col];
        /* Rows are split by `threads`, however many of them work: each part has sums of its own, and which rows are
         * summed together decides the last bits. */
#pragma omp for schedule(static)
        for (int64_t part = 0; part < threads; part++)
            for (int64_t tile = first_of(part, tiles, threads); tile < first_of(part + 1, tiles, threads); tile++)
                add_rows(&p, tile * MANY, vectors, memory, sums + part * side, narrow + 2 * part * small);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.I; i++) add_sums(&p, i, sums, side, threads);
    }
    free(memory);
    return 0;
}
