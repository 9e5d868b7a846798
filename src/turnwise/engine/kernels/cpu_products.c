/* Matrix products of training, float32, on the CPU: many rows, weights that do not change, and low-rank parts.
 *
 * c[M,N] = a[M,K] b[K,N] in blocks: a block of b is packed into panels that stay in L2, MR rows of `a` are copied to
 * L1, and a register tile of those rows by one panel runs over the block's depth. Any of the three may be transposed: b
 * is turned as it is packed, `a` as it is copied, c as it is written.
 */
#include "cpu_tiles.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

enum {
    MAX_DEPTH = 512, /* MR rows of this depth fit L1 */
    MAX_COLS = 384, /* a packed block of MAX_DEPTH by MAX_COLS fits L2 */
    ROW_STRIDE = MAX_DEPTH + 16, /* of the copied rows: no multiple of 4 KiB, which would put all rows in one L1 set */
};
DEFINE_TILES(choose_tile, ROW_STRIDE, 1)

static void copy_rows(const Matrix *a, int64_t row, int64_t rows, int64_t start, int64_t depth, float *to) {
    const float *from = a->data + row * a->row + start * a->col;
    if (a->col == 1) {
        for (int64_t r = 0; r < rows; r++) memcpy(to + r * ROW_STRIDE, from + r * a->row, sizeof(float) * depth);
        return;
    }
    for (int64_t k = 0; k < depth; k++)
        for (int64_t r = 0; r < rows; r++) to[r * ROW_STRIDE + k] = from[r * a->row + k * a->col];
}

typedef struct {
    Matrix a, b, c;
    int64_t K;
    float alpha;
    int is_added;
} Product;

/* Ask for rows of `a` that are needed next, a share at a time: `turn` of `turns`. */
INLINE void fetch_rows(const Matrix *a, int64_t row, int64_t rows, int64_t start, int64_t depth, int64_t turn,
                       int64_t turns) {
    if (a->col != 1) return;
    for (int64_t r = rows * turn / turns; r < rows * (turn + 1) / turns; r++)
        for (int64_t k = 0; k < depth; k += 16) __builtin_prefetch(a->data + (row + r) * a->row + start + k, 0, 2);
}

/* Rows [row, row + rows) of c, rows <= MR, and columns [col, col + cols), from the packed b and the copied rows of a;
 * meanwhile the `after` rows of `a` behind them are fetched, from column `first` on. */
static void multiply_rows(const Product *p, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t depth,
                          int is_added, const float *copied, const float *panels, int64_t first, int64_t after) {
    float corner[MR * NR];
    for (int64_t start = 0, width; start < cols; start += width) {
        width = panel_width(cols - start);
        Tile *tile = choose_tile(rows, width);
        const float *panel = panels + start * depth;
        float *to = p->c.data + row * p->c.row + (col + start) * p->c.col;
        int64_t real = min_of(width, cols - start);
        fetch_rows(&p->a, row + rows, after, first, depth, start / NR, (cols + NR - 1) / NR);
        if (real == width && rows % ROW_STEP == 0 && p->c.col == 1) {
            tile(copied, panel, depth, p->alpha, to, p->c.row, is_added);
            continue;
        }
        tile(copied, panel, depth, p->alpha, corner, NR, 0);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < real; j++) {
                float *at = to + r * p->c.row + j * p->c.col;
                *at = is_added ? *at + corner[r * NR + j] : corner[r * NR + j];
            }
    }
}

/* A block of c; `panels` holds MAX_DEPTH * (MAX_COLS + NR) floats. */
static void multiply_block(const Product *p, int64_t row, int64_t rows, int64_t col, int64_t cols, float *panels) {
    float copied[MR * ROW_STRIDE];
    int64_t steps = (p->K + MAX_DEPTH - 1) / MAX_DEPTH, step = (p->K + steps * 8 - 1) / (steps * 8) * 8;
    for (int64_t k = 0; k < p->K; k += step) {
        int64_t depth = min_of(step, p->K - k);
        Matrix b = {p->b.data + k * p->b.row + col * p->b.col, p->b.row, p->b.col};
        pack(&b, depth, cols, panels);
        for (int64_t r = row; r < row + rows; r += MR) {
            int64_t present = min_of(MR, row + rows - r);
            copy_rows(&p->a, r, present, k, depth, copied);
            int64_t after = min_of(MR, row + rows - r - present);
            multiply_rows(p, r, present, col, cols, depth, p->is_added || k > 0, copied, panels, k, after);
        }
    }
}

/* c = alpha a b, or added to c. Strides are (row, column) in floats; scratch holds MAX_DEPTH * (MAX_COLS + NR) floats
 * for each thread. No size is 0. */
void tw_product(float *a, int64_t a_row, int64_t a_col, float *b, int64_t b_row, int64_t b_col, float *c, int64_t c_row,
                int64_t c_col, int64_t M, int64_t N, int64_t K, float alpha, int is_added, float *scratch,
                int threads) {
    const Product p = {{a, a_row, a_col}, {b, b_row, b_col}, {c, c_row, c_col}, K, alpha, is_added};
    if (M * N * K < (int64_t)SERIAL_FLOATS * 32) threads = 1;
    int64_t col_tasks = (N + MAX_COLS - 1) / MAX_COLS;
    int64_t cols = (N + col_tasks * NR - 1) / (col_tasks * NR) * NR;
    col_tasks = (N + cols - 1) / cols;
    /* Every block of rows packs b once more, so they are halved only while threads would be short of work. */
    int64_t rows = (M + MR - 1) / MR * MR;
    while (threads > 1 && (M + rows - 1) / rows * col_tasks < 3 * threads && rows > 8 * MR)
        rows = (rows / 2 + MR - 1) / MR * MR;
    int64_t row_tasks = (M + rows - 1) / rows;
#pragma omp parallel num_threads(threads)
    {
#if defined(_OPENMP)
        float *panels = scratch + (int64_t)omp_get_thread_num() * MAX_DEPTH * (MAX_COLS + NR);
#else
        float *panels = scratch;
#endif
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < row_tasks * col_tasks; task++) {
            int64_t row = task % row_tasks * rows, col = task / row_tasks * cols;
            multiply_block(&p, row, min_of(rows, M - row), col, min_of(cols, N - col), panels);
        }
    }
}
