// Compiled with -march=armv8.2-a+dotprod.

#include <arm_neon.h>

#include "generic_kernels.inc"

namespace jqx {
namespace {

// R rows by C columns.
template <int R, int C>
void dots_of(const int8_t* x, int64_t x_stride, const int8_t* w, int64_t w_stride, int64_t k,
             int32_t* sums) {
  int32x4_t total[R][C];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < C; ++j) total[i][j] = vdupq_n_s32(0);
  }
  int64_t at = 0;
  for (; at + 16 <= k; at += 16) {
    int8x16_t own[C];
    for (int j = 0; j < C; ++j) own[j] = vld1q_s8(w + j * w_stride + at);
    for (int i = 0; i < R; ++i) {
      const int8x16_t row = vld1q_s8(x + i * x_stride + at);
      for (int j = 0; j < C; ++j) total[i][j] = vdotq_s32(total[i][j], own[j], row);
    }
  }
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < C; ++j) {
      const int32_t rest = dot(x + i * x_stride + at, w + j * w_stride + at, k - at);
      sums[i * kColumns + j] = vaddvq_s32(total[i][j]) + rest;
    }
  }
}

template <int C>
void dots_of_columns(const int8_t* x, int64_t x_stride, int rows, const int8_t* w,
                     int64_t w_stride, int64_t k, int32_t* sums) {
  int i = 0;
  for (; i + 4 <= rows; i += 4) {
    dots_of<4, C>(x + i * x_stride, x_stride, w, w_stride, k, sums + i * kColumns);
  }
  for (; i < rows; ++i) {
    dots_of<1, C>(x + i * x_stride, x_stride, w, w_stride, k, sums + i * kColumns);
  }
}

void dots_by_dot(const int8_t* x, int64_t x_stride, const int32_t*, int rows, const int8_t* w,
                 int64_t w_stride, int columns, int64_t k, int32_t* sums) {
  int j = 0;
  for (; j + 4 <= columns; j += 4) {
    dots_of_columns<4>(x, x_stride, rows, w + j * w_stride, w_stride, k, sums + j);
  }
  for (; j < columns; ++j) {
    dots_of_columns<1>(x, x_stride, rows, w + j * w_stride, w_stride, k, sums + j);
  }
}

}  // namespace

const Kernels& neon_kernels() {
  static const Kernels all = [] {
    Kernels own = plain_kernels("NEON");
    own.dots = dots_by_dot, own.panel = panel_by<dots_by_dot>;
    return own;
  }();
  return all;
}

}  // namespace jqx
