// Compares all kernels that this processor runs with plain loops, on random shapes, without XLA.
//
// Arrays end where a page begins that nobody may touch: sanitizers do not see what masked
// instructions and assembly read and write beyond what is given.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "convolutions.h"
#include "decoded.h"
#include "products.h"
#include "rows.h"
#include "tiles.h"

namespace {

using jqx::Kernels;

template <class T>
struct BeforeAWall {
  using value_type = T;

  BeforeAWall() = default;
  template <class U>
  BeforeAWall(const BeforeAWall<U>&) {}

  static size_t pages(size_t count) { return (count * sizeof(T) + kPage - 1) / kPage * kPage; }

  T* allocate(size_t count) {
    const size_t size = pages(count);
    void* all = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    uint8_t* wall = static_cast<uint8_t*>(all) + size;
    if (mprotect(wall, kPage, PROT_NONE) != 0) throw std::bad_alloc();
    return reinterpret_cast<T*>(wall - count * sizeof(T));
  }

  void deallocate(T* data, size_t count) {
    uint8_t* wall = reinterpret_cast<uint8_t*>(data + count);
    munmap(wall - pages(count), pages(count) + kPage);
  }

  template <class U>
  bool operator==(const BeforeAWall<U>&) const {
    return true;
  }
  template <class U>
  bool operator!=(const BeforeAWall<U>&) const {
    return false;
  }

  static constexpr size_t kPage = 65536;  // or a multiple of it
};

template <class T>
using Array = std::vector<T, BeforeAWall<T>>;

// Each piece of work has a thread of its own.
class Threads : public jqx::Pool {
 public:
  ~Threads() override {
    for (auto& thread : threads_) thread.join();
  }
  int64_t threads() const override { return 4; }
  void schedule(std::function<void()> work) override { threads_.emplace_back(std::move(work)); }

 private:
  std::vector<std::thread> threads_;
};

std::mt19937 generator(0);
int failures = 0;

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

// Returns a size, one in three a multiple of `of`, where there is one.
int64_t size_near(int64_t of, int64_t most) {
  return between(0, 2) == 0 ? of * between(1, most / of) : between(1, most);
}

template <class T>
Array<T> numbers(int64_t count, int64_t low, int64_t high) {
  Array<T> found(count);
  for (auto& x : found) x = static_cast<T>(between(low, high));
  return found;
}

Array<float> floats(int64_t count) {
  std::normal_distribution<float> normal;
  Array<float> found(count);
  for (auto& x : found) x = normal(generator);
  return found;
}

void check(bool holds, const Kernels& kernels, const std::string& what) {
  if (holds) return;
  ++failures;
  std::printf("WRONG (%s): %s\n", kernels.name, what.c_str());
}

void check_products(const Kernels& kernels) {
  const bool is_long = between(0, 7) == 0;  // along k
  const int64_t most_rows[] = {6, 47, 100};
  const int64_t batch = is_long ? 1 : between(1, 3), m = between(1, most_rows[between(0, 2)]);
  const int64_t n = size_near(64, is_long ? 64 : 150);
  const int64_t k = is_long ? between(1000, 2400) : size_near(64, 300);
  const auto x = numbers<int8_t>(batch * m * k, -128, 127);
  const auto w = numbers<int8_t>(batch * n * k, -128, 127);
  const bool one_x = between(0, 1), one_w = between(0, 1), rounds = between(0, 1);
  const auto x_zero = numbers<int32_t>(batch * (one_x ? 1 : m), -128, 127);
  const auto w_zero = numbers<int32_t>(batch * (one_w ? 1 : n), -128, 127);
  auto x_scale = floats(batch * m), w_scale = floats(batch * n);
  for (auto& s : x_scale) s = 0.01f + std::fabs(s) / 100;
  const auto real = floats(batch * m * k);
  Array<int8_t> codes(x);
  if (rounds) {
    for (int64_t i = 0; i < batch * m * k; ++i) {
      const float y = std::nearbyint(real[i] / x_scale[i / k]);
      codes[i] = static_cast<int8_t>(std::min(std::max(y, -127.0f), 127.0f));
    }
  }
  Array<int32_t> sums(batch * m * n), expected(batch * m * n);
  Array<float> scaled(batch * m * n);
  jqx::Product p;
  p.batch = batch, p.m = m, p.n = n, p.k = k, p.low = -127, p.high = 127;
  if (rounds) {
    p.floats = real.data();
  } else {
    p.codes = x.data();
  }
  p.w = w.data();
  p.x_scale = {x_scale.data(), false};
  p.w_scale = {w_scale.data(), false};
  const bool has_x = between(0, 1), has_w = between(0, 1);
  if (has_x) p.x_zero = {x_zero.data(), one_x};
  if (has_w) p.w_zero = {w_zero.data(), one_w};
  const std::string shape = std::to_string(batch) + " x " + std::to_string(m) + " x " +
                            std::to_string(k) + " x " + std::to_string(n);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        int64_t total = 0;
        const int64_t a = has_x ? x_zero[one_x ? b : b * m + i] : 0;
        const int64_t c = has_w ? w_zero[one_w ? b : b * n + j] : 0;
        for (int64_t l = 0; l < k; ++l) {
          total += (codes[(b * m + i) * k + l] - a) * (w[(b * n + j) * k + l] - c);
        }
        expected[(b * m + i) * n + j] = static_cast<int32_t>(total);
      }
    }
  }
  Threads pool;
  p.sums = sums.data();
  jqx::multiply(p, kernels, pool);
  check(sums == expected, kernels, "sums of " + shape);
  p.sums = nullptr, p.scaled = scaled.data();
  jqx::multiply(p, kernels, pool);
  bool same = true;
  for (int64_t i = 0; i < batch * m * n; ++i) {
    const int64_t row = i / n, column = i / (m * n) * n + i % n;
    same &= scaled[i] == float(expected[i]) * x_scale[row] * w_scale[column];
  }
  check(same, kernels, "scaled sums of " + shape);
}

