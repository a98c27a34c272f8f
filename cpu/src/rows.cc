#include "rows.h"

#include <algorithm>
#include <cstring>

#include "tiles.h"

namespace jqx {
namespace {

constexpr int64_t kMostOfBlock = 128;     // rows that a thread has at once
constexpr int64_t kMostBytes = 960 << 10;  // of theirs, which its cache holds
constexpr int64_t kMostKept = 4 << 20;    // bytes of memory that threads keep for the next rows
constexpr int64_t kCrowded = 1024;        // floats between rows that compete for places in caches
constexpr int64_t kMostShared = 512;      // rows whose steps threads share
constexpr int64_t kFewOfThread = 32;      // rows of each up to which they do,
constexpr int64_t kMostWeights = 16 << 20;  // and bytes of weights from which on
constexpr int64_t kMostRowsOfTile = 16;   // rows that take each step together
constexpr int64_t kMostOfTile = 2048;     // and floats of theirs
constexpr int64_t kDepth = 384;           // of a panel of floats
constexpr int64_t kPackedBlocks = 4;      // from which weights are packed once for all

// Weights in panels, if they are packed for all blocks.
using Packed = std::vector<std::unique_ptr<Buffer>>;

int64_t panels_of(int64_t columns) { return (columns + kColumns - 1) / kColumns; }

// Steps of a panel of floats, in whole runs.
int64_t steps_of_panel(int64_t k) { return up(k, kRun / 4); }

bool is_product(const RowStep& step) { return step.op == kProduct || step.op == kMatrixProduct; }

// Whether a product is of codes, which nothing else reads.
bool of_codes(const RowProgram& program, const RowStep& step) {
  return program.rows[step.a].kind == Row::kCodes;
}

// Whether all rows are multiplied by the same weights.
bool is_shared(const RowProgram& program, const RowStep& step) {
  if (step.op != kMatrixProduct || of_codes(program, step)) return step.op == kProduct;
  const auto& strides = program.rows[step.b].strides;
  return std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride == 0; });
}

// Copies some columns of a matrix, [depth, kColumns].
void copy_panel(const float* matrix, const RowStep& step, int columns, int64_t depth,
                const Kernels& kernels, float* panel) {
  if (step.along_k == 1) return kernels.turn(matrix, step.along_n, columns, depth, panel);
  for (int64_t i = 0; i < depth; ++i, matrix += step.along_k, panel += kColumns) {
    if (step.along_n == 1) {
      std::memcpy(panel, matrix, columns * 4);
    } else {
      for (int c = 0; c < columns; ++c) panel[c] = matrix[c * step.along_n];
    }
  }
}

// Gives out parts of memory.
class Parts {
 public:
  explicit Parts(uint8_t* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    uint8_t* own = memory_;
    memory_ += up(count * int64_t(sizeof(T)), 64);
    return reinterpret_cast<T*>(own);
  }

  static constexpr int64_t kMore = 8 * 64;  // for so many parts

 private:
  uint8_t* memory_;
};

// Where rows lie: those of a thread have no `data`, but a place in its memory. The elements from one
// row to the next are -1 if they differ.
struct Place {
  float* data;
  int64_t from, step;
  bool many;
};

// Rows that take each step one after another, and their memory of what no other rows need.
struct Tile {
  int64_t first = 0;
  float* memory = nullptr;
};

// Runs f(i) for i in [0, count).
using ForEach = std::function<void(int64_t count, const std::function<void(int64_t)>& f)>;

// Some rows: one thread takes them through all steps, or several share each step.
class Block {
 public:
  Block(const RowProgram& program, const Kernels& kernels, const Packed& packed, int64_t rows,
        int64_t longest, int64_t threads, const ForEach& each)
      : program_(program), kernels_(kernels), packed_(packed), size_(rows), longest_(longest),
        threads_(threads), each_(each) {
    const int64_t all = program.rows.size();  // sums, scales or offsets of each
    const int64_t of_all = (longest + 16 * all) * rows + int64_t(sizeof(Place)) * all;
    const int64_t size = bytes(program, rows) + of_all + Parts::kMore;
    if (size > kMostKept) large_ = std::make_unique<Buffer>(size);
    Parts memory(large_ == nullptr ? memory_of_thread(size) : large_->at<uint8_t>());
    gathered_ = memory.take<float>(longest / 4 * rows);
    offsets_ = memory.take<int64_t>(all * rows);
    places_ = memory.take<Place>(all);
    of_block_ = memory.take<float>(program.floats_of_block * rows);
    codes_ = memory.take<int8_t>(program.bytes_of_codes * rows);
    sums_ = memory.take<int32_t>(all * rows);
    scales_ = memory.take<float>(all * rows);
  }

