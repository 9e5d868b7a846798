/* Linear layers of few rows on the CPU, with weights in float32 or bfloat16.
 *
 * out[M,N] = x[M,K] weight[N,K]^T for M up to about a hundred. Decoding a handful of sequences reads every weight once
 * per token, so weights are streamed exactly once, in memory order. A general GEMM copies the weight into its own
 * layout first, which at small M costs as much as the product. Here the small operand is copied instead: x is
 * transposed once into panels [K][width], and a register tile takes 8 rows of the weight as they lie, broadcasting one
 * weight per row against the panel's vectors. The tile comes out transposed and is turned back on its way to `out`.
 *
 * With weights in bfloat16, two neighbours along K are one unit ("pair", see cpu_vectors.h): x is rounded to bfloat16
 * first, K counts pairs, and a pair stands where a float stands otherwise.
 */
#include "cpu_kernels.h"
#include "cpu_vectors.h"

enum {
    TILE_ROWS = 8, /* of the weight; more would fight for one L1 set (8 ways) when a row is a multiple of 4 KiB */
    GROUP_ROWS = 16, /* unit of work of a thread: 16 floats of every row of `out`, one cache line */
    BLOCK_COLS = 128, /* rows of x that are taken at once */
    DOT_COLS = 4, /* up to here plain dot products along K are faster */
    PREFETCH_FLOATS = 4096, /* how far ahead of the dot products to fetch */
    ONE_SET = 1024, /* floats: rows a multiple of this apart, 4 KiB, fall into one L1 set */
};
#if defined(__AVX512F__)
enum { WIDE_ROWS = 8 }; /* 8 x 2 accumulators of 32 registers */
#else
enum { WIDE_ROWS = 4 }; /* 4 x 2 accumulators of 16 registers */
#endif

/* Whether tiles of a whole group take panels of one vector: twice the rows keep both units busy with pairs, where rows
 * do not fight for one set. Floats, which the instructions read from memory themselves, gain nothing. */
INLINE int has_tall_tiles(int64_t K, int is_paired) { return LANES == 16 && is_paired && K % ONE_SET != 0; }

/* Width of the next panel when `left` columns remain: two vectors, one, or half of one. With 32 registers two vectors
 * take less time than one and a half, and a tall tile of one no more than half of one. */
INLINE int64_t panel_width(int64_t left, int is_tall) {
    if (left > (LANES == 16 ? LANES : 3 * LANES / 2)) return 2 * LANES;
    return left > 8 || is_tall ? LANES : 8;
}

/* x[rows,K], columns k..k+8, into every panel; rows that do not exist become zeros. */
static void pack_columns(const float *x, int64_t rows, int64_t K, int64_t k, float *panels) {
    int64_t depth = min_of(8, K - k);
    for (int64_t first = 0, width; first < rows; first += width) {
        width = panel_width(rows - first, 0);
        float *panel = panels + first * K + k * width;
        for (int64_t m = 0; m < width; m += 8) {
            int64_t present = rows - first - m;
            const float *src = x + (first + m) * K + k;
            if (present >= 8 && depth == 8) {
                transpose8(src, K, panel + m, width);
                continue;
            }
            for (int64_t j = 0; j < depth; j++)
                for (int64_t i = 0; i < 8; i++) panel[j * width + m + i] = i < present ? src[i * K + j] : 0;
        }
    }
}

/* The same with pairs k..k+8 of x[rows,inputs], which are rounded on their way. */
static void pack_pairs(const float *x, int64_t rows, int64_t inputs, int64_t k, float *panels) {
    int64_t K = inputs / 2, depth = min_of(8, K - k);
    float rounded[64] = {0};
    for (int64_t first = 0, width; first < rows; first += width) {
        width = panel_width(rows - first, has_tall_tiles(K, 1));
        float *panel = panels + first * K + k * width;
        for (int64_t m = 0; m < width; m += 8) {
            for (int64_t i = 0; i < 8; i++) {
                if (first + m + i < rows) round_pairs(x + (first + m + i) * inputs + 2 * k, 2 * depth, rounded + 8 * i);
                else memset(rounded + 8 * i, 0, sizeof(float) * 8);
            }
            if (depth == 8) {
                transpose8(rounded, 8, panel + m, width);
                continue;
            }
            for (int64_t j = 0; j < depth; j++)
                for (int64_t i = 0; i < 8; i++) panel[j * width + m + i] = rounded[8 * i + j];
        }
    }
}

