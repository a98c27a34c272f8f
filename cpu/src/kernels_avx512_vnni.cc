// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni.
//
// `vpdpbusd` multiplies unsigned by signed bytes: weights are the unsigned operand, with their top
// bit flipped, which adds 128 to each; so sums are less by 128 times the sum of a row. The
// instruction is written in assembly: GCC 12 keeps the accumulators of the intrinsic in memory.

#include <immintrin.h>

#include "avx512.h"
#include "generic_kernels.inc"

namespace jqx {
namespace {

inline void multiply(__m512i& total, __m512i weights, __m512i rows) {
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(weights), "v"(rows));
}

inline __m512i flipped(__m512i codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8(-128)); }

constexpr int64_t kAhead = 4096;

void quantize_vnni(const float* x, int64_t n, float scale, int32_t zero, int32_t low, int32_t high,
                   int8_t* codes) {
  const __m512 s = _mm512_set1_ps(scale);
  const __m512 lo = _mm512_set1_ps(float(low - zero)), hi = _mm512_set1_ps(float(high - zero));
  const __m512i from = _mm512_set1_epi32(zero);
  for_vectors(n, [&](int64_t i, __mmask16 here) {
    const __m512 y = _mm512_div_ps(_mm512_maskz_loadu_ps(here, x + i), s);
    const __mmask16 known = _mm512_cmp_ps_mask(y, y, _CMP_ORD_Q);
    const __m512 clipped = _mm512_min_ps(_mm512_max_ps(y, lo), hi);
    const __m512i whole = _mm512_maskz_cvt_roundps_epi32(
        known, clipped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm512_mask_cvtepi32_storeu_epi8(codes + i, here, _mm512_add_epi32(whole, from));
  });
}

void map_vnni(int64_t op, Numbers a, Numbers b, int64_t rows, int64_t n, float* y, int64_t y_step) {
  const auto two = [&](auto f) {
    for (int64_t r = 0; r < rows; ++r) {
      const float *own_a = a.at + r * a.step, *own_b = b.at + r * b.step;
      const __m512 one_a = _mm512_set1_ps(*own_a), one_b = _mm512_set1_ps(*own_b);
      for_vectors(n, [&](int64_t i, __mmask16 here) {
        const __m512 x = a.many ? _mm512_maskz_loadu_ps(here, own_a + i) : one_a;
        const __m512 z = b.many ? _mm512_maskz_loadu_ps(here, own_b + i) : one_b;
        _mm512_mask_storeu_ps(y + r * y_step + i, here, f(x, z));
      });
    }
  };
  with_function(op, two, [&](auto f) { two([f](__m512 x, __m512) { return f(x); }); });
}

void select_vnni(const bool* mask, int64_t mask_step, bool many, Numbers b, Numbers c, int64_t rows,
                 int64_t n, float* y, int64_t y_step) {
  for (int64_t r = 0; r < rows; ++r, mask += mask_step) {
    const float *own_b = b.at + r * b.step, *own_c = c.at + r * c.step;
    for_vectors(n, [&](int64_t i, __mmask16 here) {
      const __m128i bytes = many ? _mm_maskz_loadu_epi8(here, mask + i) : _mm_set1_epi8(char(*mask));
      const __mmask16 set = _mm_test_epi8_mask(bytes, bytes);
      const __m512 x = b.many ? _mm512_maskz_loadu_ps(here, own_b + i) : _mm512_set1_ps(*own_b);
      const __m512 z = c.many ? _mm512_maskz_loadu_ps(here, own_c + i) : _mm512_set1_ps(*own_c);
      _mm512_mask_storeu_ps(y + r * y_step + i, here, _mm512_mask_blend_ps(set, z, x));
    });
  }
}

float reduce_vnni(int64_t op, const float* x, int64_t n) {
  const __m512 start = _mm512_set1_ps(op == kSum ? 0.0f : -INFINITY);
  const auto all = [&](auto f) {
    __m512 total[4] = {start, start, start, start};
    for (int64_t i = 0; i < n; i += 64) {
      JQX_UNROLL for (int j = 0; j < 4; ++j) {
        const __mmask16 here = __mmask16(i + 16 * j < n ? first(n - i - 16 * j) : 0);
        total[j] = f(total[j], _mm512_mask_loadu_ps(start, here, x + i + 16 * j));
      }
    }
    return f(f(total[0], total[1]), f(total[2], total[3]));
  };
  if (op == kSum) return _mm512_reduce_add_ps(all([](__m512 a, __m512 b) { return a + b; }));
  const __m512 most = all([](__m512 a, __m512 b) { return larger(a, b); });
  return no_numbers(most) ? NAN : _mm512_reduce_max_ps(most);
}

// The instructions for the less and the larger number return the second one where one is NaN.
void range_vnni(const float* x, int64_t n, float* found) {
  const __m512 most = _mm512_set1_ps(INFINITY), least = _mm512_set1_ps(-INFINITY);
  __m512 low = most, high = least;
  int64_t nans = 0;
  for_vectors(n, [&](int64_t i, __mmask16 here) {
    const __m512 own = _mm512_maskz_loadu_ps(here, x + i);
    low = _mm512_mask_min_ps(low, here, own, low);
    high = _mm512_mask_max_ps(high, here, own, high);
    nans += __builtin_popcount(_mm512_cmp_ps_mask(own, own, _CMP_UNORD_Q));
  });
  found[0] = _mm512_reduce_min_ps(low), found[1] = _mm512_reduce_max_ps(high);
  found[2] = float(nans);
}

int32_t sum_vnni(const int8_t* codes, int64_t n) {
  __m512i total = _mm512_setzero_si512();
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < n; i += 64) {
    multiply(total, ones, _mm512_maskz_loadu_epi8(first(n - i), codes + i));
  }
  return _mm512_reduce_add_epi32(total);
}