void check_groups(const Kernels& kernels) {
  const int64_t groups = between(1, 5), m = between(1, 60), n = between(1, 100);
  const int64_t k = between(1, 100);
  const auto x = numbers<int8_t>(m * k, -128, 127), w = numbers<int8_t>(groups * n * k, -128, 127);
  const auto sizes = numbers<int32_t>(groups, -3, 30);
  const auto x_zero = numbers<int32_t>(m, -9, 9), w_zero = numbers<int32_t>(groups * n, -9, 9);
  Array<int32_t> sums(m * n, 1), expected(m * n, 0);
  jqx::Product p;
  p.batch = 1, p.m = m, p.n = n, p.k = k, p.codes = x.data(), p.w = w.data();
  p.x_zero = {x_zero.data(), false}, p.w_zero = {w_zero.data(), false}, p.sums = sums.data();
  Threads pool;
  jqx::multiply_groups(p, sizes.data(), groups, kernels, pool);
  int64_t row = 0;
  for (int64_t g = 0; g < groups; ++g) {
    for (int32_t left = sizes[g]; left > 0 && row < m; --left, ++row) {
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t l = 0; l < k; ++l) {
          const int32_t code = w[(g * n + j) * k + l] - w_zero[g * n + j];
          expected[row * n + j] += (x[row * k + l] - x_zero[row]) * code;
        }
      }
    }
  }
  check(sums == expected, kernels, "rows in groups");
}

