#include "linear.h"

#include "linear_layout.h"

namespace octavo {
namespace {

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Which forms of the quantised activations the parts of a product read.
struct Wanted {
  bool bytes = false;
  bool words = false;
  bool offsets = false;
  bool any() const { return bytes || words; }
};

Wanted wanted_by(const PackedLinear& linear) {
  Wanted wanted;
  for (const PackedPart& part : linear.parts) {
    if (!is_quantised(part.kind)) continue;
    const bool reads_words = part.kind == WeightKind::int8 && linear.kernels->int8_reads_words;
    (reads_words ? wanted.words : wanted.bytes) = true;
    if (part.kind == WeightKind::q6_k) wanted.offsets = true;
  }
  return wanted;
}

// Lays quantised rows out in `memory`; returns the bytes they take. `memory` may be null to ask for the size.
size_t carve(const PackedLinear& linear, int max_rows, uint8_t* memory, QuantisedRows* rows) {
  const Wanted wanted = wanted_by(linear);
  const auto numbers = static_cast<size_t>(max_rows) * static_cast<size_t>(linear.num_inputs);
  size_t used = 0;
  const auto take = [&](bool is_wanted, size_t num_bytes) -> uint8_t* {
    if (!is_wanted) return nullptr;
    uint8_t* area = memory + used;
    used += round_up(num_bytes, 64);
    return area;
  };
  rows->bytes = reinterpret_cast<int8_t*>(take(wanted.bytes, numbers));
  rows->words = reinterpret_cast<int16_t*>(take(wanted.words, numbers * sizeof(int16_t)));
  rows->scales = reinterpret_cast<float*>(take(wanted.any(), numbers / kGroupInputs * 2 * sizeof(float)));
  rows->offsets = reinterpret_cast<int32_t*>(take(wanted.offsets, numbers / kGroupInputs * 2 * sizeof(int32_t)));
  return used;
}

// So few rows are quantised by every thread for itself: that is quicker than a barrier.
constexpr int kPrivateRows = kTileRows;

int rows_of_block(int max_rows) { return max_rows < kBlockRows ? max_rows : kBlockRows; }

size_t panel_scratch_bytes(int max_rows) {
  return kPanelScratchBytes + static_cast<size_t>(rows_of_block(max_rows)) * kPanelOutputs * sizeof(float);
}

// Panels [begin, end) of each part that make up one chunk of a product: an equal share of the bytes, whole panels.
class PanelShare {
 public:
  PanelShare(const PackedLinear& linear, int64_t num_chunks, int64_t chunk) {
    int64_t total = 0;
    for (const PackedPart& part : linear.parts) total += part.num_panels * part.panel_bytes;
    begin_ = total * chunk / num_chunks;
    end_ = total * (chunk + 1) / num_chunks;
  }

  // Parts are asked in order.
  Share next(const PackedPart& part) {
    const int64_t num_bytes = part.num_panels * part.panel_bytes;
    const Share share{panel_at(part, begin_ - offset_), panel_at(part, end_ - offset_)};
    offset_ += num_bytes;
    return share;
  }

 private:
  // The same rounding for the end of one chunk and the begin of the next.
  static int64_t panel_at(const PackedPart& part, int64_t byte) {
    if (byte <= 0) return 0;
    const int64_t panel = (byte + part.panel_bytes / 2) / part.panel_bytes;
    return panel < part.num_panels ? panel : part.num_panels;
  }

  int64_t begin_;
  int64_t end_;
  int64_t offset_ = 0;
};

void run_panels(const PackedLinear& linear, PanelShare shares, const QuantisedRows& quantised, const float* x,
                int64_t x_stride, int num_rows, float* out, int64_t out_stride, uint8_t* scratch) {
  for (const PackedPart& part : linear.parts) {
    const Share share = shares.next(part);
    if (share.begin == share.end) continue;
    PanelJob job{};
    job.kind = part.kind;
    job.panels = part.panels.get();
    job.scale_bytes = part.layout.scale_bytes;
    job.weight_bytes = part.layout.weight_bytes;
    job.panel_bytes = part.panel_bytes;
    job.panel_begin = share.begin;
    job.panel_end = share.end;
    job.num_inputs = linear.num_inputs;
    job.num_outputs = part.num_outputs;
    job.bias = part.bias.empty() ? nullptr : part.bias.data();
    job.num_rows = num_rows;
    job.x = x;
    job.x_stride = x_stride;
    job.quantised = quantised;
    job.out = out + part.first_output;
    job.out_stride = out_stride;
    job.scratch = scratch;
    linear.kernels->run_panels(job);
  }
}

}  // namespace

size_t linear_shared_scratch_bytes(const PackedLinear& linear, int max_rows) {
  QuantisedRows rows;
  return max_rows <= kPrivateRows ? 0 : carve(linear, max_rows, nullptr, &rows);
}

size_t linear_thread_scratch_bytes(const PackedLinear& linear, int max_rows) {
  QuantisedRows rows;
  const int private_rows = max_rows < kPrivateRows ? max_rows : kPrivateRows;
  return panel_scratch_bytes(max_rows) + carve(linear, private_rows, nullptr, &rows);
}

void linear_run(const PackedLinear& linear, const float* x, int64_t x_stride, int num_rows, float* out,
                int64_t out_stride, void* shared_scratch, void* thread_scratch, Team& team, int thread) {
  if (num_rows == 0) return;
  const LinearKernels& kernels = *linear.kernels;
  auto* scratch = static_cast<uint8_t*>(thread_scratch);
  QuantisedRows quantised{};
  const auto quantise = [&](const Share& rows) {
    kernels.quantise_rows(x, x_stride, linear.num_inputs, static_cast<int>(rows.begin), static_cast<int>(rows.end),
                          quantised);
  };
  const bool is_quantised = wanted_by(linear).any();
  bool is_prepared = !is_quantised;
  if (is_quantised && num_rows <= kPrivateRows) {
    carve(linear, num_rows, scratch + panel_scratch_bytes(num_rows), &quantised);
  } else if (is_quantised) {
    carve(linear, num_rows, static_cast<uint8_t*>(shared_scratch), &quantised);
    const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    const int64_t num_chunks = num_chunks_of(num_tiles, team.size());
    team.for_chunks(thread, num_chunks,
                    [&](int64_t chunk) { quantise(share_of(num_rows, num_chunks, chunk, kTileRows)); });
    is_prepared = true;
  }
  int64_t num_panels = 0;
  for (const PackedPart& part : linear.parts) num_panels += part.num_panels;
  const int64_t num_chunks = num_chunks_of(num_panels, team.size());
  team.for_chunks(thread, num_chunks, [&](int64_t chunk) {
    if (!is_prepared) quantise({0, num_rows});
    is_prepared = true;
    run_panels(linear, PanelShare(linear, num_chunks, chunk), quantised, x, x_stride, num_rows, out, out_stride,
               scratch);
  });
}

}  // namespace octavo
