#include "products.h"

#include <algorithm>
#include <cstring>

#include "tiles.h"

namespace jqx {
namespace {

constexpr int64_t kDepth = 512;  // of a panel, which the cache holds
constexpr int kLarge = 127 + 80, kNearer = 40;  // exponents

// Copies a row, filled up with zeros. One with very large numbers is brought nearer to 1 by a power
// of two, so that float32 holds its sums of codes; returns what multiplies these.
float copy_row(const uint16_t* x, int64_t k, int64_t width, uint16_t* to) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = std::max<uint16_t>(largest, x[i] & 0x7fff);
  std::memcpy(to, x, k * sizeof(uint16_t));
  std::memset(to + k, 0, (width - k) * sizeof(uint16_t));
  if (largest >> 7 < kLarge) return 1;
  for (int64_t i = 0; i < k; ++i) {
    const int exponent = to[i] >> 7 & 255;
    if (exponent == 255) continue;  // infinity or NaN
    to[i] = uint16_t(exponent > kNearer ? to[i] - (kNearer << 7) : to[i] & 0x8000);
  }
  return 0x1p40f;
}

}  // namespace

void widen(const uint16_t* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = uint32_t(x[i]) << 16;
    std::memcpy(y + i, &bits, 4);
  }
}

void multiply_bfloats(const FloatProduct& p, const Kernels& kernels, Pool& given) {
  Pool& pool = pool_for(p.batch * p.m * p.n * p.k, given);
  const int64_t width = up(p.k, kPairs), stride = p.k * p.bits / 8, groups = p.k / p.group;
  const int64_t all_rows = p.batch * p.m;
  Buffer copied(all_rows * width * 2), powers(all_rows * 4);
  uint16_t* rows = copied.at<uint16_t>();
  float* back = powers.at<float>();
  for_rows(pool, all_rows, [&](int64_t i) {
    back[i] = copy_row(p.bfloats + i * p.k, p.k, width, rows + i * width);
  });
  const Tiles tiles(p.batch, p.m, p.n, kernels.rows, pool.threads());

  parallel_for(pool, tiles.count(p.batch), [&](int64_t index) {
    const Tile tile(tiles, index, p.m, p.n);
    const int64_t b = tile.batch, row = b * p.m + tile.row;
    const int some = int(tile.row_end - tile.row);
    const int64_t in_panel = 2 * kDepth * kColumns, in_sums = some * kColumns * 4;
    uint8_t* memory = memory_of_thread(in_panel + in_sums);
    uint16_t* panel = reinterpret_cast<uint16_t*>(memory);
    float* sums = reinterpret_cast<float*>(memory + in_panel);
    for (int64_t j = tile.column; j < tile.column_end; j += kColumns) {
      const int columns = int(std::min<int64_t>(kColumns, tile.column_end - j));
      const int64_t at = b * groups * p.n + j;
      const GroupedWeights w = {p.w + (b * p.n + j) * stride, stride, p.scale + at, p.n, p.k,
                                p.group, p.bits, p.is_signed};
      const int8_t* zero = p.zero == nullptr ? nullptr : p.zero + at;
      std::memset(sums, 0, in_sums);
      for (int64_t from = 0; from < p.k; from += kDepth) {
        const int64_t to = std::min(from + kDepth, p.k);
        kernels.decode_pairs(w, zero, from, to, columns, panel);
        const uint16_t* own = rows + row * width + from;
        kernels.add_pairs(own, width, some, w, panel, from, to, columns, sums);
      }
      for (int r = 0; r < some; ++r) {
        float* y = p.y + (row + r) * p.n + j;
        for (int c = 0; c < columns; ++c) y[c] = sums[r * kColumns + c] * back[row + r];
      }
    }
  });
}

}  // namespace jqx
