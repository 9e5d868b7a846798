/* The steps between a decoder layer's matrix products, float32, for the CPU: norm, rotation, gate, forward and backward.
 *
 * Each is bound by memory: it reads its inputs once and writes its outputs once, row by row, rows shared among threads.
 * The arithmetic is that of `torch_layers.py`.
 */
#include "cpu_kernels.h"
#include "cpu_vectors.h"

/* Run the code for every vector of a row of SIZE floats: `i` is where it starts and `count` how many lanes are real.
 * The full ones come as a loop of their own, in which `count` is a constant and the loads and stores are plain. */
#define FOR_VECTORS(SIZE, ...)                                                                                         \
    {                                                                                                                  \
        int64_t i = 0;                                                                                                 \
        for (; i + LANES <= (SIZE); i += LANES) {                                                                      \
            const int count = LANES;                                                                                   \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
        if (i < (SIZE)) {                                                                                              \
            const int count = (int)((SIZE)-i);                                                                         \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }

INLINE vec get(const float *p, int count) {
    return __builtin_constant_p(count) ? load(p) : load_part(p, count, 0);
}
INLINE void put(float *p, vec v, int count) {
    if (__builtin_constant_p(count)) store(p, v);
    else store_part(p, v, count);
}

/* ---- Norm ------------------------------------------------------------------------------------------------------- */

/* out_h = h + delta (delta may be NULL: then h itself counts and out_h is not written), x = norm(out_h) * weight. */
void tw_add_norm(const float *h, const float *delta, const float *weight, float eps, float *out_h, float *x,
                 float *rstd, int64_t rows, int64_t size, int threads) {
    if (rows * size < SERIAL_FLOATS) threads = 1;
#pragma omp parallel for num_threads(team_of(threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = h + row * size;
        vec squares = {0};
        if (delta) {
            const float *more = delta + row * size;
            float *sum = out_h + row * size;
            FOR_VECTORS(size, {
                vec v = get(from + i, count) + get(more + i, count);
                put(sum + i, v, count);
                squares += v * v;
            })
            from = sum;
        } else {
            FOR_VECTORS(size, {
                vec v = get(from + i, count);
                squares += v * v;
            })
        }
        float inverse = 1 / sqrtf(sum_lanes(squares) / size + eps);
        float *to = x + row * size;
        FOR_VECTORS(size, put(to + i, get(from + i, count) * inverse * get(weight + i, count), count);)
        rstd[row] = inverse;
    }
}

/* out = rstd * (dx * weight - h * rstd^2 * mean(dx * weight * h)), added to what is there where `is_added`. */
void tw_norm_backward(const float *dx, const float *h, const float *rstd, const float *weight, float *out, int is_added,
                      int64_t rows, int64_t size, int threads) {
    if (rows * size < SERIAL_FLOATS) threads = 1;
#pragma omp parallel for num_threads(team_of(threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *grad = dx + row * size, *own = h + row * size;
        float *to = out + row * size;
        vec along = {0};
        FOR_VECTORS(size, along += get(grad + i, count) * get(weight + i, count) * get(own + i, count);)
        float inverse = rstd[row], slope = inverse * inverse * inverse * (sum_lanes(along) / size);
        if (is_added) {
            FOR_VECTORS(size, {
                vec v = get(grad + i, count) * get(weight + i, count) * inverse - get(own + i, count) * slope;
                put(to + i, get(to + i, count) + v, count);
            })
        } else {
            FOR_VECTORS(size, {
                vec v = get(grad + i, count) * get(weight + i, count) * inverse - get(own + i, count) * slope;
                put(to + i, v, count);
            })
        }
    }
}

/* ---- Heads and rotary position ---------------------------------------------------------------------------------- */

/* Whether every row's index is within 0 .. num - 1. */
static int all_exist(const int64_t *indices, int64_t rows, int64_t num) {
    for (int64_t row = 0; row < rows; row++)
        if (indices[row] < 0 || indices[row] >= num) return 0;
    return 1;
}

INLINE float head_rstd(const float *head, int64_t D, float eps) {
    vec squares = {0};
    FOR_VECTORS(D, {
        vec v = get(head + i, count);
        squares += v * v;
    })
    return 1 / sqrtf(sum_lanes(squares) / D + eps);
}

/* to = the head, normed where `norm` is given, each pair (i, i + D / 2) turned by the angle. */
INLINE void turn_head(const float *head, const float *norm, float eps, const float *cos, const float *sin, int64_t D,
                      float *to) {
    int64_t half = D / 2;
    if (!norm) {
        FOR_VECTORS(half, {
            vec a = get(head + i, count), b = get(head + half + i, count);
            vec c = get(cos + i, count), s = get(sin + i, count);
            put(to + i, a * c - b * s, count);
            put(to + half + i, b * c + a * s, count);
        })
        return;
    }
    float inverse = head_rstd(head, D, eps);
    FOR_VECTORS(half, {
        vec a = get(head + i, count) * inverse * get(norm + i, count);
        vec b = get(head + half + i, count) * inverse * get(norm + half + i, count);
        vec c = get(cos + i, count), s = get(sin + i, count);
        put(to + i, a * c - b * s, count);
        put(to + half + i, b * c + a * s, count);
    })
}

/* to = gradient of the head as it came from the projection. `raw` is that head where it was normed. */
INLINE void turn_head_back(const float *grad, const float *raw, const float *norm, float eps, const float *cos,
                           const float *sin, int64_t D, float *to) {
    int64_t half = D / 2;
    FOR_VECTORS(half, {
        vec a = get(grad + i, count), b = get(grad + half + i, count);
        vec c = get(cos + i, count), s = get(sin + i, count);
        put(to + i, a * c + b * s, count);
        put(to + half + i, b * c - a * s, count);
    })
    if (!raw) return;
    float inverse = head_rstd(raw, D, eps);
    vec along = {0};
    FOR_VECTORS(D, along += get(to + i, count) * get(norm + i, count) * get(raw + i, count);)
    float slope = inverse * inverse * inverse * (sum_lanes(along) / D);
    FOR_VECTORS(D, {
        vec v = get(to + i, count) * get(norm + i, count) * inverse - get(raw + i, count) * slope;
        put(to + i, v, count);
    })
}

