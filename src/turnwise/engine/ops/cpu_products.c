/* Matrix products of training on the CPU: many rows, weights that do not change, and low-rank parts.
 *
 * c[M,N] = a[M,K] b[K,N] in blocks: a block of b is packed into panels that stay in L2, and a register tile of MR rows
 * of `a` by one panel runs over the block's depth. Any of the three may be transposed: b is turned as it is packed, c
 * as it is written, and rows of `a` that cannot be read where they lie are copied to L1. A low-rank part adds its rank
 * to the depth: its two sides lie behind `a` and b as if they were longer, so c is written once.
 *
 * Everything is float32 but for a b of bfloat16. Then `a` is rounded to bfloat16 first, once for all blocks of b where
 * there is room, and two neighbours of the depth are one unit, a pair (cpu_vectors.h): the depth of `a` and b counts
 * pairs, that of the low-rank part floats.
 */
#include "cpu_kernels.h"
#include "cpu_tiles.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

enum {
    MAX_DEPTH = 640, /* copied rows of this depth fit L1 */
    MAX_COLS = 384, /* a packed block of MAX_DEPTH by MAX_COLS fits L2 */
    MIN_STREAMED = 1 << 18, /* floats of c, as many as L2 holds */
    ONE_SET = 1024, /* floats: rows a multiple of this apart, 4 KiB, fall into one L1 set */
    ROW_STRIDE = MAX_DEPTH + 16, /* of the copied rows: no such multiple */
};
DEFINE_TILES(choose_tile, step, 1, 0)
DEFINE_TILES(choose_pair_tile, step, 1, 1)

/* c = alpha (a b + scale low_a low_b), or added to c; `low_K` is 0 where there is no low-rank part. */
typedef struct {
    Matrix a, b, c, low_a, low_b;
    int64_t K, low_K;
    float alpha, scale;
    int is_added, is_streamed;
    int is_in_place; /* tiles read rows of `a` and low_a where they lie */
    int is_paired; /* b is bfloat16; K counts pairs */
    int64_t depth; /* of `a` and b in numbers */
    float *rounded; /* all of `a` as pairs, rows `rounded_row` apart; NULL: rows are rounded as they are copied */
    int64_t rounded_row;
} Product;

INLINE void copy_part(const Matrix *a, int64_t row, int64_t rows, int64_t start, int64_t depth, float *to) {
    const float *from = a->data + row * a->row + start * a->col;
    if (a->col == 1) {
        for (int64_t r = 0; r < rows; r++) memcpy(to + r * ROW_STRIDE, from + r * a->row, sizeof(float) * depth);
        return;
    }
    for (int64_t k = 0; k < depth; k++)
        for (int64_t r = 0; r < rows; r++) to[r * ROW_STRIDE + k] = from[r * a->row + k * a->col];
}

/* Rows of `a`, dense, as pairs [start, start + depth). */
INLINE void round_part(const Product *p, int64_t row, int64_t rows, int64_t start, int64_t depth, float *to) {
    int64_t count = min_of(2 * depth, p->depth - 2 * start);
    for (int64_t r = 0; r < rows; r++)
        round_pairs(p->a.data + (row + r) * p->a.row + 2 * start, count, to + r * ROW_STRIDE);
}

/* How much of [start, start + depth) lies in `a` and b, before the low-rank part. */
INLINE int64_t own_depth(const Product *p, int64_t start, int64_t depth) {
    return start < p->K ? min_of(depth, p->K - start) : 0;
}

/* `rows` rows of `a` and of its low-rank part as strips: where they lie, or copied. */
static int lay_strips(const Product *p, int64_t row, int64_t rows, int64_t start, int64_t depth, float *copied,
                      Strip *strips) {
    int64_t own = own_depth(p, start, depth), low = start + own - p->K;
    if (p->is_paired) {
        if (!p->rounded) round_part(p, row, rows, start, own, copied);
        if (own < depth) copy_part(&p->low_a, row, rows, low, depth - own, copied + own);
        strips[0] = (Strip){copied, ROW_STRIDE, own, 1};
        if (p->rounded) strips[0] = (Strip){p->rounded + row * p->rounded_row + start, p->rounded_row, own, 1};
        strips[1] = (Strip){copied + own, ROW_STRIDE, depth - own, 0};
        return own < depth ? 2 : 1;
    }
    if (!p->is_in_place || rows % ROW_STEP != 0) {
        copy_part(&p->a, row, rows, start, own, copied);
        if (own < depth) copy_part(&p->low_a, row, rows, low, depth - own, copied + own);
        strips[0] = (Strip){copied, ROW_STRIDE, depth, 0};
        return 1;
    }
    strips[0] = (Strip){p->a.data + row * p->a.row + start, p->a.row, own, 0};
    if (own == depth) return 1;
    strips[1] = (Strip){p->low_a.data + row * p->low_a.row + low, p->low_a.row, depth - own, 0};
    return 2;
}

