#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tiles.h"

namespace jqx {
namespace {

constexpr int64_t kMostOfBlock = 128;     // rows that a thread has at once
constexpr int64_t kMostBytes = 960 << 10;  // of theirs, which its cache holds
constexpr int64_t kFewRows = 16;          // up to which weights are read as they lie
constexpr int64_t kPackedBlocks = 4;      // from which weights are packed once for all

// Weights in panels, if they are packed for all blocks.
using Packed = std::vector<std::unique_ptr<Buffer>>;

int64_t panels_of(int64_t columns) { return (columns + kColumns - 1) / kColumns; }

bool is_product(const RowStep& step) { return step.op == kProduct || step.op == kMatrixProduct; }

int64_t count_of(const std::vector<int64_t>& lead) {
  int64_t count = 1;
  for (const int64_t n : lead) count *= n;
  return count;
}

// Brings memory nearer in some equal parts: weights come from beyond the cache of a thread, and not
// in the order in which processors expect them.
class Ahead {
 public:
  Ahead(std::pair<const uint8_t*, int64_t> bytes, int64_t parts)
      : from_(bytes.first), left_(bytes.second), each_(up(left_ / parts + 1, 64)) {}

  void fetch() {
    for (const int64_t stop = std::max<int64_t>(left_ - each_, 0); left_ > stop; left_ -= 64) {
      __builtin_prefetch(from_, 0, 2);
      from_ += 64;
    }
  }

 private:
  const uint8_t* from_;
  int64_t left_, each_;
};

// What a thread does with some rows.
class Block {
 public:
  Block(const RowProgram& program, const Kernels& kernels, const Packed& packed, int64_t rows,
        int64_t longest)
      : program_(program), kernels_(kernels), packed_(packed), size_(rows) {
    const int64_t all = program.rows.size();  // sums, scales or offsets of each
    const int64_t of_products = longest * (kPanels * kColumns + 1 + rows) + rows * kColumns * 4;
    uint8_t* memory =
        memory_of_thread(bytes(program, rows) + of_products + all * rows * 16 + 10 * 64);
    const auto take = [&](int64_t bytes) {  // ten times
      uint8_t* own = memory;
      memory += up(bytes, 64);
      return own;
    };
    panel_ = take(longest * kPanels * kColumns);
    ones_ = reinterpret_cast<int8_t*>(take(longest));
    gathered_ = reinterpret_cast<float*>(take(longest * rows));
    products_ = reinterpret_cast<float*>(take(rows * kColumns * 4));
    offsets_ = reinterpret_cast<int64_t*>(take(all * rows * 8));
    of_row_ = reinterpret_cast<float*>(take(program.floats_of_row * 4));
    of_block_ = reinterpret_cast<float*>(take(program.floats_of_block * rows * 4));
    codes_ = reinterpret_cast<int8_t*>(take(program.bytes_of_codes * rows));
    sums_ = reinterpret_cast<int32_t*>(take(all * rows * 4));
    scales_ = reinterpret_cast<float*>(take(all * rows * 4));
  }

  static int64_t bytes(const RowProgram& program, int64_t rows) {
    return program.floats_of_row * 4 + rows * (program.floats_of_block * 4 + program.bytes_of_codes);
  }

  void run(int64_t from, int64_t count) {
    count_ = count;
    place(from);
    const auto& steps = program_.steps;
    for (size_t i = 0; i < steps.size();) {
      if (is_product(steps[i])) {
        steps[i].op == kProduct ? product(steps[i], int64_t(i)) : matrix_product(steps[i]);
        ++i;
        continue;
      }
      size_t end = i;
      while (end < steps.size() && !is_product(steps[end])) ++end;
      for (int64_t r = 0; r < count; ++r) {
        for (size_t at = i; at < end; ++at) one(steps[at], r);
      }
      i = end;
    }
  }

