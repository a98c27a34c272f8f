// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni.
//
// `vpdpbusd` multiplies unsigned by signed bytes: weights are the unsigned operand, with their top
// bit flipped, which adds 128 to each; so sums are less by 128 times the sum of a row. The
// instruction is written in assembly: GCC 12 keeps the accumulators of the intrinsic in memory.

#include <immintrin.h>

#include "generic_kernels.inc"

#define JQX_UNROLL _Pragma("GCC unroll 16")

namespace jqx {
namespace {

inline void multiply(__m512i& total, __m512i weights, __m512i rows) {
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(weights), "v"(rows));
}

inline __m512i flipped(__m512i codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8(-128)); }

constexpr int64_t kAhead = 4096;

inline __mmask64 first(int64_t n) { return n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1; }

void quantize_vnni(const float* x, int64_t n, float scale, float low, float high, int8_t* codes) {
  const __m512 s = _mm512_set1_ps(scale), lo = _mm512_set1_ps(low), hi = _mm512_set1_ps(high);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 here = __mmask16(first(n - i));
    const __m512 y = _mm512_div_ps(_mm512_maskz_loadu_ps(here, x + i), s);
    const __mmask16 known = _mm512_cmp_ps_mask(y, y, _CMP_ORD_Q);
    const __m512 clipped = _mm512_min_ps(_mm512_max_ps(y, lo), hi);
    const __m512i whole = _mm512_maskz_cvt_roundps_epi32(
        known, clipped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm512_mask_cvtepi32_storeu_epi8(codes + i, here, whole);
  }
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
  const int8_t *w0 = own[0], *w1 = own[1], *w2 = own[2], *w3 = own[3];
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    JQX_UNROLL for (int j = 0; j < 4; ++j) total[i][j] = _mm512_setzero_si512();
  }
  for (int64_t at = 0; at < k; at += 64) {
    const __mmask64 here = first(k - at);
    const __m512i a = flipped(_mm512_maskz_loadu_epi8(here, w0 + at));
    const __m512i b = flipped(_mm512_maskz_loadu_epi8(here, w1 + at));
    const __m512i c = flipped(_mm512_maskz_loadu_epi8(here, w2 + at));
    const __m512i d = flipped(_mm512_maskz_loadu_epi8(here, w3 + at));
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      const __m512i row = _mm512_loadu_si512(x + i * x_stride + at);
      multiply(total[i][0], a, row);
      multiply(total[i][1], b, row);
      multiply(total[i][2], c, row);
      multiply(total[i][3], d, row);
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

// Turns 16 columns of 64 bytes into 16 runs of 4 bytes of each: a transpose of 32-bit numbers.
inline void turn(__m512i* r, uint8_t* to) {
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
  constexpr int kStep = 4 * kColumns;  // bytes of a run of the panel
  JQX_UNROLL for (int i = 0; i < 4; ++i) {
    _mm512_store_si512(to + i * kStep, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_store_si512(to + (i + 4) * kStep, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_store_si512(to + (i + 8) * kStep, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_store_si512(to + (i + 12) * kStep, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}

// A panel has, for each 4 steps along k, 4 bytes of each column.
void pack_vnni(const int8_t* w, int64_t w_stride, int columns, int64_t w_k, uint8_t* panel) {
  for (int64_t at = 0; at < w_k; at += 64) {
    for (int j = 0; j < kColumns; j += 16) {
      __m512i some[16];
      JQX_UNROLL for (int i = 0; i < 16; ++i) {
        const __mmask64 here = j + i < columns ? first(w_k - at) : 0;
        const int8_t* from = w + (here ? (j + i) * w_stride + at : 0);
        some[i] = flipped(_mm512_maskz_loadu_epi8(here, from));
      }
      turn(some, panel + at * kColumns + 4 * j);
    }
  }
}

template <int R>
__attribute__((noinline)) void panel_of(const int8_t* x, int64_t x_stride, const int32_t* of_rows,
                                        const uint8_t* panel, int64_t k, int32_t* sums) {
  __m512i total[R][4];
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    JQX_UNROLL for (int j = 0; j < 4; ++j) total[i][j] = _mm512_setzero_si512();
  }
  for (int64_t at = 0; at < k; at += 4, panel += 4 * kColumns) {
    const __m512i a = _mm512_load_si512(panel), b = _mm512_load_si512(panel + 64);
    const __m512i c = _mm512_load_si512(panel + 128), d = _mm512_load_si512(panel + 192);
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      int32_t codes;
      std::memcpy(&codes, x + i * x_stride + at, 4);
      const __m512i row = _mm512_set1_epi32(codes);
      multiply(total[i][0], a, row);
      multiply(total[i][1], b, row);
      multiply(total[i][2], c, row);
      multiply(total[i][3], d, row);
    }
  }
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    const __m512i more = _mm512_slli_epi32(_mm512_set1_epi32(of_rows[i]), 7);
    JQX_UNROLL for (int j = 0; j < 4; ++j) {
      _mm512_storeu_si512(sums + i * kColumns + 16 * j, _mm512_sub_epi32(total[i][j], more));
    }
  }
}

using PanelOf = void (*)(const int8_t*, int64_t, const int32_t*, const uint8_t*, int64_t,
                         int32_t*);
constexpr PanelOf kPanelOf[] = {panel_of<1>, panel_of<2>, panel_of<3>,
                                panel_of<4>, panel_of<5>, panel_of<6>};

void panel_vnni(const int8_t* x, int64_t x_stride, const int32_t* of_rows, int rows,
                const uint8_t* panel, int64_t k, int32_t* sums) {
  for (int i = 0; i < rows; i += kRows) {
    const int some = rows - i < kRows ? rows - i : kRows;
    kPanelOf[some - 1](x + i * x_stride, x_stride, of_rows + i, panel, k, sums + i * kColumns);
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
template <int kBits, int R>
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
    __m512 by_row[R], odd_by_row[R];
    __m512i start[R], start_high[R], start_middle[R];  // less the middle of codes
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      const __m512 power = _mm512_set1_ps(rows[i].power);
      by_row[i] = _mm512_mul_ps(scales, power);
      odd_by_row[i] = _mm512_mul_ps(odd, power);
      const __m512i zero = _mm512_setzero_si512();
      start_high[i] = start_middle[i] = zero;
      if (kBits == 8) {  // 32 bits do not hold the sum of four whole numbers
        const auto of = [&](int d) {
          __m512i sums = zero;
          multiply(sums, _mm512_set1_epi8(1), _mm512_loadu_si512(rows[i].digits[d] + at));
          return _mm512_sub_epi32(zero, _mm512_slli_epi32(sums, 7));
        };
        start_high[i] = of(0), start_middle[i] = of(1), start[i] = of(2);
      } else {
        const __m512i sums = _mm512_loadu_si512(rows[i].lanes + at / 4);
        start[i] = _mm512_sub_epi32(zero, _mm512_slli_epi32(sums, kBits - 1));
      }
    }
    // One row stays in registers for all columns; of two there is no room.
    __m512i held[3][kPer];
    if (R == 1) {
      JQX_UNROLL for (int d = 0; d < 3; ++d) {
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
        __m512i high = start_high[i], middle = start_middle[i], low = start[i];
        JQX_UNROLL for (int p = 0; p < kPer; ++p) {
          const int64_t place = at * kPer + p * kRun;
          const auto digit = [&](int d) {
            return R == 1 ? held[d][p] : _mm512_loadu_si512(rows[i].digits[d] + place);
          };
          multiply(high, some[p], digit(0));
          multiply(middle, some[p], digit(1));
          multiply(low, some[p], digit(2));
        }
        const __m512i above = _mm512_add_epi32(_mm512_slli_epi32(high, 8), middle);
        __m512 real;
        if (kBits == 8) {
          const __m512 by = _mm512_set1_ps(256);
          real = _mm512_fmadd_ps(_mm512_cvtepi32_ps(above), by, _mm512_cvtepi32_ps(low));
        } else {
          real = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(above, 8), low));
        }
        const bool is_split = lanes == 2;
        const __m512 s = j == 0   ? of_column<0>(by_row[i], odd_by_row[i], is_split)
                         : j == 1 ? of_column<1>(by_row[i], odd_by_row[i], is_split)
                         : j == 2 ? of_column<2>(by_row[i], odd_by_row[i], is_split)
                                  : of_column<3>(by_row[i], odd_by_row[i], is_split);
        total[i][j] = _mm512_fmadd_ps(real, s, total[i][j]);
      }
    }
  }
  JQX_UNROLL for (int i = 0; i < R; ++i) {
    const __m128 all = folded(total[i][0], total[i][1], total[i][2], total[i][3]);
    _mm_mask_storeu_ps(out + i * kColumns, columns, all);
  }
}