// Returns the sums of the lanes of four vectors.
inline __m128i folded(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

inline __m128 folded(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Returns how far ahead weights are fetched from memory: the next 4 columns, or those after if
// columns are short. Beyond the end nothing is read.
inline int64_t ahead_of(int64_t stride) {
  const int64_t four = 4 * stride;
  return four * ((kAhead + four - 1) / four);
}

// R rows by 4 columns; `own` are the weights of these.
template <int R>
__attribute__((noinline)) void dots_of(const int8_t* x, int64_t x_stride, const int32_t* of_rows,
                                       const int8_t* const* own, int64_t k, __mmask8 columns,
                                       int32_t* sums) {
  __m512i total[R][4];
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    JQX_UNROLL for (int j = 0; j < 4; ++j) total[i][j] = _mm512_setzero_si512();
  }
  for (int64_t at = 0; at < k; at += 64) {
    const __mmask64 here = first(k - at);
    __m512i w[4];
    JQX_UNROLL for (int j = 0; j < 4; ++j) w[j] = flipped(_mm512_maskz_loadu_epi8(here, own[j] + at));
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      const __m512i row = _mm512_loadu_si512(x + i * x_stride + at);
      JQX_UNROLL for (int j = 0; j < 4; ++j) multiply(total[i][j], w[j], row);
    }
  }
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    const __m128i all = folded(total[i][0], total[i][1], total[i][2], total[i][3]);
    const __m128i more = _mm_slli_epi32(_mm_set1_epi32(of_rows[i]), 7);
    _mm_mask_storeu_epi32(sums + i * kColumns, columns, _mm_sub_epi32(all, more));
  }
}

using DotsOf = void (*)(const int8_t*, int64_t, const int32_t*, const int8_t* const*, int64_t,
                        __mmask8, int32_t*);
constexpr DotsOf kDotsOf[] = {dots_of<1>, dots_of<2>, dots_of<3>, dots_of<4>, dots_of<5>, dots_of<6>};
constexpr int kRows = 6;

void dots_vnni(const int8_t* x, int64_t x_stride, const int32_t* of_rows, int rows,
               const int8_t* w, int64_t w_stride, int columns, int64_t k, int32_t* sums) {
  for (int j = 0; j < columns; j += 4) {
    const int here = columns - j < 4 ? columns - j : 4;
    const int8_t* own[4];
    for (int c = 0; c < 4; ++c) own[c] = w + (j + (c < here ? c : here - 1)) * w_stride;
    for (int i = 0; i < rows; i += kRows) {
      const int some = rows - i < kRows ? rows - i : kRows;
      kDotsOf[some - 1](x + i * x_stride, x_stride, of_rows + i, own, k,
                        __mmask8((1 << here) - 1), sums + i * kColumns + j);
    }
  }
}

// Turns columns of bytes, xored with some bits, into runs of 4 of each column.
void turn_bytes(const int8_t* w, int64_t w_stride, int columns, int64_t w_k, int8_t bits,
                uint8_t* panel) {
  const __m512i flip = _mm512_set1_epi8(bits);
  for (int j = 0; j < kColumns && j < columns; j += 16) {
    for (int64_t at = 0; at < w_k; at += 64) {  // each column as it lies in memory
      __m512i some[16];
      JQX_UNROLL for (int i = 0; i < 16; ++i) {
        const __mmask64 here = j + i < columns ? first(w_k - at) : 0;
        const int8_t* from = w + (here ? (j + i) * w_stride + at : 0);
        some[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(here, from), flip);
      }
      turn(some, panel + at * kColumns + 4 * j, kStep);
    }
  }
}

void pack_vnni(const int8_t* w, int64_t w_stride, int columns, int64_t w_k, uint8_t* panel) {
  turn_bytes(w, w_stride, columns, w_k, -128, panel);
}

void turn_avx512(const float* x, int64_t stride, int columns, int64_t k, float* panel) {
  turn_bytes(reinterpret_cast<const int8_t*>(x), 4 * stride, columns, 4 * k, 0,
             reinterpret_cast<uint8_t*>(panel));
}

