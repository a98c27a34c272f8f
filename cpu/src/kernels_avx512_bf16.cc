// Compiled as kernels_avx512_vnni.cc is, and with -mavx512bf16.
//
// `vdpbf16ps` adds two products of bfloat16 to a float32: products are exact, each sum is rounded
// to the nearest number, and subnormal numbers are 0, whatever the mode. It is written in assembly
// for the same reason as `vpdpbusd`.

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "avx512.h"
#include "kernels.h"

namespace jqx {
namespace {

inline void multiply(__m512& total, __m512i weights, __m512i rows) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(weights), "v"(rows));
}

// R rows beside a part of one group.
template <int R>
__attribute__((noinline)) void add_pairs_of(const uint16_t* x, int64_t x_stride,
                                            const uint16_t* panel, int64_t pairs,
                                            const float* scale, int columns, float* sums) {
  __m512 total[R][4];
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    JQX_UNROLL for (int j = 0; j < 4; ++j) total[i][j] = _mm512_setzero_ps();
  }
  for (int64_t at = 0; at < pairs; ++at, x += 2, panel += 2 * kColumns) {
    __m512i own[4];
    JQX_UNROLL for (int j = 0; j < 4; ++j) own[j] = _mm512_load_si512(panel + 32 * j);
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      int32_t pair;
      std::memcpy(&pair, x + i * x_stride, 4);
      const __m512i row = _mm512_set1_epi32(pair);
      JQX_UNROLL for (int j = 0; j < 4; ++j) multiply(total[i][j], own[j], row);
    }
  }
  JQX_UNROLL for (int j = 0; j < 4; ++j) {
    const __mmask16 here = columns_from(16 * j, columns);
    const __m512 by = _mm512_maskz_loadu_ps(here, scale + 16 * j);
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      float* own = sums + i * kColumns + 16 * j;
      _mm512_store_ps(own, _mm512_fmadd_ps(total[i][j], by, _mm512_load_ps(own)));
    }
  }
}

void add_pairs_bf16(const uint16_t* x, int64_t x_stride, int rows, const GroupedWeights& w,
                    const uint16_t* panel, int64_t from, int64_t to, int columns, float* sums) {
  constexpr decltype(&add_pairs_of<1>) kOf[] = {add_pairs_of<1>, add_pairs_of<2>, add_pairs_of<3>,
                                                add_pairs_of<4>, add_pairs_of<5>, add_pairs_of<6>};
  for (int64_t at = from, end; at < to; at = end) {
    const int64_t group = at / w.group;
    end = std::min((group + 1) * w.group, to);
    for (int i = 0; i < rows; i += 6) {
      const int some = std::min(rows - i, 6);
      kOf[some - 1](x + i * x_stride + at - from, x_stride, panel + (at - from) * kColumns,
                    (end - at + 1) / 2, w.scale + group * w.scale_stride, columns,
                    sums + i * kColumns);
    }
  }
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
  static const Kernels all = [] {
    Kernels own = avx512_vnni_kernels();
    own.name = "AVX-512 BF16", own.add_pairs = add_pairs_bf16;
    return own;
  }();
  return all;
}

}  // namespace jqx
