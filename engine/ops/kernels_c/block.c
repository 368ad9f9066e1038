/* The small operations and the blocks: one parallel region a block, the residual in float32. */
#include "kernels.h"
#include <math.h>
#include <omp.h>

static inline float inverse_rms(const float *x, int64_t k, float eps) {
  __m512 sum = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    __m512 v = _mm512_loadu_ps(x + i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  float total = _mm512_reduce_add_ps(sum);
  for (; i < k; i++) total += x[i] * x[i];
  return 1.0f / sqrtf(total / k + eps);
}

/* out [m, k] = residual / rms(residual) * weight */
void norm_rows(const float *residual, const float *weight, float eps, bf16 *out, int64_t m, int64_t k) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < m; r++) {
    const float *x = residual + r * k;
    __m512 scale = _mm512_set1_ps(inverse_rms(x, k, eps));
    for (int64_t i = 0; i < k; i += 16) {
      __mmask16 mask = k - i >= 16 ? 0xFFFF : (1u << (k - i)) - 1;
      __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale);
      v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + i));
      _mm256_mask_storeu_epi16(out + r * k + i, mask, (__m256i)_mm512_cvtneps_pbh(v));
    }
  }
}

/* One head: norm (where weight), rotation by (cos, sin), to `out`. dim is a multiple of 32. */
static inline void rotate_head(const bf16 *in, const float *weight, float eps, const float *cos, const float *sin,
                               int64_t dim, bf16 *out) {
  int64_t half = dim / 2;
  float x[MAX_DIM];
  for (int64_t i = 0; i < dim; i += 16) _mm512_storeu_ps(x + i, widen(in + i));
  if (weight) {
    __m512 scale = _mm512_set1_ps(inverse_rms(x, dim, eps));
    for (int64_t i = 0; i < dim; i += 16) {
      __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + i), scale);
      _mm512_storeu_ps(x + i, _mm512_mul_ps(v, _mm512_loadu_ps(weight + i)));
    }
  }
  for (int64_t i = 0; i < half; i += 16) {
    __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + half + i);
    __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
    narrow(out + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    narrow(out + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
}

/* qkv -> q (rotated) and the slots of K (rotated) and V. */
void prepare_rows(const Step *s, const Attention *w, bf16 *k_cache, bf16 *v_cache) {
  int64_t dim = w->dim, row = (w->heads + 2 * w->kv_heads) * dim;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->tokens; t++) {
    const bf16 *in = s->qkv + t * row;
    const float *cos = s->cos + s->positions[t] * (dim / 2), *sin = s->sin + s->positions[t] * (dim / 2);
    int64_t block = s->slots[t] / s->block_size, offset = s->slots[t] % s->block_size;
    for (int64_t h = 0; h < w->heads; h++)
      rotate_head(in + h * dim, w->q_norm, w->eps, cos, sin, dim, s->q + (t * w->heads + h) * dim);
    for (int64_t h = 0; h < w->kv_heads; h++) {
      int64_t at = ((block * w->kv_heads + h) * s->block_size + offset) * dim;
      rotate_head(in + (w->heads + h) * dim, w->k_norm, w->eps, cos, sin, dim, k_cache + at);
      memcpy(v_cache + at, in + (w->heads + w->kv_heads + h) * dim, dim * 2);
    }
  }
}

/* kv: one layer of the cache [2][block][kv_head][slot][dim]. */
static bf16 *values_of(const Step *s, const Attention *w, bf16 *kv) {
  return kv + s->num_blocks * w->kv_heads * s->block_size * w->dim;
}

void kvtop_qkv_prepare(const Step *s, const Attention *w, bf16 *kv) {
#pragma omp parallel num_threads(s->threads)
  prepare_rows(s, w, kv, values_of(s, w, kv));
}

void kvtop_attention(const Step *s, const Attention *w, bf16 *kv) {
#pragma omp parallel num_threads(s->threads)
  attend(s, w, kv, values_of(s, w, kv));
}

void kvtop_attention_block(const Step *s, const Attention *w, bf16 *kv, float *residual) {
  bf16 *v = values_of(s, w, kv);
#pragma omp parallel num_threads(s->threads)
  {
    norm_rows(residual, w->norm, w->eps, s->x, s->tokens, w->qkv.k);
    linear_rows(s->x, &w->qkv, s->qkv, s->tokens, STORE_BF16);
    prepare_rows(s, w, kv, v);
    attend(s, w, kv, v);
    linear_rows(s->y, &w->out, residual, s->tokens, ADD_F32);
  }
}

void kvtop_mlp_block(const Step *s, const Mlp *w, float *residual) {
#pragma omp parallel num_threads(s->threads)
  {
    norm_rows(residual, w->norm, w->eps, s->x, s->tokens, w->gate_up.k);
    linear_rows(s->x, &w->gate_up, s->act, s->tokens, GATED);
    linear_rows(s->act, &w->down, residual, s->tokens, ADD_F32);
  }
}