// Joins the bytes of four steps, column by column: unpacking does it within each 128 bits, which
// are then put in order.
void pack_rows_vnni(const int8_t* w, int64_t w_stride, int columns, int64_t w_k, uint8_t* panel) {
  for (int64_t at = 0; at < w_k; at += 4, panel += 4 * kColumns) {
    __m512i r[4], t[4];
    JQX_UNROLL for (int i = 0; i < 4; ++i) {
      const bool is_there = at + i < w_k;
      const __mmask64 here = is_there ? first(columns) : 0;
      r[i] = flipped(_mm512_maskz_loadu_epi8(here, w + (is_there ? (at + i) * w_stride : 0)));
    }
    JQX_UNROLL for (int i = 0; i < 4; i += 2) {
      t[i] = _mm512_unpacklo_epi8(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi8(r[i], r[i + 1]);
    }
    JQX_UNROLL for (int i = 0; i < 2; ++i) {
      r[2 * i] = _mm512_unpacklo_epi16(t[i], t[i + 2]);
      r[2 * i + 1] = _mm512_unpackhi_epi16(t[i], t[i + 2]);
    }
    JQX_UNROLL for (int i = 0; i < 2; ++i) {
      t[i] = _mm512_shuffle_i32x4(r[2 * i], r[2 * i + 1], 0x44);
      t[i + 2] = _mm512_shuffle_i32x4(r[2 * i], r[2 * i + 1], 0xee);
    }
    JQX_UNROLL for (int i = 0; i < 2; ++i) {
      _mm512_store_si512(panel + 128 * i, _mm512_shuffle_i32x4(t[2 * i], t[2 * i + 1], 0x88));
      _mm512_store_si512(panel + 128 * i + 64, _mm512_shuffle_i32x4(t[2 * i], t[2 * i + 1], 0xdd));
    }
  }
}

// R rows by 16 C columns.
template <int R, int C>
__attribute__((noinline)) void panel_of(const int8_t* x, int64_t x_stride, const int32_t* of_rows,
                                        const uint8_t* panel, int64_t k, int32_t* sums) {
  __m512i total[R][C];
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    JQX_UNROLL for (int j = 0; j < C; ++j) total[i][j] = _mm512_setzero_si512();
  }
  for (int64_t at = 0; at < k; at += 4, panel += 4 * kColumns) {
    __m512i w[C];
    JQX_UNROLL for (int j = 0; j < C; ++j) w[j] = _mm512_load_si512(panel + 64 * j);
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      int32_t codes;
      std::memcpy(&codes, x + i * x_stride + at, 4);
      const __m512i row = _mm512_set1_epi32(codes);
      JQX_UNROLL for (int j = 0; j < C; ++j) multiply(total[i][j], w[j], row);
    }
  }
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    const __m512i more = _mm512_slli_epi32(_mm512_set1_epi32(of_rows[i]), 7);
    JQX_UNROLL for (int j = 0; j < C; ++j) {
      _mm512_storeu_si512(sums + i * kColumns + 16 * j, _mm512_sub_epi32(total[i][j], more));
    }
  }
}

using PanelOf = void (*)(const int8_t*, int64_t, const int32_t*, const uint8_t*, int64_t,
                         int32_t*);
#define JQX_ROWS(C) \
  {panel_of<1, C>, panel_of<2, C>, panel_of<3, C>, panel_of<4, C>, panel_of<5, C>, panel_of<6, C>}
constexpr PanelOf kPanelOf[][kRows] = {JQX_ROWS(1), JQX_ROWS(2), JQX_ROWS(3), JQX_ROWS(4)};
#undef JQX_ROWS

void panel_vnni(const int8_t* x, int64_t x_stride, const int32_t* of_rows, int rows,
                const uint8_t* panel, int columns, int64_t k, int32_t* sums) {
  const PanelOf* of = kPanelOf[(columns - 1) / 16];
  for (int i = 0; i < rows; i += kRows) {
    const int some = rows - i < kRows ? rows - i : kRows;
    of[some - 1](x + i * x_stride, x_stride, of_rows + i, panel, k, sums + i * kColumns);
  }
}

// Multiplies pairs of 16 bits and adds both products.
inline void multiply_pairs(__m512i& total, __m512i x, __m512i w) {
  asm("vpdpwssd %2, %1, %0" : "+v"(total) : "v"(x), "v"(w));
}

