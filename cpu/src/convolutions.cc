#include "convolutions.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "tiles.h"

namespace jqx {
namespace {

constexpr int64_t kBlock = 32;    // bytes that are copied at once
constexpr int64_t kHeld = 8192;   // sums that wait for their scales
constexpr int64_t kScaled = 512;  // of them, that are scaled at once

// The taps of an axis that meet pixels of an image, where the window is at a place.
struct Taps {
  int64_t start;       // pixel of the first tap, in the image or not
  int64_t begin, end;  // which taps meet pixels

  Taps(const Axis& axis, int64_t place) : start(place * axis.stride - axis.low) {
    const auto before = [&](int64_t pixel) {
      const int64_t apart = std::max<int64_t>(pixel - start, 0);
      const int64_t step = axis.dilation;
      return std::min(step == 1 ? apart : (apart + step - 1) / step, axis.taps);
    };
    begin = before(0), end = before(axis.size);
  }
};

// Copies n bytes in whole blocks: more is written behind them, and read where it lies before `end`.
inline void copy(int8_t* to, const int8_t* from, int64_t n, const int8_t* end) {
  if (end - from < up(n, kBlock)) {
    std::memcpy(to, from, n);
  } else {
    for (int64_t i = 0; i < n; i += kBlock) std::memcpy(to + i, from + i, kBlock);
  }
}

// Rows of codes that the window meets, [taps, taps, features of a group], filled up with zeros.
class Patches {
 public:
  Patches(const Convolution& p, int64_t step)
      : p_(p), inputs_(p.features / p.groups), k_(p.height.taps * p.width.taps * inputs_),
        width_(up(k_, step)), down_(p.height.places()), across_(p.width.places()),
        end_(p.image + p.batch * p.height.size * p.width.size * p.features) {}

  int64_t rows() const { return p_.batch * down_ * across_; }
  int64_t k() const { return k_; }
  int64_t width() const { return width_; }
  int64_t image_of(int64_t row) const { return row / (down_ * across_); }

  // Whether they lie in the image as they are.
  bool are_pixels() const {
    const auto is_plain = [](const Axis& axis) {
      return axis.taps == 1 && axis.stride == 1 && axis.low == 0 && axis.high == 0;
    };
    return is_plain(p_.height) && is_plain(p_.width) && p_.groups == 1 && k_ == width_;
  }

  // Writes some rows; a block behind the last one may be written too.
  void gather(int64_t row, int count, int64_t group, int8_t* to) const {
    int64_t image = image_of(row), y = row / across_ % down_, x = row % across_;
    for (int i = 0; i < count; ++i, to += width_) {
      const int8_t zero = p_.image_zero.data == nullptr ? 0 : p_.image_zero.at(0, 0, image);
      gather_one(Taps(p_.height, y), Taps(p_.width, x), image, group, zero, to);
      if (++x == across_) x = 0, ++y;
      if (y == down_) y = 0, ++image;
    }
  }

 private:
  // Each copy writes over what the one before wrote too much.
  void gather_one(const Taps& rows, const Taps& columns, int64_t image, int64_t group, int8_t zero,
                  int8_t* to) const {
    const Axis &height = p_.height, &width = p_.width;
    const int64_t met = columns.end - columns.begin, of_row = width.taps * inputs_;
    const int64_t before = columns.begin * inputs_, behind = (width.taps - columns.end) * inputs_;
    const int64_t apart = width.dilation * p_.features;
    const bool is_run = apart == inputs_;
    const int64_t runs = is_run ? 1 : met, n = is_run ? met * inputs_ : inputs_;
    const int64_t y = image * height.size + rows.start + rows.begin * height.dilation;
    const int64_t x = columns.start + columns.begin * width.dilation;
    const int8_t* from = p_.image + (y * width.size + x) * p_.features + group * inputs_;
    const int64_t next = height.dilation * width.size * p_.features;
    const int64_t first = met > 0 ? rows.begin : height.taps, last = met > 0 ? rows.end : first;
    if (first > 0) std::memset(to, zero, first * of_row);
    to += first * of_row;
    for (int64_t i = first; i < last; ++i, to += of_row, from += next) {
      if (before > 0) std::memset(to, zero, before);
      for (int64_t j = 0; j < runs; ++j) copy(to + before + j * n, from + j * apart, n, end_);
      if (behind > 0) std::memset(to + of_row - behind, zero, behind);
    }
    if (last < height.taps) std::memset(to, zero, (height.taps - last) * of_row);
    to += (height.taps - last) * of_row;
    for (int64_t i = k_; i < width_; ++i) to[i - k_] = 0;
  }