 private:
  // Finds where each row of arguments and results lies.
  void place(int64_t from) {
    for (size_t i = 0; i < program_.rows.size(); ++i) {
      const Row& row = program_.rows[i];
      if (!row.has_strides()) continue;
      for (int64_t r = 0; r < count_; ++r) {
        int64_t rest = from + r, offset = 0;
        for (int64_t axis = int64_t(program_.lead.size()) - 1; axis >= 0; --axis) {
          const int64_t n = program_.lead[axis], next = rest / n;
          offset += (rest - next * n) * row.strides[axis];
          rest = next;
        }
        offsets_[i * size_ + r] = offset;
      }
    }
  }

  float* at(int64_t i, int64_t r) const {
    const Row& row = program_.rows[i];
    switch (row.kind) {
      case Row::kInput:
      case Row::kOutput:
        return static_cast<float*>(row.data) + offsets_[i * size_ + r];
      case Row::kOfBlock:
        return of_block_ + row.index * size_ + r * row.width;
      case Row::kOfRow:
        return of_row_ + row.index;
      default:
        return static_cast<float*>(row.data);
    }
  }

  int8_t* codes_at(const Row& row, int64_t r) const {
    return codes_ + row.index * size_ + r * up(row.width, kRun);
  }

  void one(const RowStep& step, int64_t r) {
    const Row& a = program_.rows[step.a];
    const Row& to = program_.rows[step.to];
    float* y = step.op == kQuantize ? nullptr : at(step.to, r);
    if (step.op == kSelect) {
      const bool* mask = static_cast<const bool*>(a.data) + offsets_[step.a * size_ + r];
      const bool many_b = program_.rows[step.b].width > 1, many_c = program_.rows[step.c].width > 1;
      kernels_.select(mask, a.width > 1, at(step.b, r), many_b, at(step.c, r), many_c, to.width, y);
      return;
    }
    const float* x = at(step.a, r);
    if (step.op == kQuantize) {
      quantize(step, x, r);
    } else if (step.op == kMagnitude) {
      *y = kernels_.magnitude(x, a.width);
    } else if (step.op >= kSum) {
      *y = kernels_.reduce(step.op, x, a.width);
    } else {
      const bool many_b = program_.rows[step.b].width > 1;
      kernels_.map(step.op, x, a.width > 1, at(step.b, r), many_b, to.width, y);
    }
  }

  void quantize(const RowStep& step, const float* x, int64_t r) {
    const Row& to = program_.rows[step.to];
    const int64_t width = up(to.width, kRun);
    const float scale = *at(step.b, r);
    int8_t* codes = codes_at(to, r);
    const int32_t zero = step.zero == nullptr ? 0 : *step.zero;
    kernels_.quantize(x, to.width, scale, zero, int32_t(step.low), int32_t(step.high), codes);
    std::memset(codes + to.width, 0, width - to.width);
    sums_[step.to * size_ + r] = kernels_.sum(codes, width);
    scales_[step.to * size_ + r] = scale;
  }

