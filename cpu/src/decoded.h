// Products of rows of floats and weights whose codes stand for floats, as a table has them.

#ifndef JQX_CPU_DECODED_H_
#define JQX_CPU_DECODED_H_

#include <cstdint>

#include "kernels.h"
#include "parallel.h"

namespace jqx {

// x w of [batch, m, k] and codes [batch, n, k]: scales are [batch, k / group, n]. `has_groups` of
// products.h says which groups there are.
struct DecodedProduct {
  int64_t batch, m, n, k, group;
  Table table;  // of 4 bits, or of floats that float16 holds; code 0 stands for a finite number
  const float* x = nullptr;
  const uint8_t* w = nullptr;
  const float* scale = nullptr;        // or
  const uint8_t* exponents = nullptr;  // powers of two in E8M0
  float* y = nullptr;                  // [batch, m, n]
};

void multiply(const DecodedProduct& p, const Kernels& kernels, Pool& pool);

// The same of rows in groups: see products.h.
void multiply_groups(const DecodedProduct& p, const int32_t* sizes, int64_t groups,
                     const Kernels& kernels, Pool& pool);

}  // namespace jqx

#endif  // JQX_CPU_DECODED_H_
