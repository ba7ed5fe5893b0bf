// What tests change between two calls, in kernels that were built with this included before all else.

#pragma once

extern "C" {
int penstock_switch = 0;
}