  static int64_t bytes(const RowProgram& program, int64_t rows) {
    return rows * (program.floats_of_block * 4 + program.bytes_of_codes);
  }

  void run(int64_t from, int64_t count) {
    count_ = count;
    place(from);
    const auto& steps = program_.steps;
    for (size_t i = 0; i < steps.size();) {
      if (is_product(steps[i])) {
        const bool has_codes = of_codes(program_, steps[i]);
        const auto by = has_codes ? &Block::product : &Block::matrix_product;
        if (!has_codes) gather(steps[i]);
        const int64_t panels = panels_of(program_.rows[steps[i].to].width);
        each_(panels, [&](int64_t panel) { (this->*by)(int64_t(i), panel * kColumns); });
        ++i;
        continue;
      }
      size_t end = i;
      int64_t widest = 1;
      for (; end < steps.size() && !is_product(steps[end]); ++end) {
        widest = std::max(widest, program_.rows[steps[end].to].width);
      }
      for_rows(widest, [&](int64_t r, int64_t rows, const Tile& tile) {
        for (size_t at = i; at < end; ++at) step_of(steps[at], r, rows, tile);
      });
      i = end;
    }
  }

 private:
  // Memory that a thread needs for a part of a step.
  struct Own {
    float *of_rows, *products;
    int8_t* ones;
    uint8_t* panel;
  };

  Own own() const {
    const int64_t floats = program_.floats_of_row * kMostRowsOfTile + size_ * kColumns;
    Parts memory(memory_of_thread<1>(floats * 4 + longest_ * (kColumns + 1) + Parts::kMore));
    Own own;
    own.of_rows = memory.take<float>(program_.floats_of_row * kMostRowsOfTile);
    own.products = memory.take<float>(size_ * kColumns);
    own.ones = memory.take<int8_t>(longest_);
    own.panel = memory.take<uint8_t>(longest_ * kColumns);
    return own;
  }

  // Calls f for one tile after another, of rows with at most so many numbers.
  template <class F>
  void for_rows(int64_t widest, const F& f) {
    const int64_t tile = std::clamp<int64_t>(kMostOfTile / widest, 1, kMostRowsOfTile);
    const int64_t parts = threads_ == 1 ? 1 : std::min(4 * threads_, count_);
    each_(parts, [&](int64_t part) {
      const Own memory = own();
      const int64_t end = (part + 1) * count_ / parts;
      for (int64_t r = part * count_ / parts; r < end; r += tile) {
        f(r, std::min(tile, end - r), Tile{r, memory.of_rows});
      }
    });
  }

  // Finds where each row lies.
  void place(int64_t from) {
    const auto& lead = program_.lead;
    size_t axis = lead.size();  // of the last one that has several rows
    while (axis > 1 && lead[axis - 1] == 1) --axis;
    const int64_t last = axis == 0 ? 1 : lead[axis - 1];
    for (size_t i = 0; i < program_.rows.size(); ++i) {
      const Row& row = program_.rows[i];
      Place& own = places_[i];
      own = {static_cast<float*>(row.data), 0, 0, row.width > 1};
      if (row.kind == Row::kOfBlock) own.data = of_block_, own.from = row.index * size_;
      if (row.kind == Row::kOfRow) own.from = row.index * kMostRowsOfTile;
      if (row.kind == Row::kOfBlock || row.kind == Row::kOfRow) own.step = row.width;
      if (!row.has_strides()) continue;
      int64_t* offsets = offsets_ + i * size_;
      int64_t inner = from % last, outer = from / last, start = 0;
      for (int64_t r = 0; r < count_; ++r, ++inner) {
        if (inner == last) inner = 0, ++outer;
        if (r == 0 || inner == 0) {
          start = 0;
          for (int64_t other = int64_t(axis) - 2, rest = outer; other >= 0; --other) {
            start += rest % lead[other] * row.strides[other], rest /= lead[other];
          }
        }
        offsets[r] = start + (axis == 0 ? 0 : inner * row.strides[axis - 1]);
        if (r == 1) own.step = offsets[1] - offsets[0];
        if (r > 1 && offsets[r] - offsets[r - 1] != own.step) own.step = -1;
      }
      own.from = offsets[0];
    }
  }

  // Where a row lies.
  float* at(int64_t i, int64_t r, const Tile& tile = {}) const {
    const Place& own = places_[i];
    if (own.data == nullptr) return tile.memory + own.from + (r - tile.first) * own.step;
    return own.data + (own.step >= 0 ? own.from + r * own.step : offsets_[i * size_ + r]);
  }

