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

/* Rows of an operand, element (r, k) at data + r * step + k, or data + r + k * step where they lie turned; of pairs
 * (cpu_vectors.h) instead of floats where the tile and the panel are of pairs too. */
typedef struct {
    const float *data;
    int64_t step, depth;
    int is_paired;
} Strip;

/* How a tile leaves its product: added to what is there; past the caches, for a large result at vectors' addresses
 * (lines that are written as a whole need not be read first, and leave the caches to the operands). */
enum { ADD = 1, STREAM = 2 };

/* ROWS rows, `num` strips of them side by side, times one panel of VECTORS vectors: to = alpha * product, left as
 * `how` says. Every third row has a pointer: addresses of all rows would be more than there are registers, so the
 * compiler is kept from forming them. */
#define DEFINE_TILE(NAME, ROWS, VECTORS, A_ROW, A_COL, KNOWS_PAIRS)                                                    \
    static void NAME(const Strip *strips, int num, const float *panel, float alpha, float *to, int64_t stride,         \
                     int how) {                                                                                        \
        enum { THIRDS = (ROWS + 2) / 3 };                                                                              \
        vec acc[ROWS][VECTORS];                                                                                        \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < VECTORS; j++) {                               \
            acc[r][j] = (vec){0};                                                                                      \
            if (!(how & STREAM)) __builtin_prefetch(to + r * stride + j * LANES, 1);                                   \
        }                                                                                                              \
        for (const Strip *strip = strips; strip < strips + num; strip++) {                                             \
            const int64_t step = strip->step;                                                                          \
            const float *a[THIRDS];                                                                                    \
            UNROLL for (int i = 0; i < THIRDS; i++) {                                                                  \
                a[i] = strip->data + 3 * i * (A_ROW);                                                                  \
                __asm__("" : "+r"(a[i]));                                                                              \
            }                                                                                                          \
            if (KNOWS_PAIRS && strip->is_paired) {                                                                     \
                for (int64_t k = 0; k < strip->depth; k++, panel += VECTORS * LANES) {                                 \
                    vec b[VECTORS];                                                                                    \
                    UNROLL for (int j = 0; j < VECTORS; j++) b[j] = load(panel + j * LANES);                           \
                    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < VECTORS; j++)                     \
                        acc[r][j] = dot_vec(acc[r][j], splat_vec(a[r / 3] + r % 3 * (A_ROW)), b[j]);                   \
                    UNROLL for (int i = 0; i < THIRDS; i++) a[i] += (A_COL);                                           \
                }                                                                                                      \
                continue;                                                                                              \
            }                                                                                                          \
            for (int64_t k = 0; k < strip->depth; k++, panel += VECTORS * LANES) {                                     \
                vec b[VECTORS];                                                                                        \
                UNROLL for (int j = 0; j < VECTORS; j++) b[j] = load(panel + j * LANES);                               \
                UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < VECTORS; j++)                         \
                    acc[r][j] += a[r / 3][r % 3 * (A_ROW)] * b[j];                                                     \
                UNROLL for (int i = 0; i < THIRDS; i++) a[i] += (A_COL);                                               \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < VECTORS; j++) {                               \
            float *at = to + r * stride + j * LANES;                                                                   \
            vec v = how & ADD ? acc[r][j] * alpha + load(at) : acc[r][j] * alpha;                                      \
            if (how & STREAM) store_past_caches(at, v);                                                                \
            else store(at, v);                                                                                         \
        }                                                                                                              \
    }

typedef void Tile(const Strip *, int, const float *, float, float *, int64_t, int);

/* NAME(rows, width): the smallest tile of at least `rows` rows (more are computed and dropped) for panels of `width`
 * floats; A_ROW and A_COL are 1 and `step`, either way round. KNOWS_PAIRS: strips may hold pairs. */