// 32 channels at a time: the numbers of two taps are joined channel by channel, which leaves 4 of 8
// channels in one vector and 4 in another.
void depthwise_vnni(const int8_t* x, int64_t step, int pixels, const int64_t* places,
                    const int16_t* const* weights, int taps, int64_t channels, int32_t a,
                    int32_t* sums) {
  constexpr int kMost = 32;
  const int pairs = (taps + 1) / 2;
  if (pairs > kMost) {
    return depthwise(x, step, pixels, places, weights, taps, channels, a, sums);
  }
  __m512i w[kMost][2];
  const __m512i zero = _mm512_setzero_si512(), less = _mm512_set1_epi16(int16_t(-a));
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int64_t c = 0; c < channels; c += 32) {
    const __mmask32 here = __mmask32(first(std::min<int64_t>(channels - c, 32)));
    __m512i start[2] = {zero, zero};  // less the zero point times the weights
    for (int t = 0; t < taps; t += 2) {
      const bool has_next = t + 1 < taps;
      const __m512i one = _mm512_maskz_loadu_epi16(here, weights[t] + c);
      const __m512i other =
          has_next ? _mm512_maskz_loadu_epi16(here, weights[t + 1] + c) : zero;
      w[t / 2][0] = _mm512_unpacklo_epi16(one, other);
      w[t / 2][1] = _mm512_unpackhi_epi16(one, other);
      multiply_pairs(start[0], less, w[t / 2][0]);
      multiply_pairs(start[1], less, w[t / 2][1]);
    }
    for (int i = 0; i < pixels; ++i) {
      const int8_t* from = x + i * step + c;
      __m512i even = start[0], odd = start[1];
      for (int t = 0; t < taps; t += 2) {
        const int8_t* first_tap = from + places[t];
        const int8_t* next = from + places[std::min(t + 1, taps - 1)];
        const __m512i one = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(here, first_tap));
        const __m512i other = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(here, next));
        multiply_pairs(even, _mm512_unpacklo_epi16(one, other), w[t / 2][0]);
        multiply_pairs(odd, _mm512_unpackhi_epi16(one, other), w[t / 2][1]);
      }
      int32_t* to = sums + i * channels + c;
      _mm512_mask_storeu_epi32(to, __mmask16(here), _mm512_permutex2var_epi64(even, low, odd));
      if (here >> 16) {
        const __m512i rest = _mm512_permutex2var_epi64(even, high, odd);
        _mm512_mask_storeu_epi32(to + 16, __mmask16(here >> 16), rest);
      }
    }
  }
}

// Returns the scales of 4 columns for the lanes of a run: those of lane l are in the 128 bits l / 4
// that hold it, one float a column; of groups of two lanes the second ones are in `*odd`.
inline __m512 scales_of(const GroupedWeights& w, int64_t at, int lanes, int64_t last,
                        const float* scale, __mmask8 columns, __m512* odd) {
  const auto of = [&](int64_t group) {
    group = group < last ? group : last;
    return _mm_maskz_loadu_ps(columns, scale + group * w.scale_stride);
  };
  const auto four = [](__m128 a, __m128 b, __m128 c, __m128 d) {
    const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(a), b, 1);
    const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(c), d, 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  };
  const int64_t group = at / w.group;
  switch (lanes) {
    case 2:
      *odd = four(of(group + 1), of(group + 3), of(group + 5), of(group + 7));
      return four(of(group), of(group + 2), of(group + 4), of(group + 6));
    case 4:
      return four(of(group), of(group + 1), of(group + 2), of(group + 3));
    case 8: {
      const __m128 a = of(group), b = of(group + 1);
      return four(a, a, b, b);
    }
    default:
      return _mm512_broadcast_f32x4(of(group));
  }
}

template <int J>
inline __m512 of_column(__m512 scales, __m512 odd, bool is_split) {
  constexpr int kSame = J * 0x55;
  const __m512 own = _mm512_permute_ps(scales, kSame);
  return is_split ? _mm512_mask_permute_ps(own, 0xcccc, odd, kSame) : own;
}

