// What tests change between two calls, or before a process begins, in kernels that were built with this included before all else.

#pragma once

#include <cstdlib>

extern "C" {
int penstock_switch = std::getenv("PENSTOCK_SWITCH") ? std::atoi(std::getenv("PENSTOCK_SWITCH")) : -1;
}