void check_float_products(const Kernels& kernels) {
  const int bits = 1 << between(1, 3), per = 8 / bits, middle = 1 << (bits - 1);
  const int64_t of_lanes[] = {2, 4, 8, 16, 32}, in_lane = 4 * per;
  const bool whole = between(0, 3) == 0;
  const int64_t groups = whole ? 1 : between(1, 5);
  const int64_t group = whole ? between(1, 90) * per : in_lane * of_lanes[between(0, 4)];
  const int64_t batch = between(1, 2), m = between(1, between(0, 1) ? 9 : 100);
  const int64_t n = size_near(64, 140), k = groups * group;
  if (!jqx::has_groups(k, group, bits)) return check(false, kernels, "there is no such group");
  const bool is_signed = between(0, 1), has_zero = between(0, 1);
  const auto w = numbers<uint8_t>(batch * n * k / per, 0, 255);
  auto scale = floats(batch * groups * n);
  const auto zero = numbers<int8_t>(batch * groups * n, -middle, middle - 1);
  const int digits = int(between(1, 4));  // 1: of codes; 4: of none, of bfloat16
  const auto codes = numbers<int8_t>(batch * m * k, -128, 127);
  const Array<float> x_scale(batch * m, 0.25f);
  auto x = floats(batch * m * k);
  if (digits == 1) {
    for (int64_t i = 0; i < batch * m * k; ++i) x[i] = 0.25f * codes[i];
  }
  Array<uint16_t> bfloats(batch * m * k);
  for (int64_t i = 0; digits == 4 && i < batch * m * k; ++i) {
    uint32_t of_float;
    std::memcpy(&of_float, &x[i], 4);
    bfloats[i] = uint16_t(of_float >> 16);
    of_float &= 0xffff0000;
    std::memcpy(&x[i], &of_float, 4);
  }
  Array<float> y(batch * m * n);
  jqx::FloatProduct p = {};
  p.batch = batch, p.m = m, p.n = n, p.k = k, p.group = group, p.bits = bits;
  p.is_signed = is_signed, p.digits = std::min(digits, 3), p.w = w.data(), p.scale = scale.data();
  p.y = y.data();
  if (has_zero) p.zero = zero.data();
  if (digits == 1) {
    p.codes = codes.data(), p.x_scale = {x_scale.data(), false};
  } else if (digits == 4) {
    p.bfloats = bfloats.data();
  } else {
    p.x = x.data();
  }
  Threads pool;
  jqx::multiply(p, kernels, pool);
  double worst = 0;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double total = 0, size = 1e-9, largest = 0, products = 0;
        for (int64_t l = 0; l < k; ++l) {
          const float value = x[(b * m + i) * k + l];
          largest = std::max<double>(largest, std::fabs(value));
        }
        for (int64_t l = 0; l < k; ++l) {
          const int byte = w[((b * n + j) * k + l) / per];
          int code = byte >> (l % per * bits) & ((1 << bits) - 1);
          code = is_signed ? (code ^ middle) - middle : code - middle;
          const int64_t at = (b * groups + l / group) * n + j;
          const double real = double(scale[at]) * (code - (has_zero ? zero[at] : 0));
          total += x[(b * m + i) * k + l] * real;
          products += std::fabs(x[(b * m + i) * k + l] * real);
          size += largest * std::fabs(scale[at]) * middle;
        }
        double error = std::fabs(y[(b * m + i) * n + j] - total);
        // Each sum of bfloat16 is rounded once, and twice that of a group, with its scale.
        if (digits == 4) error -= products * (k + 2 * groups) * 0x1p-24;
        worst = std::max(worst, error / size);
      }
    }
  }
  const double bound = digits == 2 ? 1.6e-5 : 1e-6;  // half a step of the largest magnitude
  check(worst < bound, kernels, std::to_string(digits) + " digits beside " + std::to_string(bits) + " bits in groups of " +
                                    std::to_string(group) + ": " + std::to_string(worst));
}

void check_rows(const Kernels& kernels) {
  const int64_t m = between(1, 40), k = between(1, 90);
  auto x = floats(m * k);
  for (int64_t i = between(0, 5); i > 0; --i) x[between(0, m * k - 1)] = i % 2 ? NAN : INFINITY;
  Array<float> magnitudes(m), ranges(3 * m);
  Threads pool;
  jqx::find_magnitudes(x.data(), m, k, magnitudes.data(), kernels, pool);
  jqx::find_ranges(x.data(), m, k, ranges.data(), kernels, pool);
  bool same = true;
  for (int64_t i = 0; i < m; ++i) {
    float low = INFINITY, high = -INFINITY, largest = 0, nans = 0;
    for (int64_t l = 0; l < k; ++l) {
      const float value = x[i * k + l];
      if (std::isnan(value)) {
        ++nans;
        continue;
      }
      low = std::min(low, value), high = std::max(high, value);
      largest = std::max(largest, std::fabs(value));
    }
    same &= ranges[3 * i] == low && ranges[3 * i + 1] == high && ranges[3 * i + 2] == nans;
    same &= nans > 0 ? std::isnan(magnitudes[i]) : magnitudes[i] == largest;
  }
  check(same, kernels, "ranges of rows");
}

