/* Sampling rows of logits as engine/sampler.py defines it: filters as one cut-off logit, then the argmax
 * of logit / temperature + Gumbel noise, whose words are Philox4x32-10(seed; token / 4, position, branch). */
#include "kernels.h"
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#define BINS 1024
#define PER_LOGIT 32 /* bins; the last one takes all that is BINS / PER_LOGIT or more below the best */

typedef struct { /* a row of engine.batch.PARAMS */
  double temperature, top_p, min_p;
  int64_t top_k, seed, branch;
} Params;

typedef struct {
  int32_t count[BINS];
  double mass[BINS];
} Histogram;

static int descending(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x < y) - (x > y);
}

static inline int bin_of(float best, float x) {
  float b = (best - x) * PER_LOGIT;
  return b < BINS - 1 ? (int)b : BINS - 1;
}

/* The values of one bin, largest first, into `out`; returns their number. */
static int64_t members(const float *x, int64_t n, float best, int bin, float *out) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; i++)
    if (bin_of(best, x[i]) == bin) out[found++] = x[i];
  qsort(out, found, sizeof *out, descending);
  return found;
}

/* The least logit that top-k, then top-p keep. scratch: n floats. */
static float ranked_cutoff(const float *x, int64_t n, float best, const Params *p, float *scratch) {
  Histogram h;
  memset(&h, 0, sizeof h);
  double total = 0;
  for (int64_t i = 0; i < n; i++) {
    int b = bin_of(best, x[i]);
    h.count[b]++;
    h.mass[b] += exp((double)x[i] - best);
  }
  float kth = -INFINITY;
  int last = BINS - 1; /* the bin of kth */
  if (p->top_k > 0 && p->top_k < n) {
    int64_t left = p->top_k;
    int b = 0;
    while (h.count[b] < left) left -= h.count[b++];
    last = b;
    members(x, n, best, b, scratch);
    kth = scratch[left - 1];
    h.mass[b] = 0;
    for (int64_t i = 0; i < h.count[b] && scratch[i] >= kth; i++) h.mass[b] += exp((double)scratch[i] - best);
  }
  for (int b = 0; b <= last; b++) total += h.mass[b];
  if (p->top_p >= 1) return kth;
  double before = 0, limit = p->top_p * total;
  for (int b = 0; b <= last; b++) {
    if (before + h.mass[b] < limit && b < last) {
      before += h.mass[b];
      continue;
    }
    int64_t found = members(x, n, best, b, scratch);
    for (int64_t i = 0; i < found; i++) {
      before += exp((double)scratch[i] - best);
      if (before >= limit || i + 1 == found || scratch[i + 1] < kth) return scratch[i];
    }
  }
  return kth;
}

static inline void round_of(__m512i *hi, __m512i *lo, __m512i c, uint32_t factor) {
  __m512i f = _mm512_set1_epi32(factor);
  __m512i even = _mm512_mul_epu32(c, f), odd = _mm512_mul_epu32(_mm512_srli_epi64(c, 32), f);
  *hi = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  *lo = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}

/* Philox4x32-10 of 16 counters (first + lane, position, branch, 0): words of 64 tokens, in order. */
static inline void noise(uint32_t first, uint32_t position, uint32_t branch, uint64_t seed, uint32_t *words) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(first), lanes), c1 = _mm512_set1_epi32(position);
  __m512i c2 = _mm512_set1_epi32(branch), c3 = _mm512_setzero_si512();
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int i = 0; i < 10; i++) {
    __m512i hi0, lo0, hi1, lo1;
    round_of(&hi0, &lo0, c0, 0xD2511F53u);
    round_of(&hi1, &lo1, c2, 0xCD9E8D57u);
    c0 = _mm512_xor_si512(_mm512_xor_si512(hi1, c1), _mm512_set1_epi32(k0));
    c2 = _mm512_xor_si512(_mm512_xor_si512(hi0, c3), _mm512_set1_epi32(k1));
    c1 = lo1, c3 = lo0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  const __m512i at = _mm512_slli_epi32(lanes, 2);
  _mm512_i32scatter_epi32(words, at, c0, 4);
  _mm512_i32scatter_epi32(words + 1, at, c1, 4);
  _mm512_i32scatter_epi32(words + 2, at, c2, 4);
  _mm512_i32scatter_epi32(words + 3, at, c3, 4);
}

