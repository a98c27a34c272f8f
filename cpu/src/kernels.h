// Kernels for products and convolutions: of rows, int8 or floats, and weights [columns, k], the
// contracted axis last in both.
//
// A set of kernels is for one instruction set; `kernels()` returns the best that this processor has.
// Drivers in products.cc, bfloats.cc, decoded.cc and convolutions.cc cut a problem into tiles and run
// a kernel on each.

#ifndef JQX_CPU_KERNELS_H_
#define JQX_CPU_KERNELS_H_

#include <cstdint>

namespace jqx {

// Columns of a tile. The sums of a tile are int32 [rows, kColumns].
constexpr int kColumns = 64;

// Codes of rows lie in whole runs of so many, filled up with zeros.
constexpr int64_t kRun = 64;

// Steps of bfloat16 that rows and panels are filled up to.
constexpr int64_t kPairs = 32;

// The most rows that a set of kernels has at once.
constexpr int kMostRows = 32;

// A row as one to three int8 digits: of floats three, or two where less will do, fixed point relative
// to its largest magnitude; of codes, the codes.
//
//   x ~ step * (256 * (256 * high + middle) + low),   step = power * rest
//
// Beside weights of 8 / per bits, a run of kRun * per codes has first those that are first in their
// byte, then those that are second, and so on: kRun * per digits in `per` parts. Digits of the rows
// of a product lie one behind another, `count` of each row, as rows of int8 at one distance.
struct Digits {
  int8_t* digits[3];  // the highest first, in whole runs
  int32_t sums[3];    // of each
  int32_t* lanes;     // of each 4 bytes of weights: the sum of its numbers, in whole runs
  float power;        // a power of two that multiplies scales
  float rest;         // what is left of the step for the result; NaN where a number is not finite
  int count;          // of digits, the same in all rows
};

// Weights in groups along k: one byte has 8 / bits codes, the first in its lowest bits.
struct GroupedWeights {
  const uint8_t* codes;  // of the first column
  int64_t stride;        // bytes from one column to the next
  const float* scale;    // [groups, columns], of the first column
  int64_t scale_stride;  // floats from one group to the next
  int64_t k;
  int64_t group;   // codes of a group
  int bits;        // of a code: 8, 4 or 2
  bool is_signed;  // whether codes are in two's complement

  int per() const { return 8 / bits; }
  int middle() const { return 1 << (bits - 1); }  // is taken from unsigned codes
};

// The float that each code of 4 or 8 bits stands for.
struct Table {
  int bits;
  const float* values;  // [1 << bits]

  // Codes of 8 bits are those of a float: the sign and the other 7 bits, moved by `shift`, are a
  // float16 that is multiplied by `power`. Those with (code & mask) ^ flip < specials are no numbers;
  // they have `fill` set in their float16.
  bool is_half = false;
  int shift = 0;
  float power = 1;
  int mask = 0, flip = 0, specials = 0, fill = 0;

  Table(int bits, const float* values);  // in decoded.cc
};

// Zero points of a row, a, and of columns, b: sum (x - a) (w - b) is sum x w - a sum w - b rest,
// modulo 2**32.
struct ZeroPoints {
  uint32_t a, rest;           // rest = sum x - k a
  const int32_t* of_columns;  // sum w, or nullptr where a is 0
  const int32_t* b;           // or nullptr
  int64_t b_stride;           // 1, or 0 where one stands for all

  ZeroPoints(int64_t k, int32_t a, const int32_t* of_columns, int32_t of_row, const int32_t* b,
             int64_t b_stride)
      : a(uint32_t(a)), rest(uint32_t(of_row) - uint32_t(k) * uint32_t(a)),
        of_columns(of_columns), b(b), b_stride(b_stride) {}
};

// Some numbers of each row, or one that stands for as many.
struct Numbers {
  const float* at;  // of the first row
  int64_t step;     // floats from one row to the next
  bool many;
};

struct Kernels {
  const char* name;

