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

#define GROUP 32  /* values that share a scale and a minimum in INT4 */

typedef struct {
  int64_t n, k, kp;   /* out, in, ceil(k / 2) */
  const void *data;   /* panels */
  const float *bias;  /* [n] or NULL */
  int64_t bits;       /* of a value in the panels: 16 (bf16), 8 or 4 */
  const void *scale;  /* 8: float [n]; 4: fp16 [panel][group][scale, minimum][32] */
} Linear;

/* One layer of the KV cache: bf16, or bits of e4m3 with a scale for each (block, head, slot). */
typedef struct {
  void *k, *v;
  float *k_scale, *v_scale; /* NULL: bf16 */
} Cache;

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

typedef struct {
  int64_t hidden, layers;
  const bf16 *embed;          /* [vocab, hidden] */
  const Attention *attention; /* [layers] */
  const Mlp *mlp;             /* [layers] */
  const float *norm;          /* [hidden] */
  float eps;
  Linear head;
} Decoder;

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
  double *times;                                /* NULL, or [TIMED + 1]: see timed() in block.c */
} Step;

enum { EMBED, NORM, QKV, QKV_PREPARE, ATTENTION, OUT, GATE_UP, DOWN, HEAD, TIMED }; /* as KERNELS in native.py */

/* Each of these is called by every thread of a parallel region and ends with a barrier. */
void norm_rows(const float *residual, const float *weight, float eps, bf16 *out, int64_t m, int64_t k);
enum { STORE_BF16, STORE_F32, ADD_F32, GATED };
void linear_rows(const bf16 *x, const Linear *w, void *out, int64_t m, int mode);
void prepare_rows(const Step *s, const Attention *w, const Cache *c);
void attend(const Step *s, const Attention *w, const Cache *c);

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

/* e4m3 is a float16 without its lowest seven bits, 2^8 too small: both ways are exact, subnormals too. */
static inline __m512 from_e4m3(const uint8_t *p) {
  __m256i u = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p));
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0x80)), 8);
  __m256i rest = _mm256_slli_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0x7F)), 7);
  return _mm512_cvtph_ps(_mm256_or_si256(sign, rest)); /* times 2^8 is the value */
}

/* |v| at most 448; to the nearest, ties to even. */
static inline void to_e4m3(uint8_t *p, __m512 v) {
  __m512 a = _mm512_abs_ps(v);
  __m512i bits = _mm512_castps_si512(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFFF)), odd);
  __m512 r = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xFFF00000)));
  __m512 even = _mm512_set1_ps(16384.0f); /* floats from here on are 2^-9 apart, as e4m3's subnormals are */
  __mmask16 small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(0.015625f), _CMP_LT_OQ);
  r = _mm512_mask_sub_ps(r, small, _mm512_add_ps(a, even), even);
  __m256i half = _mm512_cvtps_ph(_mm512_mul_ps(r, _mm512_set1_ps(0.00390625f)), _MM_FROUND_TO_NEAREST_INT);
  __m512i code = _mm512_cvtepu16_epi32(_mm256_srli_epi16(half, 7));
  __mmask16 minus = _mm512_movepi32_mask(_mm512_castps_si512(v));
  code = _mm512_mask_or_epi32(code, minus, code, _mm512_set1_epi32(0x80));
  _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(code));
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