template <int kBits>
void grouped_in(const Digits* rows, int count, const GroupedWeights& w, int columns, float* out) {
  for (int j = 0; j < columns; j += 4) {
    const int here = columns - j < 4 ? columns - j : 4;
    const __mmask8 valid = __mmask8((1 << here) - 1);
    const uint8_t* own[4];
    for (int c = 0; c < 4; ++c) own[c] = w.codes + (j + (c < here ? c : here - 1)) * w.stride;
    int i = 0;
    for (; i + 2 <= count; i += 2) {
      grouped_of<kBits, 2>(rows + i, w, own, w.scale + j, valid, out + i * kColumns + j);
    }
    if (i < count) grouped_of<kBits, 1>(rows + i, w, own, w.scale + j, valid, out + i * kColumns + j);
  }
}

void grouped_vnni(const Digits* rows, int count, const GroupedWeights& w, int columns, float* out) {
  const auto f = w.bits == 8 ? grouped_in<8> : w.bits == 4 ? grouped_in<4> : grouped_in<2>;
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
      turn(some, panel + at * kColumns + 4 * j);
    }
  }
}

void unpack_vnni(const GroupedWeights& w, int columns, uint8_t* panel) {
  const auto f = w.bits == 8 ? unpack_in<8> : w.bits == 4 ? unpack_in<4> : unpack_in<2>;
  f(w, columns, panel);
}