void check_convolutions(const Kernels& kernels) {
  const bool is_depthwise = between(0, 2) == 0;
  jqx::Convolution p;
  p.groups = is_depthwise ? between(2, 90) : between(1, 3);
  p.batch = between(1, 3), p.features = p.groups * (is_depthwise ? 1 : between(1, 40));
  p.outputs = p.groups * between(1, is_depthwise ? 2 : 70);
  const auto axis = [] {
    return jqx::Axis{between(1, 12), between(1, 4), between(1, 3),
                     between(1, 2),  between(-1, 3), between(-1, 3)};
  };
  p.height = axis(), p.width = axis();
  const jqx::Axis &height = p.height, &width = p.width;
  const int64_t m = height.places() * width.places(), inputs = p.features / p.groups;
  if (m == 0) return;
  const auto image = numbers<int8_t>(p.batch * height.size * width.size * p.features, -128, 127);
  const auto kernel = numbers<int8_t>(height.taps * width.taps * inputs * p.outputs, -128, 127);
  const bool one_a = between(0, 1), one_b = between(0, 1);
  const bool has_a = between(0, 1), has_b = between(0, 1);
  const auto a = numbers<int8_t>(p.batch, -128, 127), b = numbers<int8_t>(p.outputs, -128, 127);
  auto left = floats(p.batch), right = floats(p.outputs);
  for (auto& s : left) s = 0.01f + std::fabs(s) / 100;
  p.image = image.data(), p.kernel = kernel.data();
  p.image_scale = {left.data(), one_a}, p.kernel_scale = {right.data(), one_b};
  if (has_a) p.image_zero = {a.data(), one_a};
  if (has_b) p.kernel_zero = {b.data(), one_b};
  const int64_t count = p.batch * m * p.outputs;
  Array<int32_t> sums(count), expected(count);
  Array<float> scaled(count);
  for (int64_t at = 0; at < count; ++at) {
    const int64_t n = at % p.outputs, x = at / p.outputs % width.places();
    const int64_t y = at / p.outputs / width.places() % height.places(), i = at / p.outputs / m;
    const int64_t group = n / (p.outputs / p.groups);
    const int zero = has_a ? a[one_a ? 0 : i] : 0, own = has_b ? b[one_b ? 0 : n] : 0;
    int64_t total = 0;
    for (int64_t tap = 0; tap < height.taps * width.taps; ++tap) {
      const int64_t down = y * height.stride - height.low + tap / width.taps * height.dilation;
      const int64_t across = x * width.stride - width.low + tap % width.taps * width.dilation;
      if (down < 0 || down >= height.size || across < 0 || across >= width.size) continue;
      const int64_t pixel = (i * height.size + down) * width.size + across;
      for (int64_t c = 0; c < inputs; ++c) {
        const int code = image[pixel * p.features + group * inputs + c];
        total += (code - zero) * (kernel[(tap * inputs + c) * p.outputs + n] - own);
      }
    }
    expected[at] = int32_t(total);
  }
  const std::string shape = std::to_string(p.batch) + " x " + std::to_string(height.size) + " x " +
                            std::to_string(width.size) + " x " + std::to_string(p.features) +
                            " to " + std::to_string(p.outputs) + " in " + std::to_string(p.groups);
  Threads pool;
  p.sums = sums.data();
  jqx::convolve(p, kernels, pool);
  check(sums == expected, kernels, "convolution of " + shape);
  p.sums = nullptr, p.scaled = scaled.data();
  jqx::convolve(p, kernels, pool);
  bool same = true;
  for (int64_t at = 0; at < count; ++at) {
    const int64_t i = at / p.outputs / m, n = at % p.outputs;
    same &= scaled[at] == float(expected[at]) * left[one_a ? 0 : i] * right[one_b ? 0 : n];
  }
  check(same, kernels, "scaled convolution of " + shape);
}

// The numbers of an 8-bit float with so many bits of a fraction.
Array<float> float8(int fractions, int bias, bool has_infinity, bool has_nan_for_zero) {
  Array<float> table(256);
  const int ones = (1 << fractions) - 1;
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code & 127) >> fractions, fraction = code & ones;
    const int whole = fraction + (exponent > 0 ? ones + 1 : 0);
    float size = std::ldexp(float(whole), std::max(exponent, 1) - bias - fractions);
    const bool is_last = (code & 127) >= 128 - (has_infinity ? ones + 1 : 1);
    if (is_last && !has_nan_for_zero) size = has_infinity && fraction == 0 ? INFINITY : NAN;
    table[code] = code & 128 ? -size : size;
  }
  if (has_nan_for_zero) table[128] = NAN;
  return table;
}

