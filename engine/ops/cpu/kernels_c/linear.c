/* Linears: packed weights, fp32 sums. One tile kernel serves decode, prefill and attention.
 *
 * Weights in 8 or 4 bits are read once a pass and become a panel of bf16 in the cache, which the tile kernel
 * then takes: INT8 as whole numbers, exact, scaled as results are stored; INT4 as its values. */
#include "kernels.h"
#include <omp.h>
#include <stdlib.h>

void share(int64_t n, int64_t *from, int64_t *to) {
  int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
  *from = n * t / all;
  *to = n * (t + 1) / all;
}

/* weight [n, k] with rows of k elements -> panels, zero-padded to whole panels and pairs. */
void kvtop_pack(const bf16 *weight, int64_t n, int64_t k, bf16 *out) {
  int64_t kp = (k + 1) / 2;
#pragma omp parallel for
  for (int64_t p = 0; p < (n + PANEL - 1) / PANEL; p++)
    for (int64_t i = 0; i < kp; i++)
      for (int64_t c = 0; c < PANEL; c++)
        for (int64_t j = 0; j < 2; j++) {
          int64_t row = p * PANEL + c, col = 2 * i + j;
          out[((p * kp + i) * PANEL + c) * 2 + j] = row < n && col < k ? weight[row * k + col] : 0;
        }
}

/* codes [n, k] -> panels of bytes. */
void kvtop_pack8(const int8_t *codes, int64_t n, int64_t k, int8_t *out) {
  int64_t kp = (k + 1) / 2;
#pragma omp parallel for
  for (int64_t p = 0; p < (n + PANEL - 1) / PANEL; p++)
    for (int64_t i = 0; i < kp; i++)
      for (int64_t c = 0; c < 2 * PANEL; c++) {
        int64_t row = p * PANEL + c / 2, col = 2 * i + c % 2;
        out[(p * kp + i) * 2 * PANEL + c] = row < n && col < k ? codes[row * k + col] : 0;
      }
}

/* codes [n][group][16], value i of a group in the low half of byte i % 16, from 16 on in the high half; scale
 * and minimum fp16 [n][group] -> panels [n / 32][k / 2][32] (a pair of k in a byte), see Linear for `scales`. */
void kvtop_pack4(const uint8_t *codes, const uint16_t *scale, const uint16_t *minimum, int64_t n, int64_t k,
                 uint8_t *out, uint16_t *scales) {
  int64_t kp = (k + 1) / 2, groups = (k + GROUP - 1) / GROUP;
#pragma omp parallel for
  for (int64_t p = 0; p < (n + PANEL - 1) / PANEL; p++)
    for (int64_t c = 0; c < PANEL; c++) {
      int64_t row = p * PANEL + c;
      for (int64_t i = 0; i < kp; i++) {
        int at = 2 * i % GROUP, shift = at < 16 ? 0 : 4;
        const uint8_t *in = codes + (row * groups + 2 * i / GROUP) * 16 + at % 16;
        out[(p * kp + i) * PANEL + c] = row < n ? (in[0] >> shift & 15) | (in[1] >> shift & 15) << 4 : 0;
      }
      for (int64_t g = 0; g < groups; g++) {
        uint16_t *to = scales + (p * groups + g) * 2 * PANEL + c;
        to[0] = row < n ? scale[row * groups + g] : 0;
        to[PANEL] = row < n ? minimum[row * groups + g] : 0;
      }
    }
}

