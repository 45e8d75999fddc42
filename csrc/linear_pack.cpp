#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "linear_layout.h"

namespace octavo {
namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kScaleBytes = 2;  // f16
constexpr int64_t kSubScaleBytes = 12;
constexpr int64_t kSubBlocks = 16;

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

void pack_int8(const uint8_t* row, int64_t num_inputs, int lane, const PanelLayout& layout, uint8_t* panel) {
  for (int64_t group = 0; group < num_inputs / kGroupInputs; ++group, row += 34) {
    copy_units(row, 2, 1, lane, panel + group * 32);
    copy_units(row + 2, 2, 16, lane, panel + layout.scale_bytes + group * layout.group_bytes);
  }
}

// A file's block of 32 already pairs input i with input 16 + i in one byte, which is what a panel wants.
void pack_nibbles(const uint8_t* row, int64_t num_inputs, int num_scales, int lane, const PanelLayout& layout,
                  uint8_t* panel) {
  for (int64_t group = 0; group < num_inputs / kGroupInputs; ++group) {
    copy_units(row, 2, num_scales, lane, panel + group * num_scales * 32);
    row += num_scales * kScaleBytes;
    copy_units(row, 4, 4, lane, panel + layout.scale_bytes + group * layout.group_bytes);
    row += 16;
  }
}

// Packs 32 numbers below 16 as the nibbles of one group.
void pack_group_nibbles(const uint8_t* numbers, int lane, uint8_t* group) {
  uint8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>((numbers[i] & 15) | (numbers[16 + i] & 15) << 4);
  copy_units(bytes, 4, 4, lane, group);
}

void pack_q4_k(const uint8_t* row, int64_t num_inputs, int lane, const PanelLayout& layout, uint8_t* panel) {
  uint8_t* group_out = panel + layout.scale_bytes;
  for (int64_t block = 0; block < num_inputs / kSuperBlockInputs; ++block, row += 144) {
    copy_units(row, 2, 2, lane, panel);
    copy_units(row + 4, 1, 12, lane, panel + 64);
    panel += 64 + kSubScaleBytes * kPanelOutputs;
    for (int group = 0; group < 8; ++group, group_out += layout.group_bytes) {
      const uint8_t* bytes = row + 16 + (group / 2) * 32;  // two groups share 32 bytes: low halves, then high halves
      uint8_t numbers[32];
      for (int i = 0; i < 32; ++i) numbers[i] = (bytes[i] >> (4 * (group % 2))) & 15;
      pack_group_nibbles(numbers, lane, group_out);
    }
  }
}

void pack_q6_k(const uint8_t* row, int64_t num_inputs, int lane, const PanelLayout& layout, uint8_t* panel) {
  uint8_t* group_out = panel + layout.scale_bytes;
  for (int64_t block = 0; block < num_inputs / kSuperBlockInputs; ++block, row += 210) {
    copy_units(row + 208, 2, 1, lane, panel);
    copy_units(row + 192, 1, 16, lane, panel + 32);
    panel += 32 + kSubBlocks * kPanelOutputs;
    for (int group = 0; group < 8; ++group, group_out += layout.group_bytes) {
      // Each half of 128 inputs has 64 bytes of low nibbles and 32 bytes with four two-bit fields.
      const uint8_t* low = row + (group / 4) * 64 + (group % 2) * 32;
      const uint8_t* high = row + 128 + (group / 4) * 32;
      uint8_t numbers[32];
      uint8_t fields[8] = {};
      for (int i = 0; i < 32; ++i) {
        numbers[i] = (low[i] >> (4 * (group % 4 / 2))) & 15;
        const int two_bits = (high[i] >> (2 * (group % 4))) & 3;
        fields[i / 16 * 4 + i % 4] |= static_cast<uint8_t>(two_bits << (2 * (i % 16 / 4)));
      }
      pack_group_nibbles(numbers, lane, group_out);
      copy_units(fields, 4, 2, lane, group_out + 256);
    }
  }
}

void pack_row(WeightKind kind, const uint8_t* row, int64_t num_inputs, int lane, const PanelLayout& layout,
              uint8_t* panel) {
  switch (kind) {
    case WeightKind::f32:
      return pack_floats<uint32_t>(row, num_inputs, lane, panel);
    case WeightKind::f16:
    case WeightKind::bf16:
      return pack_floats<uint16_t>(row, num_inputs, lane, panel);
    case WeightKind::int8:
      return pack_int8(row, num_inputs, lane, layout, panel);
    case WeightKind::q4_0:
      return pack_nibbles(row, num_inputs, 1, lane, layout, panel);
    case WeightKind::q4_1:
      return pack_nibbles(row, num_inputs, 2, lane, layout, panel);
    case WeightKind::q4_k:
      return pack_q4_k(row, num_inputs, lane, layout, panel);
    case WeightKind::q6_k:
      return pack_q6_k(row, num_inputs, lane, layout, panel);
  }
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
  packed.layout = panel_layout(part.kind, num_inputs);
  const size_t num_bytes = static_cast<size_t>(packed.num_panels * packed.layout.panel_bytes);
  packed.panels.reset(static_cast<uint8_t*>(::operator new[](num_bytes, std::align_val_t{kAlignment})));

  const int64_t row_bytes = file_row_bytes(part.kind, num_inputs);
  const auto* rows = static_cast<const uint8_t*>(part.rows);
  for (int64_t panel = 0; panel < packed.num_panels; ++panel) {
    uint8_t* to = packed.panels.get() + panel * packed.layout.panel_bytes;
    const int64_t first = panel * kPanelOutputs;
    const int num_lanes = static_cast<int>(std::min<int64_t>(kPanelOutputs, part.num_outputs - first));
    if (num_lanes < kPanelOutputs) std::memset(to, 0, static_cast<size_t>(packed.layout.panel_bytes));
    for (int lane = 0; lane < num_lanes; ++lane) {
      pack_row(part.kind, rows + (first + lane) * row_bytes, num_inputs, lane, packed.layout, to);
    }
  }
  if (part.bias != nullptr) {
    packed.bias.assign(static_cast<size_t>(packed.num_panels * kPanelOutputs), 0.0f);
    std::memcpy(packed.bias.data(), part.bias, static_cast<size_t>(part.num_outputs) * sizeof(float));
  }
  return packed;
}

}  // namespace