  void product(const RowStep& step, int64_t index) {
    const Row& codes = program_.rows[step.a];
    const Row& to = program_.rows[step.to];
    const int64_t k = step.k, width = up(k, kRun), n = to.width;
    const int32_t* of_rows = sums_ + step.a * size_;
    const float* scales = scales_ + step.a * size_;
    const RowStep& made = *maker(step.a);
    const int32_t zero = made.zero == nullptr ? 0 : *made.zero;
    const bool corrects = made.zero != nullptr || step.w_zero != nullptr;
    const bool panels = !packed_.empty() || count_ > kFewRows;
    alignas(64) int32_t sums[kMostRows * kColumns];
    alignas(64) int32_t of_columns[kPanels][kColumns];
    const int64_t panel_bytes = width * kColumns;
    for (int64_t from = 0; from < n; from += kPanels * kColumns) {
      const int64_t end = std::min(from + kPanels * kColumns, n);
      const auto columns_from = [&](int64_t j) { return int(std::min<int64_t>(kColumns, end - j)); };
      const auto panel_from = [&](int64_t j) -> const uint8_t* {
        if (!packed_.empty()) return packed_[index]->at<uint8_t>(j * width);
        return panel_ + (j - from) / kColumns * panel_bytes;
      };
      for (int64_t j = from; j < end; j += kColumns) {
        const int columns = columns_from(j);
        const int8_t* w = step.w + j * k;
        if (panels && packed_.empty()) {
          kernels_.pack(w, k, columns, k, panel_ + (j - from) / kColumns * panel_bytes);
        }
        if (made.zero == nullptr) continue;
        int32_t* sums_of = of_columns[(j - from) / kColumns];
        const int32_t of_ones = int32_t(k);
        std::memset(ones_, 1, k), std::memset(ones_ + k, 0, width - k);
        if (panels) {
          kernels_.panel(ones_, width, &of_ones, 1, panel_from(j), columns, width, sums_of);
        } else {
          kernels_.dots(ones_, width, &of_ones, 1, w, k, columns, k, sums_of);
        }
      }
      const int64_t tiles = (count_ + kernels_.rows - 1) / kernels_.rows * panels_of(end - from);
      Ahead ahead(weights_after(index, end), tiles);
      for (int64_t i = 0; i < count_; i += kernels_.rows) {
        const int some = int(std::min<int64_t>(kernels_.rows, count_ - i));
        const int8_t* own = codes_at(codes, i);
        for (int64_t j = from; j < end; j += kColumns) {
          const int columns = columns_from(j);
          ahead.fetch();
          if (panels) {
            kernels_.panel(own, width, of_rows + i, some, panel_from(j), columns, width, sums);
          } else {
            kernels_.dots(own, width, of_rows + i, some, step.w + j * k, k, columns, k, sums);
          }
          const int32_t* w_zero = step.w_zero == nullptr ? nullptr : step.w_zero + j * step.zero_stride;
          const int32_t* sums_of = made.zero == nullptr ? nullptr : of_columns[(j - from) / kColumns];
          for (int r = 0; r < some; ++r) {
            int32_t* total = sums + r * kColumns;
            if (corrects) {
              kernels_.correct(total, columns, k, zero, sums_of, of_rows[i + r], w_zero,
                               step.zero_stride);
            }
            kernels_.scale(total, columns, scales[i + r], step.scale + j * step.scale_stride,
                           int64_t(step.scale_stride), at(step.to, i + r) + j);
          }
        }
      }
    }
  }

  // Returns the weights that are multiplied after those of some columns: those of the next columns,
  // or of the next product.
  std::pair<const uint8_t*, int64_t> weights_after(int64_t index, int64_t column) const {
    const auto& steps = program_.steps;
    if (column == program_.rows[steps[index].to].width) {
      do ++index;
      while (index < int64_t(steps.size()) && steps[index].op != kProduct);
      if (index == int64_t(steps.size())) return {nullptr, 0};
      column = 0;
    }
    const RowStep& step = steps[index];
    const int64_t n = program_.rows[step.to].width;
    const int64_t columns = std::min(kPanels * int64_t(kColumns), n - column);
    if (packed_.empty()) {
      return {reinterpret_cast<const uint8_t*>(step.w) + column * step.k, columns * step.k};
    }
    const int64_t width = up(step.k, kRun);
    return {packed_[index]->at<uint8_t>(column * width), columns * width};
  }

  // All rows of a block meet the same matrix.
  void matrix_product(const RowStep& step) {
    const int64_t n = program_.rows[step.to].width, k = step.k;
    const float* matrix = static_cast<const float*>(program_.rows[step.b].data);
    matrix += offsets_[step.b * size_];
    for (int64_t r = 0; r < count_; ++r) std::memcpy(gathered_ + r * k, at(step.a, r), k * 4);
    float* panel = reinterpret_cast<float*>(panel_);
    for (int64_t j = 0; j < n; j += kColumns) {
      const int columns = int(std::min<int64_t>(kColumns, n - j));
      const float* from = matrix + j * step.along_n;
      if (step.along_n == 1) {
        for (int64_t i = 0; i < k; ++i) {
          std::memcpy(panel + i * kColumns, from + i * step.along_k, columns * 4);
        }
      } else {
        for (int64_t i = 0; i < k; ++i) {
          const float* own = from + i * step.along_k;
          for (int c = 0; c < columns; ++c) panel[i * kColumns + c] = own[c * step.along_n];
        }
      }
      const bool lies_together = program_.rows[step.to].kind == Row::kOfBlock;
      float* y = lies_together ? at(step.to, 0) + j : products_;
      const int64_t y_stride = lies_together ? n : kColumns;
      for (int64_t r = 0; r < count_; ++r) std::memset(y + r * y_stride, 0, columns * 4);
      kernels_.add_products(gathered_, k, int(count_), panel, k, columns, y, y_stride);
      if (lies_together) continue;
      for (int64_t r = 0; r < count_; ++r) {
        std::memcpy(at(step.to, r) + j, products_ + r * kColumns, columns * 4);
      }
    }
  }