// R rows beside 4 columns.
template <int kBits, int kDigits, int R>
__attribute__((noinline)) void grouped_of(const Digits* rows, const GroupedWeights& w,
                                          const uint8_t* const* own, const float* scale,
                                          __mmask8 columns, float* out) {
  constexpr int kPer = 8 / kBits;
  constexpr int64_t kInLane = 4 * kPer;
  const int64_t bytes = (w.k + kPer - 1) / kPer, last = (w.k - 1) / w.group;
  const int lanes = w.group >= 16 * kInLane ? 16 : int(w.group / kInLane);
  const __m512i mask = _mm512_set1_epi8((1 << kBits) - 1);
  const int all_flipped = kBits == 8 ? 0x80 : kBits == 4 ? 0x88 : 0xaa;
  const __m512i flip = _mm512_set1_epi8(char(w.is_signed ? all_flipped : 0));
  const int64_t ahead = ahead_of(w.stride);
  __m512 total[R][4];
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    JQX_UNROLL for (int j = 0; j < 4; ++j) total[i][j] = _mm512_setzero_ps();
  }
  for (int64_t at = 0; at < bytes; at += kRun) {
    __m512 odd = _mm512_setzero_ps();
    const __m512 scales = scales_of(w, at * kPer, lanes, last, scale, columns, &odd);
    const __mmask64 here = first(bytes - at);
    __m512i start[R][kDigits];  // less the middle of codes
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      const __m512i zero = _mm512_setzero_si512();
      if (kBits == 8) {  // 32 bits do not hold the sum of four whole numbers
        JQX_UNROLL for (int d = 0; d < kDigits; ++d) {
          __m512i sums = zero;
          multiply(sums, _mm512_set1_epi8(1), _mm512_loadu_si512(rows[i].digits[d] + at));
          start[i][d] = _mm512_sub_epi32(zero, _mm512_slli_epi32(sums, 7));
        }
      } else {
        const __m512i sums = _mm512_loadu_si512(rows[i].lanes + at / 4);
        JQX_UNROLL for (int d = 0; d < kDigits - 1; ++d) start[i][d] = zero;
        start[i][kDigits - 1] = _mm512_sub_epi32(zero, _mm512_slli_epi32(sums, kBits - 1));
      }
    }
    // One row stays in registers for all columns; of two there is no room.
    __m512i held[kDigits][kPer];
    if (R == 1) {
      JQX_UNROLL for (int d = 0; d < kDigits; ++d) {
        JQX_UNROLL for (int p = 0; p < kPer; ++p) {
          held[d][p] = _mm512_loadu_si512(rows[0].digits[d] + at * kPer + p * kRun);
        }
      }
    }
    JQX_UNROLL for (int j = 0; j < 4; ++j) {
      _mm_prefetch(own[j] + at + ahead, _MM_HINT_T0);
      const __m512i codes = _mm512_xor_si512(_mm512_maskz_loadu_epi8(here, own[j] + at), flip);
      __m512i some[kPer];
      JQX_UNROLL for (int p = 0; p < kPer; ++p) {
        const __m512i shifted = p == 0 ? codes : _mm512_srli_epi16(codes, p * kBits);
        some[p] = kBits == 8 ? shifted : _mm512_and_si512(shifted, mask);
      }
      JQX_UNROLL for (int i = 0; i < R; ++i) {
        __m512i sums[kDigits];
        JQX_UNROLL for (int d = 0; d < kDigits; ++d) sums[d] = start[i][d];
        JQX_UNROLL for (int p = 0; p < kPer; ++p) {
          const int64_t place = at * kPer + p * kRun;
          JQX_UNROLL for (int d = 0; d < kDigits; ++d) {
            const __m512i digits =
                R == 1 ? held[d][p] : _mm512_loadu_si512(rows[i].digits[d] + place);
            multiply(sums[d], some[p], digits);
          }
        }
        constexpr int kWhole = kBits == 8 && kDigits == 3 ? 2 : kDigits;  // that 32 bits hold
        __m512i whole = sums[0];
        JQX_UNROLL for (int d = 1; d < kWhole; ++d) {
          whole = _mm512_add_epi32(_mm512_slli_epi32(whole, 8), sums[d]);
        }
        __m512 real = _mm512_cvtepi32_ps(whole);
        if (kWhole < kDigits) {
          const __m512 by = _mm512_set1_ps(256);
          real = _mm512_fmadd_ps(real, by, _mm512_cvtepi32_ps(sums[kDigits - 1]));
        }
        const bool is_split = lanes == 2;
        const __m512 s = j == 0   ? of_column<0>(scales, odd, is_split)
                         : j == 1 ? of_column<1>(scales, odd, is_split)
                         : j == 2 ? of_column<2>(scales, odd, is_split)
                                  : of_column<3>(scales, odd, is_split);
        real = _mm512_mul_ps(real, _mm512_set1_ps(rows[i].power));
        total[i][j] = _mm512_fmadd_ps(real, s, total[i][j]);
      }
    }
  }
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    const __m128 all = folded(total[i][0], total[i][1], total[i][2], total[i][3]);
    _mm_mask_storeu_ps(out + i * kColumns, columns, all);
  }
}

template <int kBits, int kDigits>
void grouped_in(const Digits* rows, int count, const GroupedWeights& w, int columns, float* out) {
  for (int j = 0; j < columns; j += 4) {
    const int here = columns - j < 4 ? columns - j : 4;
    const __mmask8 valid = __mmask8((1 << here) - 1);
    const uint8_t* own[4];
    for (int c = 0; c < 4; ++c) own[c] = w.codes + (j + (c < here ? c : here - 1)) * w.stride;
    for (int i = 0; i < count; i += 2) {
      const auto f = i + 2 <= count ? grouped_of<kBits, kDigits, 2> : grouped_of<kBits, kDigits, 1>;
      f(rows + i, w, own, w.scale + j, valid, out + i * kColumns + j);
    }
  }
}

template <int kDigits>
void grouped_by(const Digits* rows, int count, const GroupedWeights& w, int columns, float* out) {
  const auto f = w.bits == 8   ? grouped_in<8, kDigits>
                 : w.bits == 4 ? grouped_in<4, kDigits>
                               : grouped_in<2, kDigits>;
  f(rows, count, w, columns, out);
}

void grouped_vnni(const Digits* rows, int count, const GroupedWeights& w, int columns, float* out) {
  const auto f = rows->count == 3 ? grouped_by<3> : rows->count == 2 ? grouped_by<2> : grouped_by<1>;
  f(rows, count, w, columns, out);
}

// Returns 64 codes, a byte each, in order.
template <int kBits>
inline __m512i unpacked(const uint8_t* from, int64_t bytes) {
  if (kBits == 8) return _mm512_maskz_loadu_epi8(first(bytes), from);
  if (kBits == 4) {
    const __m256i packed = _mm256_maskz_loadu_epi8(__mmask32(first(bytes)), from);
    const __m512i wide = _mm512_cvtepu8_epi16(packed);
    const __m512i both = _mm512_or_si512(wide, _mm512_slli_epi16(wide, 4));
    return _mm512_and_si512(both, _mm512_set1_epi8(0x0f));
  }
  const __m128i packed = _mm_maskz_loadu_epi8(__mmask16(first(bytes)), from);
  const __m512i wide = _mm512_cvtepu8_epi32(packed);
  const __m512i two = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 6));
  const __m512i four = _mm512_or_si512(two, _mm512_slli_epi32(two, 12));
  return _mm512_and_si512(four, _mm512_set1_epi8(0x03));
}