/* Rows 2 k and 2 k + 1 of a bfloat16 b that is dense in its rows, `cols` columns from `col` on, become row k of the
 * panels, for k in [start, start + rows). A row behind the last is 0. */
static void pack_row_pairs(const Product *p, int64_t start, int64_t rows, int64_t depth, int64_t col, int64_t cols,
                           float *panels) {
    typedef uint16_t halves __attribute__((vector_size(sizeof(vec) / 2), aligned(2), may_alias));
    for (int64_t at = 0, width; at < cols; at += width) {
        width = panel_width(cols - at);
        for (int64_t k = 0; k < rows; k++) {
            const uint16_t *first = (const uint16_t *)p->b.data + 2 * (start + k) * p->b.row + col + at;
            int is_last = 2 * (start + k) + 1 == p->depth;
            const uint16_t *second = first + (is_last ? 0 : p->b.row);
            float *to = panels + at * depth + k * width;
            if (at + width > cols) {
                for (int64_t j = 0; j < width; j++) {
                    uint32_t pair = at + j >= cols ? 0 : first[j] | (is_last ? 0 : (uint32_t)second[j] << 16);
                    memcpy(to + j, &pair, sizeof(pair));
                }
                continue;
            }
            for (int64_t j = 0; j < width; j += LANES) {
                bits low = __builtin_convertvector(*(const halves *)(first + j), bits);
                bits high = __builtin_convertvector(*(const halves *)(second + j), bits);
                store(to + j, (vec)(is_last ? low : low | high << 16u));
            }
        }
    }
}

static void pack_block(const Product *p, int64_t start, int64_t depth, int64_t col, int64_t cols, float *panels) {
    int64_t own = own_depth(p, start, depth), low = start + own - p->K;
    Matrix b = {p->b.data + start * p->b.row + col * p->b.col, p->b.row, p->b.col};
    if (p->is_paired && p->b.col == 1) {
        pack_row_pairs(p, start, own, depth, col, cols, panels);
    } else if (p->is_paired) { /* neighbours of the depth are neighbours in memory: a matrix of pairs */
        b = (Matrix){p->b.data + start + col * p->b.col / 2, 1, p->b.col / 2};
        pack_part(&b, 0, own, depth, cols, panels);
    } else {
        pack_part(&b, 0, own, depth, cols, panels);
    }
    if (own == depth) return;
    Matrix more = {p->low_b.data + low * p->low_b.row + col * p->low_b.col, p->low_b.row, p->low_b.col};
    pack_part(&more, own, depth - own, depth, cols, panels);
    for (int64_t at = 0, width; at < cols; at += width) {
        width = panel_width(cols - at);
        for (int64_t i = own * width; i < depth * width; i += LANES) {
            float *to = panels + at * depth + i;
            store(to, load(to) * p->scale);
        }
    }
}

/* Ask for rows of `a` that are needed next, a share at a time: `turn` of `turns`. */
INLINE void fetch_share(const Product *p, int64_t row, int64_t rows, int64_t start, int64_t depth, int64_t turn,
                        int64_t turns) {
    Matrix a = p->rounded ? (Matrix){p->rounded, p->rounded_row, 1} : p->a;
    if (a.col != 1) return;
    if (p->is_paired && !p->rounded) start *= 2, depth *= 2;
    for (int64_t r = rows * turn / turns; r < rows * (turn + 1) / turns; r++)
        for (int64_t k = 0; k < depth; k += 16) __builtin_prefetch(a.data + (row + r) * a.row + start + k, 0, 2);
}

/* Rows [row, row + rows) of c, rows <= MR, and columns [col, col + cols), from the packed b and the strips of `a`;
 * meanwhile the `after` rows of `a` behind them are fetched, from column `first` on. */
static void multiply_rows(const Product *p, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t depth,
                          int how, const Strip *strips, int num, const float *panels, int64_t first, int64_t after) {
    float corner[MR * NR];
    for (int64_t start = 0, width; start < cols; start += width) {
        width = panel_width(cols - start);
        Tile *tile = p->is_paired ? choose_pair_tile(rows, width) : choose_tile(rows, width);
        const float *panel = panels + start * depth;
        float *to = p->c.data + row * p->c.row + (col + start) * p->c.col;
        int64_t real = min_of(width, cols - start);
        fetch_share(p, row + rows, after, first, own_depth(p, first, depth), start / NR, (cols + NR - 1) / NR);
        if (real == width && rows % ROW_STEP == 0 && p->c.col == 1) {
            tile(strips, num, panel, p->alpha, to, p->c.row, how);
            continue;
        }
        tile(strips, num, panel, p->alpha, corner, NR, 0);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < real; j++) {
                float *at = to + r * p->c.row + j * p->c.col;
                *at = how & ADD ? *at + corner[r * NR + j] : corner[r * NR + j];
            }
    }
}

