// The Python face of a packed weight; shared with the executors that use it.
#pragma once

#include <memory>

#include "linear.h"

namespace octavo {

struct LinearHandle {
  std::shared_ptr<const PackedLinear> linear;
};

}  // namespace octavo
