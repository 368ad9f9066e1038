/* Paged attention. Decodes read the cache in place, KEYS keys a task; prefills pack K and V once into
 * panels and then run on the dot tile, all query heads of a KV head together.
 *
 * Slots past a sequence's length may hold NaN: they are replaced before any arithmetic. */
#include "kernels.h"
#include <math.h>
#include <omp.h>

#define LOG2E 1.44269504f

/* Keys and values read from e4m3 lie here while a task needs them. */
typedef struct {
  bf16 k[KEYS * MAX_DIM], v[KEYS * MAX_DIM];
} Decoded;

static inline const bf16 *decoded(const uint8_t *in, float scale, int64_t dim, bf16 *out) {
  __m512 by = _mm512_set1_ps(scale * 256.0f);
  for (int64_t d = 0; d < dim; d += 16) narrow(out + d, _mm512_mul_ps(from_e4m3(in + d), by));
  return out;
}

/* Addresses of `count` keys from `first`, which lie in blocks; past the end the last key again. */
static inline void locate(const Step *s, const Attention *w, int seq, int64_t kv_head, int64_t first, int count,
                          const Cache *c, Decoded *room, const bf16 **k, const bf16 **v) {
  const int32_t *table = s->tables + (int64_t)s->rows[seq] * s->table_stride;
  int64_t last = s->kv_lens[seq] - 1;
  for (int i = 0; i < count; i++) {
    int64_t key = first + i < last ? first + i : last;
    int64_t slot = ((int64_t)table[key / s->block_size] * w->kv_heads + kv_head) * s->block_size +
                   key % s->block_size;
    if (!c->k_scale) {
      k[i] = (const bf16 *)c->k + slot * w->dim;
      v[i] = (const bf16 *)c->v + slot * w->dim;
    } else if (first + i > last) { /* the last one is decoded already */
      k[i] = k[i - 1];
      v[i] = v[i - 1];
    } else {
      k[i] = decoded((const uint8_t *)c->k + slot * w->dim, c->k_scale[slot], w->dim, room->k + i * w->dim);
      v[i] = decoded((const uint8_t *)c->v + slot * w->dim, c->v_scale[slot], w->dim, room->v + i * w->dim);
    }
  }
}

/* ------------------------------------------------------------------------------------------- decode */

/* Lane i of the result: v[i]'s lanes joined by `op`. Sixteen reductions for the price of four. */
#define REDUCE_16(name, op)                                                                                    \
  static inline __m512 name(__m512 v[16]) {                                                                    \
    for (int i = 0; i < 16; i += 4) {                                                                          \
      __m512 a = op(_mm512_unpacklo_ps(v[i], v[i + 1]), _mm512_unpackhi_ps(v[i], v[i + 1]));                   \
      __m512 b = op(_mm512_unpacklo_ps(v[i + 2], v[i + 3]), _mm512_unpackhi_ps(v[i + 2], v[i + 3]));           \
      __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));                               \
      __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));                               \
      v[i / 4] = op(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));                                               \
    }                                                                                                          \
    __m512 a = op(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xDD));             \
    __m512 b = op(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xDD));             \
    return op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));                             \
  }
REDUCE_16(sums, _mm512_add_ps)
REDUCE_16(maxima, _mm512_max_ps)

/* p[j] . v[j] over `count` keys (a multiple of 16) for the 32 dimensions from d; heads at most 8. */
static inline __attribute__((always_inline)) void weigh(const int heads, const bf16 *p, const bf16 **v, int count,
                                                        int64_t d, float *out, int64_t stride) {
  const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                        37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(16));
  __m512 acc[8][2];
#pragma GCC unroll 8
  for (int h = 0; h < heads; h++) acc[h][0] = acc[h][1] = _mm512_setzero_ps();
  for (int j = 0; j < count; j += 2) {
    __m512i a = _mm512_loadu_si512(v[j] + d), b = _mm512_loadu_si512(v[j + 1] + d);
    __m512bh lo = (__m512bh)_mm512_permutex2var_epi16(a, even, b), hi = (__m512bh)_mm512_permutex2var_epi16(a, odd, b);
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++) {
      __m512bh x = pair(p + h * KEYS + j);
      acc[h][0] = _mm512_dpbf16_ps(acc[h][0], x, lo);
      acc[h][1] = _mm512_dpbf16_ps(acc[h][1], x, hi);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < heads; h++) {
    _mm512_storeu_ps(out + h * stride + d, acc[h][0]);
    _mm512_storeu_ps(out + h * stride + d + 16, acc[h][1]);
  }
}

