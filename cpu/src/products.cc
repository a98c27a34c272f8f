#include "products.h"

#include <algorithm>
#include <cstring>

#include "tiles.h"

namespace jqx {
namespace {

constexpr int64_t kFromPanel = 48;      // rows from which a copy of the weights pays
constexpr int64_t kLongest = 16384;     // of a panel
constexpr int64_t kLongestSum = 131071;  // of products of two int8 that 32 bits hold
constexpr int64_t kMostDigits = 1024;   // rows of floats whose digits are held
constexpr int64_t kFewBfloats = 6;      // up to which digits are faster: FEW in jqx

// Returns the parameter of one batch, from one of its rows or columns on.
template <class T>
Each<T> from(const Each<T>& each, int64_t batch, int64_t count, int64_t i) {
  return {each.from(batch, count, i), each.is_one};
}

// Returns the product of some of all rows and the weights of one batch.
Product part_of(const Product& p, int64_t batch, int64_t row, int64_t count) {
  Product part = p;
  part.batch = 1, part.m = count;
  if (p.codes != nullptr) part.codes += row * p.k;
  if (p.floats != nullptr) part.floats += row * p.k;
  part.x_scale = from(p.x_scale, 0, p.m, row), part.x_zero = from(p.x_zero, 0, p.m, row);
  part.w += batch * p.n * p.k;
  part.w_scale = from(p.w_scale, batch, p.n, 0), part.w_zero = from(p.w_zero, batch, p.n, 0);
  if (p.sums != nullptr) part.sums += row * p.n;
  if (p.scaled != nullptr) part.scaled += row * p.n;
  return part;
}

FloatProduct part_of(const FloatProduct& p, int64_t batch, int64_t row, int64_t count) {
  FloatProduct part = p;
  const int64_t scales = p.k / p.group * p.n;
  part.batch = 1, part.m = count;
  if (p.x != nullptr) part.x += row * p.k;
  if (p.bfloats != nullptr) part.bfloats += row * p.k;
  if (p.codes != nullptr) part.codes += row * p.k;
  part.x_scale = from(p.x_scale, row / p.m, p.m, row % p.m);
  part.y += row * p.n;
  part.w += batch * p.n * (p.k * p.bits / 8), part.scale += batch * scales;
  if (p.zero != nullptr) part.zero += batch * scales;
  return part;
}

}  // namespace

void multiply_groups(const Product& p, const int32_t* sizes, int64_t groups, const Kernels& kernels,
                     Pool& pool) {
  const int64_t row = multiply_each(
      p.m, sizes, groups, kernels, pool,
      [&](int64_t group, int64_t row, int64_t count) { return part_of(p, group, row, count); });
  const size_t rest = (p.m - row) * p.n * 4;
  if (p.sums != nullptr) std::memset(p.sums + row * p.n, 0, rest);
  if (p.scaled != nullptr) std::memset(p.scaled + row * p.n, 0, rest);
}

void multiply_groups(const FloatProduct& p, const int32_t* sizes, int64_t groups,
                     const Kernels& kernels, Pool& pool) {
  const int64_t row = multiply_each(
      p.m, sizes, groups, kernels, pool,
      [&](int64_t group, int64_t row, int64_t count) { return part_of(p, group, row, count); });
  std::memset(p.y + row * p.n, 0, (p.m - row) * p.n * 4);
}

void multiply(const Product& p, const Kernels& kernels, Pool& given) {
  Pool& pool = pool_for(p.batch * p.m * p.n * p.k, given);
  const int64_t width = up(p.k, kRun);
  const bool as_given = p.codes != nullptr && p.k == width;
  const int64_t all_rows = p.batch * p.m;
  Buffer copied(as_given ? 0 : all_rows * width);
  const int8_t* rows = as_given ? p.codes : copied.at<int8_t>();
  Buffer sums_of_rows(all_rows * 4);
  int32_t* of_rows = sums_of_rows.at<int32_t>();
  for_rows(pool, all_rows, [&](int64_t i) {
    if (!as_given) {
      int8_t* to = copied.at<int8_t>(i * width);
      if (p.codes != nullptr) {
        std::memcpy(to, p.codes + i * p.k, p.k);
      } else {
        const float scale = p.x_scale.at(i / p.m, p.m, i % p.m);
        kernels.quantize(p.floats + i * p.k, p.k, scale, 0, p.low, p.high, to);
      }
      std::memset(to + p.k, 0, width - p.k);
    }
    of_rows[i] = kernels.sum(rows + i * width, width);
  });
  const bool panels = p.m >= kFromPanel && p.k <= kLongest;
  const Tiles tiles(p.batch, p.m, p.n, kernels.rows, pool.threads());
  Buffer ones(p.x_zero.data == nullptr ? 0 : width);
  if (p.x_zero.data != nullptr) std::memset(ones.at<int8_t>(), 1, width);
  const int64_t panel_bytes = width * kColumns;

  parallel_for(pool, tiles.count(p.batch), [&](int64_t index) {
    const Tile tile(tiles, index, p.m, p.n);
    const int64_t b = tile.batch;
    alignas(64) int32_t sums[kMostRows * kColumns];
    alignas(64) int32_t of_columns[kPanels][kColumns];
    uint8_t* packed = panels ? memory_of_thread(tiles.panels * panel_bytes) : nullptr;
    for (int64_t j = tile.column; j < tile.column_end; j += kColumns) {
      const int columns = int(std::min<int64_t>(kColumns, tile.column_end - j));
      const int64_t at = (j - tile.column) / kColumns;
      const int8_t* w = p.w + (b * p.n + j) * p.k;
      if (panels) kernels.pack(w, p.k, columns, p.k, packed + at * panel_bytes);
      if (p.x_zero.data != nullptr) {
        const int32_t of_ones = int32_t(width);
        kernels.dots(ones.at<int8_t>(), width, &of_ones, 1, w, p.k, columns, p.k, of_columns[at]);
      }
    }
    for (int64_t i = tile.row; i < tile.row_end; i += kernels.rows) {
      const int some = int(std::min<int64_t>(kernels.rows, tile.row_end - i));
      const int8_t* own = rows + (b * p.m + i) * width;
      const int32_t* sums_of = of_rows + b * p.m + i;
      for (int64_t j = tile.column; j < tile.column_end; j += kColumns) {
        const int columns = int(std::min<int64_t>(kColumns, tile.column_end - j));
        const int64_t at = (j - tile.column) / kColumns;
        if (panels) {
          const uint8_t* panel = packed + at * panel_bytes;
          kernels.panel(own, width, sums_of, some, panel, columns, width, sums);
        } else {
          const int8_t* w = p.w + (b * p.n + j) * p.k;
          kernels.dots(own, width, sums_of, some, w, p.k, columns, p.k, sums);
        }
        for (int r = 0; r < some; ++r) {
          int32_t* total = sums + r * kColumns;
          const bool has_zero = p.x_zero.data != nullptr;
          const ZeroPoints zeros(p.k, has_zero ? p.x_zero.at(b, p.m, i + r) : 0,
                                 has_zero ? of_columns[at] : nullptr, sums_of[r],
                                 p.w_zero.from(b, p.n, j), p.w_zero.stride());
          const int64_t to = (b * p.m + i + r) * p.n + j;
          if (p.sums != nullptr) {
            kernels.correct(total, columns, zeros);
            std::memcpy(p.sums + to, total, columns * sizeof(int32_t));
          } else {
            const float left = p.x_scale.at(b, p.m, i + r);
            kernels.scale(total, columns, zeros, left, p.w_scale.from(b, p.n, j),
                          p.w_scale.stride(), p.scaled + to);
          }
        }
      }
    }
  });
}

bool has_groups(int64_t k, int64_t group, int bits) {
  if (bits != 8 && bits != 4 && bits != 2) return false;
  const int64_t in_lane = 32 / bits, in_run = 16 * in_lane;
  if (k <= 0 || group <= 0 || k * bits % 8 != 0) return false;
  if (group == k) return true;
  if (k % group != 0) return false;
  return group % in_run == 0 || group == 8 * in_lane || group == 4 * in_lane || group == 2 * in_lane;
}

void multiply(const FloatProduct& p, const Kernels& kernels, Pool& given) {
  const bool has_pairs = p.bfloats != nullptr && kernels.add_pairs != nullptr;
  const bool as_bfloats = has_pairs && p.m > kFewBfloats;  // all rows alike
  if (p.m > kMostDigits) {  // some rows at once, so that not all of their digits are held
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t i = 0; i < p.m; i += kMostDigits) {
        const FloatProduct part = part_of(p, b, b * p.m + i, std::min(kMostDigits, p.m - i));
        as_bfloats ? multiply_bfloats(part, kernels, given) : multiply(part, kernels, given);
      }
    }
    return;
  }
  if (as_bfloats) return multiply_bfloats(p, kernels, given);
  if (p.bfloats != nullptr) {
    Buffer floats(p.batch * p.m * p.k * 4);
    widen(p.bfloats, p.batch * p.m * p.k, floats.at<float>());
    FloatProduct wide = p;
    wide.bfloats = nullptr, wide.x = floats.at<float>();
    return multiply(wide, kernels, given);
  }
  Pool& pool = pool_for(p.batch * p.m * p.n * p.k, given);
  const int count = p.codes != nullptr ? 1 : p.digits;
  const bool many = count * p.m >= kFromPanel && p.k <= kLongest;
  const bool panels = kernels.grouped_panel != nullptr && many;
  const int per = panels ? 1 : 8 / p.bits;  // codes that digits lie for
  const int64_t width = up(p.k, kRun * per), lanes = width / (4 * per), groups = p.k / p.group;
  const int64_t stride = p.k * p.bits / 8;
  // One scale a column and whole bytes: sums of digits stay integers to the end.
  const bool whole =
      !panels && p.bits == 8 && groups == 1 && p.is_signed && p.k <= kLongestSum;
  const bool counts = p.zero != nullptr;
  const int64_t all_rows = p.batch * p.m;
  Buffer digits(all_rows * count * width), sums(all_rows * lanes * 4), told(all_rows * sizeof(Digits));
  Buffer of_groups(counts ? all_rows * groups * 4 : 0);
  Buffer of_digits(panels ? all_rows * groups * count * 4 : 0);
  Digits* rows = told.at<Digits>();
  parallel_for(pool, all_rows, [&](int64_t i) {
    for (int d = 0; d < count; ++d) rows[i].digits[d] = digits.at<int8_t>((i * count + d) * width);
    rows[i].lanes = sums.at<int32_t>(i * lanes * 4);
    rows[i].count = count;
    if (p.codes != nullptr) {
      kernels.arrange(p.codes + i * p.k, p.k, per, rows + i);
      rows[i].rest = p.x_scale.at(i / p.m, p.m, i % p.m);
    } else {
      kernels.split(p.x + i * p.k, p.k, per, rows + i);
    }
    if (panels) {
      int32_t* own = of_digits.at<int32_t>(i * groups * count * 4);
      for (int64_t g = 0; g < groups; ++g) {
        for (int d = 0; d < count; ++d) {
          own[g * count + d] = kernels.sum(rows[i].digits[d] + g * p.group, p.group);
        }
      }
    }
    if (!counts) return;
    const int64_t in_group = groups == 1 ? lanes : lanes * p.group / width;
    float* own = of_groups.at<float>(i * groups * 4);
    for (int64_t g = 0; g < groups; ++g) {
      int64_t total = 0;
      const int64_t stop = std::min((g + 1) * in_group, lanes);
      for (int64_t l = g * in_group; l < stop; ++l) total += rows[i].lanes[l];
      own[g] = float(total) * rows[i].power;
    }
  });
  const Tiles tiles(p.batch, p.m, p.n, kernels.rows, pool.threads());

  parallel_for(pool, tiles.count(p.batch), [&](int64_t index) {
    const Tile tile(tiles, index, p.m, p.n);
    const int64_t b = tile.batch;
    alignas(64) float found[kMostRows * kColumns];
    alignas(64) int32_t totals[3 * kMostRows * kColumns];
    uint8_t* panel = panels ? memory_of_thread(width * kColumns) : nullptr;
    for (int64_t j = tile.column; j < tile.column_end; j += kColumns) {
      const int columns = int(std::min<int64_t>(kColumns, tile.column_end - j));
      const int64_t at = b * groups * p.n + j;
      const GroupedWeights w = {p.w + (b * p.n + j) * stride, stride, p.scale + at, p.n, p.k,
                                p.group, p.bits, p.is_signed};
      const int8_t* zero = p.zero == nullptr ? nullptr : p.zero + at;
      if (panels) kernels.unpack(w, columns, panel);
      for (int64_t i = tile.row; i < tile.row_end; i += kernels.rows) {
        const int some = int(std::min<int64_t>(kernels.rows, tile.row_end - i));
        const Digits* own = rows + b * p.m + i;
        const float* of_rows = counts ? of_groups.at<float>((b * p.m + i) * groups * 4) : nullptr;
        if (panels) {
          const int32_t* sums_of = of_digits.at<int32_t>((b * p.m + i) * groups * count * 4);
          kernels.grouped_panel(own, some, w, panel, zero, sums_of, of_rows, columns, found);
        } else if (whole) {
          const int8_t* codes = reinterpret_cast<const int8_t*>(w.codes);
          int32_t sums_of[3 * kMostRows];
          for (int r = 0; r < some; ++r) {
            std::memcpy(sums_of + count * r, own[r].sums, count * sizeof(int32_t));
          }
          kernels.dots(own->digits[0], width, sums_of, count * some, codes, stride, columns, p.k,
                       totals);
        } else {
          kernels.grouped(own, some, w, columns, found);
        }
        for (int r = 0; r < some; ++r) {
          float* y = found + r * kColumns;
          if (whole) {
            const int32_t* total = totals + count * r * kColumns;
            kernels.join(total, count, own[r].power, w.scale, columns, y);
          }
          if (zero != nullptr && !panels) kernels.shift(w, zero, of_rows + r * groups, columns, y);
          float* to = p.y + (b * p.m + i + r) * p.n + j;
          for (int c = 0; c < columns; ++c) to[c] = y[c] * own[r].rest;
        }
      }
    }
  });
}

void find_magnitudes(const float* x, int64_t m, int64_t k, float* y, const Kernels& kernels,
                     Pool& pool) {
  for_rows(pool_for(8 * m * k, pool), m, [&](int64_t i) { y[i] = kernels.magnitude(x + i * k, k); });
}

void find_ranges(const float* x, int64_t m, int64_t k, float* y, const Kernels& kernels,
                 Pool& pool) {
  for_rows(pool_for(8 * m * k, pool), m, [&](int64_t i) { kernels.range(x + i * k, k, y + 3 * i); });
}

}  // namespace jqx
