#include "decoded.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tiles.h"

namespace jqx {
namespace {

constexpr int64_t kFew = 8;     // rows up to which codes are decoded for each few of them
constexpr int64_t kDepth = 512;  // of a panel of floats, which the cache holds

float half(int bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float size = std::ldexp(float(exponent > 0 ? fraction + 1024 : fraction), std::max(exponent, 1) - 25);
  if (exponent == 31) size = fraction > 0 ? NAN : INFINITY;
  return bits & 0x8000 ? -size : size;
}

bool is_same(float a, float b) {
  return a != a ? b != b : a == b && std::signbit(a) == std::signbit(b);
}

// Whether the float16 that a table tells of are its values.
bool fits(const Table& t) {
  for (int code = 0; code < 256; ++code) {
    int bits = (code & 0x80) << 8 | (code & 0x7f) << t.shift;
    if (((code & t.mask) ^ t.flip) < t.specials) bits |= t.fill;
    if (!is_same(half(bits) * t.power, t.values[code])) return false;
  }
  return true;
}

}  // namespace

Table::Table(int bits, const float* values) : bits(bits), values(values) {
  if (bits != 8) return;
  for (shift = 8; shift > 5; --shift) {
    power = values[1] / half(1 << shift);
    const int fractions = 1 << (10 - shift);
    // Infinity and NaN as float16 has them, one NaN of each sign, infinity and NaN, NaN for -0.
    const int kinds[][4] = {{0, 0, 0, 0},
                            {0x7f, 0x7f, 1, 0x7c00},
                            {0x7f, 0x7f, fractions, 0x7c00},
                            {0xff, 0x80, 1, 0x7e00}};
    for (const auto& kind : kinds) {
      mask = kind[0], flip = kind[1], specials = kind[2], fill = kind[3];
      if ((is_half = fits(*this))) return;
    }
  }
  power = 1;
}

namespace {

// Moves a row into the order of `decoded`, and returns what its products are multiplied by: very
// large and very small rows are brought nearer to 1, so that sums of a group stay in range.
float arrange(const float* x, int64_t k, int parts, int64_t width, float magnitude, float* to) {
  const float nearer = magnitude > 0x1p64f ? 0x1p-64f : magnitude < 0x1p-64f ? 0x1p32f : 1.0f;
  for (int64_t run = 0; run < width; run += 16 * parts, to += 16 * parts) {
    for (int i = 0; i < 16 * parts; ++i) {
      to[i % parts * 16 + i / parts] = run + i < k ? x[run + i] * nearer : 0.0f;
    }
  }
  return 1 / nearer;
}

// Copies scales of kColumns columns side by side: in steps of a power of two bytes, as they often
// lie, they would all fall into one set of the cache.
void copy_scales(const DecodedProduct& p, int64_t from, int columns, float* to) {
  for (int64_t g = 0; g < p.k / p.group; ++g, from += p.n, to += kColumns) {
    if (p.exponents == nullptr) {
      std::memcpy(to, p.scale + from, columns * sizeof(float));
      continue;
    }
    uint32_t found[kColumns];
    for (int c = 0; c < columns; ++c) {
      const uint32_t code = p.exponents[from + c];
      found[c] = code == 255 ? 0x7fc00000 : code == 0 ? 1 << 22 : code << 23;
    }
    std::memcpy(to, found, columns * sizeof(float));
  }
}

}  // namespace

void multiply(const DecodedProduct& p, const Kernels& kernels, Pool& given) {
  Pool& pool = pool_for(p.batch * p.m * p.n * p.k, given);
  const int bits = p.table.bits, parts = 32 / bits;
  const int64_t width = up(p.k, 16 * parts), stride = p.k * bits / 8, groups = p.k / p.group;
  const int64_t all_rows = p.batch * p.m;
  const bool few = kernels.decoded != nullptr && p.m <= kFew;
  Buffer arranged(few ? all_rows * width * 4 : 0), back(few ? all_rows * 4 : 0);
  float *rows = arranged.at<float>(), *powers = back.at<float>();
  parallel_for(pool, few ? all_rows : 0, [&](int64_t i) {
    const float* x = p.x + i * p.k;
    const float magnitude = kernels.magnitude(x, p.k);
    powers[i] = arrange(x, p.k, parts, width, magnitude, rows + i * width);
  });
  const Tiles tiles(p.batch, p.m, p.n, kernels.rows, pool.threads());

  parallel_for(pool, tiles.count(p.batch), [&](int64_t index) {
    const Tile tile(tiles, index, p.m, p.n);
    const int64_t b = tile.batch;
    const int some = int(tile.row_end - tile.row);
    alignas(64) float found[kFew * kColumns];
    const int64_t scales = groups * kColumns, floats = few ? 0 : kDepth * kColumns;
    float* scale = reinterpret_cast<float*>(memory_of_thread((scales + floats) * 4));
    float* panel = scale + scales;
    for (int64_t j = tile.column; j < tile.column_end; j += kColumns) {
      const int columns = int(std::min<int64_t>(kColumns, tile.column_end - j));
      copy_scales(p, b * groups * p.n + j, columns, scale);
      const GroupedWeights w = {p.w + (b * p.n + j) * stride, stride, scale, kColumns, p.k, p.group,
                                bits, false};
      float* y = p.y + (b * p.m + tile.row) * p.n + j;
      if (few) {
        const float* own = rows + (b * p.m + tile.row) * width;
        kernels.decoded(own, width, some, w, p.table, columns, found);
        for (int r = 0; r < some; ++r) {
          const float power = powers[b * p.m + tile.row + r] * p.table.power;
          for (int c = 0; c < columns; ++c) y[r * p.n + c] = found[r * kColumns + c] * power;
        }
        continue;
      }
      for (int r = 0; r < some; ++r) std::memset(y + r * p.n, 0, columns * sizeof(float));
      for (int64_t from = 0; from < p.k; from += kDepth) {
        const int64_t to = std::min(from + kDepth, p.k);
        const float* x = p.x + (b * p.m + tile.row) * p.k + from;
        kernels.decode(w, p.table, from, to, columns, panel);
        kernels.add_products(x, p.k, some, panel, kColumns, to - from, columns, panel, kColumns, y,
                             p.n);
      }
    }
  });
}

void multiply_groups(const DecodedProduct& p, const int32_t* sizes, int64_t groups,
                     const Kernels& kernels, Pool& pool) {
  const auto part_of = [&](int64_t group, int64_t row, int64_t count) {
    DecodedProduct part = p;
    const int64_t scales = p.k / p.group * p.n;
    part.m = count;
    part.x += row * p.k, part.y += row * p.n;
    part.w += group * p.n * (p.k * p.table.bits / 8);
    if (p.scale != nullptr) part.scale += group * scales;
    if (p.exponents != nullptr) part.exponents += group * scales;
    return part;
  };
  const int64_t row = multiply_each(p.m, sizes, groups, kernels, pool, part_of);
  std::memset(p.y + row * p.n, 0, (p.m - row) * p.n * 4);
}

}  // namespace jqx