/* Up to 8 query heads (rows of q, dim apart) over keys [first, first + count) of one KV head.
 * out: `heads` rows of dim + 2 floats: the weighted sum of V, then maximum (base 2) and denominator. */
static void decode_part(int64_t dim, const bf16 *q, int heads, const bf16 **k, const bf16 **v, int count,
                        float *out) {
  float score[8][KEYS] __attribute__((aligned(64)));
  bf16 p[8 * KEYS] __attribute__((aligned(64)));
  int64_t stride = dim + 2;
  int padded = (count + 15) / 16 * 16;
  const __m512 scale = _mm512_set1_ps(LOG2E / sqrtf((float)dim));
  for (int j = 0; j < padded; j += 16) {
    if (j + 16 < padded)
      for (int i = 16; i < 32; i++)
        for (int64_t d = 0; d < dim; d += 32) _mm_prefetch(k[j + i] + d, _MM_HINT_T0);
    for (int i = 0; i < 16; i++)
      for (int64_t d = 0; d < dim; d += 32) _mm_prefetch(v[j + i] + d, _MM_HINT_T1);
    for (int h = 0; h < heads; h++) {
      __m512 acc[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
      for (int64_t d = 0; d < dim; d += 32) {
        __m512bh x = (__m512bh)_mm512_loadu_si512(q + h * dim + d);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
          acc[i] = _mm512_dpbf16_ps(acc[i], x, (__m512bh)_mm512_loadu_si512(k[j + i] + d));
      }
      __m512 v16 = _mm512_mul_ps(sums(acc), scale);
      __mmask16 past = count - j >= 16 ? 0 : (__mmask16)(0xFFFF << (count - j));
      _mm512_store_ps(&score[h][j], _mm512_mask_mov_ps(v16, past, _mm512_set1_ps(-INFINITY)));
    }
  }
  for (int h = 0; h < heads; h++) {
    __m512 top = _mm512_load_ps(score[h]), sum = _mm512_setzero_ps();
    for (int j = 16; j < padded; j += 16) top = _mm512_max_ps(top, _mm512_load_ps(&score[h][j]));
    float max = _mm512_reduce_max_ps(top);
    for (int j = 0; j < padded; j += 16) {
      __m512 e = exp2_neg(_mm512_sub_ps(_mm512_load_ps(&score[h][j]), _mm512_set1_ps(max)));
      sum = _mm512_add_ps(sum, e);
      narrow(p + h * KEYS + j, e);
    }
    out[h * stride + dim] = max;
    out[h * stride + dim + 1] = _mm512_reduce_add_ps(sum);
  }
  for (int64_t d = 0; d < dim; d += 32) switch (heads) {
#define CASE(h) \
  case h: weigh(h, p, v, padded, d, out, stride); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

/* Joins `parts` partial results [head][dim + 2] of one query head, `stride` floats apart. */
static void merge(const float *partial, int64_t parts, int64_t stride, int64_t dim, bf16 *out) {
  float max = -INFINITY, sum = 0, factor[parts];
  for (int64_t i = 0; i < parts; i++) max = fmaxf(max, partial[i * stride + dim]);
  for (int64_t i = 0; i < parts; i++) {
    factor[i] = exp2f(partial[i * stride + dim] - max);
    sum += factor[i] * partial[i * stride + dim + 1];
  }
  for (int64_t d = 0; d < dim; d += 16) {
    __m512 acc = _mm512_setzero_ps();
    for (int64_t i = 0; i < parts; i++)
      acc = _mm512_fmadd_ps(_mm512_set1_ps(factor[i]), _mm512_loadu_ps(partial + i * stride + d), acc);
    narrow(out + d, _mm512_div_ps(acc, _mm512_set1_ps(sum)));
  }
}

static void decode(const Step *s, const Attention *w, const Cache *c) {
  int64_t dim = w->dim, group = w->heads / w->kv_heads, row = w->heads * (dim + 2);
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < s->num_decode * w->kv_heads; task++) {
    int seq = s->decode[task / w->kv_heads * 2], part = s->decode[task / w->kv_heads * 2 + 1];
    int64_t kv_head = task % w->kv_heads, left = s->kv_lens[seq] - (int64_t)part * KEYS;
    const bf16 *k[KEYS], *v[KEYS];
    Decoded room;
    int count = left < KEYS ? left : KEYS;
    locate(s, w, seq, kv_head, (int64_t)part * KEYS, (count + 15) / 16 * 16, c, &room, k, v);
    float *out = s->partial + (s->part_start[seq] + part) * row + kv_head * group * (dim + 2);
    const bf16 *q = s->q + (s->q_starts[seq] * w->heads + kv_head * group) * dim;
    for (int64_t h = 0; h < group; h += 8)
      decode_part(dim, q + h * dim, group - h < 8 ? group - h : 8, k, v, count, out + h * (dim + 2));
  }
#pragma omp for schedule(static)
  for (int64_t task = 0; task < s->num_merge * w->heads; task++) {
    int seq = s->merge[task / w->heads * 2], parts = s->merge[task / w->heads * 2 + 1];
    int64_t head = task % w->heads;
    merge(s->partial + s->part_start[seq] * row + head * (dim + 2), parts, row, dim,
          s->y + (s->q_starts[seq] * w->heads + head) * dim);
  }
}

/* ------------------------------------------------------------------------------------------ prefill */

/* One key block: K as panels over keys [KEYS / 32][dim / 2][32][2], V as panels over dimensions
 * [dim / 32][KEYS / 2][32][2]; keys past the end become zeros. */
static void pack_block(const bf16 **k, const bf16 **v, int count, int64_t dim, bf16 *keys, bf16 *values) {
  int padded = (count + 31) / 32 * 32;
  for (int j = 0; j < padded; j++)
    for (int64_t d = 0; d < dim / 2; d++) {
      uint32_t two = 0;
      if (j < count) memcpy(&two, k[j] + 2 * d, 4);
      memcpy(keys + ((j / 32 * (dim / 2) + d) * 32 + j % 32) * 2, &two, 4);
    }
  for (int64_t d = 0; d < dim; d += 32)
    for (int j = 0; j < padded; j += 2) {
      __m512i a = _mm512_setzero_si512(), b = a;
      if (j < count) a = _mm512_loadu_si512(v[j] + d);
      if (j + 1 < count) b = _mm512_loadu_si512(v[j + 1] + d);
      const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                                            6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
      bf16 *to = values + (d / 32 * (KEYS / 2) + j / 2) * 64;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, even, b));
      _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, _mm512_add_epi16(even, _mm512_set1_epi16(16)), b));
    }
}