  // Rounds x / scale to the nearest integer, half to even, plus the zero point, in [low, high]; a
  // NaN becomes the zero point.
  void (*quantize)(const float* x, int64_t n, float scale, int32_t zero, int32_t low, int32_t high,
                   int8_t* codes);

  // Returns the largest magnitude, of bits without a sign: infinity is above numbers, NaN above all.
  float (*magnitude)(const float* x, int64_t n);

  // Writes the least and the largest number, infinities where there is none, and how many are NaN.
  void (*range)(const float* x, int64_t n, float* found);

  // Returns the sum of codes.
  int32_t (*sum)(const int8_t* codes, int64_t n);

  // Sums of products of few rows: reads the weights as they lie. `k` is theirs; rows are filled up,
  // and `of_rows` are their sums.
  void (*dots)(const int8_t* x, int64_t x_stride, const int32_t* of_rows, int rows, const int8_t* w,
               int64_t w_stride, int columns, int64_t k, int32_t* sums);

  // Copies weights of kColumns columns into a panel of kColumns * k bytes, k a multiple of kRun;
  // what is beyond `columns` and `w_k` does not matter.
  void (*pack)(const int8_t* w, int64_t w_stride, int columns, int64_t w_k, uint8_t* panel);

  // The same of weights that lie [w_k, columns], into a panel of as many steps as fill runs of 4.
  void (*pack_rows)(const int8_t* w, int64_t w_stride, int columns, int64_t w_k, uint8_t* panel);

  // Sums of products of `rows` rows and a panel of k steps, a multiple of `step`, for `columns`
  // columns or some more.
  void (*panel)(const int8_t* x, int64_t x_stride, const int32_t* of_rows, int rows,
                const uint8_t* panel, int columns, int64_t k, int32_t* sums);

  // Sums of products of each channel with `taps` numbers of its own, at `pixels` places that are
  // `step` bytes apart: of (x[places[t] + c] - a) * weights[t][c] over t, modulo 2**32, in
  // [pixels, channels]. Weights and what x is less a are in [-255, 255].
  void (*depthwise)(const int8_t* x, int64_t step, int pixels, const int64_t* places,
                    const int16_t* const* weights, int taps, int64_t channels, int32_t a,
                    int32_t* sums);

  // Takes what zero points add from sums of a row.
  void (*correct)(int32_t* sums, int columns, const ZeroPoints& zeros);

  // Does so, which may change the sums, and multiplies them by two scales, the left one first.
  void (*scale)(int32_t* sums, int columns, const ZeroPoints& zeros, float left,
                const float* right, int64_t right_stride, float* out);

  // Splits a row in `to->count` digits: two or three.
  void (*split)(const float* x, int64_t k, int per, Digits* to);

  // Copies a row of codes to where its one digit lies; power is 1, and rest is left to the caller.
  void (*arrange)(const int8_t* x, int64_t k, int per, Digits* to);

  // Sums of rows and weights in groups, times scales and powers: [count, kColumns]. Unsigned codes
  // are taken less their middle.
  void (*grouped)(const Digits* rows, int count, const GroupedWeights& w, int columns, float* out);

  // Unpacks weights of kColumns columns into a panel as `pack` does, of k rounded up to kRun; codes
  // more than they are by their middle, or as they are if unsigned. Like `grouped_panel` it may be
  // missing: nullptr.
  void (*unpack)(const GroupedWeights& w, int columns, uint8_t* panel);

  // What `grouped` returns, less zero points, of rows split for 8 bits and an unpacked panel; of
  // each row and group `of_digits` has the sums of its digits, [count, groups, digits], and `of_groups`,
  // if there are zero points, that of its numbers, times power.
  void (*grouped_panel)(const Digits* rows, int count, const GroupedWeights& w,
                        const uint8_t* panel, const int8_t* zero, const int32_t* of_digits,
                        const float* of_groups, int columns, float* out);

  // Takes zero points from sums of `grouped`: of each group the sum of its numbers, times scales.
  void (*shift)(const GroupedWeights& w, const int8_t* zero, const float* of_groups, int columns,
                float* out);

