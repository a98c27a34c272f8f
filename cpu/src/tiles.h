// What drivers share: memory, and tiles of a result that threads take one by one.

#ifndef JQX_CPU_TILES_H_
#define JQX_CPU_TILES_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>

#include "kernels.h"
#include "parallel.h"

namespace jqx {

constexpr int kPanels = 4;           // of a tile, at most
constexpr int64_t kSmall = 1 << 19;  // products that are not worth a second thread

// Memory in whole cache lines.
class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : data_(static_cast<uint8_t*>(::operator new(bytes + 64, std::align_val_t(64)))) {}
  ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <class T>
  T* at(int64_t byte = 0) const {
    return reinterpret_cast<T*>(data_ + byte);
  }

 private:
  uint8_t* data_;
};

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Returns memory of this thread, kept from one tile to the next: for one user of it at a time.
template <int kUse = 0>
uint8_t* memory_of_thread(int64_t bytes) {
  thread_local std::unique_ptr<Buffer> held;
  thread_local int64_t size = -1;
  if (size < bytes) {
    held = std::make_unique<Buffer>(bytes);
    size = bytes;
  }
  return held->at<uint8_t>();
}

class OneThread : public Pool {
 public:
  int64_t threads() const override { return 1; }
  void schedule(std::function<void()>) override {}
};

// Returns the threads that so many products are worth: those given, or the one that calls.
inline Pool& pool_for(int64_t products, Pool& given) {
  static OneThread& alone = *new OneThread;  // for threads that outlive this library's end
  return products < kSmall ? alone : given;
}

// Calls f(i) for each row, some of them at a time.
inline void for_rows(Pool& pool, int64_t rows, const std::function<void(int64_t)>& f) {
  const int64_t some = std::max<int64_t>(1, rows / (8 * pool.threads()));
  parallel_for(pool, (rows + some - 1) / some, [&](int64_t part) {
    for (int64_t i = part * some; i < std::min((part + 1) * some, rows); ++i) f(i);
  });
}

// Tiles of a result [batch, m, n]: a few panels of kColumns columns and some rows.
struct Tiles {
  int64_t panels;   // of a tile
  int64_t columns;  // how many tiles there are along n
  int64_t each;     // rows of a tile
  int64_t rows;     // how many tiles there are along m

  // Wide ones, whose rows are written in longer runs, but so many that threads end at about the
  // same time.
  Tiles(int64_t batch, int64_t m, int64_t n, int64_t at_once, int64_t threads) {
    const int64_t all = (n + kColumns - 1) / kColumns;
    panels = kPanels;
    while (panels > 1 && batch * ((all + panels - 1) / panels) < 2 * threads) panels /= 2;
    columns = (all + panels - 1) / panels;
    const int64_t wanted = (4 * threads + batch * columns - 1) / (batch * columns);
    each = std::max<int64_t>(up((m + wanted - 1) / wanted, at_once), at_once);
    rows = (m + each - 1) / each;
  }

  // Those of all columns, or of fewer where there are not enough rows for all threads: what is made
  // of a row serves a whole tile.
  static Tiles of_rows(int64_t batch, int64_t m, int64_t n, int64_t at_once, int64_t threads) {
    Tiles tiles(batch, m, n, at_once, threads);
    const int64_t all = (n + kColumns - 1) / kColumns, wanted = up(4 * threads, batch) / batch;
    tiles.each = std::max<int64_t>(up((m + wanted - 1) / wanted, at_once), at_once);
    tiles.rows = (m + tiles.each - 1) / tiles.each;
    tiles.columns = 1;
    while (batch * tiles.rows * tiles.columns < 2 * threads && tiles.columns < all) ++tiles.columns;
    tiles.panels = (all + tiles.columns - 1) / tiles.columns;
    tiles.columns = (all + tiles.panels - 1) / tiles.panels;
    return tiles;
  }

  int64_t count(int64_t batch) const { return batch * columns * rows; }
};

// One of them.
struct Tile {
  int64_t batch, row, row_end, column, column_end;

  Tile(const Tiles& tiles, int64_t i, int64_t m, int64_t n) {
    batch = i / (tiles.columns * tiles.rows);
    column = i / tiles.rows % tiles.columns * tiles.panels * kColumns;
    column_end = std::min(column + tiles.panels * kColumns, n);
    row = i % tiles.rows * tiles.each;
    row_end = std::min(row + tiles.each, m);
  }
};

// Multiplies rows in groups, each by its own weights: `part_of(group, row, count)` is a product of
// some rows. Returns how many rows there are in groups.
template <class PartOf>
int64_t multiply_each(int64_t rows, const int32_t* sizes, int64_t groups, const Kernels& kernels,
                      Pool& pool, PartOf part_of) {
  int64_t row = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t count = std::min<int64_t>(std::max(sizes[group], 0), rows - row);
    if (count > 0) multiply(part_of(group, row, count), kernels, pool);
    row += count;
  }
  return row;
}

}  // namespace jqx

#endif  // JQX_CPU_TILES_H_