void check_decoded_products(const Kernels& kernels) {
  const bool is_byte = between(0, 1);
  const int bits = is_byte ? 8 : 4, per = 8 / bits;
  auto table = floats(1 << bits);
  check(!is_byte || !jqx::Table(bits, table.data()).is_half, kernels, "float16 of any numbers");
  const int kind = is_byte ? between(1, 4) : 0;
  if (kind == 1) table = float8(2, 15, true, false);
  if (kind == 2) table = float8(3, 7, false, false);
  if (kind == 3) table = float8(3, 8, false, true);
  if (kind == 4) table = float8(4, 3, true, false);
  const jqx::Table decoded(bits, table.data());
  check(decoded.is_half == is_byte, kernels, "float16 of format " + std::to_string(kind));
  const auto beyond = float8(2, 16, false, true);  // float16 does not hold its largest numbers
  check(!jqx::Table(8, beyond.data()).is_half, kernels, "float16 of float8_e5m2fnuz");
  const int64_t of_lanes[] = {2, 4, 8, 16, 32}, in_lane = 4 * per;
  const bool whole = between(0, 3) == 0;
  const int64_t groups = whole ? 1 : between(1, 5);
  const int64_t group = whole ? between(1, 700) * per : in_lane * of_lanes[between(0, 4)];
  const int64_t batch = between(1, 2), m = between(1, between(0, 1) ? 9 : 40);
  const int64_t n = between(1, 140), k = groups * group;
  auto w = numbers<uint8_t>(batch * n * k / per, 0, 255);
  const bool has_specials = between(0, 3) == 0;
  if (is_byte && !has_specials) {
    for (auto& code : w) code = std::isfinite(table[code]) ? code : 0;
  }
  const auto x = floats(batch * m * k);
  const bool are_powers = between(0, 1);
  auto scale = floats(batch * groups * n);
  const auto exponents = numbers<uint8_t>(batch * groups * n, 110, 140);
  for (int64_t i = 0; are_powers && i < batch * groups * n; ++i) {
    scale[i] = std::ldexp(1.0f, exponents[i] - 127);
  }
  Array<float> y(batch * m * n);
  jqx::DecodedProduct p = {batch, m, n, k, group, decoded};
  p.x = x.data(), p.w = w.data(), p.y = y.data();
  if (are_powers) {
    p.exponents = exponents.data();
  } else {
    p.scale = scale.data();
  }
  Threads pool;
  jqx::multiply(p, kernels, pool);
  double worst = 0;
  bool same = true;
  for (int64_t i = 0; i < batch * m * n; ++i) {
    const int64_t b = i / (m * n), row = i / n, column = i % n;
    double total = 0, size = 1e-9;
    for (int64_t l = 0; l < k; ++l) {
      const int byte = w[((b * n + column) * k + l) / per];
      const int code = byte >> (l % per * bits) & ((1 << bits) - 1);
      const double real = double(scale[(b * groups + l / group) * n + column]) * table[code];
      total += x[row * k + l] * real;
      size += std::fabs(x[row * k + l] * real);
    }
    if (!std::isfinite(size)) {
      same &= std::isnan(total) ? std::isnan(y[i]) : total == y[i];
    } else {
      worst = std::max(worst, std::fabs(y[i] - total) / size);
    }
  }
  // Each product and sum is rounded once, and twice for scales.
  check(worst < (k + 4) * 0x1p-24 && same, kernels,
        "floats beside codes of " + std::to_string(bits) + " bits, format " + std::to_string(kind) +
            ", in groups of " + std::to_string(group) + " of " + std::to_string(k) + ": " +
            std::to_string(worst));
}