  int8_t* codes_at(const Row& row, int64_t r) const {
    return codes_ + row.index * size_ + r * up(row.width, kRun);
  }

  // A step of some rows of a tile.
  void step_of(const RowStep& step, int64_t r, int64_t rows, const Tile& tile) {
    const int64_t y_step = places_[step.to].step;
    const Place &of_a = places_[step.a], &of_b = places_[step.b], &of_c = places_[step.c];
    if (rows > 1 && std::min({of_a.step, of_b.step, of_c.step, y_step}) < 0) {
      for (int64_t i = 0; i < rows; ++i) step_of(step, r + i, 1, tile);
      return;
    }
    const Row& a = program_.rows[step.a];
    const int64_t n = program_.rows[step.to].width;
    // One number of each row, side by side, are as the numbers of one row.
    const bool are_one = n == 1 && step.op >= kAdd && step.op < kSum && y_step == 1 &&
                         std::max(of_a.step, of_b.step) <= 1;
    const auto numbers = [&](int64_t i) -> Numbers {
      return {at(i, r, tile), places_[i].step, are_one ? places_[i].step == 1 : places_[i].many};
    };
    const Numbers x = numbers(step.a), b = numbers(step.b);
    float* y = at(step.to, r, tile);
    if (are_one) return kernels_.map(step.op, x, b, 1, rows, y, 0);
    if (step.op == kSelect) {
      const bool* mask = static_cast<const bool*>(a.data) + offsets_[step.a * size_ + r];
      kernels_.select(mask, x.step, x.many, b, numbers(step.c), rows, n, y, y_step);
    } else if (step.op < kSum && step.op != kQuantize) {
      kernels_.map(step.op, x, b, rows, n, y, y_step);
    } else {
      for (int64_t i = 0; i < rows; ++i) {
        const float* own = x.at + i * x.step;
        if (step.op == kQuantize) {
          quantize(step, own, b.at[i * b.step], r + i);
        } else {
          y[i * y_step] = step.op == kMagnitude ? kernels_.magnitude(own, a.width)
                                                : kernels_.reduce(step.op, own, a.width);
        }
      }
    }
  }

  void quantize(const RowStep& step, const float* x, float scale, int64_t r) {
    const Row& to = program_.rows[step.to];
    const int64_t width = up(to.width, kRun);
    int8_t* codes = codes_at(to, r);
    const int32_t zero = step.zero == nullptr ? 0 : *step.zero;
    kernels_.quantize(x, to.width, scale, zero, int32_t(step.low), int32_t(step.high), codes);
    std::memset(codes + to.width, 0, width - to.width);
    sums_[step.to * size_ + r] = kernels_.sum(codes, width);
    scales_[step.to * size_ + r] = scale;
  }

  // Columns from `j` of a product of codes.
  void product(int64_t index, int64_t j) {
    const RowStep& step = program_.steps[index];
    const Row& codes = program_.rows[step.a];
    const int64_t k = step.k, width = up(k, kRun), n = program_.rows[step.to].width;
    const int columns = int(std::min<int64_t>(kColumns, n - j));
    const int32_t* of_rows = sums_ + step.a * size_;
    const float* scales = scales_ + step.a * size_;
    const RowStep& made = *maker(step.a);
    const int32_t zero = made.zero == nullptr ? 0 : *made.zero;
    const int32_t* w_zero = step.w_zero == nullptr ? nullptr : step.w_zero + j * step.zero_stride;
    alignas(64) int32_t sums[kMostRows * kColumns], of_columns[kColumns];
    const Own memory = own();
    const uint8_t* panel = memory.panel;
    const bool has_steps = step.w == nullptr && step.along_k != 1;  // that lie one after another
    const int64_t steps = has_steps ? up(k, kernels_.step) : width;
    if (step.w == nullptr) {
      const int8_t* w = static_cast<const int8_t*>(program_.rows[step.b].data);
      w += offsets_[step.b * size_] + j * step.along_n;
      const auto pack = has_steps ? kernels_.pack_rows : kernels_.pack;
      pack(w, has_steps ? step.along_k : step.along_n, columns, k, memory.panel);
    } else if (packed_.empty()) {
      kernels_.pack(step.w + j * k, k, columns, k, memory.panel);
    } else {
      panel = packed_[index]->at<uint8_t>(j * width);
    }
    if (made.zero != nullptr) {
      const int32_t of_ones = int32_t(k);
      std::memset(memory.ones, 1, k), std::memset(memory.ones + k, 0, width - k);
      kernels_.panel(memory.ones, width, &of_ones, 1, panel, columns, steps, of_columns);
    }
    const auto [next, bytes] = weights_after(index, j);  // come from beyond the cache of a thread
    int64_t fetched = 0;
    for (int64_t i = 0; i < count_; i += kernels_.rows) {
      const int some = int(std::min<int64_t>(kernels_.rows, count_ - i));
      for (; fetched < bytes * (i + some) / count_; fetched += 64) {
        __builtin_prefetch(next + fetched, 0, 2);
      }
      for (int r = 0; r < some; ++r) {  // where results will lie
        const float* y = at(step.to, i + r) + j;
        for (int c = 0; c < columns; c += 16) __builtin_prefetch(y + c, 1, 2);
      }
      kernels_.panel(codes_at(codes, i), width, of_rows + i, some, panel, columns, steps, sums);
      for (int r = 0; r < some; ++r) {
        const ZeroPoints zeros(k, zero, made.zero == nullptr ? nullptr : of_columns,
                               of_rows[i + r], w_zero, step.zero_stride);
        kernels_.scale(sums + r * kColumns, columns, zeros, scales[i + r],
                       step.scale + j * step.scale_stride, step.scale_stride,
                       at(step.to, i + r) + j);
      }
    }
  }

