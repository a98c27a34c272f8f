// Programs that run on the rows of arrays: products of codes or floats, and what is computed between
// them, as in a layer of a network or in attention.
//
// Rows do not depend on each other. So a thread takes some rows through all steps, while they are in
// its cache, and threads meet once in a program and not once in a product.

#ifndef JQX_CPU_ROWS_H_
#define JQX_CPU_ROWS_H_

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace jqx {

// Steps of a program. Those from kAdd on are functions of numbers, those from kSum on of a row.
enum Op : int64_t {
  kQuantize, kProduct, kMatrixProduct, kSelect,
  kAdd, kSub, kMul, kDiv, kMax, kMin,
  kNeg, kAbs, kExp, kTanh, kLogistic, kErf, kErfc, kSqrt, kRsqrt,
  kSum, kLargest, kMagnitude, kOps
};

inline bool is_binary(int64_t op) { return op >= kAdd && op <= kMin; }

// Some numbers for each row, or codes of a row.
struct Row {
  enum Kind : int64_t {
    kInput,     // of an argument
    kColumns,   // of an argument, the same for all rows
    kConstant,  // one number
    kOfRow,     // in memory that only one row needs at a time
    kOfBlock,   // in memory of the rows that a thread has at once
    kOutput,    // of a result
    kCodes,     // int8 in that memory
    kMask,      // of an argument of booleans
    kMatrix,    // an argument that many rows are multiplied by, of floats or codes
    kKinds
  };

  Kind kind;
  int64_t index;  // of an argument, a constant or a result; else a place in the memory of a thread
  int64_t width;  // one number stands for as many as are needed

  // What the caller fills in: elements from one index to the next along each axis of rows, of what
  // has strides.
  void* data = nullptr;
  std::vector<int64_t> strides = {};

  bool has_strides() const {
    return kind == kInput || kind == kOutput || kind == kMask || kind == kMatrix;
  }
};

struct RowStep {
  int64_t op, to, a, b, c;  // indices of rows; a mask chooses `b` where it is set, else `c`

  // Of a quantization, into codes of [low, high], by the scale `b`.
  int64_t low = 0, high = 0;
  const int32_t* zero = nullptr;  // one for all, or nullptr

  // Of a product with the matrix `b`, elements between its steps and between its columns.
  int64_t along_k = 0, along_n = 0;

  // Of a product of the codes `a`, with weights [columns, k] or a matrix.
  int64_t k = 0;
  const int8_t* w = nullptr;
  const float* scale = nullptr;
  int64_t scale_stride = 0;
  const int32_t* w_zero = nullptr;
  int64_t zero_stride = 0;
};

struct RowProgram {
  std::vector<int64_t> lead;  // sizes of the axes of rows
  std::vector<Row> rows;
  std::vector<RowStep> steps;
  int64_t floats_of_row = 0;    // memory that only one row needs at a time
  int64_t floats_of_block = 0;  // for each of the rows that a thread has at once
  int64_t bytes_of_codes = 0;   // likewise, in whole runs
};

void run_rows(const RowProgram& program, const Kernels& kernels, Pool& pool);

}  // namespace jqx

#endif  // JQX_CPU_ROWS_H_
