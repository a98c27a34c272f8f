// What kernels for AVX-512 share.

#ifndef JQX_CPU_AVX512_H_
#define JQX_CPU_AVX512_H_

#include <immintrin.h>

#include "kernels.h"

#define JQX_UNROLL _Pragma("GCC unroll 16")

namespace jqx {
namespace {

// A panel has, for each 4 steps along k, 4 bytes of each column.
constexpr int64_t kStep = 4 * kColumns;

inline __mmask64 first(int64_t n) { return n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1; }

// Those of 16 columns from `from` that there are.
inline __mmask16 columns_from(int from, int columns) {
  return __mmask16(columns > from ? first(columns - from) : 0);
}

// Calls f for each 16 of n numbers, from which one and which of them there are.
template <class F>
inline void for_vectors(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(i, __mmask16(-1));
  if (i < n) f(i, __mmask16(first(n - i)));
}

// What functions of row_functions.inc need, of 16 numbers. Of two numbers, one of them NaN, the
// instructions for the less and the larger number return the second.
inline __m512 fused(__m512 x, __m512 y, __m512 z) { return _mm512_fmadd_ps(x, y, z); }
inline __m512 magnitude_of(__m512 x) { return _mm512_abs_ps(x); }
inline __m512 root(__m512 x) { return _mm512_sqrt_ps(x); }
inline __mmask16 no_numbers(__m512 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline __m512 larger(__m512 x, __m512 z) {
  return _mm512_mask_blend_ps(no_numbers(x), _mm512_max_ps(x, z), x);
}
inline __m512 scaled(__m512 x, __m512 n) { return _mm512_scalef_ps(x, n); }
inline __m512 within(__m512 x, float low, float high) {
  return _mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), x));
}
inline __m512 with_sign(__m512 x, __m512 of) {
  return _mm512_or_ps(x, _mm512_and_ps(of, _mm512_set1_ps(-0.0f)));  // x >= 0
}
inline __m512 less(__m512 x, float than, __m512 y, __m512 z) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(than), _CMP_LT_OQ), z, y);
}

// Turns 16 columns of 64 bytes into 16 runs of 4 bytes of each, `step` bytes from one to the next:
// a transpose of 32-bit numbers.
inline void turn(__m512i* r, uint8_t* to, int64_t step) {
  __m512i t[16];
  JQX_UNROLL for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  JQX_UNROLL for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  JQX_UNROLL for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  JQX_UNROLL for (int i = 0; i < 4; ++i) {
    _mm512_store_si512(to + i * step, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_store_si512(to + (i + 4) * step, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_store_si512(to + (i + 8) * step, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_store_si512(to + (i + 12) * step, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}

// Turns 64 bytes of each of kColumns columns of codes, and fetches those that lie `ahead` bytes on.
inline void turn_codes(const GroupedWeights& w, int64_t byte, int64_t ahead, int columns,
                       uint8_t* turned) {
  const int64_t width = (w.k * w.bits + 7) / 8;
  for (int j = 0; j < kColumns; j += 16) {
    __m512i some[16];
    JQX_UNROLL for (int i = 0; i < 16; ++i) {
      const __mmask64 own = j + i < columns ? first(width - byte) : 0;
      const uint8_t* at = w.codes + (own ? (j + i) * w.stride + byte : 0);
      _mm_prefetch(at + ahead, _MM_HINT_T1);
      some[i] = _mm512_maskz_loadu_epi8(own, at);
    }
    turn(some, turned + 4 * j, kStep);
  }
}

}  // namespace
}  // namespace jqx

#endif  // JQX_CPU_AVX512_H_
