// Tiles of AMX in plain C++, from the pseudo code of Intel's manual, where a processor has none.
// What a processor would refuse ends the program; so does a thread that leaves tiles configured.

#ifndef JQX_CPU_EMULATED_AMX_H_
#define JQX_CPU_EMULATED_AMX_H_

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace jqx {
namespace emulated {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

inline void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

struct Tile {
  int rows = 0, bytes = 0;  // 0 and 0: there is no such tile
  uint8_t data[kMostRows][kMostBytes] = {};
};

// What one thread has.
struct Unit {
  bool is_configured = false;
  Tile tiles[kTiles];

  ~Unit() { demand(!is_configured, "a thread ends with its tiles configured"); }

  Tile& tile(int i) {
    demand(is_configured, "no tiles are configured");
    demand(tiles[i].rows > 0, "this tile is not configured");
    return tiles[i];
  }
};

inline Unit& unit() {
  thread_local Unit own;
  return own;
}

inline void release() {
  for (Tile& tile : unit().tiles) tile = Tile();
  unit().is_configured = false;
}

inline void load_config(const void* from) {
  uint8_t bytes[64];
  std::memcpy(bytes, from, 64);
  release();
  if (bytes[0] == 0) return;
  demand(bytes[0] == 1, "there is no such palette");
  demand(bytes[1] == 0, "an instruction starts at a row other than the first");
  for (int i = 2; i < 16; ++i) demand(bytes[i] == 0, "reserved bytes are 0");
  for (int i = 16 + 2 * kTiles; i < 48; ++i) demand(bytes[i] == 0, "reserved bytes are 0");
  for (int i = 48 + kTiles; i < 64; ++i) demand(bytes[i] == 0, "reserved bytes are 0");
  for (int i = 0; i < kTiles; ++i) {
    Tile& tile = unit().tiles[i];
    tile.rows = bytes[48 + i];
    tile.bytes = bytes[16 + 2 * i] + 256 * bytes[17 + 2 * i];
    demand(tile.rows <= kMostRows && tile.bytes <= kMostBytes, "a tile is too large");
    demand((tile.rows == 0) == (tile.bytes == 0), "a tile has no rows or no columns");
  }
  unit().is_configured = true;
}

template <int kTile>
void zero() {
  std::memset(unit().tile(kTile).data, 0, sizeof(Tile::data));
}

template <int kTile>
void load(const void* base, int64_t stride) {
  Tile& tile = unit().tile(kTile);
  zero<kTile>();
  const char* from = static_cast<const char*>(base);
  for (int i = 0; i < tile.rows; ++i) std::memcpy(tile.data[i], from + i * stride, tile.bytes);
}

template <int kTile>
void store(void* base, int64_t stride) {
  const Tile& tile = unit().tile(kTile);
  char* to = static_cast<char*>(base);
  for (int i = 0; i < tile.rows; ++i) std::memcpy(to + i * stride, tile.data[i], tile.bytes);
}

inline void demand_fitting(const Tile& sums, const Tile& left, const Tile& right) {
  demand(sums.bytes % 4 == 0 && left.bytes % 4 == 0 && right.bytes % 4 == 0, "bytes go by fours");
  demand(sums.rows == left.rows, "sums and what is on the left have as many rows");
  demand(sums.bytes == right.bytes, "sums and what is on the right have as many columns");
  demand(left.bytes / 4 == right.rows, "what is multiplied fits");
}

// Of bytes that are A on the left and B on the right.
template <class A, class B, int kSums, int kLeft, int kRight>
void multiply() {
  static_assert(kSums != kLeft && kSums != kRight && kLeft != kRight, "three different tiles");
  Tile& sums = unit().tile(kSums);
  const Tile &left = unit().tile(kLeft), &right = unit().tile(kRight);
  demand_fitting(sums, left, right);
  for (int m = 0; m < sums.rows; ++m) {
    for (int k = 0; k < left.bytes / 4; ++k) {
      for (int n = 0; n < sums.bytes / 4; ++n) {
        uint32_t total;
        std::memcpy(&total, sums.data[m] + 4 * n, 4);
        for (int i = 0; i < 4; ++i) {
          const int32_t a = A(left.data[m][4 * k + i]), b = B(right.data[k][4 * n + i]);
          total += uint32_t(a * b);
        }
        std::memcpy(sums.data[m] + 4 * n, &total, 4);
      }
    }
  }
  for (int m = sums.rows; m < kMostRows; ++m) std::memset(sums.data[m], 0, kMostBytes);
}

inline float bfloat(const uint8_t* from) {
  uint16_t upper;
  std::memcpy(&upper, from, 2);
  const uint32_t bits = uint32_t(upper) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Of bfloat16: even and odd steps have sums of their own, which are added at the end. Subnormal
// numbers are left as they are.
template <int kSums, int kLeft, int kRight>
void multiply_pairs() {
  static_assert(kSums != kLeft && kSums != kRight && kLeft != kRight, "three different tiles");
  Tile& sums = unit().tile(kSums);
  const Tile &left = unit().tile(kLeft), &right = unit().tile(kRight);
  demand_fitting(sums, left, right);
  for (int m = 0; m < sums.rows; ++m) {
    for (int n = 0; n < sums.bytes / 4; ++n) {
      float parts[2] = {}, total;
      for (int k = 0; k < left.bytes / 4; ++k) {
        for (int i = 0; i < 2; ++i) {
          const float a = bfloat(left.data[m] + 4 * k + 2 * i);
          parts[i] = std::fma(a, bfloat(right.data[k] + 4 * n + 2 * i), parts[i]);
        }
      }
      std::memcpy(&total, sums.data[m] + 4 * n, 4);
      total += parts[0] + parts[1];
      std::memcpy(sums.data[m] + 4 * n, &total, 4);
    }
  }
  for (int m = sums.rows; m < kMostRows; ++m) std::memset(sums.data[m], 0, kMostBytes);
}

}  // namespace emulated
}  // namespace jqx

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) jqx::emulated::load_config(from)
#define _tile_release() jqx::emulated::release()
#define _tile_zero(tile) jqx::emulated::zero<tile>()
#define _tile_loadd(tile, base, stride) jqx::emulated::load<tile>(base, stride)
#define _tile_stored(tile, base, stride) jqx::emulated::store<tile>(base, stride)
#define _tile_dpbssd(sums, a, b) jqx::emulated::multiply<int8_t, int8_t, sums, a, b>()
#define _tile_dpbsud(sums, a, b) jqx::emulated::multiply<int8_t, uint8_t, sums, a, b>()
#define _tile_dpbf16ps(sums, a, b) jqx::emulated::multiply_pairs<sums, a, b>()

#endif  // JQX_CPU_EMULATED_AMX_H_
