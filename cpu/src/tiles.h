// A result cut into tiles for threads, and the memory that a tile needs.

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

constexpr int kRows = 24;            // that are multiplied at once
constexpr int kPanels = 4;           // of a tile, at most
constexpr int64_t kSmall = 1 << 19;  // products that are not worth a second thread

// Returns memory of this thread, kept from one tile to the next.
inline uint8_t* memory_of_thread(int64_t bytes) {
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

// Tiles of a result [batch, m, n]: a few panels of kColumns columns and some rows.
struct Tiles {
  int64_t panels;   // of a tile
  int64_t columns;  // how many tiles there are along n
  int64_t each;     // rows of a tile
  int64_t rows;     // how many tiles there are along m

  // Wide ones, whose rows are written in longer runs, but so many that threads end at about the
  // same time.
  Tiles(int64_t batch, int64_t m, int64_t n, int64_t threads) {
    const int64_t all = (n + kColumns - 1) / kColumns;
    panels = kPanels;
    while (panels > 1 && batch * ((all + panels - 1) / panels) < 2 * threads) panels /= 2;
    columns = (all + panels - 1) / panels;
    const int64_t wanted = (4 * threads + batch * columns - 1) / (batch * columns);
    each = std::max<int64_t>(up((m + wanted - 1) / wanted, kRows), kRows);
    rows = (m + each - 1) / each;
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

}  // namespace jqx

#endif  // JQX_CPU_TILES_H_