  // Sums of rows and weights of sums of digits, `count` rows of them, with one scale a column.
  void (*join)(const int32_t* sums, int count, float power, const float* scale, int columns,
               float* out);

  // Products of few rows of floats and weights that a table decodes, [rows, kColumns]. Of a run of
  // kRun bytes rows have first those numbers whose codes are first in their 4 bytes, then those that
  // are second, and so on, and zeros beyond the end. The power of the table is left out. It may be
  // missing: nullptr.
  void (*decoded)(const float* x, int64_t x_stride, int rows, const GroupedWeights& w,
                  const Table& table, int columns, float* out);

  // Decodes kColumns columns, times scales, into a panel [k, kColumns] of whole runs of kRun bytes:
  // those from `from`, a multiple of such a run, to `to`.
  void (*decode)(const GroupedWeights& w, const Table& table, int64_t from, int64_t to, int columns,
                 float* panel);

  // Products of rows of floats and a panel of k floats for each of kColumns columns, which are added
  // to `y`. Strides are the floats from one row or step to the next. The panel at `next` is brought
  // nearer meanwhile.
  void (*add_products)(const float* x, int64_t x_stride, int rows, const float* panel,
                       int64_t panel_stride, int64_t k, int columns, const float* next,
                       int64_t next_stride, float* y, int64_t y_stride);

  // Decodes kColumns columns, less their zero points, into a panel of bfloat16: for every two steps
  // along k both numbers of each column. Steps are those from `from`, a multiple of what kRun bytes
  // hold, to `to`, filled up to kPairs with what is finite.
  void (*decode_pairs)(const GroupedWeights& w, const int8_t* zero, int64_t from, int64_t to,
                       int columns, uint16_t* panel);

  // Adds products of bfloat16 rows and such a panel, summed in float32 for each group and then
  // times its scale, to `sums`, [rows, kColumns]. The first step of x is `from`; beyond the end of k
  // there are zeros, up to kPairs. It may be missing: nullptr.
  void (*add_pairs)(const uint16_t* x, int64_t x_stride, int rows, const GroupedWeights& w,
                    const uint16_t* panel, int64_t from, int64_t to, int columns, float* sums);

  // Copies columns of floats, `stride` floats from one to the next, into a panel [k, kColumns] of
  // whole runs of 16 steps; what is beyond `columns` and k does not matter.
  void (*turn)(const float* x, int64_t stride, int columns, int64_t k, float* panel);

  // A function of numbers of some rows, by its Op in rows.h.
  void (*map)(int64_t op, Numbers a, Numbers b, int64_t rows, int64_t n, float* y, int64_t y_step);

  // Numbers of `b` where a mask is set, and of `c` elsewhere. A mask has one for each number of a
  // row, or one for all.
  void (*select)(const bool* mask, int64_t mask_step, bool many, Numbers b, Numbers c, int64_t rows,
                 int64_t n, float* y, int64_t y_step);

  // Returns the sum of a row or its largest number; NaN if there is one.
  float (*reduce)(int64_t op, const float* x, int64_t n);

  // Rows that are multiplied at once: whole blocks of those that kernels hold in registers.
  int rows = 24;

  // Steps along k of which panels have a multiple; what is filled up does not matter.
  int64_t step = 4;
};

// Those that a processor may run: the last is for any.
const Kernels* const* all_kernels();

// The best of them, or the one that was chosen.
const Kernels& kernels();

// Chooses one by its name; returns whether this processor runs it.
bool choose(const char* name);

// One set each. No constants: what makes one is compiled for its instructions, and runs only where
// these are.
const Kernels& generic_kernels();
#if defined(JQX_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_vnni_kernels();
const Kernels& avx512_bf16_kernels();  // those of AVX-512 VNNI, with products of bfloat16
const Kernels& amx_kernels();          // those of AVX-512 VNNI, with products of tiles
#endif
#if defined(JQX_ARM)
const Kernels& neon_kernels();
#endif

}  // namespace jqx

#endif  // JQX_CPU_KERNELS_H_
