// Compiled as kernels_avx512_vnni.cc is, and with -mamx-tile -mamx-int8 -mamx-bf16.
//
// A tile has up to 16 rows of 64 bytes. A product of tiles adds to sums [16, 16] what rows [16, 64]
// make with columns, of which a tile has 4 bytes each for every 4 steps along k, as panels do. The
// bytes of panels are unsigned, as for `vpdpbusd`: 128 times the sum of a row is taken from sums.

#include <immintrin.h>

#include <algorithm>
#include <initializer_list>

#include "avx512.h"
#include "kernels.h"

#if defined(JQX_EMULATED_AMX)
#include "emulated_amx.h"
#endif

namespace jqx {
namespace {

constexpr int kTile = 16;        // rows of a tile, and columns of sums
constexpr int kFewRows = 4;      // beside which tiles are mostly empty
constexpr int64_t kShort = 32;   // groups below are worth no tiles
constexpr int64_t kPart = 1024;  // of k that few rows are packed for: 32 rows take 32 kB

// Says that assembly reads what was written to `data`: intrinsics of GCC for tiles do not.
inline void publish(const void* data) { asm volatile("" : : "r"(data) : "memory"); }

// The shapes of tiles, in this thread until the end of a scope. None are left behind: oneDNN, which
// may run in the same thread, loads its own where those that it finds are others.
class Shapes {
 public:
  struct Shape {
    int rows;  // 0: there is no such tile
    int64_t bytes;
  };