/* Panel p as bf16, [kp][32][2]. */
static void expand(const Linear *w, int64_t p, bf16 *out) {
  if (w->bits == 8) {
    const int8_t *in = (const int8_t *)w->data + p * w->kp * 2 * PANEL;
    for (int64_t i = 0; i < w->kp * 2 * PANEL; i += 32) {
      __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(in + i))));
      __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(in + i + 16))));
      _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    return;
  }
  const __m512i both = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                        21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  int64_t groups = (w->k + GROUP - 1) / GROUP;
  const uint8_t *in = (const uint8_t *)w->data + p * w->kp * PANEL;
  const uint16_t *scales = (const uint16_t *)w->scale + p * groups * 2 * PANEL;
  for (int64_t g = 0; g < groups; g++, scales += 2 * PANEL)
    for (int c = 0; c < PANEL; c += 16) {
      __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(scales + c)));
      __m512 m = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(scales + PANEL + c)));
      int64_t end = (g + 1) * GROUP / 2 < w->kp ? (g + 1) * GROUP / 2 : w->kp;
      for (int64_t i = g * GROUP / 2; i < end; i++) {
        __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(in + i * PANEL + c)));
        __m512 lo = _mm512_cvtepi32_ps(_mm512_and_si512(b, _mm512_set1_epi32(15)));
        __m512 hi = _mm512_cvtepi32_ps(_mm512_srli_epi32(b, 4));
        __m512i v = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(hi, d, m), _mm512_fmadd_ps(lo, d, m));
        _mm512_storeu_si512(out + (i * PANEL + c) * 2, _mm512_permutexvar_epi16(both, v));
      }
    }
}

/* Room for `size` values that stays with the thread. */
static bf16 *room(int64_t size) {
  static __thread bf16 *buffer;
  static __thread int64_t had;
  if (had < size) {
    free(buffer);
    buffer = aligned_alloc(64, (size * 2 + 63) / 64 * 64);
    had = size;
  }
  return buffer;
}

/* Accumulators stay in registers because `rows` and `panels` are constants at every call. */
static inline __attribute__((always_inline)) void tile(const int rows, const int panels, const bf16 *a,
                                                       int64_t lda, const bf16 *b0, const bf16 *b1,
                                                       int64_t kp, float *out, int64_t ldo) {
  __m512 acc[ROWS][4];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * panels; c++) acc[r][c] = _mm512_setzero_ps();
  for (int64_t i = 0; i < kp; i++) {
    __m512bh w[4];
    w[0] = (__m512bh)_mm512_loadu_si512(b0 + i * 2 * PANEL);
    w[1] = (__m512bh)_mm512_loadu_si512(b0 + i * 2 * PANEL + 32);
    if (panels == 2) {
      w[2] = (__m512bh)_mm512_loadu_si512(b1 + i * 2 * PANEL);
      w[3] = (__m512bh)_mm512_loadu_si512(b1 + i * 2 * PANEL + 32);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      __m512bh x = pair(a + r * lda + 2 * i);
#pragma GCC unroll 4
      for (int c = 0; c < 2 * panels; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], x, w[c]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * panels; c++) _mm512_storeu_ps(out + r * ldo + c * 16, acc[r][c]);
}

void dot_tile(int rows, const bf16 *a, int64_t lda, const bf16 *b0, const bf16 *b1, int64_t kp, float *out,
              int64_t ldo) {
#define CASE(r, p) \
  case r: return tile(r, p, a, lda, b0, b1, kp, out, ldo);
  if (b1) switch (rows) { CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2) }
  else switch (rows) {
      CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
      CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
    }
#undef CASE
}

static inline __mmask16 tail(int64_t left) { return left >= 16 ? 0xFFFF : left <= 0 ? 0 : (1u << left) - 1; }

/* 16 columns from c of one row: + bias, then as `mode` says. */
static inline void store(const Linear *w, void *out, int64_t row, int64_t c, __m512 v, int mode) {
  __mmask16 k = tail(w->n - c);
  if (w->bits == 8) v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(k, (const float *)w->scale + c));
  if (w->bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(k, w->bias + c));
  float *f = (float *)out + row * w->n + c;
  if (mode == STORE_BF16)
    _mm256_mask_storeu_epi16((bf16 *)out + row * w->n + c, k, (__m256i)_mm512_cvtneps_pbh(v));
  else if (mode == STORE_F32)
    _mm512_mask_storeu_ps(f, k, v);
  else
    _mm512_mask_storeu_ps(f, k, _mm512_add_ps(_mm512_maskz_loadu_ps(k, f), v));
}

