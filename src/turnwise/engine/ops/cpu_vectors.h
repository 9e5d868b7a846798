/* Vectors of floats for the CPU kernels.
 *
 * They are GCC/Clang vector extensions, so this compiles for any target; intrinsics appear only where the extensions
 * have no good spelling (max, horizontal sums, transposes) and each has a plain fallback. Everything must be built
 * without -ffast-math: masked logits are -inf and a NaN has to stay visible.
 */
#ifndef TURNWISE_CPU_VECTORS_H
#define TURNWISE_CPU_VECTORS_H
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

/* Set where other work leaves all threads together less than one core: then one of them does the work. How a kernel
 * splits its work follows `threads` in any case, so that results do not depend on this. */
extern volatile int tw_is_alone;
#define team_of(threads) (tw_is_alone ? 1 : (threads))

#define INLINE static inline __attribute__((always_inline))
/* Before loops over register arrays: the arrays live in registers only if every index is a constant. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vec8 __attribute__((vector_size(32)));
typedef uint32_t bits8 __attribute__((vector_size(32)));
/* The same vector at any float address. */
typedef float vec8_mem __attribute__((vector_size(32), aligned(4), may_alias));

/* The widest vector. */
#if defined(__AVX512F__)
enum { LANES = 16 };
typedef float vec __attribute__((vector_size(64)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef float vec_mem __attribute__((vector_size(64), aligned(4), may_alias));
#else
enum { LANES = 8 };
typedef vec8 vec;
typedef bits8 bits;
typedef vec8_mem vec_mem;
#endif

/* With fewer floats to read than this a second thread costs more than it brings. */
enum { SERIAL_FLOATS = 1 << 15 };

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE vec8 load8(const float *p) { return *(const vec8_mem *)p; }
INLINE void store8(float *p, vec8 v) { *(vec8_mem *)p = v; }
INLINE vec8 splat8(float f) { return (vec8){f, f, f, f, f, f, f, f}; }
INLINE vec load(const float *p) { return *(const vec_mem *)p; }
INLINE void store(float *p, vec v) { *(vec_mem *)p = v; }
/* p is at a multiple of the vector's size. Whoever reads it in another thread waits for `finish_stores` here. */
INLINE void store_past_caches(float *p, vec v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__)
    _mm256_stream_ps(p, (__m256)v);
#else
    store(p, v);
#endif
}
INLINE void finish_stores(void) {
#if defined(__AVX__)
    _mm_sfence();
#endif
}
INLINE vec splat(float f) { return (vec){0} + f; }

/* The first `count` floats, `rest` in the other lanes; and back. For the ends of rows. */
INLINE vec load_part(const float *p, int64_t count, float rest) {
    float lanes[LANES];
    UNROLL for (int i = 0; i < LANES; i++) lanes[i] = rest;
    memcpy(lanes, p, sizeof(float) * count);
    return load(lanes);
}
INLINE void store_part(float *p, vec v, int64_t count) {
    float lanes[LANES];
    store(lanes, v);
    memcpy(p, lanes, sizeof(float) * count);
}

/* a where a > b, else b: with a NaN on either side the result is b. */
INLINE vec8 max8(vec8 a, vec8 b) {
#if defined(__AVX2__)
    return (vec8)_mm256_max_ps((__m256)a, (__m256)b);
#else
    bits8 take_a = (bits8)(a > b);
    return (vec8)(((bits8)a & take_a) | ((bits8)b & ~take_a));
#endif
}

INLINE vec max_vec(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return max8(a, b);
#endif
}

INLINE float sum8(vec8 v) {
    float half[4];
    UNROLL for (int i = 0; i < 4; i++) half[i] = v[i] + v[i + 4];
    return (half[0] + half[2]) + (half[1] + half[3]);
}

INLINE float sum_lanes(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    return sum8(v);
#endif
}

INLINE float max_of_lanes(vec8 v) {
    float m = v[0];
    UNROLL for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
    return m;
}

INLINE float max_of_vec(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return max_of_lanes(v);
#endif
}

/* exp(x) for x <= 0, to about 1e-7 relative; 0 below the smallest normal result, NaN for NaN.
 * x = n ln2 + r with |r| <= ln2/2, exp(r) by its Taylor series (the first term left out is below 6e-9), 2^n by bits. */
#define DEFINE_EXP(NAME, V, BITS, MAX)                                                                                 \
    INLINE V NAME(V x) {                                                                                               \
        const V lowest = (V){0} + -87.33654f; /* exp(lowest) = FLT_MIN */                                              \
        const float to_int = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, kept in the mantissa */       \
        V clamped = MAX(lowest, x);                                                                                    \
        V shifted = clamped * 1.44269504f + to_int;                                                                    \
        V n = shifted - to_int;                                                                                        \
        V r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f; /* ln2 in two parts; n times the first is exact */   \
        V p = (V){0} + 1.0f / 5040;                                                                                    \
        p = p * r + 1.0f / 720;                                                                                        \
        p = p * r + 1.0f / 120;                                                                                        \
        p = p * r + 1.0f / 24;                                                                                         \
        p = p * r + 1.0f / 6;                                                                                          \
        p = p * r + 0.5f;                                                                                              \
        p = p * r + 1.0f;                                                                                              \
        p = p * r + 1.0f;                                                                                              \
        V power = (V)(((BITS)shifted << 23u) + (127u << 23));                                                          \
        return (V)((BITS)(p * power) & ~(BITS)(x < lowest));                                                           \
    }
DEFINE_EXP(exp8, vec8, bits8, max8)
#if defined(__AVX512F__)
DEFINE_EXP(exp_vec, vec, bits, max_vec)
#else
INLINE vec exp_vec(vec x) { return exp8(x); }
#endif

/* tanh(x) to about 1e-7: a continued fraction near 0, where 1 - exp(-2x) would cancel, and exponentials beyond. */
#define DEFINE_TANH(NAME, V, BITS, EXP)                                                                                \
    INLINE V NAME(V x) {                                                                                               \
        V size = (V)((BITS)x & 0x7fffffffu), square = x * x, e = EXP(size * -2.0f);                                    \
        V top = ((square + 378.0f) * square + 17325.0f) * square + 135135.0f;                                          \
        V bottom = ((square * 28.0f + 3150.0f) * square + 62370.0f) * square + 135135.0f;                              \
        BITS is_small = (BITS)(size < 1.0f);                                                                           \
        BITS near = (BITS)(size * top / bottom) & is_small, far = (BITS)((1.0f - e) / (1.0f + e)) & ~is_small;         \
        return (V)(near | far | ((BITS)x & 0x80000000u));                                                              \
    }
DEFINE_TANH(tanh8, vec8, bits8, exp8)
#if defined(__AVX512F__)
DEFINE_TANH(tanh_vec, vec, bits, exp_vec)
#else
INLINE vec tanh_vec(vec x) { return tanh8(x); }
#endif

/* dst[j][i] = src[i][j], 8 x 8, with bias[i] added where `is_added`; else the bits stay as they are. */
INLINE void turn8(const int is_added, const float *src, int64_t src_stride, float *dst, int64_t dst_stride, vec8 bias) {
#if defined(__AVX2__)
    __m256 a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(src + i * src_stride);
    UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        vec8 low = (vec8)_mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
        vec8 high = (vec8)_mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
        store8(dst + i * dst_stride, is_added ? low + bias : low);
        store8(dst + (i + 4) * dst_stride, is_added ? high + bias : high);
    }
#else
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 8; i++)
            dst[j * dst_stride + i] = is_added ? src[i * src_stride + j] + bias[i] : src[i * src_stride + j];