  Shapes(std::initializer_list<Shape> shapes) {
    struct {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } all;
    static_assert(sizeof(all) == 64, "the operand of ldtilecfg");
    int tile = 0;
    for (const Shape& own : shapes) {
      all.rows[tile] = uint8_t(own.rows);
      all.bytes[tile++] = uint16_t(own.rows == 0 ? 0 : own.bytes);
    }
    publish(&all);
    _tile_loadconfig(&all);
  }
  ~Shapes() { _tile_release(); }
  Shapes(const Shapes&) = delete;
  Shapes& operator=(const Shapes&) = delete;
};

// One or two tiles of rows beside two of columns.
inline void panel_of(const int8_t* x, int64_t x_stride, bool is_two, const uint8_t* panel,
                     int64_t k, int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (is_two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t at = 0; at < k; at += kRun, panel += kRun * kColumns) {
    _tile_loadd(4, x + at, x_stride);
    _tile_loadd(6, panel, kStep);
    _tile_loadd(7, panel + 64, kStep);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if (is_two) {
      _tile_loadd(5, x + kTile * x_stride + at, x_stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 4 * kColumns);
  _tile_stored(1, sums + kTile, 4 * kColumns);
  if (is_two) {
    _tile_stored(2, sums + kTile * kColumns, 4 * kColumns);
    _tile_stored(3, sums + kTile * kColumns + kTile, 4 * kColumns);
  }
}

void panel_amx(const int8_t* x, int64_t x_stride, const int32_t* of_rows, int rows,
               const uint8_t* panel, int columns, int64_t k, int32_t* sums) {
  for (int i = 0; i < rows; i += 2 * kTile) {
    const Shapes::Shape upper = {std::min(rows - i, kTile), 64}, codes = {kTile, 64};
    const Shapes::Shape lower = {std::min(rows - i - upper.rows, kTile), 64};
    const Shapes shapes({upper, upper, lower, lower, upper, lower, codes, codes});
    for (int j = 0; j < columns; j += 2 * kTile) {
      panel_of(x + i * x_stride, x_stride, lower.rows > 0, panel + 4 * j, k,
               sums + i * kColumns + j);
    }
  }
  for (int i = 0; i < rows; ++i) {
    const __m512i more = _mm512_slli_epi32(_mm512_set1_epi32(of_rows[i]), 7);
    for (int j = 0; j < columns; j += 16) {
      int32_t* own = sums + i * kColumns + j;
      _mm512_storeu_si512(own, _mm512_sub_epi32(_mm512_loadu_si512(own), more));
    }
  }
}

// Up to 16 rows beside the columns of a panel.
template <int kDigits>
void grouped_panel_of(const Digits* rows, int count, const GroupedWeights& w, const uint8_t* panel,
                      const int8_t* zero, const int32_t* of_digits, const float* of_groups,
                      int columns, float* out) {
  const int64_t groups = w.k / w.group;
  const int64_t length = groups == 1 ? (w.k + kRun - 1) / kRun * kRun : w.group;
  const int64_t run = std::min(length, kRun);
  const int64_t stride = count > 1 ? rows[1].digits[0] - rows[0].digits[0] : 0;
  const Shapes::Shape sums = {count, 64}, digits = {count, run}, codes = {int(run / 4), 64};
  const Shapes shapes({sums, sums, sums, digits, digits, digits, codes});
  alignas(64) int32_t found[kDigits][kTile][kTile];
  const __m512 by = _mm512_set1_ps(256);
  for (int64_t g = 0; g < groups; ++g) {
    for (int j = 0; j < columns; j += kTile) {
      _tile_zero(0);
      if (kDigits > 1) _tile_zero(1);
      if (kDigits > 2) _tile_zero(2);
      for (int64_t at = g * length; at < (g + 1) * length; at += run) {
        _tile_loadd(6, panel + at * kColumns + 4 * j, kStep);
        _tile_loadd(3, rows[0].digits[0] + at, stride);
        _tile_dpbsud(0, 3, 6);
        if (kDigits > 1) {
          _tile_loadd(4, rows[0].digits[1] + at, stride);
          _tile_dpbsud(1, 4, 6);
        }
        if (kDigits > 2) {
          _tile_loadd(5, rows[0].digits[2] + at, stride);
          _tile_dpbsud(2, 5, 6);
        }
      }
      _tile_stored(0, found[0], 64);
      if (kDigits > 1) _tile_stored(1, found[kDigits > 1 ? 1 : 0], 64);
      if (kDigits > 2) _tile_stored(2, found[kDigits > 2 ? 2 : 0], 64);
      const __mmask16 here = __mmask16(first(columns - j));
      const __m512 scale = _mm512_maskz_loadu_ps(here, w.scale + g * w.scale_stride + j);
      __m512 less = _mm512_setzero_ps();
      if (zero != nullptr) {
        const __m128i own = _mm_maskz_loadu_epi8(here, zero + g * w.scale_stride + j);
        less = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(own));
      }
      for (int i = 0; i < count; ++i) {
        const auto digit = [&](int d) {
          const int32_t more = w.middle() * of_digits[(i * groups + g) * kDigits + d];
          const __m512i total = _mm512_load_si512(found[d][i]);
          return _mm512_cvtepi32_ps(_mm512_sub_epi32(total, _mm512_set1_epi32(more)));
        };
        __m512 y = digit(0);
        for (int d = 1; d < kDigits; ++d) y = _mm512_fmadd_ps(y, by, digit(d));
        y = _mm512_mul_ps(y, _mm512_set1_ps(rows[i].power));
        if (zero != nullptr) {
          y = _mm512_fnmadd_ps(less, _mm512_set1_ps(of_groups[i * groups + g]), y);
        }
        float* own = out + i * kColumns + j;
        const __m512 before = g == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(own);
        _mm512_storeu_ps(own, _mm512_fmadd_ps(y, scale, before));
      }
    }
  }
}

void grouped_panel_amx(const Digits* rows, int count, const GroupedWeights& w,
                       const uint8_t* panel, const int8_t* zero, const int32_t* of_digits,
                       const float* of_groups, int columns, float* out) {
  const int64_t groups = w.k / w.group;
  if (groups > 1 && w.group < kShort) {
    return avx512_vnni_kernels().grouped_panel(rows, count, w, panel, zero, of_digits, of_groups, columns,
                                     out);
  }
  const int digits = rows->count;
  const auto f = digits == 3   ? grouped_panel_of<3>
                 : digits == 2 ? grouped_panel_of<2>
                               : grouped_panel_of<1>;
  for (int i = 0; i < count; i += kTile) {
    const float* own = of_groups == nullptr ? nullptr : of_groups + i * groups;
    f(rows + i, std::min(count - i, kTile), w, panel, zero, of_digits + i * groups * digits, own,
      columns, out + i * kColumns);
  }
}

// Up to 32 rows beside columns in whole tiles: weights are read once, as they lie, as the rows of
// tiles, and what is packed are the rows. Sums of tiles are [columns, rows].
void dots_of(const int8_t* x, int64_t x_stride, int rows, const int8_t* w, int64_t w_stride,
             int columns, int64_t k, int32_t* sums) {
  const int tiles = rows > kTile ? 2 : 1;
  alignas(64) uint8_t packed[2][kPart * kTile];
  alignas(64) int8_t last[kTile][kRun];  // of the weights, filled up with zeros
  alignas(64) int32_t found[2][kTile][kTile];
  const Shapes::Shape whole = {kTile, 64};
  const Shapes shapes({whole, whole, whole, whole, whole});
  for (int64_t from = 0; from < k; from += kPart) {
    const int64_t to = std::min(from + kPart, k);
    for (int t = 0; t < tiles; ++t) {
      for (int64_t at = from; at < to; at += kRun) {
        __m512i some[kTile];
        JQX_UNROLL for (int i = 0; i < kTile; ++i) {
          const bool is_row = kTile * t + i < rows;
          const int8_t* own = x + (is_row ? kTile * t + i : 0) * x_stride + at;
          some[i] = is_row ? _mm512_loadu_si512(own) : _mm512_setzero_si512();
        }
        turn(some, packed[t] + (at - from) * kTile, 64);
      }
    }
    publish(packed);
    for (int j = 0; j < columns; j += kTile) {
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t at = from; at < to; at += kRun) {
        const int8_t* own = w + j * w_stride + at;
        int64_t stride = w_stride;
        if (at + kRun > k) {
          const __mmask64 here = first(k - at);
          for (int i = 0; i < kTile; ++i) {
            _mm512_store_si512(last[i], _mm512_maskz_loadu_epi8(here, own + i * w_stride));
          }
          publish(last);
          own = last[0], stride = kRun;
        }
        _tile_loadd(2, own, stride);
        _tile_loadd(3, packed[0] + (at - from) * kTile, 64);
        _tile_dpbssd(0, 2, 3);
        if (tiles == 2) {
          _tile_loadd(4, packed[1] + (at - from) * kTile, 64);
          _tile_dpbssd(1, 2, 4);
        }
      }
      _tile_stored(0, found[0], 64);
      _tile_stored(1, found[1], 64);
      for (int t = 0; t < tiles; ++t) {
        __m512i some[kTile];
        JQX_UNROLL for (int i = 0; i < kTile; ++i) some[i] = _mm512_load_si512(found[t][i]);
        turn(some, reinterpret_cast<uint8_t*>(found[t]), 64);
        for (int i = 0; i < std::min(rows - kTile * t, kTile); ++i) {
          int32_t* own = sums + (kTile * t + i) * kColumns + j;
          const __m512i before = from == 0 ? _mm512_setzero_si512() : _mm512_loadu_si512(own);
          _mm512_storeu_si512(own, _mm512_add_epi32(before, _mm512_load_si512(found[t][i])));
        }
      }
    }
  }
}

void dots_amx(const int8_t* x, int64_t x_stride, const int32_t* of_rows, int rows, const int8_t* w,
              int64_t w_stride, int columns, int64_t k, int32_t* sums) {
  const int left = rows % kTile < kFewRows ? rows % kTile : 0;
  const int in_tiles = columns / kTile * kTile, rows_in_tiles = in_tiles > 0 ? rows - left : 0;
  for (int i = 0; i < rows_in_tiles; i += 2 * kTile) {
    const int some = std::min(rows_in_tiles - i, 2 * kTile);
    dots_of(x + i * x_stride, x_stride, some, w, w_stride, in_tiles, k, sums + i * kColumns);
  }
  avx512_vnni_kernels().dots(x, x_stride, of_rows, rows_in_tiles, w + in_tiles * w_stride, w_stride,
                   columns - in_tiles, k, sums + in_tiles);
  avx512_vnni_kernels().dots(x + rows_in_tiles * x_stride, x_stride, of_rows + rows_in_tiles,
                   rows - rows_in_tiles, w, w_stride, columns, k, sums + rows_in_tiles * kColumns);
}

// Up to 32 rows beside the columns of a panel of bfloat16. `tdpbf16ps` rounds as `vdpbf16ps` does,
// and also takes subnormal numbers for 0. What groups of less than 32 steps leave of a tile is empty.
void add_pairs_of(const uint16_t* x, int64_t x_stride, int rows, const GroupedWeights& w,
                  const uint16_t* panel, int64_t from, int64_t to, int columns, float* sums) {
  const int run = int(w.group == w.k ? kPairs : std::min(w.group, kPairs));
  const Shapes::Shape upper = {std::min(rows, kTile), 64}, lower = {rows - upper.rows, 64};
  const Shapes::Shape above = {upper.rows, 2 * run}, below = {lower.rows, 2 * run};
  const Shapes::Shape pairs = {run / 2, 64};
  const Shapes shapes({upper, upper, lower, lower, above, below, pairs, pairs});
  const bool is_two = lower.rows > 0;
  alignas(64) float found[2 * kTile][2 * kTile];
  for (int64_t at = from, end; at < to; at = end) {
    const int64_t group = at / w.group;
    end = std::min((group + 1) * w.group, to);
    for (int j = 0; j < columns; j += 2 * kTile) {
      _tile_zero(0);
      _tile_zero(1);
      if (is_two) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t step = at - from; step < end - from; step += run) {
        const uint16_t* own = panel + step * kColumns + 2 * j;
        _tile_loadd(4, x + step, 2 * x_stride);
        _tile_loadd(6, own, kStep);
        _tile_loadd(7, own + 2 * kTile, kStep);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (is_two) {
          _tile_loadd(5, x + kTile * x_stride + step, 2 * x_stride);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, found[0], sizeof(found[0]));
      _tile_stored(1, found[0] + kTile, sizeof(found[0]));
      if (is_two) {
        _tile_stored(2, found[kTile], sizeof(found[0]));
        _tile_stored(3, found[kTile] + kTile, sizeof(found[0]));
      }
      for (int c = 0; c < 2 * kTile; c += 16) {
        const __mmask16 here = __mmask16(columns > j + c ? first(columns - j - c) : 0);
        const float* scale = w.scale + group * w.scale_stride + (here ? j + c : 0);
        const __m512 by = _mm512_maskz_loadu_ps(here, scale);
        for (int i = 0; i < rows; ++i) {
          float* own = sums + i * kColumns + j + c;
          const __m512 total = _mm512_load_ps(found[i] + c);
          _mm512_store_ps(own, _mm512_fmadd_ps(total, by, _mm512_load_ps(own)));
        }
      }
    }
  }
}

void add_pairs_amx(const uint16_t* x, int64_t x_stride, int rows, const GroupedWeights& w,
                   const uint16_t* panel, int64_t from, int64_t to, int columns, float* sums) {
  publish(x), publish(panel);
  for (int i = 0; i < rows; i += 2 * kTile) {
    const int some = std::min(rows - i, 2 * kTile);
    const uint16_t* own = x + i * x_stride;
    add_pairs_of(own, x_stride, some, w, panel, from, to, columns, sums + i * kColumns);
  }
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels all = [] {
    Kernels own = avx512_vnni_kernels();
    own.name = "AMX", own.rows = 2 * kTile, own.step = kRun;
    own.dots = dots_amx, own.panel = panel_amx, own.grouped_panel = grouped_panel_amx;
    own.add_pairs = add_pairs_amx;
    return own;
  }();
  return all;
}

}  // namespace jqx