/* Softmax over one key block for `rows` rows of scores, KEYS apart; a row sees keys below its limit. Updates
 * maxima and denominators (lane: row), writes the weights as bf16, returns the factors for what was
 * summed before. */
static inline __m512 soften(float *score, int rows, int count, const int *limit, float scale, __m512 *max,
                            __m512 *sum, bf16 *p) {
  __m512 v[16];
  float now[16] __attribute__((aligned(64)));
  for (int i = 0; i < 16; i++) v[i] = _mm512_setzero_ps();
  for (int i = 0; i < rows; i++) {
    float *row = score + i * KEYS;
    for (int j = limit[i] < 0 ? 0 : limit[i] / 16 * 16; j < count; j += 16) {
      __mmask16 past = limit[i] <= j ? 0xFFFF : (__mmask16)(0xFFFF << (limit[i] - j));
      _mm512_mask_store_ps(row + j, past, _mm512_set1_ps(-INFINITY));
    }
    v[i] = _mm512_load_ps(row);
    for (int j = 16; j < count; j += 16) v[i] = _mm512_max_ps(v[i], _mm512_load_ps(row + j));
  }
  __m512 new = _mm512_max_ps(*max, _mm512_mul_ps(maxima(v), _mm512_set1_ps(scale)));
  _mm512_store_ps(now, new);
  for (int i = 0; i < rows; i++) {
    v[i] = _mm512_setzero_ps();
    for (int j = 0; j < count; j += 16) {
      __m512 x = _mm512_load_ps(score + i * KEYS + j);
      x = exp2_neg(_mm512_fmsub_ps(x, _mm512_set1_ps(scale), _mm512_set1_ps(now[i])));
      v[i] = _mm512_add_ps(v[i], x);
      narrow(p + i * KEYS + j, x);
    }
  }
  for (int i = rows; i < 16; i++) v[i] = _mm512_setzero_ps();
  __m512 factor = exp2_neg(_mm512_sub_ps(*max, new));
  *sum = _mm512_fmadd_ps(*sum, factor, sums(v));
  *max = new;
  return factor;
}