  // Returns the step that makes codes.
  const RowStep* maker(int64_t codes) const {
    for (const RowStep& step : program_.steps) {
      if (step.op == kQuantize && step.to == codes) return &step;
    }
    return nullptr;
  }

  const RowProgram& program_;
  const Kernels& kernels_;
  const Packed& packed_;
  int64_t size_, count_ = 0;
  uint8_t* panel_;
  float *gathered_, *products_, *of_row_, *of_block_, *scales_;
  int64_t* offsets_;
  int8_t *codes_, *ones_;
  int32_t* sums_;
};

// Packs the weights of all products.
Packed packed_weights(const RowProgram& program, const Kernels& kernels, Pool& pool) {
  Packed packed(program.steps.size());
  std::vector<std::pair<int64_t, int64_t>> panels;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const RowStep& step = program.steps[i];
    if (step.op != kProduct) continue;
    const int64_t count = panels_of(program.rows[step.to].width);
    packed[i] = std::make_unique<Buffer>(count * kColumns * up(step.k, kRun));
    for (int64_t j = 0; j < count; ++j) panels.emplace_back(i, j * kColumns);
  }
  parallel_for(pool, panels.size(), [&](int64_t index) {
    const auto [i, j] = panels[index];
    const RowStep& step = program.steps[i];
    const int columns = int(std::min<int64_t>(kColumns, program.rows[step.to].width - j));
    kernels.pack(step.w + j * step.k, step.k, columns, step.k,
                 packed[i]->at<uint8_t>(j * up(step.k, kRun)));
  });
  return packed;
}

}  // namespace

void run_rows(const RowProgram& program, const Kernels& kernels, Pool& pool) {
  int64_t longest = 0, alike = count_of(program.lead);  // rows that meet the same matrices
  bool multiplies_codes = false;
  for (const RowStep& step : program.steps) {
    const int64_t bytes = step.op == kMatrixProduct ? 4 * step.k : step.k;
    longest = std::max(longest, up(bytes, kRun));
    multiplies_codes |= step.op == kProduct;
  }
  const int64_t m = alike;
  for (const Row& row : program.rows) {
    if (row.kind != Row::kMatrix) continue;
    int64_t count = 1;
    for (size_t axis = row.strides.size(); axis-- > 0 && row.strides[axis] == 0;) {
      count *= program.lead[axis];
    }
    alike = std::min(alike, count);
  }
  const int64_t each = Block::bytes(program, 1) - Block::bytes(program, 0);
  const int64_t held = std::min(kMostOfBlock, kMostBytes / std::max<int64_t>(each, 1));
  const int64_t most = std::max<int64_t>(held, kernels.rows), threads = pool.threads();
  int64_t of_each = (alike + most - 1) / most;  // blocks, as many for all threads
  if (of_each < kPackedBlocks * threads && alike == m) of_each = up(of_each, threads);
  const int64_t size = up((alike + of_each - 1) / of_each, std::min<int64_t>(alike, 8));
  of_each = (alike + size - 1) / size;
  const int64_t blocks = of_each * (m / alike);
  Packed packed;
  if (multiplies_codes && blocks >= kPackedBlocks * pool.threads()) {
    packed = packed_weights(program, kernels, pool);
  }
  parallel_for(pool, blocks, [&](int64_t i) {
    const int64_t from = i % of_each * size;
    Block(program, kernels, packed, size, longest)
        .run(i / of_each * alike + from, std::min(size, alike - from));
  });
}

}  // namespace jqx