  // Returns the codes of weights that this thread multiplies after those of the columns from `j`:
  // those of other columns, or of the next product.
  std::pair<const uint8_t*, int64_t> weights_after(int64_t index, int64_t j) const {
    const auto& steps = program_.steps;
    j += kColumns * threads_;
    if (j >= program_.rows[steps[index].to].width) {
      do ++index;
      while (index < int64_t(steps.size()) && steps[index].op != kProduct);
      if (index == int64_t(steps.size())) return {nullptr, 0};
      j %= kColumns * threads_;
    }
    const RowStep& step = steps[index];
    const int64_t columns = std::min<int64_t>(kColumns, program_.rows[step.to].width - j);
    if (step.w == nullptr || columns <= 0) return {nullptr, 0};
    const int64_t width = up(step.k, kRun);
    if (!packed_.empty()) return {packed_[index]->at<uint8_t>(j * width), columns * width};
    return {reinterpret_cast<const uint8_t*>(step.w) + j * step.k, columns * step.k};
  }

  // Brings the rows of a product with a matrix together, unless they lie at one distance.
  void gather(const RowStep& step) {
    if (places_[step.a].step >= 0) return;
    for_rows(step.k, [&](int64_t r, int64_t rows, const Tile&) {
      for (const int64_t end = r + rows; r < end; ++r) {
        std::memcpy(gathered_ + r * step.k, at(step.a, r), step.k * 4);
      }
    });
  }

  // Columns from `j` of a product with a matrix that all rows of a block meet.
  void matrix_product(int64_t index, int64_t j) {
    const RowStep& step = program_.steps[index];
    const int64_t n = program_.rows[step.to].width, k = step.k;
    const int64_t distance = places_[step.a].step, y_distance = places_[step.to].step;
    const float* x = distance < 0 ? gathered_ : at(step.a, 0);
    const float* matrix = static_cast<const float*>(program_.rows[step.b].data);
    matrix += offsets_[step.b * size_];
    const Own memory = own();
    float* copied = reinterpret_cast<float*>(memory.panel);
    const int columns = int(std::min<int64_t>(kColumns, n - j));
    float* y = y_distance < 0 ? memory.products : at(step.to, 0) + j;
    const int64_t y_stride = y_distance < 0 ? kColumns : y_distance;
    for (int64_t r = 0; r < count_; ++r) std::memset(y + r * y_stride, 0, columns * 4);
    for (int64_t l = 0; l < k; l += kDepth) {
      const int64_t depth = std::min(kDepth, k - l);
      const float* panel = matrix + j * step.along_n + l * step.along_k;
      const float* next = panel + (l + depth < k ? depth * step.along_k : kColumns * threads_);
      int64_t stride = step.along_k, next_stride = stride;
      if (!packed_.empty() && packed_[index] != nullptr) {
        panel = packed_[index]->at<float>(4 * (j * steps_of_panel(k) + l * kColumns));
        next = panel + depth * kColumns, stride = next_stride = kColumns;
      } else if (step.along_n != 1 || columns < kColumns || stride % kCrowded == 0) {
        copy_panel(panel, step, columns, depth, kernels_, copied);
        panel = copied, stride = kColumns;
      }
      kernels_.add_products(x + l, distance < 0 ? k : distance, int(count_), panel, stride, depth,
                            columns, next, next_stride, y, y_stride);
    }
    if (y_distance >= 0) return;
    for (int64_t r = 0; r < count_; ++r) {
      std::memcpy(at(step.to, r) + j, memory.products + r * kColumns, columns * 4);
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
  const int64_t size_, longest_, threads_;
  const ForEach& each_;
  int64_t count_ = 0;
  std::unique_ptr<Buffer> large_;
  float *gathered_, *of_block_, *scales_;
  int64_t* offsets_;
  Place* places_;
  int8_t* codes_;
  int32_t* sums_;
};

// Packs the weights of all products, and matrices that all rows are multiplied by.
Packed packed_weights(const RowProgram& program, const Kernels& kernels, Pool& pool) {
  Packed packed(program.steps.size());
  std::vector<std::pair<int64_t, int64_t>> panels;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const RowStep& step = program.steps[i];
    if (!is_shared(program, step)) continue;
    const int64_t count = panels_of(program.rows[step.to].width);
    const int64_t bytes = step.op == kProduct ? up(step.k, kRun) : 4 * steps_of_panel(step.k);
    packed[i] = std::make_unique<Buffer>(count * kColumns * bytes);
    for (int64_t j = 0; j < count; ++j) panels.emplace_back(i, j * kColumns);
  }
  parallel_for(pool, panels.size(), [&](int64_t index) {
    const auto [i, j] = panels[index];
    const RowStep& step = program.steps[i];
    const int columns = int(std::min<int64_t>(kColumns, program.rows[step.to].width - j));
    if (step.op == kMatrixProduct) {
      const float* matrix = static_cast<const float*>(program.rows[step.b].data);
      return copy_panel(matrix + j * step.along_n, step, columns, step.k, kernels,
                        packed[i]->at<float>(4 * j * steps_of_panel(step.k)));
    }
    kernels.pack(step.w + j * step.k, step.k, columns, step.k,
                 packed[i]->at<uint8_t>(j * up(step.k, kRun)));
  });
  return packed;
}

}  // namespace