/* qkv [rows, (Q + 2 K) D] -> query [rows, Q, D], key [rows, K, D], or turned in place where both are NULL. With a cache
 * (keys, values [num_slots, K, D]) the row's key and value also go to its slot. Returns 0, or 1 if a position or a slot
 * does not exist. */
int tw_rotate(float *qkv, const float *cos, const float *sin, const int64_t *positions, int64_t num_positions,
              const float *query_norm, const float *key_norm, float eps, float *query, float *key, float *cache_keys,
              float *cache_values, const int64_t *slots, int64_t num_slots, int64_t rows, int64_t query_heads,
              int64_t kv_heads, int64_t D, int threads) {
    if (!all_exist(positions, rows, num_positions) || (slots && !all_exist(slots, rows, num_slots))) return 1;
    int64_t width = (query_heads + 2 * kv_heads) * D, kv_width = kv_heads * D;
    if (rows * width < SERIAL_FLOATS) threads = 1;
#pragma omp parallel for num_threads(team_of(threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *from = qkv + row * width, *own_query = query ? query + row * query_heads * D : from;
        const float *c = cos + positions[row] * (D / 2), *s = sin + positions[row] * (D / 2);
        for (int64_t h = 0; h < query_heads; h++)
            turn_head(from + h * D, query_norm, eps, c, s, D, own_query + h * D);
        from += query_heads * D;
        float *own_key = key ? key + row * kv_width : from;
        for (int64_t h = 0; h < kv_heads; h++) turn_head(from + h * D, key_norm, eps, c, s, D, own_key + h * D);
        if (slots) {
            memcpy(cache_keys + slots[row] * kv_width, own_key, sizeof(float) * kv_width);
            memcpy(cache_values + slots[row] * kv_width, from + kv_width, sizeof(float) * kv_width);
        }
    }
    return 0;
}

/* Gradients of query, key and value -> of qkv. `strides` holds (token, head) strides in floats of each of the three;
 * `qkv` is NULL where heads are not normed. Returns 0, or 1 if a position does not exist. */
int tw_rotate_backward(const float *dquery, const float *dkey, const float *dvalue, const int64_t *strides,
                       const float *qkv, const float *cos, const float *sin, const int64_t *positions,
                       int64_t num_positions, const float *query_norm, const float *key_norm, float eps, float *out,
                       int64_t rows, int64_t query_heads, int64_t kv_heads, int64_t D, int threads) {
    if (!all_exist(positions, rows, num_positions)) return 1;
    int64_t width = (query_heads + 2 * kv_heads) * D, key_start = query_heads * D, value_start = key_start + kv_heads * D;
    if (rows * width < SERIAL_FLOATS) threads = 1;
#pragma omp parallel for num_threads(team_of(threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cos + positions[row] * (D / 2), *s = sin + positions[row] * (D / 2);
        const float *raw = qkv ? qkv + row * width : NULL;
        float *to = out + row * width;
        for (int64_t h = 0; h < query_heads; h++)
            turn_head_back(dquery + row * strides[0] + h * strides[1], raw ? raw + h * D : NULL, query_norm, eps, c, s,
                           D, to + h * D);
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t at = key_start + h * D;
            turn_head_back(dkey + row * strides[2] + h * strides[3], raw ? raw + at : NULL, key_norm, eps, c, s, D,
                           to + at);
            memcpy(to + value_start + h * D, dvalue + row * strides[4] + h * strides[5], sizeof(float) * D);
        }
    }
    return 0;
}

/* ---- Gate ------------------------------------------------------------------------------------------------------- */

/* 1 / (1 + exp(-x)), from exp(-|x|), which never overflows and keeps small results exact. */
INLINE vec sigmoid(vec x) {
    vec e = exp_vec((vec)((bits)x | 0x80000000u));
    bits is_negative = (bits)(x < 0);
    vec numerator = (vec)(((bits)e & is_negative) | ((bits)splat(1) & ~is_negative));
    return numerator / (1 + e);
}

/* act [rows, size] = silu(gate) * up, from gate_up [rows, 2 size], whose rows start `stride` floats apart. */
void tw_swiglu(const float *gate_up, int64_t stride, float *act, int64_t rows, int64_t size, int threads) {
    if (rows * size < SERIAL_FLOATS) threads = 1;
#pragma omp parallel for num_threads(team_of(threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * stride, *up = gate + size;
        float *to = act + row * size;
        FOR_VECTORS(size, {
            vec g = get(gate + i, count);
            put(to + i, g * sigmoid(g) * get(up + i, count), count);
        })
    }
}

/* In place: gate_up becomes its gradient, dact becomes the activation. */
void tw_swiglu_backward(float *dact, float *gate_up, int64_t stride, int64_t rows, int64_t size, int threads) {
    if (rows * size < SERIAL_FLOATS) threads = 1;
#pragma omp parallel for num_threads(team_of(threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *gate = gate_up + row * stride, *up = gate + size, *to = dact + row * size;
        FOR_VECTORS(size, {
            vec g = get(gate + i, count), u = get(up + i, count), d = get(to + i, count);
            vec s = sigmoid(g), silu = g * s;
            put(gate + i, d * u * (s + silu * (1 - s)), count);
            put(up + i, d * silu, count);
            put(to + i, silu * u, count);
        })
    }
}
