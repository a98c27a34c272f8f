// Products of rows and weights, cut into tiles for kernels.

#ifndef JQX_CPU_PRODUCTS_H_
#define JQX_CPU_PRODUCTS_H_

#include <cstdint>

#include "kernels.h"
#include "parallel.h"

namespace jqx {

// A parameter of rows or columns: one for each, or one for all.
template <class T>
struct Each {
  const T* data = nullptr;  // nullptr where there is none
  bool is_one = false;      // of each batch

  T at(int64_t batch, int64_t count, int64_t i) const {
    return is_one ? data[batch] : data[batch * count + i];
  }
  const T* from(int64_t batch, int64_t count, int64_t i) const {
    return data == nullptr ? nullptr : is_one ? data + batch : data + batch * count + i;
  }
  int stride() const { return is_one ? 0 : 1; }
};

// sum (x - x_zero) (w - w_zero), int32 modulo 2**32, or times x_scale * w_scale in float32.
struct Product {
  int64_t batch, m, n, k;
  const int8_t* codes = nullptr;  // [batch, m, k], or
  const float* floats = nullptr;  // that are rounded to codes by x_scale, in [low, high]
  int32_t low = 0, high = 0;
  const int8_t* w = nullptr;  // [batch, n, k]
  Each<float> x_scale, w_scale;
  Each<int32_t> x_zero, w_zero;
  int32_t* sums = nullptr;   // [batch, m, n], or
  float* scaled = nullptr;   // likewise
};

void multiply(const Product& p, const Kernels& kernels, Pool& pool);

// x w of rows [batch, m, k], floats or codes, and weights in groups [batch, n, k]: scales and zero
// points are [batch, k / group, n]. Unsigned codes, and their zero points, are less their middle.
struct FloatProduct {
  int64_t batch, m, n, k, group;
  int bits;
  bool is_signed;
  int digits;           // of floats: 3, or 2 where less will do
  const float* x;       // or nullptr, where there are
  const int8_t* codes;  // that take
  Each<float> x_scale;
  const uint8_t* w;
  const float* scale;
  const int8_t* zero;  // or nullptr
  float* y;            // [batch, m, n]
  const uint16_t* bfloats = nullptr;  // rows of bfloat16, where `x` and `codes` are nullptr
};

// Whether a kernel has such groups.
bool has_groups(int64_t k, int64_t group, int bits);

void multiply(const FloatProduct& p, const Kernels& kernels, Pool& pool);

// The same where the rows of one batch are in groups: the first sizes[0] rows meet the first of the
// weights, the next sizes[1] the second one. A negative size is 0, groups beyond the rows are cut,
// and the result of rows beyond the groups is 0.
void multiply_groups(const Product& p, const int32_t* sizes, int64_t groups, const Kernels& kernels,
                     Pool& pool);
void multiply_groups(const FloatProduct& p, const int32_t* sizes, int64_t groups,
                     const Kernels& kernels, Pool& pool);

// What `multiply` does with more than a few rows of bfloat16 where kernels have `add_pairs`, counted
// in each group where rows are in groups. Weights less zero points are whole numbers below 256,
// which bfloat16 holds, so products are exact. Each of the k sums is rounded to float32, and that of
// a group, or of each 512 steps of it, twice more, with its scale; subnormal numbers are 0. A row
// that is not finite has the sums that IEEE 754 gives it.
void multiply_bfloats(const FloatProduct& p, const Kernels& kernels, Pool& pool);

// The rows as float32.
void widen(const uint16_t* x, int64_t count, float* y);

// The largest magnitude of each row of x [m, k].
void find_magnitudes(const float* x, int64_t m, int64_t k, float* y, const Kernels& kernels,
                     Pool& pool);

// The least and the largest number of each row, and how many are NaN: y [m, 3].
void find_ranges(const float* x, int64_t m, int64_t k, float* y, const Kernels& kernels,
                 Pool& pool);

}  // namespace jqx

#endif  // JQX_CPU_PRODUCTS_H_
