// Products of bfloat16 rows and integer weights in groups, by products of bfloat16.

#ifndef JQX_CPU_BFLOATS_H_
#define JQX_CPU_BFLOATS_H_

#include "products.h"

namespace jqx {

// What `multiply` does with more than a few rows of bfloat16 where kernels have `add_pairs`, counted
// in each group where rows are in groups. Weights less zero points are whole numbers below 256,
// which bfloat16 holds, so products are exact. Each of the k sums is rounded to float32, and that of
// a group, or of each 512 steps of it, twice more, with its scale; subnormal numbers are 0. A row
// that is not finite has the sums that IEEE 754 gives it.
void multiply_bfloats(const FloatProduct& p, const Kernels& kernels, Pool& pool);

// The rows as float32.
void widen(const uint16_t* x, int64_t count, float* y);

}  // namespace jqx

#endif  // JQX_CPU_BFLOATS_H_
