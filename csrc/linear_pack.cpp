#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "linear_layout.h"
#include "linear_memory.h"

namespace octavo {
namespace {

struct BlockSize {
  int64_t inputs;
  int64_t bytes;
};

// The smallest whole piece of a row in a file.
BlockSize block_of(WeightKind kind) {
  switch (kind) {
    case WeightKind::f32:
      return {1, 4};
    case WeightKind::f16:
    case WeightKind::bf16:
      return {1, 2};
    case WeightKind::int8:
      return {kGroupInputs, 34};
    case WeightKind::q4_0:
      return {kGroupInputs, 18};
    case WeightKind::q4_1:
      return {kGroupInputs, 20};
    case WeightKind::q4_k:
      return {kSuperBlockInputs, 144};
    case WeightKind::q6_k:
      return {kSuperBlockInputs, 210};
  }
  throw std::invalid_argument("unknown weight kind");
}

// The functions below write one row of a file into column `lane` (0..15) of a panel.

template <class Element>
void pack_floats(const uint8_t* row, int64_t num_inputs, int lane, uint8_t* panel) {
  for (int64_t k = 0; k < num_inputs; ++k) {
    std::memcpy(panel + (k * kPanelOutputs + lane) * sizeof(Element), row + k * sizeof(Element), sizeof(Element));
  }
}

void copy_units(const uint8_t* from, int unit_bytes, int num_units, int lane, uint8_t* to) {
  for (int j = 0; j < num_units; ++j) {
    std::memcpy(to + (j * kPanelOutputs + lane) * unit_bytes, from + j * unit_bytes, static_cast<size_t>(unit_bytes));
  }
}

// Where a group of a panel lies.
struct GroupPlace {
  uint8_t* scales;  // of its block
  uint8_t* group;
  int index;  // in its block
};

GroupPlace place_of(uint8_t* panel, const PanelLayout& layout, int64_t num_groups, int64_t group) {
  const int64_t first = group / kBlockGroups * kBlockGroups;
  const int64_t count = std::min<int64_t>(kBlockGroups, num_groups - first);
  uint8_t* block = panel + first * (layout.scale_bytes + layout.weight_bytes);
  const int64_t index = group - first;
  return {block, block + count * layout.scale_bytes + index * layout.weight_bytes, static_cast<int>(index)};
}

void pack_int8(const uint8_t* row, int lane, const GroupPlace& to) {
  copy_units(row, 2, 1, lane, to.scales + to.index * 32);
  copy_units(row + 2, 2, 16, lane, to.group);
}

// A file's block of 32 already pairs input i with input 16 + i in one byte, which is what a panel wants.
void pack_nibbles(const uint8_t* row, int num_scales, int lane, const GroupPlace& to) {
  copy_units(row, 2, num_scales, lane, to.scales + to.index * num_scales * 32);
  copy_units(row + 2 * num_scales, 4, 4, lane, to.group);
}

// Packs 32 numbers below 16 as the nibbles of one group.
void pack_numbers(const uint8_t* numbers, int lane, uint8_t* group) {
  uint8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>((numbers[i] & 15) | (numbers[16 + i] & 15) << 4);
  copy_units(bytes, 4, 4, lane, group);
}

// `row` is the super-block of the file.
void pack_q4_k(const uint8_t* row, int lane, const GroupPlace& to) {
  if (to.index == 0) {
    copy_units(row, 2, 2, lane, to.scales);
    copy_units(row + 4, 1, 12, lane, to.scales + 64);
  }
  const uint8_t* bytes = row + 16 + to.index / 2 * 32;  // two groups share 32 bytes: low halves, then high halves
  uint8_t numbers[32];
  for (int i = 0; i < 32; ++i) numbers[i] = (bytes[i] >> (4 * (to.index % 2))) & 15;
  pack_numbers(numbers, lane, to.group);
}

// `row` is the super-block of the file.
void pack_q6_k(const uint8_t* row, int lane, const GroupPlace& to) {
  if (to.index == 0) {
    copy_units(row + 208, 2, 1, lane, to.scales);
    copy_units(row + 192, 1, 16, lane, to.scales + 32);
  }
  // Each half of 128 inputs has 64 bytes of low nibbles and 32 bytes with four two-bit fields.
  const int quarter = to.index % 4;
  const uint8_t* low = row + to.index / 4 * 64 + quarter % 2 * 32;
  const uint8_t* high = row + 128 + to.index / 4 * 32;
  uint8_t numbers[32];
  uint8_t fields[8] = {};
  for (int i = 0; i < 32; ++i) {
    numbers[i] = (low[i] >> (4 * (quarter / 2))) & 15;
    const int two_bits = (high[i] >> (2 * quarter)) & 3;
    fields[i / 16 * 4 + i % 4] |= static_cast<uint8_t>(two_bits << (2 * (i % 16 / 4)));
  }
  pack_numbers(numbers, lane, to.group);
  copy_units(fields, 4, 2, lane, to.group + 256);
}

void pack_groups(WeightKind kind, const uint8_t* row, int64_t num_inputs, int lane, uint8_t* panel) {
  const PanelLayout layout = panel_layout(kind);
  const int64_t num_groups = num_inputs / kGroupInputs;
  for (int64_t group = 0; group < num_groups; ++group) {
    const GroupPlace to = place_of(panel, layout, num_groups, group);
    switch (kind) {
      case WeightKind::int8:
        pack_int8(row + group * 34, lane, to);
        break;
      case WeightKind::q4_0:
        pack_nibbles(row + group * 18, 1, lane, to);
        break;
      case WeightKind::q4_1:
        pack_nibbles(row + group * 20, 2, lane, to);
        break;
      case WeightKind::q4_k:
        pack_q4_k(row + group / kBlockGroups * 144, lane, to);
        break;
      default:
        pack_q6_k(row + group / kBlockGroups * 210, lane, to);
        break;
    }
  }
}

void pack_row(WeightKind kind, const uint8_t* row, int64_t num_inputs, int lane, uint8_t* panel) {
  if (kind == WeightKind::f32) return pack_floats<uint32_t>(row, num_inputs, lane, panel);
  if (!is_quantised(kind)) return pack_floats<uint16_t>(row, num_inputs, lane, panel);
  pack_groups(kind, row, num_inputs, lane, panel);
}

PackedPart pack_part(const LinearPart& part, int64_t num_inputs, int64_t first_output) {
  if (part.num_outputs < 1) throw std::invalid_argument("linear: a part needs at least one output");
  if (num_inputs % inputs_multiple(part.kind) != 0) {
    std::string message = std::to_string(num_inputs);
    message += " inputs are no multiple of ";
    message += std::to_string(inputs_multiple(part.kind));
    message += ", the size of a block of this kind; hold the tensor as f16 or f32";
    throw std::invalid_argument(message);
  }
  PackedPart packed;
  packed.kind = part.kind;
  packed.first_output = first_output;
  packed.num_outputs = part.num_outputs;
  packed.num_panels = (part.num_outputs + kPanelOutputs - 1) / kPanelOutputs;
  packed.layout = panel_layout(part.kind);
  packed.panel_bytes = file_row_bytes(part.kind, num_inputs) * kPanelOutputs;
  const size_t num_bytes = static_cast<size_t>(packed.num_panels * packed.panel_bytes);
  packed.panels = weight_memory(num_bytes);

  const int64_t row_bytes = file_row_bytes(part.kind, num_inputs);
  const auto* rows = static_cast<const uint8_t*>(part.rows);
  for (int64_t panel = 0; panel < packed.num_panels; ++panel) {
    uint8_t* to = packed.panels.get() + panel * packed.panel_bytes;
    const int64_t first = panel * kPanelOutputs;
    const int num_lanes = static_cast<int>(std::min<int64_t>(kPanelOutputs, part.num_outputs - first));
    if (num_lanes < kPanelOutputs) std::memset(to, 0, static_cast<size_t>(packed.panel_bytes));
    for (int lane = 0; lane < num_lanes; ++lane) {
      pack_row(part.kind, rows + (first + lane) * row_bytes, num_inputs, lane, to);
    }
  }
  if (part.bias != nullptr) {
    packed.bias.assign(static_cast<size_t>(packed.num_panels * kPanelOutputs), 0.0f);
    std::memcpy(packed.bias.data(), part.bias, static_cast<size_t>(part.num_outputs) * sizeof(float));
  }
  return packed;
}

}  // namespace

bool is_quantised(WeightKind kind) { return inputs_multiple(kind) > 1; }

int64_t inputs_multiple(WeightKind kind) { return block_of(kind).inputs; }

int64_t file_row_bytes(WeightKind kind, int64_t num_inputs) {
  const BlockSize block = block_of(kind);
  return num_inputs / block.inputs * block.bytes;
}

PanelLayout panel_layout(WeightKind kind) {
  switch (kind) {
    case WeightKind::f32:
      return {0, 2048};
    case WeightKind::f16:
    case WeightKind::bf16:
      return {0, 1024};
    case WeightKind::int8:
      return {32, 512};
    case WeightKind::q4_0:
      return {32, 256};
    case WeightKind::q4_1:
      return {64, 256};
    case WeightKind::q4_k:
      return {(32 + 32 + 192) / kBlockGroups, 256};
    case WeightKind::q6_k:
      return {(32 + 256) / kBlockGroups, 384};
  }
  throw std::invalid_argument("unknown weight kind");
}

std::shared_ptr<const PackedLinear> pack_linear(const std::vector<LinearPart>& parts, int64_t num_inputs, Isa isa,
                                                bool may_widen) {
  if (parts.empty()) throw std::invalid_argument("linear: no parts");
  if (num_inputs < 1) throw std::invalid_argument("linear: at least one input is needed");
  auto linear = std::make_shared<PackedLinear>();
  linear->kernels = &choose_linear_kernels(isa, may_widen);
  linear->num_inputs = num_inputs;
  linear->num_outputs = 0;
  for (const LinearPart& part : parts) {
    linear->parts.push_back(pack_part(part, num_inputs, linear->num_outputs));
    linear->num_outputs += part.num_outputs;
  }
  return linear;
}

int64_t linear_num_outputs(const PackedLinear& linear) { return linear.num_outputs; }

int64_t linear_num_inputs(const PackedLinear& linear) { return linear.num_inputs; }

const char* linear_kernels_name(const PackedLinear& linear) { return linear.kernels->name; }

size_t linear_resident_bytes(const PackedLinear& linear) {
  size_t num_bytes = 0;
  for (const PackedPart& part : linear.parts) {
    num_bytes += static_cast<size_t>(part.num_panels * part.panel_bytes) + part.bias.size() * sizeof(float);
  }
  return num_bytes;
}

}  // namespace octavo