// A program of rows: quantizes them with or without a zero point, multiplies their codes, adds and
// selects numbers, multiplies them or their codes by matrices, and returns both products.
void check_programs(const Kernels& kernels) {
  const int64_t batch = between(1, 4), each = between(1, between(0, 9) == 0 ? 900 : 150);
  const int64_t k = between(1, 200), n = between(1, 150), columns = between(1, 90), m = batch * each;
  const bool shifted = between(0, 1) == 1, masked = between(0, 1) == 1;
  const bool shared = between(0, 1) == 1, turned = between(0, 1) == 1;  // of the matrix
  const bool coded = between(0, 1) == 1;
  Array<float> x(m * k), scales(n), bias(n), matrix(batch * n * columns), y(m * n), z(m * columns);
  Array<int8_t> w(n * k), codes(batch * n * columns);
  Array<uint8_t> mask(n);  // booleans
  for (auto& each : x) each = float(between(-400, 400)) / 64;
  for (auto* some : {&w, &codes}) {
    for (auto& each : *some) each = int8_t(between(-128, 127));
  }
  for (auto& each : scales) each = float(between(1, 64)) / 4096;
  for (auto& each : bias) each = float(between(-64, 64)) / 16;
  for (auto& each : matrix) each = float(between(-8, 8)) / 4;
  for (int64_t j = 0; j < n; ++j) mask[j] = between(0, 3) > 0;
  float scale = 0.0625f, low = -1e30f;
  const int32_t zero = int32_t(between(-50, 50)), matrix_zero = int32_t(between(-50, 50));

  using jqx::Row;
  jqx::RowProgram program;
  program.lead = {batch, each};
  program.rows = {{Row::kInput, 0, k, x.data(), {each * k, k}},
                  {Row::kColumns, 0, 1, &scale},
                  {Row::kCodes, 0, k},
                  {Row::kOfBlock, 0, n},
                  {Row::kColumns, 0, n, bias.data()},
                  {Row::kConstant, 0, 1, &low},
                  {Row::kMask, 0, n, mask.data(), {0, 0}},
                  {Row::kOfRow, 0, n},
                  {Row::kOutput, 0, n, y.data(), {each * n, n}},
                  {Row::kMatrix, 0, columns, matrix.data(), {shared ? 0 : n * columns, 0}},
                  {Row::kOutput, 1, columns, z.data(), {columns, batch * columns}},
                  {Row::kCodes, jqx::up(k, jqx::kRun), n}};
  if (coded) program.rows[9].data = codes.data();
  program.floats_of_row = n, program.floats_of_block = n;
  program.bytes_of_codes = jqx::up(k, jqx::kRun) + jqx::up(n, jqx::kRun);
  jqx::RowStep quantize = {jqx::kQuantize, 2, 0, 1, 0};
  quantize.low = -128, quantize.high = 127, quantize.zero = shifted ? &zero : nullptr;
  jqx::RowStep product = {jqx::kProduct, 3, 2, 2, 2};
  product.k = k, product.w = w.data(), product.scale = scales.data(), product.scale_stride = 1;
  jqx::RowStep again = quantize;
  again.to = 11, again.a = 8, again.b = 1;
  const int64_t multiplied = coded ? 11 : 8;
  jqx::RowStep last = {jqx::kMatrixProduct, 10, multiplied, 9, multiplied};
  last.scale = &scale, last.w_zero = shifted ? &matrix_zero : nullptr;
  last.k = n, last.along_k = turned ? 1 : columns, last.along_n = turned ? n : 1;
  const int64_t added = masked ? 7 : 8;
  program.steps = {quantize, product, {jqx::kAdd, added, 3, 4, 4}};
  if (masked) program.steps.push_back({jqx::kSelect, 8, 6, 7, 5});
  if (coded) program.steps.push_back(again);
  program.steps.push_back(last);
  Threads threads;
  jqx::run_rows(program, kernels, threads);

  bool same = true;
  double worst = 0;
  const auto code_of = [&](float number) {  // less the zero point
    const double own = shifted ? zero : 0, code = std::nearbyint(number / scale) + own;
    return int64_t(std::min(std::max(code, -128.0), 127.0) - own);
  };
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      int64_t sum = 0;
      for (int64_t at = 0; at < k; ++at) sum += code_of(x[i * k + at]) * w[j * k + at];
      const float expected = float(sum) * scale * scales[j] + bias[j];
      same &= y[i * n + j] == (masked && !mask[j] ? low : expected);
    }
    const int64_t b = i / each;
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0, size = 1e-30;
      int64_t of_codes = 0;
      for (int64_t at = 0; at < n; ++at) {
        const int64_t in_matrix = turned ? j * n + at : at * columns + j;
        const int64_t place = (shared ? 0 : b * n * columns) + in_matrix;
        const double one = double(y[i * n + at]) * matrix[place];
        sum += one, size += std::fabs(one);
        of_codes += code_of(y[i * n + at]) * (codes[place] - (shifted ? matrix_zero : 0));
      }
      const float found = z[(i % each * batch + b) * columns + j];
      if (coded) same &= found == float(of_codes) * scale * scale;
      if (!coded) worst = std::max(worst, std::fabs(found - sum) / size);
    }
  }
  check(same && worst < (n + 4) * 0x1p-24, kernels,
        "a program of " + std::to_string(m) + " rows of " + std::to_string(k) + " and " +
            std::to_string(n) + (same ? "" : ", codes"));
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 100;
  for (const Kernels* const* each = jqx::all_kernels(); *each != nullptr; ++each) {
    std::printf("%s\n", (*each)->name);
    for (int i = 0; i < rounds; ++i) {
      check_products(**each);
      check_groups(**each);
      check_rows(**each);
      check_float_products(**each);
      check_convolutions(**each);
      check_decoded_products(**each);
      check_programs(**each);
    }
  }
  std::printf("%d wrong\n", failures);
  return failures > 0;
}