/* Query rows [first, first + rows) of one sequence and KV head; row i is token i / group, head i % group. */
static void prefill_tile(const Step *s, const Attention *w, int seq, int64_t kv_head, int64_t first, int rows) {
  int64_t dim = w->dim, group = w->heads / w->kv_heads, n = s->q_starts[seq + 1] - s->q_starts[seq];
  int64_t before = s->kv_lens[seq] - n, end = before + (first + rows - 1) / group + 1;
  bf16 q[ROWS * MAX_DIM] __attribute__((aligned(64))), p[ROWS * KEYS] __attribute__((aligned(64)));
  float score[ROWS * KEYS] __attribute__((aligned(64))), acc[ROWS * MAX_DIM] __attribute__((aligned(64)));
  float part[ROWS * PANEL] __attribute__((aligned(64))), factor[16] __attribute__((aligned(64)));
  int64_t from[ROWS];
  int limit[ROWS];
  __m512 max = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  for (int i = 0; i < rows; i++) {
    int64_t token = s->q_starts[seq] + (first + i) / group, head = kv_head * group + (first + i) % group;
    from[i] = (token * w->heads + head) * dim;
    memcpy(q + i * dim, s->q + from[i], dim * 2);
  }
  memset(acc, 0, rows * dim * sizeof *acc);
  for (int64_t key = 0; key < end; key += KEYS) {
    int64_t at = ((s->part_start[seq] + key / KEYS) * w->kv_heads + kv_head) * KEYS * dim;
    int count = end - key < KEYS ? (end - key + 31) / 32 * 32 : KEYS;
    for (int c = 0; c < count; c += PANEL)
      dot_tile(rows, q, dim, s->keys + at + c * dim, 0, dim / 2, score + c, KEYS);
    for (int i = 0; i < rows; i++) limit[i] = before + (first + i) / group + 1 - key;
    _mm512_store_ps(factor, soften(score, rows, count, limit, LOG2E / sqrtf(dim), &max, &sum, p));
    for (int64_t d = 0; d < dim; d += PANEL) {
      dot_tile(rows, p, KEYS, s->values + at + d * KEYS, 0, count / 2, part, PANEL);
      for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL; c += 16) {
          float *to = acc + i * dim + d + c;
          _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), _mm512_set1_ps(factor[i]),
                                              _mm512_load_ps(part + i * PANEL + c)));
        }
    }
  }
  _mm512_store_ps(factor, sum);
  for (int i = 0; i < rows; i++)
    for (int64_t d = 0; d < dim; d += 16)
      narrow(s->y + from[i] + d, _mm512_div_ps(_mm512_load_ps(acc + i * dim + d), _mm512_set1_ps(factor[i])));
}

static void prefill(const Step *s, const Attention *w, const Cache *c) {
  int64_t dim = w->dim, group = w->heads / w->kv_heads;
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < s->num_pack * w->kv_heads; task++) {
    int seq = s->pack[task / w->kv_heads * 2], part = s->pack[task / w->kv_heads * 2 + 1];
    int64_t kv_head = task % w->kv_heads, left = s->kv_lens[seq] - (int64_t)part * KEYS;
    int64_t at = ((s->part_start[seq] + part) * w->kv_heads + kv_head) * KEYS * dim;
    const bf16 *k[KEYS], *v[KEYS];
    Decoded room;
    int count = left < KEYS ? left : KEYS;
    locate(s, w, seq, kv_head, (int64_t)part * KEYS, count, c, &room, k, v);
    pack_block(k, v, count, dim, s->keys + at, s->values + at);
  }
  /* The last tiles of a sequence see the most keys: they go first, so that threads end together. */
#pragma omp for schedule(dynamic)
  for (int64_t task = s->num_tiles * w->kv_heads - 1; task >= 0; task--) {
    int seq = s->tiles[task / w->kv_heads * 2];
    int64_t first = s->tiles[task / w->kv_heads * 2 + 1];
    int64_t all = (s->q_starts[seq + 1] - s->q_starts[seq]) * group, kv_head = task % w->kv_heads;
    prefill_tile(s, w, seq, kv_head, first, all - first < ROWS ? all - first : ROWS);
  }
}

void attend(const Step *s, const Attention *w, const Cache *c) {
  if (s->num_decode) decode(s, w, c);
  if (s->num_tiles) prefill(s, w, c);
}