#if defined(__AVX512F__)
#define DEFINE_TILES(NAME, A_ROW, A_COL, KNOWS_PAIRS)                                                                  \
    DEFINE_TILE(NAME##_12_1, 12, 1, A_ROW, A_COL, KNOWS_PAIRS)                                                         \
    DEFINE_TILE(NAME##_12_2, 12, 2, A_ROW, A_COL, KNOWS_PAIRS)                                                         \
    DEFINE_TILE(NAME##_8_1, 8, 1, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    DEFINE_TILE(NAME##_8_2, 8, 2, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    DEFINE_TILE(NAME##_4_1, 4, 1, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    DEFINE_TILE(NAME##_4_2, 4, 2, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    INLINE Tile *NAME(int64_t rows, int64_t width) {                                                                   \
        if (rows > 8) return width == NR ? NAME##_12_2 : NAME##_12_1;                                                  \
        if (rows > 4) return width == NR ? NAME##_8_2 : NAME##_8_1;                                                    \
        return width == NR ? NAME##_4_2 : NAME##_4_1;                                                                  \
    }
#else
#define DEFINE_TILES(NAME, A_ROW, A_COL, KNOWS_PAIRS)                                                                  \
    DEFINE_TILE(NAME##_6_1, 6, 1, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    DEFINE_TILE(NAME##_6_2, 6, 2, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    DEFINE_TILE(NAME##_4_1, 4, 1, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    DEFINE_TILE(NAME##_4_2, 4, 2, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    DEFINE_TILE(NAME##_2_1, 2, 1, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    DEFINE_TILE(NAME##_2_2, 2, 2, A_ROW, A_COL, KNOWS_PAIRS)                                                           \
    INLINE Tile *NAME(int64_t rows, int64_t width) {                                                                   \
        if (rows > 4) return width == NR ? NAME##_6_2 : NAME##_6_1;                                                    \
        if (rows > 2) return width == NR ? NAME##_4_2 : NAME##_4_1;                                                    \
        return width == NR ? NAME##_2_2 : NAME##_2_1;                                                                  \
    }
#endif

INLINE int64_t panel_width(int64_t left) { return left > LANES ? NR : LANES; }

/* Up to 8 rows of b, and up to `width` columns, become rows of a panel; columns that do not exist become zeros. */
INLINE void pack_rows(const float *from, const Matrix *b, int64_t rows, int64_t cols, int64_t width, float *panel) {
    if (cols < width) {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < width; j++) panel[i * width + j] = j < cols ? from[i * b->row + j * b->col] : 0;
    } else if (b->col == 1) {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < width; j += LANES) store(panel + i * width + j, load(from + i * b->row + j));
    } else if (b->row == 1 && rows == 8) {
        for (int64_t j = 0; j < width; j += 8) transpose8(from + j * b->col, b->col, panel + j, width);
    } else {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < width; j++) panel[i * width + j] = from[i * b->row + j * b->col];
    }
}

/* Ask for 8 rows of b and `width` columns. */
INLINE void fetch_rows(const float *from, const Matrix *b, int64_t width) {
    if (b->col == 1) {
        for (int64_t i = 0; i < 8; i++)
            for (int64_t j = 0; j < width; j += 16) __builtin_prefetch(from + i * b->row + j, 0, 2);
    } else {
        for (int64_t j = 0; j < width; j++) __builtin_prefetch(from + j * b->col, 0, 2);
    }
}

/* b [rows, cols] becomes rows [first, first + rows) of panels that are `depth` deep. Weights come from memory: while
 * one panel is packed, the next is asked for. */
static void pack_part(const Matrix *b, int64_t first, int64_t rows, int64_t depth, int64_t cols, float *panels) {
    for (int64_t start = 0, width; start < cols; start += width) {
        width = panel_width(cols - start);
        const float *from = b->data + start * b->col;
        float *panel = panels + start * depth + first * width;
        int64_t real = min_of(width, cols - start), after = min_of(width, cols - start - real);
        for (int64_t k = 0; k < rows; k += 8) {
            fetch_rows(from + width * b->col + k * b->row, b, after);
            pack_rows(from + k * b->row, b, min_of(8, rows - k), real, width, panel + k * width);
        }
    }
}

/* All of b [depth, cols] into panels. */
static void pack(const Matrix *b, int64_t depth, int64_t cols, float *panels) {
    pack_part(b, 0, depth, depth, cols, panels);
}

#endif