// R rows, three digits each, beside a panel.
template <int R>
__attribute__((noinline)) void grouped_panel_of(const Digits* rows, const GroupedWeights& w,
                                                const uint8_t* panel, const int8_t* zero,
                                                const int32_t* of_digits, const float* of_groups,
                                                int columns, float* out) {
  const int64_t groups = w.k / w.group;
  __mmask16 here[4];
  JQX_UNROLL for (int j = 0; j < 4; ++j) here[j] = __mmask16(columns > 16 * j ? first(columns - 16 * j) : 0);
  alignas(64) float sums[R][kColumns];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kColumns; j += 16) _mm512_store_ps(sums[i] + j, _mm512_setzero_ps());
  }
  for (int64_t g = 0; g < groups; ++g) {
    __m512i total[R][3][4];
    JQX_UNROLL for (int i = 0; i < R; ++i) {
      JQX_UNROLL for (int d = 0; d < 3; ++d) {
        const int32_t less = -w.middle() * of_digits[(i * groups + g) * 3 + d];
        JQX_UNROLL for (int j = 0; j < 4; ++j) total[i][d][j] = _mm512_set1_epi32(less);
      }
    }
    for (int64_t at = g * w.group; at < (g + 1) * w.group; at += 4, panel += 4 * kColumns) {
      const __m512i a = _mm512_load_si512(panel), b = _mm512_load_si512(panel + 64);
      const __m512i c = _mm512_load_si512(panel + 128), e = _mm512_load_si512(panel + 192);
      JQX_UNROLL for (int i = 0; i < R; ++i) {
        JQX_UNROLL for (int d = 0; d < 3; ++d) {
          int32_t codes;
          std::memcpy(&codes, rows[i].digits[d] + at, 4);
          const __m512i row = _mm512_set1_epi32(codes);
          multiply(total[i][d][0], a, row);
          multiply(total[i][d][1], b, row);
          multiply(total[i][d][2], c, row);
          multiply(total[i][d][3], e, row);
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
        y = _mm512_fmadd_ps(y, by, _mm512_cvtepi32_ps(total[i][1][j]));
        y = _mm512_fmadd_ps(y, by, _mm512_cvtepi32_ps(total[i][2][j]));
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

void grouped_panel_vnni(const Digits* rows, int count, const GroupedWeights& w,
                        const uint8_t* panel, const int8_t* zero, const int32_t* of_digits,
                        const float* of_groups, int columns, float* out) {
  const int64_t groups = w.k / w.group;
  for (int i = 0; i < count; i += 2) {
    const auto f = i + 1 < count ? grouped_panel_of<2> : grouped_panel_of<1>;
    const float* own = of_groups == nullptr ? nullptr : of_groups + i * groups;
    f(rows + i, w, panel, zero, of_digits + i * groups * 3, own, columns, out + i * kColumns);
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
  const __m512i ones = _mm512_set1_epi8(1);
  const int64_t in_run = kRun * per;
  alignas(64) int8_t plain[3][4 * kRun];
  __m512i all[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t run = 0; run * in_run < k; ++run) {
    for (int64_t i = 0; i < in_run; i += 16) {
      const int64_t left = k - run * in_run - i;
      const __mmask16 here = is_finite && left > 0 ? __mmask16(first(left)) : 0;
      const __m512 y = _mm512_div_ps(_mm512_maskz_loadu_ps(here, x + run * in_run + (here ? i : 0)), by);
      const __m512i number = _mm512_cvt_roundps_epi32(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24);
      const __m512i above = _mm512_srai_epi32(_mm512_sub_epi32(number, low), 8);
      const __m512i middle = _mm512_srai_epi32(_mm512_slli_epi32(above, 24), 24);
      const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(above, middle), 8);
      _mm_store_si128(reinterpret_cast<__m128i*>(plain[0] + i), _mm512_cvtepi32_epi8(high));
      _mm_store_si128(reinterpret_cast<__m128i*>(plain[1] + i), _mm512_cvtepi32_epi8(middle));
      _mm_store_si128(reinterpret_cast<__m128i*>(plain[2] + i), _mm512_cvtepi32_epi8(low));
    }
    __m512i sums[3];
    for (int d = 0; d < 3; ++d) {
      int8_t* own = to->digits[d] + run * in_run;
      gather(plain[d], per, own);
      sums[d] = _mm512_setzero_si512();
      for (int p = 0; p < per; ++p) multiply(sums[d], ones, _mm512_loadu_si512(own + p * kRun));
      all[d] = _mm512_add_epi32(all[d], sums[d]);
    }
    const __m512i above = _mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]);
    _mm512_storeu_si512(to->lanes + run * (kRun / 4),
                        _mm512_add_epi32(_mm512_slli_epi32(above, 8), sums[2]));
  }
  for (int d = 0; d < 3; ++d) to->sums[d] = _mm512_reduce_add_epi32(all[d]);
}

void scale_vnni(const int32_t* sums, int columns, float left, const float* right,
                int64_t right_stride, float* out) {
  const bool is_plain = left >= 0x1p-64f && left <= 0x1p64f;
  if (!is_plain) return scale(sums, columns, left, right, right_stride, out);
  const __m512 first_scale = _mm512_set1_ps(left), one = _mm512_set1_ps(right[0]);
  for (int j = 0; j < columns; j += 16) {
    const __mmask16 here = __mmask16(first(columns - j));
    const __m512 second = right_stride == 0 ? one : _mm512_maskz_loadu_ps(here, right + j);
    const __m512 real = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(here, sums + j));
    const __m512 y = _mm512_mul_ps(_mm512_mul_ps(real, first_scale), second);
    _mm512_mask_storeu_ps(out + j, here, y);
  }
}

}  // namespace
}  // namespace jqx

#include "decoded_avx512.inc"

namespace jqx {

const Kernels kAvx512Vnni = {"AVX-512 VNNI", quantize_vnni, magnitude, sum_vnni, dots_vnni, pack_vnni,
                            panel_vnni, correct, scale_vnni, split_vnni, grouped_vnni,
                            unpack_vnni, grouped_panel_vnni, shift, join, decoded_avx512,
                            decode_avx512, add_products_avx512};

}  // namespace jqx
