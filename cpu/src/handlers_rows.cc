// Reads programs of rows. A program that does not fit its arguments is an error of XLA.

#include <string>

#include "checks.h"
#include "rows.h"

namespace jqx {
namespace {

constexpr int64_t kOfRowField = 3;   // numbers of a row in the attribute `rows`
constexpr int64_t kOfStepField = 9;  // and of a step in `steps`

ffi::Error unfit(const std::string& what, int64_t at) {
  return ffi::Error::InvalidArgument("jqx_cpu: rows: " + what + " does not fit, at " +
                                     std::to_string(at) + ".");
}

// Whether rows, with `more` elements behind the first one of each, lie within a buffer.
bool lies_within(const Row& row, const std::vector<int64_t>& lead, int64_t more,
                 const ffi::AnyBuffer& x) {
  const int64_t count = int64_t(x.element_count());
  int64_t last = more;
  if (more < 0 || more >= count) return false;
  for (size_t axis = 0; axis < lead.size(); ++axis) {
    const int64_t stride = row.strides[axis];
    if (stride < 0 || stride > count) return false;
    last += (lead[axis] - 1) * stride;
    if (last >= count) return false;
  }
  return true;
}

ffi::Error read_row(ffi::RemainingArgs& arguments, ffi::RemainingRets& results,
                    ffi::Span<const float> constants, int64_t at, RowProgram* program) {
  Row& row = program->rows[at];
  const int64_t width = row.width, index = row.index;
  if (row.kind < 0 || row.kind >= Row::kKinds || width < 1 || width > INT32_MAX) {
    return unfit("a row", at);
  }
  if (index < 0 || index > int64_t(1) << 40) return unfit("the index of a row", at);
  switch (row.kind) {
    case Row::kInput:
    case Row::kMask:
    case Row::kMatrix:
    case Row::kColumns: {
      const auto own = arguments.get<ffi::AnyBuffer>(size_t(index));
      if (!own.has_value()) return unfit("an argument", at);
      const bool of_codes = row.kind == Row::kMatrix && own->element_type() == ffi::S8;
      const auto dtype = row.kind == Row::kMask ? ffi::PRED : of_codes ? ffi::S8 : ffi::F32;
      const bool fits = row.kind == Row::kColumns ? has(*own, ffi::F32, {width})
                                                  : own->element_type() == dtype;
      if (!fits || !is_aligned(own->untyped_data(), ffi::ByteWidth(dtype))) {
        return unfit("an argument", at);
      }
      const int64_t more = row.kind == Row::kMatrix ? 0 : width - 1;
      if (row.has_strides() && !lies_within(row, program->lead, more, *own)) {
        return unfit("the size of an argument", at);
      }
      row.data = own->untyped_data();
      break;
    }
    case Row::kConstant:
      if (index >= int64_t(constants.size()) || width != 1) return unfit("a constant", at);
      row.data = const_cast<float*>(constants.begin() + index);
      break;
    case Row::kOutput: {
      auto own = results.get<ffi::AnyBuffer>(size_t(index));
      if (!own.has_value() || (*own)->element_type() != ffi::F32 ||
          !is_aligned((*own)->untyped_data(), 4) ||
          !lies_within(row, program->lead, width - 1, **own)) {
        return unfit("a result", at);
      }
      row.data = (*own)->untyped_data();
      break;
    }
    case Row::kOfRow:
      program->floats_of_row = std::max(program->floats_of_row, index + width);
      break;
    case Row::kOfBlock:
      program->floats_of_block = std::max(program->floats_of_block, index + width);
      break;
    default:
      if (index % kRun != 0) return unfit("a place of codes", at);
      program->bytes_of_codes =
          std::max(program->bytes_of_codes, index + (width + kRun - 1) / kRun * kRun);
  }
  return ffi::Error::Success();
}

// Whether a row has floats that a step may read.
bool is_number(const Row& row) {
  return row.kind != Row::kCodes && row.kind != Row::kMask && row.kind != Row::kMatrix;
}

bool is_written(const Row& row) {
  return row.kind == Row::kOfRow || row.kind == Row::kOfBlock || row.kind == Row::kOutput;
}

// Whether codes of a product are made before it.
bool are_made(const std::vector<RowStep>& steps, size_t before, int64_t codes) {
  for (size_t i = 0; i < before; ++i) {
    if (steps[i].op == kQuantize && steps[i].to == codes) return true;
  }
  return false;
}

// Reads the indices of the scales of n columns and of their zero points; -1 stands for 1 and 0.
ffi::Error read_scales(ffi::RemainingArgs& arguments, const int64_t* fields, size_t at, int64_t n,
                       RowStep* step) {
  static const float one = 1;
  step->scale = &one;
  if (fields[0] < 0) return ffi::Error::Success();
  const auto scale = arguments.get<ffi::AnyBuffer>(size_t(fields[0]));
  const bool is_one = scale.has_value() && has(*scale, ffi::F32, {1});
  if (!is_one && !(scale.has_value() && has(*scale, ffi::F32, {n}))) return unfit("a scale", at);
  step->scale = static_cast<const float*>(scale->untyped_data()), step->scale_stride = !is_one;
  if (fields[1] < 0) return ffi::Error::Success();
  const auto zero = arguments.get<ffi::AnyBuffer>(size_t(fields[1]));
  const bool is_same = zero.has_value() && has(*zero, ffi::S32, {1});
  if (!is_same && !(zero.has_value() && has(*zero, ffi::S32, {n}))) return unfit("a zero point", at);
  step->w_zero = static_cast<const int32_t*>(zero->untyped_data()), step->zero_stride = !is_same;
  return ffi::Error::Success();
}

ffi::Error read_product(ffi::RemainingArgs& arguments, const int64_t* fields, size_t at,
                        RowProgram* program) {
  RowStep& step = program->steps[at];
  const Row &to = program->rows[step.to], &codes = program->rows[step.a];
  const bool is_row = to.kind == Row::kOfBlock || to.kind == Row::kOutput;
  if (!is_row || codes.kind != Row::kCodes || !are_made(program->steps, at, step.a)) {
    return unfit("a product", at);
  }
  step.k = codes.width;
  const int64_t n = to.width;
  if (fields[3] < 0) return unfit("a weight", at);
  const auto w = arguments.get<ffi::AnyBuffer>(size_t(fields[3]));
  if (!w.has_value()) return unfit("a weight", at);
  if (fields[6] < 0) {
    if (!has(*w, ffi::S8, {n, step.k})) return unfit("a weight", at);
    step.w = static_cast<const int8_t*>(w->untyped_data());
  } else {
    Groups stack;
    const auto index = arguments.get<ffi::AnyBuffer>(size_t(fields[6]));
    if (!index.has_value() || is_absent(*index) || w->dimensions().size() != 3) {
      return unfit("a stack", at);
    }
    if (auto error = find("rows", *index, nullptr, *w, 1, &stack); error.failure()) return error;
    if (!has(*w, ffi::S8, {stack.stack, n, step.k})) return unfit("a stack", at);
    step.w = static_cast<const int8_t*>(w->untyped_data()) + stack.at * n * step.k;
  }
  return read_scales(arguments, fields + 4, at, n, &step);
}

ffi::Error read_matrix_product(ffi::RemainingArgs& arguments, const int64_t* fields, size_t at,
                               RowProgram* program) {
  RowStep& step = program->steps[at];
  const Row &to = program->rows[step.to], &x = program->rows[step.a];
  const Row& matrix = program->rows[step.b];
  const bool codes = x.kind == Row::kCodes && are_made(program->steps, at, step.a);
  const bool reads = codes || x.kind == Row::kInput || x.kind == Row::kOfBlock ||
                     x.kind == Row::kOutput;
  const bool writes = to.kind == Row::kOutput || to.kind == Row::kOfBlock;
  if (!reads || !writes || matrix.kind != Row::kMatrix) return unfit("a product", at);
  step.k = x.width, step.along_k = fields[4], step.along_n = fields[5];
  const auto own = arguments.get<ffi::AnyBuffer>(size_t(matrix.index));
  const int64_t most = INT32_MAX;
  const bool fits = step.along_k >= 0 && step.along_n >= 0 && step.along_k <= most &&
                    step.along_n <= most && matrix.width == to.width;
  const int64_t more = (step.k - 1) * step.along_k + (to.width - 1) * step.along_n;
  if (!fits || !own.has_value() || !lies_within(matrix, program->lead, more, *own) ||
      own->element_type() != (codes ? ffi::S8 : ffi::F32)) {
    return unfit("a matrix", at);
  }
  if (!codes) return ffi::Error::Success();
  if (step.along_k != 1 && step.along_n != 1) return unfit("a matrix", at);
  return read_scales(arguments, fields + 6, at, to.width, &step);
}

ffi::Error read_step(ffi::RemainingArgs& arguments, const int64_t* fields, size_t at,
                     RowProgram* program) {
  RowStep& step = program->steps[at];
  const int64_t count = program->rows.size();
  const auto is_row = [&](int64_t i) { return i >= 0 && i < count; };
  step.op = fields[0], step.to = fields[1], step.a = fields[2];
  step.b = step.op == kProduct ? step.a : fields[3];
  step.c = step.op == kSelect ? fields[4] : step.a;
  if (step.op < 0 || step.op >= kOps || !is_row(step.to) || !is_row(step.a) || !is_row(step.b) ||
      !is_row(step.c)) {
    return unfit("a step", at);
  }
  if (step.op == kProduct) return read_product(arguments, fields, at, program);
  if (step.op == kMatrixProduct) return read_matrix_product(arguments, fields, at, program);
  const Row &to = program->rows[step.to], &a = program->rows[step.a], &b = program->rows[step.b];
  const auto suits = [&](const Row& x) { return x.width == 1 || x.width == to.width; };
  if (step.op == kSelect) {
    const Row& c = program->rows[step.c];
    const bool fits = a.kind == Row::kMask && is_number(b) && is_number(c) && is_written(to) &&
                      suits(a) && suits(b) && suits(c);
    return fits ? ffi::Error::Success() : unfit("a step", at);
  }
  if (!is_number(a) || !is_number(b)) return unfit("an operand", at);
  if (step.op != kQuantize) {
    const bool fits = step.op >= kSum ? to.width == 1 : suits(a) && suits(b);
    return is_written(to) && fits ? ffi::Error::Success() : unfit("a result of a step", at);
  }
  if (to.kind != Row::kCodes || a.width != to.width || b.width != 1) return unfit("codes", at);
  step.low = fields[5], step.high = fields[6];
  if (step.low < -128 || step.low > step.high || step.high > 127) return unfit("a range", at);
  if (fields[4] < 0) return ffi::Error::Success();
  const auto zero = arguments.get<ffi::AnyBuffer>(size_t(fields[4]));
  if (!zero.has_value() || !has(*zero, ffi::S32, {1})) return unfit("a zero point", at);
  step.zero = static_cast<const int32_t*>(zero->untyped_data());
  return ffi::Error::Success();
}

ffi::Error rows(ffi::ThreadPool pool, Integers lead, Integers rows, Integers strides, Integers steps,
                ffi::Span<const float> constants, ffi::RemainingArgs arguments,
                ffi::RemainingRets results) {
  const size_t count = rows.size() / kOfRowField;
  if (rows.size() % kOfRowField != 0 || steps.size() % kOfStepField != 0 ||
      strides.size() != count * lead.size()) {
    return unfit("the size of a program", int64_t(rows.size()));
  }
  RowProgram program;
  program.rows.resize(count);
  program.steps.resize(steps.size() / kOfStepField);
  program.lead.assign(lead.begin(), lead.end());
  int64_t m = 1;
  for (const int64_t n : program.lead) {
    if (n < 0 || n > INT32_MAX || m * n > int64_t(1) << 31) return unfit("a size", n);
    m *= n;
  }
  if (m == 0 || program.steps.empty()) return ffi::Error::Success();
  for (size_t i = 0; i < count; ++i) {
    const int64_t* fields = rows.begin() + i * kOfRowField;
    const int64_t* own = strides.begin() + i * lead.size();
    program.rows[i] = {Row::Kind(fields[0]), fields[1], fields[2], nullptr, {own, own + lead.size()}};
    const auto error = read_row(arguments, results, constants, int64_t(i), &program);
    if (error.failure()) return error;
  }
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const auto error = read_step(arguments, steps.begin() + i * kOfStepField, i, &program);
    if (error.failure()) return error;
  }
  return run(pool, [&](Pool& threads) { run_rows(program, kernels(), threads); });
}

}  // namespace
}  // namespace jqx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jqx_cpu_rows, jqx::rows,
                              jqx::bound<0>()
                                  .Attr<jqx::Integers>("lead")
                                  .Attr<jqx::Integers>("rows")
                                  .Attr<jqx::Integers>("strides")
                                  .Attr<jqx::Integers>("steps")
                                  .Attr<ffi::Span<const float>>("constants")
                                  .RemainingArgs()
                                  .RemainingRets());
