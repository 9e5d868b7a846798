/* Register tiles for matrix products, and the panels they read: shared by `cpu_products.c` and `cpu_attention.c`.
 *
 * A tile is MR rows or fewer of a small operand, each element broadcast, times one panel of the other operand: [depth]
 * by two vectors, packed one behind the other, or by one vector where the last columns are no more.
 */
#ifndef TURNWISE_CPU_TILES_H
#define TURNWISE_CPU_TILES_H
#include "cpu_vectors.h"

#if defined(__AVX512F__)
enum { MR = 12, ROW_STEP = 4 }; /* 12 x 2 accumulators of 32 registers */
#else
enum { MR = 6, ROW_STEP = 2 }; /* 6 x 2 accumulators of 16 registers */
#endif
enum { NR = 2 * LANES };

/* Element (i, j) lies at data + i * row + j * col. */
typedef struct {
    float *data;
    int64_t row, col;
} Matrix;

/* ROWS rows of `a`, element (r, k) at a[r * A_ROW + k * A_COL], times one panel of NUM vectors:
 * to = alpha * product, plus what is there if is_added. */
#define DEFINE_TILE(NAME, ROWS, NUM, A_ROW, A_COL)                                                                     \
    static void NAME(const float *a, const float *panel, int64_t depth, float alpha, float *to, int64_t stride,        \
                     int is_added) {                                                                                   \
        vec acc[ROWS][NUM];                                                                                            \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < NUM; j++) {                                   \
            acc[r][j] = (vec){0};                                                                                      \
            __builtin_prefetch(to + r * stride + j * LANES, 1);                                                        \
        }                                                                                                              \
        for (int64_t k = 0; k < depth; k++) {                                                                          \
            vec b[NUM];                                                                                                \
            UNROLL for (int j = 0; j < NUM; j++) b[j] = load(panel + (k * NUM + j) * LANES);                           \
            UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < NUM; j++)                                 \
                acc[r][j] += a[r * (A_ROW) + k * (A_COL)] * b[j];                                                      \
        }                                                                                                              \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < NUM; j++) {                                   \
            float *at = to + r * stride + j * LANES;                                                                   \
            store(at, is_added ? acc[r][j] * alpha + load(at) : acc[r][j] * alpha);                                    \
        }                                                                                                              \
    }

typedef void Tile(const float *, const float *, int64_t, float, float *, int64_t, int);

/* NAME(rows, width): the smallest tile of at least `rows` rows (more are computed and dropped) for panels of `width`
 * floats, with the strides of `a` as constants. */
#if defined(__AVX512F__)
#define DEFINE_TILES(NAME, A_ROW, A_COL)                                                                               \
    DEFINE_TILE(NAME##_12_1, 12, 1, A_ROW, A_COL)                                                                      \
    DEFINE_TILE(NAME##_12_2, 12, 2, A_ROW, A_COL)                                                                      \
    DEFINE_TILE(NAME##_8_1, 8, 1, A_ROW, A_COL)                                                                        \
    DEFINE_TILE(NAME##_8_2, 8, 2, A_ROW, A_COL)                                                                        \
    DEFINE_TILE(NAME##_4_1, 4, 1, A_ROW, A_COL)                                                                        \
    DEFINE_TILE(NAME##_4_2, 4, 2, A_ROW, A_COL)                                                                        \
    INLINE Tile *NAME(int64_t rows, int64_t width) {                                                                   \
        if (rows > 8) return width == NR ? NAME##_12_2 : NAME##_12_1;                                                  \
        if (rows > 4) return width == NR ? NAME##_8_2 : NAME##_8_1;                                                    \
        return width == NR ? NAME##_4_2 : NAME##_4_1;                                                                  \
    }
#else
#define DEFINE_TILES(NAME, A_ROW, A_COL)                                                                               \
    DEFINE_TILE(NAME##_6_1, 6, 1, A_ROW, A_COL)                                                                        \
    DEFINE_TILE(NAME##_6_2, 6, 2, A_ROW, A_COL)                                                                        \
    DEFINE_TILE(NAME##_4_1, 4, 1, A_ROW, A_COL)                                                                        \
    DEFINE_TILE(NAME##_4_2, 4, 2, A_ROW, A_COL)                                                                        \
    DEFINE_TILE(NAME##_2_1, 2, 1, A_ROW, A_COL)                                                                        \
    DEFINE_TILE(NAME##_2_2, 2, 2, A_ROW, A_COL)                                                                        \
    INLINE Tile *NAME(int64_t rows, int64_t width) {                                                                   \
        if (rows > 4) return width == NR ? NAME##_6_2 : NAME##_6_1;                                                    \
        if (rows > 2) return width == NR ? NAME##_4_2 : NAME##_4_1;                                                    \
        return width == NR ? NAME##_2_2 : NAME##_2_1;                                                                  \
    }
#endif

INLINE int64_t panel_width(int64_t left) { return left > LANES ? NR : LANES; }

/* The first 8 rows of b, or fewer, become rows k and on of panels; columns that do not exist become zeros. */
INLINE void pack_rows(const Matrix *b, int64_t k, int64_t rows, int64_t depth, int64_t cols, float *panels) {
    for (int64_t start = 0, width; start < cols; start += width) {
        width = panel_width(cols - start);
        float *panel = panels + start * depth + k * width;
        const float *from = b->data + start * b->col;
        if (cols - start < width) {
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < width; j++)
                    panel[i * width + j] = j < cols - start ? from[i * b->row + j * b->col] : 0;
        } else if (b->col == 1) {
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < width; j += LANES) store(panel + i * width + j, load(from + i * b->row + j));
        } else if (b->row == 1 && rows == 8) {
            for (int64_t j = 0; j < width; j += 8) transpose8(from + j * b->col, b->col, panel + j, width, splat8(0));
        } else {
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < width; j++) panel[i * width + j] = from[i * b->row + j * b->col];
        }
    }
}

/* b [rows, cols] becomes rows [first, first + rows) of panels that are `depth` deep. */
static void pack_part(const Matrix *b, int64_t first, int64_t rows, int64_t depth, int64_t cols, float *panels) {
    for (int64_t k = 0; k < rows; k += 8) {
        Matrix from = {b->data + k * b->row, b->row, b->col};
        pack_rows(&from, first + k, min_of(8, rows - k), depth, cols, panels);
    }
}

/* All of b [depth, cols] into panels. */
static void pack(const Matrix *b, int64_t depth, int64_t cols, float *panels) {
    pack_part(b, 0, depth, depth, cols, panels);
}

#endif