/* tile[r][..] = weight rows r times one panel of NUM vectors of type V. While it runs, the rows of the following tile,
 * which lie right behind, are fetched into L2: the hardware gives up on so many short streams. */
#define DEFINE_TILE(NAME, V, V_MEM, NUM, ROWS, ADD)                                                                    \
    static void NAME(const float *weight, int64_t K, const float *panel, float *tile, int64_t tile_stride) {          \
        enum { WIDTH = sizeof(V) / sizeof(float) * (NUM) };                                                            \
        V acc[ROWS][NUM];                                                                                              \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < NUM; j++) acc[r][j] = (V){0};                 \
        const float *ahead = weight + ROWS * K;                                                                        \
        int64_t k = 0;                                                                                                 \
        for (; k + 4 <= K; k += 4) {                                                                                   \
            UNROLL for (int line = 0; line < ROWS / 4; line++) __builtin_prefetch(ahead + line * 16, 0, 2);            \
            ahead += ROWS * 4;                                                                                         \
            UNROLL for (int i = 0; i < 4; i++) TILE_STEP(V, V_MEM, NUM, ROWS, k + i, ADD)                              \
        }                                                                                                              \
        for (; k < K; k++) TILE_STEP(V, V_MEM, NUM, ROWS, k, ADD)                                                      \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < NUM; j++)                                     \
            ((V_MEM *)(tile + r * tile_stride))[j] = acc[r][j];                                                        \
    }
#define TILE_STEP(V, V_MEM, NUM, ROWS, DEPTH, ADD)                                                                     \
    {                                                                                                                  \
        V x[NUM];                                                                                                      \
        UNROLL for (int j = 0; j < NUM; j++) x[j] = ((const V_MEM *)(panel + (DEPTH) * WIDTH))[j];                     \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < NUM; j++)                                     \
            ADD(V, acc[r][j], weight + r * K + (DEPTH), x[j]);                                                         \
    }
#define ADD_FLOATS(V, ACC, AT, X) ACC += *(AT) * X
#define ADD_PAIRS(V, ACC, AT, X) ACC = dot_##V(ACC, splat_##V(AT), X)
DEFINE_TILE(tile_wide, vec, vec_mem, 2, WIDE_ROWS, ADD_FLOATS)
DEFINE_TILE(pair_wide, vec, vec_mem, 2, WIDE_ROWS, ADD_PAIRS)
#if defined(__AVX512F__)
DEFINE_TILE(tile_single, vec, vec_mem, 1, TILE_ROWS, ADD_FLOATS)
DEFINE_TILE(pair_single, vec, vec_mem, 1, TILE_ROWS, ADD_PAIRS)
DEFINE_TILE(pair_tall, vec, vec_mem, 1, GROUP_ROWS, ADD_PAIRS)
#endif
DEFINE_TILE(tile_half, vec8, vec8_mem, 1, TILE_ROWS, ADD_FLOATS)
DEFINE_TILE(pair_half, vec8, vec8_mem, 1, TILE_ROWS, ADD_PAIRS)

/* One block of rows of x against the whole weight. */
typedef struct {
    const float *weight, *x, *bias; /* x: panels for tiles, rows for dot products; bias may be NULL */
    int64_t N, K, M;
    float *out;
    int is_paired;
} Linear;