/* Natural logarithm of normal positive floats, inf and 0; relative error under 2e-7. */
static inline __m512 log_ps(__m512 x) {
  static const float c[] = {-4.459986235e-02f, 1.044342996e-01f,  -1.318910064e-01f, 1.449377967e-01f,
                            -1.664580560e-01f, 1.998925807e-01f,  -2.500007584e-01f, 3.333350145e-01f,
                            -5.000000117e-01f, 9.999999958e-01f};
  const __m512 one = _mm512_set1_ps(1);
  __m512 e = _mm512_getexp_ps(x), m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  /* a mantissa from 1.5 on was halved into [0.75, 1): its exponent is one more than getexp says */
  e = _mm512_mask_add_ps(e, _mm512_cmp_ps_mask(m, one, _CMP_LT_OQ), e, one);
  __m512 t = _mm512_sub_ps(m, one), p = _mm512_set1_ps(c[0]);
  for (int i = 1; i < 10; i++) p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(c[i]));
  return _mm512_fmadd_ps(e, _mm512_set1_ps(0.693147181f), _mm512_mul_ps(t, p));
}

/* -log(-log(1 - u)), u = (word + 1/2) / 2^32 */
static inline __m512 gumbel(__m512i word) {
  const __m512 one = _mm512_set1_ps(1), zero = _mm512_setzero_ps();
  __m512 u = _mm512_add_ps(_mm512_cvtepu32_ps(word), _mm512_set1_ps(0.5f));
  u = _mm512_mul_ps(u, _mm512_set1_ps(0x1p-32f));
  __m512 rest = _mm512_sub_ps(one, u), gone = _mm512_sub_ps(one, rest);
  /* log1p(-u) = log(rest) * u / (1 - rest): what rounding did to 1 - u cancels */
  __m512 e = _mm512_div_ps(_mm512_mul_ps(log_ps(rest), u), gone);
  e = _mm512_mask_sub_ps(e, _mm512_cmp_ps_mask(gone, zero, _CMP_EQ_OQ), zero, u);
  return _mm512_sub_ps(zero, log_ps(_mm512_sub_ps(zero, e)));
}

static int64_t draw(const float *logits, int64_t n, const Params *p, int64_t position, float *x, float *scratch) {
  float best = -INFINITY, cut = -INFINITY, temperature = (float)p->temperature;
  for (int64_t i = 0; i < n; i++) {
    x[i] = logits[i] / temperature;
    best = x[i] > best ? x[i] : best;
  }
  for (int64_t i = n; i < (n + 63) / 64 * 64; i++) x[i] = -INFINITY;
  if (p->min_p > 0) cut = best + logf((float)p->min_p);
  if ((p->top_k > 0 && p->top_k < n) || p->top_p < 1) cut = fmaxf(cut, ranked_cutoff(x, n, best, p, scratch));
  uint32_t words[64] __attribute__((aligned(64)));
  float top = -INFINITY;
  int64_t chosen = 0;
  for (int64_t i = 0; i < n; i += 64) {
    __mmask16 kept[4];
    for (int j = 0; j < 4; j++)
      kept[j] = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + i + 16 * j), _mm512_set1_ps(cut), _CMP_GE_OQ);
    if (!(kept[0] | kept[1] | kept[2] | kept[3])) continue;
    noise((uint32_t)(i / 4), (uint32_t)position, (uint32_t)p->branch, (uint64_t)p->seed, words);
    for (int j = 0; j < 4; j++) {
      if (!kept[j]) continue;
      __m512 score = _mm512_add_ps(_mm512_loadu_ps(x + i + 16 * j), gumbel(_mm512_load_si512(words + 16 * j)));
      float high = _mm512_mask_reduce_max_ps(kept[j], score);
      if (high > top) {
        __mmask16 at = _mm512_mask_cmp_ps_mask(kept[j], score, _mm512_set1_ps(high), _CMP_EQ_OQ);
        top = high;
        chosen = i + 16 * j + __builtin_ctz(at);
      }
    }
  }
  return chosen;
}

static int64_t argmax(const float *x, int64_t n) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(x + i));
  float best = _mm512_reduce_max_ps(top);
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  for (i = 0; x[i] != best; i++);
  return i;
}

/* ids [m]: a token for each row of logits [m, n], or -1 where a logit is not finite.
 * scratch: 2 * (n + 64) floats for every thread. */
void kvtop_sample(const float *logits, int64_t m, int64_t n, const Params *params, const int64_t *positions,
                  float *scratch, int64_t *ids, int64_t threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t r = 0; r < m; r++) {
    const float *row = logits + r * n;
    float *x = scratch + omp_get_thread_num() * 2 * (n + 64);
    __m512 sum = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sum = _mm512_add_ps(sum, _mm512_loadu_ps(row + i));
    float total = _mm512_reduce_add_ps(sum);
    for (; i < n; i++) total += row[i];
    if (!isfinite(total)) ids[r] = -1;
    else if (params[r].temperature > 0 && params[r].top_k != 1)
      ids[r] = draw(row, n, params + r, positions[r], x, x + n + 64);
    else
      ids[r] = argmax(row, n);
  }
}
