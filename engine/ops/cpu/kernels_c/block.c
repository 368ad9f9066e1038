/* The small operations, the blocks and the whole decoder: one parallel region each, the residual in float32. */
#include "kernels.h"
#include <float.h>
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

/* One head in e4m3: the largest value becomes 448. What is not finite makes the scale so. */
static void quantise_head(const bf16 *in, int64_t dim, uint8_t *out, float *scale) {
  __m512i top = _mm512_setzero_si512(); /* as integers, so that NaN is the largest */
  for (int64_t i = 0; i < dim; i += 16)
    top = _mm512_max_epi32(top, _mm512_castps_si512(_mm512_abs_ps(widen(in + i))));
  int32_t bits = _mm512_reduce_max_epi32(top);
  float largest;
  memcpy(&largest, &bits, 4);
  *scale = largest / 448.0f;
  if (*scale < FLT_MIN) *scale = FLT_MIN;
  __m512 by = _mm512_set1_ps(*scale), most = _mm512_set1_ps(448.0f);
  for (int64_t i = 0; i < dim; i += 16) {
    __m512 v = _mm512_div_ps(widen(in + i), by);
    to_e4m3(out + i, _mm512_max_ps(_mm512_min_ps(v, most), _mm512_sub_ps(_mm512_setzero_ps(), most)));
  }
}

/* qkv -> q (rotated) and the slots of K (rotated) and V. */
void prepare_rows(const Step *s, const Attention *w, const Cache *c) {
  int64_t dim = w->dim, row = (w->heads + 2 * w->kv_heads) * dim;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < s->tokens; t++) {
    const bf16 *in = s->qkv + t * row;
    const float *cos = s->cos + s->positions[t] * (dim / 2), *sin = s->sin + s->positions[t] * (dim / 2);
    int64_t block = s->slots[t] / s->block_size, offset = s->slots[t] % s->block_size;
    for (int64_t h = 0; h < w->heads; h++)
      rotate_head(in + h * dim, w->q_norm, w->eps, cos, sin, dim, s->q + (t * w->heads + h) * dim);
    for (int64_t h = 0; h < w->kv_heads; h++) {
      int64_t slot = (block * w->kv_heads + h) * s->block_size + offset;
      const bf16 *key = in + (w->heads + h) * dim, *value = in + (w->heads + w->kv_heads + h) * dim;
      if (c->k_scale) {
        bf16 rotated[MAX_DIM];
        rotate_head(key, w->k_norm, w->eps, cos, sin, dim, rotated);
        quantise_head(rotated, dim, (uint8_t *)c->k + slot * dim, c->k_scale + slot);
        quantise_head(value, dim, (uint8_t *)c->v + slot * dim, c->v_scale + slot);
      } else {
        rotate_head(key, w->k_norm, w->eps, cos, sin, dim, (bf16 *)c->k + slot * dim);
        memcpy((bf16 *)c->v + slot * dim, value, dim * 2);
      }
    }
  }
}

/* kv: one layer of the cache [2][block][kv_head][slot][dim]; scale [2][block][kv_head][slot] or NULL. */
static Cache cache_of(const Step *s, const Attention *w, void *kv, float *scale) {
  int64_t slots = s->num_blocks * w->kv_heads * s->block_size;
  Cache c = {kv, (char *)kv + slots * w->dim * (scale ? 1 : 2), scale, scale ? scale + slots : 0};
  return c;
}

void kvtop_qkv_prepare(const Step *s, const Attention *w, void *kv, float *scale) {
  Cache c = cache_of(s, w, kv, scale);
#pragma omp parallel num_threads(s->threads)
  prepare_rows(s, w, &c);
}

void kvtop_attention(const Step *s, const Attention *w, void *kv, float *scale) {
  Cache c = cache_of(s, w, kv, scale);
#pragma omp parallel num_threads(s->threads)
  attend(s, w, &c);
}

/* Called after a kernel's last barrier: adds to times[kernel] the seconds since the kernel before it ended, which
 * times[TIMED] keeps. */
static inline void timed(const Step *s, int kernel) {
  if (!s->times || omp_get_thread_num()) return;
  double now = omp_get_wtime();
  s->times[kernel] += now - s->times[TIMED];
  s->times[TIMED] = now;
}

/* residual += out(attention(norm(residual))) */
static void attention_rows(const Step *s, const Attention *w, const Cache *c, float *residual) {
  norm_rows(residual, w->norm, w->eps, s->x, s->tokens, w->qkv.k);
  timed(s, NORM);
  linear_rows(s->x, &w->qkv, s->qkv, s->tokens, STORE_BF16);
  timed(s, QKV);
  prepare_rows(s, w, c);
  timed(s, QKV_PREPARE);
  attend(s, w, c);
  timed(s, ATTENTION);
  linear_rows(s->y, &w->out, residual, s->tokens, ADD_F32);
  timed(s, OUT);
}

/* residual += down(silu(gate) * up) of norm(residual) */
static void mlp_rows(const Step *s, const Mlp *w, float *residual) {
  norm_rows(residual, w->norm, w->eps, s->x, s->tokens, w->gate_up.k);
  timed(s, NORM);
  linear_rows(s->x, &w->gate_up, s->act, s->tokens, GATED);
  timed(s, GATE_UP);
  linear_rows(s->act, &w->down, residual, s->tokens, ADD_F32);
  timed(s, DOWN);
}

void kvtop_attention_block(const Step *s, const Attention *w, void *kv, float *scale, float *residual) {
  Cache c = cache_of(s, w, kv, scale);
#pragma omp parallel num_threads(s->threads)
  attention_rows(s, w, &c, residual);
}

void kvtop_mlp_block(const Step *s, const Mlp *w, float *residual) {
#pragma omp parallel num_threads(s->threads)
  mlp_rows(s, w, residual);
}

/* A whole step: ids [tokens] -> logits [samples, vocab] of the rows `wanted`. residual [tokens, hidden] and
 * last [samples, hidden] are scratch. One call and one parallel region, so that the caller's interpreter is
 * asked for nothing and the threads meet only at barriers. */
void kvtop_decoder(const Step *s, const Decoder *w, void *kv, float *scale, const int64_t *ids, const int64_t *wanted,
                   int64_t samples, float *residual, float *last, float *logits) {
  int64_t k = w->hidden;
  if (s->times) s->times[TIMED] = omp_get_wtime();
#pragma omp parallel num_threads(s->threads)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s->tokens; t++)
      for (int64_t i = 0; i < k; i += 16) {
        __mmask16 mask = k - i >= 16 ? 0xFFFF : (1u << (k - i)) - 1;
        __m256i v = _mm256_maskz_loadu_epi16(mask, w->embed + ids[t] * k + i);
        __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16);
        _mm512_mask_storeu_epi32(residual + t * k + i, mask, wide);
      }
    timed(s, EMBED);
    for (int64_t l = 0; l < w->layers; l++) {
      const Attention *a = w->attention + l;
      int64_t slots = 2 * s->num_blocks * a->kv_heads * s->block_size;
      Cache c = cache_of(s, a, (char *)kv + l * slots * a->dim * (scale ? 1 : 2), scale ? scale + l * slots : 0);
      attention_rows(s, a, &c, residual);
      mlp_rows(s, w->mlp + l, residual);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < samples; i++) memcpy(last + i * k, residual + wanted[i] * k, k * sizeof(float));
    norm_rows(last, w->norm, w->eps, s->x, samples, k);
    timed(s, NORM);
    linear_rows(s->x, &w->head, logits, samples, STORE_F32);
    timed(s, HEAD);
  }
}
