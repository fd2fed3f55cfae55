// The reduction of numbers of several ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

// In the order of OPS in dualdist/backends/shm/host.py.
enum class Op { sum, product, min, max, mean };

using Parts = std::vector<const char*>;  // of each rank, in rank order

// Reduces in rank order. `out` may be one of the first two parts.
void reduce(Op op, char* out, const Parts& parts, int64_t nbytes, at::ScalarType dtype);
