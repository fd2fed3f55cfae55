// The parts of the extension, each in a file of its own.
#pragma once

#include <pybind11/pybind11.h>

void bind_gradients(pybind11::module_& module);
void bind_shared_memory(pybind11::module_& module);