void AlignedDelete::operator()(uint8_t* bytes) const { ::operator delete[](bytes, std::align_val_t{kAlignment}); }

bool is_quantised(WeightKind kind) { return inputs_multiple(kind) > 1; }

int64_t inputs_multiple(WeightKind kind) { return block_of(kind).inputs; }

int64_t file_row_bytes(WeightKind kind, int64_t num_inputs) {
  const BlockSize block = block_of(kind);
  return num_inputs / block.inputs * block.bytes;
}

PanelLayout panel_layout(WeightKind kind, int64_t num_inputs) {
  const int64_t groups = num_inputs / kGroupInputs;
  const int64_t super_blocks = num_inputs / kSuperBlockInputs;
  PanelLayout layout{};
  layout.panel_bytes = file_row_bytes(kind, num_inputs) * kPanelOutputs;
  switch (kind) {
    case WeightKind::f32:
    case WeightKind::f16:
    case WeightKind::bf16:
      layout.group_bytes = file_row_bytes(kind, kGroupInputs) * kPanelOutputs;
      return layout;
    case WeightKind::int8:
      layout.group_bytes = 512;
      layout.scale_bytes = groups * kScaleBytes * kPanelOutputs;
      return layout;
    case WeightKind::q4_0:
    case WeightKind::q4_1:
      layout.group_bytes = 256;
      layout.scale_bytes = groups * kScaleBytes * kPanelOutputs * (kind == WeightKind::q4_1 ? 2 : 1);
      return layout;
    case WeightKind::q4_k:
      layout.group_bytes = 256;
      layout.scale_bytes = super_blocks * (2 * kScaleBytes + kSubScaleBytes) * kPanelOutputs;
      return layout;
    case WeightKind::q6_k:
      layout.group_bytes = 384;
      layout.scale_bytes = super_blocks * (kScaleBytes + kSubBlocks) * kPanelOutputs;
      return layout;
  }
  throw std::invalid_argument("unknown weight kind");
}

std::shared_ptr<const PackedLinear> pack_linear(const std::vector<LinearPart>& parts, int64_t num_inputs, Isa isa) {
  if (parts.empty()) throw std::invalid_argument("linear: no parts");
  if (num_inputs < 1) throw std::invalid_argument("linear: at least one input is needed");
  auto linear = std::make_shared<PackedLinear>();
  linear->isa = isa;
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

size_t linear_resident_bytes(const PackedLinear& linear) {
  size_t num_bytes = 0;
  for (const PackedPart& part : linear.parts) {
    num_bytes += static_cast<size_t>(part.num_panels * part.layout.panel_bytes) + part.bias.size() * sizeof(float);
  }
  return num_bytes;
}

}  // namespace octavo