template <int kBits>
void unpack_in(const GroupedWeights& w, int columns, uint8_t* panel) {
  const __m512i flip = _mm512_set1_epi8(char(w.is_signed ? w.middle() : 0));
  const int64_t width = w.k * kBits / 8;
  for (int64_t at = 0; at < w.k; at += 64) {
    for (int j = 0; j < kColumns; j += 16) {
      __m512i some[16];
      const int64_t byte = at * kBits / 8;
      JQX_UNROLL for (int i = 0; i < 16; ++i) {
        const int64_t column = j + i < columns ? j + i : 0;
        const uint8_t* from = w.codes + column * w.stride + byte;
        some[i] = _mm512_xor_si512(unpacked<kBits>(from, width - byte), flip);
      }
      turn(some, panel + at * kColumns + 4 * j, kStep);
    }
  }
}

void unpack_vnni(const GroupedWeights& w, int columns, uint8_t* panel) {
  const auto f = w.bits == 8 ? unpack_in<8> : w.bits == 4 ? unpack_in<4> : unpack_in<2>;
  f(w, columns, panel);
}

// Codes become float32 as the lowest bits of 2**23, which is then taken from them together with
// their middle and zero point: bfloat16 holds what is left.
template <int kBits>
void decode_pairs_in(const GroupedWeights& w, const int8_t* zero, int64_t from, int64_t to,
                     int columns, uint16_t* panel) {
  constexpr int kPer = 32 / kBits;  // codes of 4 bytes
  constexpr int kMagic = 0x4b000000;
  const __m512i mask = _mm512_set1_epi32((1 << kBits) - 1);
  const __m512i magic = _mm512_set1_epi32(kMagic | (w.is_signed ? w.middle() : 0));
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  __m512 less[4];
  const auto find_less = [&](int64_t group) {
    JQX_UNROLL for (int j = 0; j < 4; ++j) {
      less[j] = _mm512_set1_ps(0x1p23f + float(w.middle()));
      if (zero == nullptr) continue;
      const __mmask16 here = columns_from(16 * j, columns);
      const int8_t* own = zero + (here ? group * w.scale_stride + 16 * j : 0);
      const __m128i codes = _mm_maskz_loadu_epi8(here, own);
      less[j] = _mm512_add_ps(less[j], _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
    }
  };
  int64_t group = from / w.group;
  find_less(group);
  const int64_t stop = (to + kPairs - 1) / kPairs * kPairs;
  alignas(64) uint8_t turned[kRun * kColumns];
  for (int64_t k = from; k < stop; k += 16 * kPer) {
    turn_codes(w, k * kBits / 8, (to - from) * kBits / 8, columns, turned);
    for (int l = 0; l < 16 && k + l * kPer < stop; ++l) {
      const int64_t at = k + l * kPer;
      if (zero != nullptr && at < to && at / w.group != group) find_less(group = at / w.group);
      JQX_UNROLL for (int j = 0; j < 4; ++j) {
        const __m512i codes = _mm512_load_si512(turned + 4 * (l * kColumns + 16 * j));
        const auto real = [&](int i) {
          const __m512i own = i == 0 ? codes : _mm512_srli_epi32(codes, i * kBits);
          // own & mask ^ magic
          const __m512i joined = _mm512_ternarylogic_epi32(own, mask, magic, 0x6a);
          return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(joined), less[j]));
        };
        JQX_UNROLL for (int p = 0; p < kPer / 2; ++p) {
          const __m512i even = _mm512_srli_epi32(real(2 * p), 16), odd = real(2 * p + 1);
          // odd & upper | even
          const __m512i both = _mm512_ternarylogic_epi32(odd, upper, even, 0xea);
          _mm512_store_si512(panel + 2 * ((l * kPer / 2 + p) * kColumns + 16 * j), both);
        }
      }
    }
    panel += 16 * kPer * kColumns;
  }
}

void decode_pairs_vnni(const GroupedWeights& w, const int8_t* zero, int64_t from, int64_t to,
                       int columns, uint16_t* panel) {
  const auto f = w.bits == 8   ? decode_pairs_in<8>
                 : w.bits == 4 ? decode_pairs_in<4>
                               : decode_pairs_in<2>;
  f(w, zero, from, to, columns, panel);
}

