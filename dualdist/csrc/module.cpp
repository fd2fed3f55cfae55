// The extension module: dualdist._core_<version of torch>, built by setup.py and loaded by dualdist/utils/extension.py.
#include "modules.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "dualdist's C++ parts; each has a Python twin of the same interface.";
  bind_gradients(module);
  bind_shared_memory(module);
}