  const Convolution& p_;
  int64_t inputs_, k_, width_, down_, across_;
  const int8_t* end_;
};

// Each output of one feature.
void convolve_depthwise(const Convolution& p, const Kernels& kernels, Pool& pool) {
  const int64_t n = p.outputs, times = n / p.features, taps = p.height.taps * p.width.taps;
  const int64_t down = p.height.places(), across = p.width.places();
  const int64_t pixels = p.batch * p.height.size * p.width.size;
  // The features as the outputs read them, and the kernel less its zero points.
  Buffer repeated(times == 1 ? 0 : pixels * n), weights(taps * n * sizeof(int16_t));
  const int8_t* image = times == 1 ? p.image : repeated.at<int8_t>();
  if (times > 1) {
    parallel_for(pool, p.batch * p.height.size, [&](int64_t row) {
      const int64_t first = row * p.width.size * p.features;
      for (int64_t i = first; i < first + p.width.size * p.features; ++i) {
        std::memset(repeated.at<int8_t>(i * times), p.image[i], times);
      }
    });
  }
  for (int64_t i = 0; i < taps * n; ++i) {
    const int zero = p.kernel_zero.data == nullptr ? 0 : p.kernel_zero.at(0, 0, i % n);
    weights.at<int16_t>()[i] = int16_t(p.kernel[i] - zero);
  }
  const int64_t at_once = std::max<int64_t>(kHeld / n, 1), rows = p.batch * down;
  const int64_t some = std::max<int64_t>(rows / (8 * pool.threads()), 1);
  // Few outputs are scaled together, by scales that are repeated as often.
  const int64_t scaled = std::max<int64_t>(kScaled / n, 1);
  std::vector<float> scales;
  for (int64_t i = 0; i < scaled * n && p.scaled != nullptr; ++i) {
    scales.push_back(p.kernel_scale.at(0, 0, i % n));
  }

  parallel_for(pool, (rows + some - 1) / some, [&](int64_t part) {
    std::vector<int64_t> places(taps);
    std::vector<const int16_t*> own(taps);
    int32_t* held = reinterpret_cast<int32_t*>(memory_of_thread(at_once * n * sizeof(int32_t)));
    for (int64_t row = part * some; row < std::min((part + 1) * some, rows); ++row) {
      const int64_t b = row / down;
      const int32_t zero = p.image_zero.data == nullptr ? 0 : p.image_zero.at(0, 0, b);
      const Taps y(p.height, row % down);
      for (int64_t at = 0, stop; at < across; at = stop) {  // pixels that meet the same taps
        const Taps x(p.width, at);
        const auto is_alike = [&](const Taps& other) {
          return other.begin == x.begin && other.end == x.end;
        };
        stop = at + 1;
        while (stop < across && stop < at + at_once && is_alike(Taps(p.width, stop))) ++stop;
        int met = 0;
        for (int64_t i = y.begin; i < y.end; ++i) {
          for (int64_t j = x.begin; j < x.end; ++j, ++met) {
            const int64_t line = b * p.height.size + y.start + i * p.height.dilation;
            places[met] = (line * p.width.size + x.start + j * p.width.dilation) * n;
            own[met] = weights.at<int16_t>() + (i * p.width.taps + j) * n;
          }
        }
        const int64_t to = row * across + at;
        int32_t* sums = p.sums != nullptr ? p.sums + to * n : held;
        kernels.depthwise(image, p.width.stride * n, int(stop - at), places.data(), own.data(), met,
                          n, zero, sums);
        for (int64_t i = 0; i < stop - at && p.scaled != nullptr; i += scaled) {
          const int count = int(std::min(scaled, stop - at - i) * n);
          const float left = p.image_scale.at(0, 0, b);
          const ZeroPoints none(0, 0, nullptr, 0, nullptr, 0);  // depthwise took them
          kernels.scale(sums + i * n, count, none, left, scales.data(), 1, p.scaled + (to + i) * n);
        }
      }
    }
  });
}

}  // namespace

void convolve(const Convolution& p, const Kernels& kernels, Pool& given) {
  const Patches patches(p, kernels.step);
  const int64_t m = patches.rows(), n = p.outputs / p.groups, k = patches.k();
  Pool& pool = pool_for(m * p.outputs * k, given);
  if (p.groups > 1 && p.groups == p.features) return convolve_depthwise(p, kernels, pool);
  const int64_t width = patches.width(), panels = (n + kColumns - 1) / kColumns;
  const int64_t panel_bytes = width * kColumns;
  const bool has_zero = p.image_zero.data != nullptr, as_given = patches.are_pixels();
  Buffer packed(p.groups * panels * panel_bytes), ones(width);
  Buffer of_columns(has_zero ? p.groups * panels * kColumns * sizeof(int32_t) : 0);
  Buffer zeros(p.outputs * sizeof(int32_t));
  Each<int32_t> kernel_zero;
  if (p.kernel_zero.data != nullptr) {
    kernel_zero = {zeros.at<int32_t>(), p.kernel_zero.is_one};
    const int64_t count = kernel_zero.is_one ? 1 : p.outputs;
    std::copy(p.kernel_zero.data, p.kernel_zero.data + count, zeros.at<int32_t>());
  }
  std::memset(ones.at<int8_t>(), 1, k);
  std::memset(ones.at<int8_t>(k), 0, width - k);
  parallel_for(pool, p.groups * panels, [&](int64_t i) {
    const int64_t group = i / panels, j = i % panels * kColumns;
    const int columns = int(std::min<int64_t>(kColumns, n - j));
    uint8_t* panel = packed.at<uint8_t>(i * panel_bytes);
    kernels.pack_rows(p.kernel + group * n + j, p.outputs, columns, k, panel);
    if (has_zero) {
      const int32_t of_ones = int32_t(k);
      kernels.panel(ones.at<int8_t>(), width, &of_ones, 1, panel, columns, width,
                    of_columns.at<int32_t>() + i * kColumns);
    }
  });
  const Tiles tiles = Tiles::of_rows(p.groups, m, n, kernels.rows, pool.threads());

  parallel_for(pool, tiles.count(p.groups), [&](int64_t index) {
    const Tile tile(tiles, index, m, n);
    const int64_t group = tile.batch;
    const int at_once = kernels.rows;
    alignas(64) int32_t sums[kMostRows * kColumns];
    int32_t of_rows[kMostRows];
    int64_t images[kMostRows];
    int8_t* gathered = nullptr;
    if (!as_given) gathered = reinterpret_cast<int8_t*>(memory_of_thread(at_once * width + kBlock));
    for (int64_t i = tile.row; i < tile.row_end; i += at_once) {
      const int some = int(std::min<int64_t>(at_once, tile.row_end - i));
      const int8_t* rows = as_given ? p.image + i * width : gathered;
      if (!as_given) patches.gather(i, some, group, gathered);
      for (int r = 0; r < some; ++r) {
        of_rows[r] = kernels.sum(rows + r * width, width);
        images[r] = patches.image_of(i + r);
      }
      for (int64_t j = tile.column; j < tile.column_end; j += kColumns) {
        const int columns = int(std::min<int64_t>(kColumns, tile.column_end - j));
        const int64_t at = group * panels + j / kColumns, output = group * n + j;
        const uint8_t* panel = packed.at<uint8_t>(at * panel_bytes);
        kernels.panel(rows, width, of_rows, some, panel, columns, width, sums);
        for (int r = 0; r < some; ++r) {
          int32_t* own = sums + r * kColumns;
          const ZeroPoints zeros(k, has_zero ? p.image_zero.at(0, 0, images[r]) : 0,
                                 has_zero ? of_columns.at<int32_t>() + at * kColumns : nullptr,
                                 of_rows[r], kernel_zero.from(0, 0, output), kernel_zero.stride());
          const int64_t to = (i + r) * p.outputs + output;
          if (p.sums != nullptr) {
            kernels.correct(own, columns, zeros);
            std::memcpy(p.sums + to, own, columns * sizeof(int32_t));
          } else {
            const float left = p.image_scale.at(0, 0, images[r]);
            kernels.scale(own, columns, zeros, left, p.kernel_scale.from(0, 0, output),
                          p.kernel_scale.stride(), p.scaled + to);
          }
        }
      }
    }
  });
}

}  // namespace jqx