// R rows beside a panel.
template <int kDigits, int R>
__attribute__((noinline)) void grouped_panel_of(const Digits* rows, const GroupedWeights& w,
                                                const uint8_t* panel, const int8_t* zero,
                                                const int32_t* of_digits, const float* of_groups,
                                                int columns, float* out) {
  const int64_t groups = w.k / w.group;
  __mmask16 here[4];
  JQX_UNROLL for (int j = 0; j < 4; ++j) here[j] = columns_from(16 * j, columns);
  alignas(64) float sums[R][kColumns];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kColumns; j += 16) _mm512_store_ps(sums[i] + j, _mm512_setzero_ps());
  }
  for (int64_t g = 0; g < groups; ++g) {
    __m512i total[R][kDigits][4];
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      JQX_UNROLL for (int d = 0; d < kDigits; ++d) {
        const int32_t less = -w.middle() * of_digits[(i * groups + g) * kDigits + d];
        JQX_UNROLL for (int j = 0; j < 4; ++j) total[i][d][j] = _mm512_set1_epi32(less);
      }
    }
    for (int64_t at = g * w.group; at < (g + 1) * w.group; at += 4, panel += 4 * kColumns) {
      __m512i own[4];
      JQX_UNROLL for (int j = 0; j < 4; ++j) own[j] = _mm512_load_si512(panel + 64 * j);
      JQX_UNROLL for (int i = 0; i < R; ++i) {
        JQX_UNROLL for (int d = 0; d < kDigits; ++d) {
          int32_t codes;
          std::memcpy(&codes, rows[i].digits[d] + at, 4);
          const __m512i row = _mm512_set1_epi32(codes);
          JQX_UNROLL for (int j = 0; j < 4; ++j) multiply(total[i][d][j], own[j], row);
        }
      }
    }
    JQX_UNROLL for (int j = 0; j < 4; ++j) {
      const __m512 scale = _mm512_maskz_loadu_ps(here[j], w.scale + g * w.scale_stride + 16 * j);
      __m512 less = _mm512_setzero_ps();
      if (zero != nullptr) {
        const int8_t* own = zero + g * w.scale_stride + 16 * j;
        less = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(here[j], own)));
      }
      JQX_UNROLL for (int i = 0; i < R; ++i) {
        const __m512 power = _mm512_set1_ps(rows[i].power);
        const __m512 by = _mm512_set1_ps(256);
        __m512 y = _mm512_cvtepi32_ps(total[i][0][j]);
        JQX_UNROLL for (int d = 1; d < kDigits; ++d) {
          y = _mm512_fmadd_ps(y, by, _mm512_cvtepi32_ps(total[i][d][j]));
        }
        y = _mm512_mul_ps(y, power);
        if (zero != nullptr) {
          y = _mm512_fnmadd_ps(less, _mm512_set1_ps(of_groups[i * groups + g]), y);
        }
        const __m512 before = _mm512_load_ps(sums[i] + 16 * j);
        _mm512_store_ps(sums[i] + 16 * j, _mm512_fmadd_ps(y, scale, before));
      }
    }
  }
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kColumns; j += 16) {
      _mm512_storeu_ps(out + i * kColumns + j, _mm512_load_ps(sums[i] + j));
    }
  }
}

using GroupedPanelOf = void (*)(const Digits*, const GroupedWeights&, const uint8_t*, const int8_t*,
                                const int32_t*, const float*, int, float*);
constexpr GroupedPanelOf kGroupedPanelOf[3][kRows] = {  // by digits, of which registers hold kRows
    {grouped_panel_of<1, 1>, grouped_panel_of<1, 2>, grouped_panel_of<1, 3>,
     grouped_panel_of<1, 4>, grouped_panel_of<1, 5>, grouped_panel_of<1, 6>},
    {grouped_panel_of<2, 1>, grouped_panel_of<2, 2>, grouped_panel_of<2, 3>},
    {grouped_panel_of<3, 1>, grouped_panel_of<3, 2>}};

void grouped_panel_vnni(const Digits* rows, int count, const GroupedWeights& w,
                        const uint8_t* panel, const int8_t* zero, const int32_t* of_digits,
                        const float* of_groups, int columns, float* out) {
  const int64_t groups = w.k / w.group;
  const int digits = rows->count, most = kRows / digits;
  for (int i = 0; i < count; i += most) {
    const int some = count - i < most ? count - i : most;
    const float* own = of_groups == nullptr ? nullptr : of_groups + i * groups;
    kGroupedPanelOf[digits - 1][some - 1](rows + i, w, panel, zero, of_digits + i * groups * digits,
                                          own, columns, out + i * kColumns);
  }
}

// Returns the bytes of a run that are the p-th of each `per`, in order, in the lowest bits.
inline void gather(const int8_t* from, int per, int8_t* to) {
  for (int part = 0; part < per; ++part) {  // kRun / per of each place at once
    const __m512i codes = _mm512_loadu_si512(from + part * kRun);
    for (int p = 0; p < per; ++p) {
      int8_t* own = to + p * kRun + part * (kRun / per);
      if (per == 1) {
        _mm512_storeu_si512(own, codes);
      } else if (per == 2) {
        const __m512i shifted = _mm512_srli_epi16(codes, 8 * p);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(own), _mm512_cvtepi16_epi8(shifted));
      } else {
        const __m512i shifted = _mm512_srli_epi32(codes, 8 * p);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(own), _mm512_cvtepi32_epi8(shifted));
      }
    }
  }
}