#if defined(__AVX512F__)
/* `multiply_group` of a whole group with pairs, whose last panel is one vector wide. */
static void multiply_tall(const Linear *p, int64_t row) {
    float tile[GROUP_ROWS * BLOCK_COLS];
    const float *w = p->weight + row * p->K;
    int64_t K = p->K, M = p->M, first = 0;
    for (; first + LANES < M; first += 2 * LANES)
        for (int r = 0; r < GROUP_ROWS; r += WIDE_ROWS)
            pair_wide(w + r * K, K, p->x + first * K, tile + r * BLOCK_COLS + first, BLOCK_COLS);
    pair_tall(w, K, p->x + first * K, tile + first, BLOCK_COLS);
    for (int r = 0; r < GROUP_ROWS; r += 8) {
        int64_t at = row + r, m = 0;
        for (; m + 8 <= M; m += 8)
            turn8(1, tile + r * BLOCK_COLS + m, BLOCK_COLS, p->out + m * p->N + at, p->N,
                  p->bias ? load8(p->bias + at) : splat8(0));
        for (; m < M; m++)
            for (int64_t i = 0; i < 8; i++)
                p->out[m * p->N + at + i] = tile[(r + i) * BLOCK_COLS + m] + (p->bias ? p->bias[at + i] : 0);
    }
}
#endif

/* Columns of `out` [row, row + count) from the packed x, count <= GROUP_ROWS. Needs N >= TILE_ROWS. */
static void multiply_group(const Linear *p, int64_t row, int64_t count) {
    float tile[TILE_ROWS * BLOCK_COLS], *out = p->out;
    const float *bias = p->bias;
    int64_t N = p->N, K = p->K, M = p->M;
    int is_tall = has_tall_tiles(K, p->is_paired);
#if defined(__AVX512F__)
    if (is_tall && count == GROUP_ROWS && M % (2 * LANES) > 0 && M % (2 * LANES) <= LANES) {
        multiply_tall(p, row);
        return;
    }
#endif
    for (int64_t done = 0; done < count; done += TILE_ROWS) {
        /* The last tile may reach back over rows that are written already: they are computed again and left out. */
        int64_t start = min_of(row + done, N - TILE_ROWS);
        int64_t skip = row + done - start, rows = min_of(TILE_ROWS, row + count - start);
        const float *w = p->weight + start * K;
        for (int64_t first = 0, width; first < M; first += width) {
            const float *panel = p->x + first * K;
            width = panel_width(M - first, is_tall);
            if (width == 2 * LANES) {
                for (int r = 0; r < TILE_ROWS; r += WIDE_ROWS)
                    (p->is_paired ? pair_wide : tile_wide)(w + r * K, K, panel, tile + r * BLOCK_COLS + first,
                                                           BLOCK_COLS);
            } else if (width == 8) {
                (p->is_paired ? pair_half : tile_half)(w, K, panel, tile + first, BLOCK_COLS);
            } else {
#if defined(__AVX512F__)
                (p->is_paired ? pair_single : tile_single)(w, K, panel, tile + first, BLOCK_COLS);
#endif
            }
        }
        for (int64_t m = 0; m < M; m += 8) {
            if (skip == 0 && rows == TILE_ROWS && m + 8 <= M) {
                turn8(1, tile + m, BLOCK_COLS, out + m * N + start, N, bias ? load8(bias + start) : splat8(0));
                continue;
            }
            for (int64_t i = m; i < min_of(m + 8, M); i++)
                for (int64_t r = skip; r < rows; r++)
                    out[i * N + start + r] = tile[r * BLOCK_COLS + i] + (bias ? bias[start + r] : 0);
        }
    }
}

/* out[i][r] for `rows` rows of the weight from `row` on and `cols` rows of x from `col` on, both small constants after
 * inlining, as `is_paired` is. */
INLINE void dots(const int is_paired, const int rows, const int cols, const Linear *p, int64_t row, int64_t col) {
    vec acc[2][DOT_COLS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int i = 0; i < cols; i++) acc[r][i] = (vec){0};
    const int64_t K = p->K;
    const float *weight = p->weight + row * K, *x = p->x + col * K;
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        vec w[2];
        UNROLL for (int r = 0; r < rows; r++) {
            w[r] = *(const vec_mem *)(weight + r * K + k);
            __builtin_prefetch(weight + PREFETCH_FLOATS + k * rows + r * LANES, 0, 2);
        }
        UNROLL for (int i = 0; i < cols; i++) {
            vec v = *(const vec_mem *)(x + i * K + k);
            UNROLL for (int r = 0; r < rows; r++)
                acc[r][i] = is_paired ? dot_vec(acc[r][i], w[r], v) : acc[r][i] + w[r] * v;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int i = 0; i < cols; i++) {
        if (is_paired && k < K)
            acc[r][i] = dot_vec(acc[r][i], load_part(weight + r * K + k, K - k, 0), load_part(x + i * K + k, K - k, 0));
        float sum = sum_lanes(acc[r][i]) + (p->bias ? p->bias[row + r] : 0);
        for (int64_t rest = is_paired ? K : k; rest < K; rest++) sum += weight[r * K + rest] * x[i * K + rest];
        p->out[(col + i) * p->N + row + r] = sum;
    }
}

