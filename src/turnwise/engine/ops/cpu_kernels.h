/* The kernels that `cpu_pass.c` calls one after the other; each is described where it is defined. */
#ifndef TURNWISE_CPU_KERNELS_H
#define TURNWISE_CPU_KERNELS_H
#include <stdint.h>

void tw_linear(const float *x, int64_t M, int64_t K, const float *weight, int64_t N, const float *bias, float *out,
               float *scratch, int threads);
void tw_linear_pairs(const float *x, int64_t M, int64_t K, const void *weight, int64_t N, const float *bias, float *out,
                     float *scratch, int threads);
void tw_product(float *const *data, const int64_t *strides, const int64_t *sizes, float alpha, float scale,
                int is_added, int is_paired, float *scratch, int threads);
void tw_add_norm(const float *h, const float *delta, const float *weight, float eps, float *out_h, float *x,
                 float *rstd, int64_t rows, int64_t size, int threads);
int tw_rotate(float *qkv, const float *cos, const float *sin, const int64_t *positions, int64_t num_positions,
              const float *query_norm, const float *key_norm, float eps, float *query, float *key, float *cache_keys,
              float *cache_values, const int64_t *slots, int64_t num_slots, int64_t rows, int64_t query_heads,
              int64_t kv_heads, int64_t D, int threads);
void tw_swiglu(const float *gate_up, int64_t stride, float *act, int64_t rows, int64_t size, int threads);
int tw_paged_decode(const float *query, int64_t query_stride, const float *keys, int64_t key_stride,
                    const float *values, int64_t value_stride, const int32_t *block_table, const int32_t *context_lens,
                    float *out, int64_t B, int64_t heads, int64_t kv_heads, int64_t D, int64_t num_blocks,
                    int64_t block_size, int64_t max_blocks, float scale, float softcap, int64_t window,
                    const float *sinks, int threads);
int tw_attend_cache(void *const *data, const int64_t *strides, const int64_t *sizes, const int64_t *chunks,
                    const int64_t *blocks, float scale, float softcap, int threads);

#endif