// Writes the digits of a run to where they lie, and adds to their sums.
inline void place(const int8_t (*plain)[4 * kRun], int64_t run, int per, Digits* to) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i all = _mm512_setzero_si512();
  for (int d = 0; d < to->count; ++d) {
    int8_t* own = to->digits[d] + run * kRun * per;
    gather(plain[d], per, own);
    __m512i sums = _mm512_setzero_si512();
    for (int p = 0; p < per; ++p) multiply(sums, ones, _mm512_loadu_si512(own + p * kRun));
    to->sums[d] += _mm512_reduce_add_epi32(sums);
    all = _mm512_add_epi32(_mm512_slli_epi32(all, 8), sums);
  }
  _mm512_storeu_si512(to->lanes + run * (kRun / 4), all);
}

void split_vnni(const float* x, int64_t k, int per, Digits* to) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += 16) {
    const __m512i bits = _mm512_maskz_loadu_epi32(__mmask16(first(k - i)), x + i);
    most = _mm512_max_epu32(most, _mm512_and_si512(bits, magnitude));
  }
  const float step = step_of(_mm512_reduce_max_epu32(most), to);
  const bool is_finite = to->rest == to->rest;
  const __m512 by = _mm512_set1_ps(step);
  const int64_t in_run = kRun * per;
  const int count = to->count;
  alignas(64) int8_t plain[3][4 * kRun];
  std::memset(to->sums, 0, sizeof(to->sums));
  for (int64_t run = 0; run * in_run < k; ++run) {
    for (int64_t i = 0; i < in_run; i += 16) {
      const int64_t left = k - run * in_run - i;
      const __mmask16 here = is_finite && left > 0 ? __mmask16(first(left)) : 0;
      const __m512 y = _mm512_div_ps(_mm512_maskz_loadu_ps(here, x + run * in_run + (here ? i : 0)), by);
      __m512i number = _mm512_cvt_roundps_epi32(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      for (int d = count - 1; d >= 0; --d) {
        const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24);
        _mm_store_si128(reinterpret_cast<__m128i*>(plain[d] + i), _mm512_cvtepi32_epi8(digit));
        number = _mm512_srai_epi32(_mm512_sub_epi32(number, digit), 8);
      }
    }
    place(plain, run, per, to);
  }
}

void arrange_vnni(const int8_t* x, int64_t k, int per, Digits* to) {
  alignas(64) int8_t plain[3][4 * kRun];
  to->sums[0] = 0, to->power = 1;
  const int64_t in_run = kRun * per;
  for (int64_t run = 0; run * in_run < k; ++run) {
    for (int64_t i = 0; i < in_run; i += kRun) {
      const int64_t left = k - run * in_run - i;
      const __mmask64 here = left > 0 ? first(left) : 0;
      const int8_t* from = x + run * in_run + (here ? i : 0);
      _mm512_store_si512(plain[0] + i, _mm512_maskz_loadu_epi8(here, from));
    }
    place(plain, run, per, to);
  }
}

void scale_vnni(int32_t* sums, int columns, const ZeroPoints& by, float left, const float* right,
                int64_t right_stride, float* out) {
  const bool is_plain = left >= 0x1p-64f && left <= 0x1p64f;
  if (!is_plain) return scale(sums, columns, by, left, right, right_stride, out);
  const __m512 first_scale = _mm512_set1_ps(left), one = _mm512_set1_ps(right[0]);
  for_vectors(columns, [&](int64_t j, __mmask16 here) {
    const __m512 second = right_stride == 0 ? one : _mm512_maskz_loadu_ps(here, right + j);
    __m512i sum = _mm512_maskz_loadu_epi32(here, sums + j);
    const auto less = [&](uint32_t each, __m512i of) {
      sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(_mm512_set1_epi32(int(each)), of));
    };
    if (by.of_columns != nullptr) less(by.a, _mm512_maskz_loadu_epi32(here, by.of_columns + j));
    if (by.b != nullptr) {
      less(by.rest, by.b_stride == 0 ? _mm512_set1_epi32(*by.b)
                                     : _mm512_maskz_loadu_epi32(here, by.b + j));
    }
    const __m512 y = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), first_scale), second);
    _mm512_mask_storeu_ps(out + j, here, y);
  });
}

}  // namespace
}  // namespace jqx

#include "decoded_avx512.inc"

namespace jqx {

const Kernels& avx512_vnni_kernels() {
  static const Kernels all = [] {
    Kernels own = plain_kernels("AVX-512 VNNI");
    own.quantize = quantize_vnni, own.turn = turn_avx512, own.map = map_vnni;
    own.select = select_vnni, own.reduce = reduce_vnni, own.range = range_vnni, own.sum = sum_vnni;
    own.dots = dots_vnni;
    own.pack = pack_vnni, own.pack_rows = pack_rows_vnni, own.panel = panel_vnni;
    own.depthwise = depthwise_vnni, own.scale = scale_vnni;
    own.split = split_vnni, own.arrange = arrange_vnni, own.grouped = grouped_vnni;
    own.unpack = unpack_vnni, own.grouped_panel = grouped_panel_vnni;
    own.decoded = decoded_avx512, own.decode = decode_avx512;
    own.add_products = add_products_avx512, own.decode_pairs = decode_pairs_vnni;
    return own;
  }();
  return all;
}

}  // namespace jqx
