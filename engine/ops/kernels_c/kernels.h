/* What the C kernels share: the structures that Python fills, bf16 and exp2 on AVX-512, the dot tile.
 *
 * Matrices are row-major. Weights are packed in panels of 32 output columns: [n / 32][k / 2][32][2], so
 * that one 64-byte load feeds 16 columns with a pair of k, which is what vdpbf16ps multiplies.
 * Structures mirror engine/ops/native.py field by field.
 *
 * Invariant: a result row never depends on the other rows. Every sum over k or over keys runs in one
 * order, whatever the tile, the batch, the number of threads.
 */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

#define PANEL 32  /* columns of a packed panel */
#define ROWS 12   /* most rows of a dot tile */
#define MAX_DIM 256
#define KEYS 128  /* keys that share a softmax pass; fixed, so that sums don't depend on the batch */

typedef struct {
  int64_t n, k, kp;   /* out, in, ceil(k / 2) */
  const bf16 *data;   /* panels */
  const float *bias;  /* [n] or NULL */
} Linear;

typedef struct {
  Linear qkv, out;
  const float *norm, *q_norm, *k_norm; /* [hidden], [dim] or NULL */
  int64_t heads, kv_heads, dim;
  float eps;
} Attention;

typedef struct {
  Linear gate_up, down;
  const float *norm;
  float eps;
} Mlp;

/* A step: tokens of all sequences, flat. Tasks are (sequence, part) pairs; see native.py. */
typedef struct {
  int64_t tokens, threads, block_size, table_stride, num_blocks;
  const int32_t *positions, *rows, *q_starts, *kv_lens, *tables;
  const int64_t *slots;
  const float *cos, *sin; /* [position][dim / 2] */
  int64_t num_decode, num_pack, num_tiles, num_merge;
  const int32_t *decode, *pack, *tiles, *merge; /* (sequence, part) pairs */
  const int64_t *part_start;                    /* [sequence] first partial result or packed key block */
  bf16 *x, *qkv, *q, *y, *act;                  /* scratch of one block */
  bf16 *keys, *values;                          /* packed KV of prefills: [key block][kv_head][KEYS x dim] */
  float *partial;                               /* [part][head][dim + 2]: sums, maximum, denominator */
} Step;

/* Each of these is called by every thread of a parallel region and ends with a barrier. */
void norm_rows(const float *residual, const float *weight, float eps, bf16 *out, int64_t m, int64_t k);
enum { STORE_BF16, STORE_F32, ADD_F32, GATED };
void linear_rows(const bf16 *x, const Linear *w, void *out, int64_t m, int mode);
void prepare_rows(const Step *s, const Attention *w, bf16 *k_cache, bf16 *v_cache);
void attend(const Step *s, const Attention *w, const bf16 *k_cache, const bf16 *v_cache);

/* out[r][c] = sum over k of a[r][k] * b[k][c] for `rows` rows (at most 6 with two panels, 12 with one) and
 * the columns of b0, then of b1 (may be NULL). lda and ldo: elements from row to row. */
void dot_tile(int rows, const bf16 *a, int64_t lda, const bf16 *b0, const bf16 *b1, int64_t kp, float *out,
              int64_t ldo);

static inline __m512 widen(const bf16 *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

static inline void narrow(bf16 *p, __m512 v) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(v)); }

static inline __m512bh pair(const bf16 *p) { /* two neighbours in every lane */
  int32_t v;
  memcpy(&v, p, 4);
  return (__m512bh)_mm512_set1_epi32(v);
}

/* 2^x for x <= 0 or NaN; relative error under 2e-7, exactly 0 from -inf to -150. */
static inline __m512 exp2_neg(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x); /* in this order NaN stays NaN */
  __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.32647244e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.67151324e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55073376e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40222421e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93146978e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

/* A thread's share [*from, *to) of n things. */
void share(int64_t n, int64_t *from, int64_t *to);