#endif
}
INLINE void transpose8(const float *src, int64_t src_stride, float *dst, int64_t dst_stride) {
    turn8(0, src, src_stride, dst, dst_stride, splat8(0));
}

/* ---- Pairs --------------------------------------------------------------------------------------------------------
 *
 * Two bfloat16 numbers that are neighbours in a sum, the first in the low half, in the place of one float. Whatever
 * moves floats moves pairs; only products and roundings know the difference.
 */

/* acc + a.first b.first + a.second b.second in every lane, summed in float32. */
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#define HAS_PAIR_DOTS 1
INLINE vec8 dot_vec8(vec8 acc, vec8 a, vec8 b) {
    return (vec8)_mm256_dpbf16_ps((__m256)acc, (__m256bh)a, (__m256bh)b);
}
INLINE vec dot_vec(vec acc, vec a, vec b) {
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
#else
#define HAS_PAIR_DOTS 0
#define DEFINE_DOT(NAME, V, BITS)                                                                                      \
    INLINE V NAME(V acc, V a, V b) {                                                                                   \
        acc += (V)((BITS)a << 16u) * (V)((BITS)b << 16u);                                                              \
        return acc + (V)((BITS)a & 0xffff0000u) * (V)((BITS)b & 0xffff0000u);                                          \
    }
DEFINE_DOT(dot_vec8, vec8, bits8)
DEFINE_DOT(dot_vec, vec, bits)
#endif

/* The pair at `p` in every lane. Adding 0 to a float would change the bits of some pairs. */
INLINE uint32_t pair_at(const float *p) {
    uint32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return pair;
}
INLINE vec8 splat_vec8(const float *p) { return (vec8)((bits8){0} + pair_at(p)); }
INLINE vec splat_vec(const float *p) { return (vec)((bits){0} + pair_at(p)); }

/* The nearest bfloat16, the even one of two; NaN stays NaN. */
INLINE uint32_t round_float(float f) {
    uint32_t wide;
    memcpy(&wide, &f, sizeof(wide));
    return f != f ? (wide >> 16) | 0x40u : (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
}

/* `count` floats as pairs, (count + 1) / 2 of them; behind an odd one stands 0. */
INLINE void round_pairs(const float *from, int64_t count, float *to) {
    int64_t i = 0;
#if HAS_PAIR_DOTS
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256((__m256i *)(to + i / 2), (__m256i)_mm512_cvtneps_pbh((__m512)load(from + i)));
#endif
    for (; i < count; i += 2) {
        uint32_t pair = round_float(from[i]) | (i + 1 < count ? round_float(from[i + 1]) << 16 : 0);
        memcpy(to + i / 2, &pair, sizeof(pair));
    }
}

#endif
