// Compiled with -mavx2 -mfma.

#include <immintrin.h>

#include "generic_kernels.inc"

namespace jqx {
namespace {

int32_t folded(__m256i x) {
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

__m256i wide(const int8_t* x) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// Of 16 bits: products of 8 bits as such would saturate.
template <int R>
void dots_of(const int8_t* x, int64_t x_stride, const int8_t* w, int64_t k, int32_t* sums) {
  __m256i total[R];
  for (int i = 0; i < R; ++i) total[i] = _mm256_setzero_si256();
  int64_t at = 0;
  for (; at + 16 <= k; at += 16) {
    const __m256i own = wide(w + at);
    for (int i = 0; i < R; ++i) {
      const __m256i products = _mm256_madd_epi16(own, wide(x + i * x_stride + at));
      total[i] = _mm256_add_epi32(total[i], products);
    }
  }
  for (int i = 0; i < R; ++i) {
    sums[i * kColumns] = folded(total[i]) + dot(x + i * x_stride + at, w + at, k - at);
  }
}

void dots_in_16_bits(const int8_t* x, int64_t x_stride, const int32_t*, int rows, const int8_t* w,
                     int64_t w_stride, int columns, int64_t k, int32_t* sums) {
  for (int j = 0; j < columns; ++j) {
    int i = 0;
    for (; i + 4 <= rows; i += 4) {
      dots_of<4>(x + i * x_stride, x_stride, w + j * w_stride, k, sums + i * kColumns + j);
    }
    for (; i < rows; ++i) {
      dots_of<1>(x + i * x_stride, x_stride, w + j * w_stride, k, sums + i * kColumns + j);
    }
  }
}

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels all = [] {
    Kernels own = plain_kernels("AVX2");
    own.dots = dots_in_16_bits, own.panel = panel_by<dots_in_16_bits>;
    return own;
  }();
  return all;
}

}  // namespace jqx