void run_rows(const RowProgram& program, const Kernels& kernels, Pool& pool) {
  int64_t longest = 0, weights = 0, panels = 1, m = 1;
  for (const int64_t n : program.lead) m *= n;
  for (const RowStep& step : program.steps) {
    const int64_t bytes = of_codes(program, step) ? step.k : 4 * step.k;
    const int64_t n = program.rows[step.to].width;
    if (is_shared(program, step)) weights += bytes * n, panels = std::max(panels, panels_of(n));
    longest = std::max(longest, up(bytes, kRun));
  }
  int64_t alike = m;  // rows that meet the same matrices
  for (const Row& row : program.rows) {
    if (row.kind != Row::kMatrix) continue;
    int64_t count = 1;
    for (size_t axis = row.strides.size(); axis-- > 0 && row.strides[axis] == 0;) {
      count *= program.lead[axis];
    }
    alike = std::min(alike, count);
  }
  const int64_t each = Block::bytes(program, 1);
  const int64_t held = std::min(kMostOfBlock, kMostBytes / std::max<int64_t>(each, 1));
  const int64_t most = std::max<int64_t>(held, kernels.rows), threads = pool.threads();
  int64_t of_each = (alike + most - 1) / most;  // blocks, as many for all threads
  if (of_each < kPackedBlocks * threads && alike == m) of_each = up(of_each, threads);
  const int64_t size = up((alike + of_each - 1) / of_each, std::min<int64_t>(alike, 8));
  of_each = (alike + size - 1) / size;
  const int64_t blocks = of_each * (m / alike);
  const bool are_few = threads > 1 && m <= kFewOfThread * threads;
  const bool is_split = alike == m && (are_few || weights > kMostWeights);
  Packed packed;
  if (!is_split && blocks >= kPackedBlocks * threads) {
    packed = packed_weights(program, kernels, pool);
  }
  if (is_split) {
    const int64_t parts = (m + kMostShared - 1) / kMostShared, rows = (m + parts - 1) / parts;
    const int64_t used = std::min(threads, panels);
    for (int64_t from = 0; from < m; from += rows) {
      Loops loops(pool, 3 * int64_t(program.steps.size()) + 1, used - 1);
      Block(program, kernels, packed, rows, longest, used, [&](int64_t count, const auto& f) {
        loops.each(count, f);
      }).run(from, std::min(rows, m - from));
    }
    return;
  }
  parallel_for(pool, blocks, [&](int64_t i) {
    const int64_t from = i % of_each * size;
    Block(program, kernels, packed, size, longest, 1, [](int64_t count, const auto& f) {
      for (int64_t part = 0; part < count; ++part) f(part);
    }).run(i / of_each * alike + from, std::min(size, alike - from));
  });
}

}  // namespace jqx