INLINE void dot_rows(const int is_paired, const Linear *p, int64_t row, int64_t count) {
    for (int64_t r = row; r < row + count; r += 2) {
        int pair = r + 1 < row + count;
        for (int64_t m = 0; m < p->M; m += DOT_COLS) {
            int64_t left = p->M - m;
            if (!pair)
                for (int64_t i = m; i < min_of(p->M, m + DOT_COLS); i++) dots(is_paired, 1, 1, p, r, i);
            else if (left == 1) dots(is_paired, 2, 1, p, r, m);
            else if (left == 2) dots(is_paired, 2, 2, p, r, m);
            else if (left == 3) dots(is_paired, 2, 3, p, r, m);
            else dots(is_paired, 2, 4, p, r, m);
        }
    }
}

/* `p` in blocks of rows of x[M,inputs]; scratch holds inputs * (BLOCK_COLS + 32) floats. */
static void multiply_blocks(Linear p, const float *x, int64_t M, int64_t inputs, float *scratch, int threads) {
    float *out = p.out;
    if (p.N * p.K < SERIAL_FLOATS) threads = 1;
    for (int64_t m = 0; m < M; m += BLOCK_COLS) {
        const float *rows = x + m * inputs;
        p.M = min_of(BLOCK_COLS, M - m), p.out = out + m * p.N;
        int by_dots = p.M <= DOT_COLS || p.N < TILE_ROWS;
        p.x = by_dots && !p.is_paired ? rows : scratch;
        for (int64_t i = 0; i < p.M && by_dots && p.is_paired; i++)
            round_pairs(rows + i * inputs, inputs, scratch + i * p.K);
#pragma omp parallel num_threads(team_of(threads))
        {
            if (!by_dots) {
#pragma omp for schedule(static)
                for (int64_t k = 0; k < p.K; k += 8) {
                    if (p.is_paired) pack_pairs(rows, p.M, inputs, k, scratch);
                    else pack_columns(rows, p.M, p.K, k, scratch);
                }
            }
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < p.N; row += GROUP_ROWS) {
                int64_t count = min_of(GROUP_ROWS, p.N - row);
                if (!by_dots) multiply_group(&p, row, count);
                else if (p.is_paired) dot_rows(1, &p, row, count);
                else dot_rows(0, &p, row, count);
            }
        }
    }
}

/* out = x weight^T + bias, bias may be NULL; scratch holds K * (BLOCK_COLS + 32) floats. */
void tw_linear(const float *x, int64_t M, int64_t K, const float *weight, int64_t N, const float *bias, float *out,
               float *scratch, int threads) {
    Linear p = {.weight = weight, .bias = bias, .N = N, .K = K, .out = out};
    multiply_blocks(p, x, M, K, scratch, threads);
}

/* The same with x rounded to bfloat16 and a weight of bfloat16; K is even. */
void tw_linear_pairs(const float *x, int64_t M, int64_t K, const void *weight, int64_t N, const float *bias, float *out,
                     float *scratch, int threads) {
    Linear p = {.weight = weight, .bias = bias, .N = N, .K = K / 2, .out = out, .is_paired = 1};
    multiply_blocks(p, x, M, K, scratch, threads);
}

/* Whether this processor has an instruction for the dot products of pairs, and the library uses it. */
int tw_has_pair_dots(void) {
#if HAS_PAIR_DOTS
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return 0;
#endif
}