/* A block of c; `panels` holds MAX_DEPTH * (MAX_COLS + NR) floats. */
static void multiply_block(const Product *p, int64_t row, int64_t rows, int64_t col, int64_t cols, float *panels) {
    float copied[MR * ROW_STRIDE];
    int64_t K = p->K + p->low_K, steps = (K + MAX_DEPTH - 1) / MAX_DEPTH, step = (K + steps * 8 - 1) / (steps * 8) * 8;
    for (int64_t k = 0; k < K; k += step) {
        int64_t depth = min_of(step, K - k);
        pack_block(p, k, depth, col, cols, panels);
        /* What is added to in steps stays in the caches meanwhile. */
        int how = (p->is_added || k > 0 ? ADD : 0) | (p->is_streamed && step >= K ? STREAM : 0);
        for (int64_t r = row; r < row + rows; r += MR) {
            int64_t present = min_of(MR, row + rows - r);
            Strip strips[2];
            int num = lay_strips(p, r, present, k, depth, copied, strips);
            int64_t after = min_of(MR, row + rows - r - present);
            multiply_rows(p, r, present, col, cols, depth, how, strips, num, panels, k, after);
        }
    }
}

/* Whether c goes past the caches: it is too large to be found there later, and tiles write whole vectors of it. */
static int can_stream(const Matrix *c, int64_t size) {
    return size >= MIN_STREAMED && c->col == 1 && c->row % LANES == 0 && (uintptr_t)c->data % sizeof(vec) == 0;
}

/* Whether rows of `a` are rounded once: b is packed in more than one block. */
static int is_rounded_once(const Product *p, int64_t M, int64_t N) { return p->is_paired && N > MAX_COLS && M >= MR; }

/* `p` with blocks of rows and columns shared out. Scratch holds MAX_DEPTH * (MAX_COLS + NR) floats for each thread, and
 * with pairs all of `a` behind them: M + MR rows of (depth + 1) / 2 + LANES, since a tile may read MR rows past the end. */
static void multiply_all(const Product p, int64_t M, int64_t N, float *scratch, int threads) {
    if (M * N * (p.K + p.low_K) < (int64_t)SERIAL_FLOATS * 32) threads = 1;
    int64_t col_tasks = (N + MAX_COLS - 1) / MAX_COLS;
    int64_t cols = (N + col_tasks * NR - 1) / (col_tasks * NR) * NR;
    col_tasks = (N + cols - 1) / cols;
    /* Every block of rows packs b once more, so they are halved only while threads would be short of work. */
    int64_t rows = (M + MR - 1) / MR * MR;
    while (threads > 1 && (M + rows - 1) / rows * col_tasks < 2 * threads && rows > 8 * MR)
        rows = (rows / 2 + MR - 1) / MR * MR;
    int64_t row_tasks = (M + rows - 1) / rows;
#pragma omp parallel num_threads(team_of(threads))
    {
        if (p.rounded) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < M; row++)
                round_pairs(p.a.data + row * p.a.row, p.depth, p.rounded + row * p.rounded_row);
        }
#if defined(_OPENMP)
        float *panels = scratch + (int64_t)omp_get_thread_num() * MAX_DEPTH * (MAX_COLS + NR);
#else
        float *panels = scratch;
#endif
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < row_tasks * col_tasks; task++) {
            int64_t row = task % row_tasks * rows, col = task / row_tasks * cols;
            multiply_block(&p, row, min_of(rows, M - row), col, min_of(cols, N - col), panels);
            finish_stores();
        }
    }
}

/* c = alpha (a b + scale low_a low_b), or added to c. `strides` are (row, column) in numbers of a, b, c, low_a and
 * low_b, `sizes` M, N, K and low_K. M, N and K + low_K are not 0. With `is_paired`, b is bfloat16, dense in its rows or
 * in its columns (then K and the distance of columns are even), and `a` dense in its rows. */
void tw_product(float *const *data, const int64_t *strides, const int64_t *sizes, float alpha, float scale,
                int is_added, int is_paired, float *scratch, int threads) {
    Matrix sides[5];
    for (int i = 0; i < 5; i++) sides[i] = (Matrix){data[i], strides[2 * i], strides[2 * i + 1]};
    int64_t M = sizes[0], N = sizes[1];
    Product p = {.a = sides[0], .b = sides[1], .c = sides[2], .low_a = sides[3], .low_b = sides[4],
                       .K = is_paired ? (sizes[2] + 1) / 2 : sizes[2], .low_K = sizes[3], .alpha = alpha,
                       .scale = scale, .is_added = is_added, .is_paired = is_paired, .depth = sizes[2],
                       .is_in_place = sides[0].col == 1 && sides[3].col == 1 && sides[0].row % ONE_SET != 0,
                       .is_streamed = can_stream(&sides[2], M * N)};
    if (is_rounded_once(&p, M, N)) {
        p.rounded = scratch + (int64_t)threads * MAX_DEPTH * (MAX_COLS + NR);
        p.rounded_row = p.K + (p.K % ONE_SET == 0 ? LANES : 0);
    }
    multiply_all(p, M, N, scratch, threads);
}
