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

}  // namespace
}  // namespace jqx

#endif  // JQX_CPU_AVX512_H_