/* silu(gate) * up for 16 columns from c; the merged weight holds gate, then up. */
static inline void store_gated(const Linear *w, bf16 *out, int64_t row, int64_t c, __m512 gate, __m512 up) {
  int64_t half = w->n / 2;
  if (w->bits == 8) {
    gate = _mm512_mul_ps(gate, _mm512_loadu_ps((const float *)w->scale + c));
    up = _mm512_mul_ps(up, _mm512_loadu_ps((const float *)w->scale + half + c));
  }
  if (w->bias) {
    gate = _mm512_add_ps(gate, _mm512_loadu_ps(w->bias + c));
    up = _mm512_add_ps(up, _mm512_loadu_ps(w->bias + half + c));
  }
  /* gate / (1 + e^-gate), by e^-|gate| so that nothing overflows */
  __m512 e = exp2_neg(_mm512_mul_ps(_mm512_abs_ps(gate), _mm512_set1_ps(-1.44269504f)));
  __m512 top = _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(gate)), _mm512_set1_ps(1), e);
  __m512 silu = _mm512_div_ps(_mm512_mul_ps(gate, top), _mm512_add_ps(_mm512_set1_ps(1), e));
  narrow(out + row * half + c, _mm512_mul_ps(silu, up));
}

/* Rows [m0, m1) times panels [p0, p1). Blocks of rows stay in L2 while the panels pass by. */
static void block(const bf16 *x, const Linear *w, void *out, int64_t m0, int64_t m1, int64_t p0, int64_t p1,
                  int mode) {
  float t[ROWS * PANEL * 2];
  int64_t size = w->kp * 2 * PANEL, shift = mode == GATED ? w->n / 2 / PANEL : 1;
  bf16 *made = w->bits == 16 ? 0 : room(2 * size);
  int64_t rows_in_l2 = (384 << 10) / (2 * w->k) / 6 * 6;
  if (rows_in_l2 < 12) rows_in_l2 = 12;
  for (int64_t mb = m0; mb < m1; mb += rows_in_l2) {
    int64_t me = mb + rows_in_l2 < m1 ? mb + rows_in_l2 : m1;
    /* 7 to 12 rows: one pass over a single panel reads the weights once, which is what decode waits for */
    int few = me - mb > 6 && me - mb <= ROWS && mode != GATED;
    for (int64_t p = p0; p < p1;) {
      int two = mode == GATED || (!few && p + 1 < p1);
      const bf16 *b0 = (const bf16 *)w->data + p * size, *b1 = two ? b0 + shift * size : 0;
      if (w->bits != 16) {
        expand(w, p, made);
        if (two) expand(w, p + shift, made + size);
        b0 = made;
        b1 = two ? made + size : 0;
      }
      int step = two ? 6 : ROWS, width = two ? 2 * PANEL : PANEL;
      for (int64_t r = mb; r < me; r += step) {
        int rows = me - r < step ? me - r : step;
        dot_tile(rows, x + r * w->k, w->k, b0, b1, w->kp, t, width);
        for (int i = 0; i < rows; i++)
          if (mode == GATED)
            for (int c = 0; c < PANEL; c += 16)
              store_gated(w, out, r + i, p * PANEL + c, _mm512_loadu_ps(t + i * width + c),
                          _mm512_loadu_ps(t + i * width + PANEL + c));
          else
            for (int c = 0; c < width; c += 16)
              store(w, out, r + i, p * PANEL + c, _mm512_loadu_ps(t + i * width + c), mode);
      }
      p += two && mode != GATED ? 2 : 1;
    }
  }
}

void linear_rows(const bf16 *x, const Linear *w, void *out, int64_t m, int mode) {
  int64_t panels = (w->n + PANEL - 1) / PANEL, from, to, threads = omp_get_num_threads();
  if (mode == GATED) panels = w->n / 2 / PANEL;
  if (panels < 8 * threads && m >= 12 * threads) { /* too few panels to share evenly: share rows */
    share((m + 5) / 6, &from, &to);
    block(x, w, out, from * 6, to * 6 < m ? to * 6 : m, 0, panels, mode);
  } else {
    share(panels, &from, &to);
    block(x, w, out, 0, m, from, to, mode);
  }
#pragma omp barrier
}

void kvtop_linear(const bf16 *x, const Linear *w, void *out, int64_t m, int64_t mode, int64_t threads) {
#pragma omp parallel num_threads(threads)
  linear_rows(x, w, out, m, mode);
}
