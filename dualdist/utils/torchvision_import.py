"""Import of torchvision even if its compiled operators do not load with the installed torch."""

import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import torch

from dualdist.errors import TorchvisionError

# Operators that `import torchvision` registers fake kernels for; it fails if they do not exist.
SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
LIBRARIES = ("_C_stable", "_C")  # since torchvision 0.29, and before
ADVICE = (
    "install the release for this torch without replacing torch, "
    "e.g. `pip install --no-deps torchvision==0.28.0 pillow` for torch 2.13"
)


def load_torchvision() -> ModuleType:
    """Return the module `torchvision`; call this before the program's first `import torchvision`.

    If torchvision's compiled operators cannot be loaded (a CUDA build with a CPU torch, say), plain
    `import torchvision` fails with "operator torchvision::nms does not exist". This declares the missing operators
    first, without implementations: models, transforms and data sets are pure Python and work; box operators such as
    `torchvision.ops.nms` still raise when called.

    Raises:
        TorchvisionError: torchvision is not installed, or fails to import.
    """
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    if not _prepare_operators():
        raise TorchvisionError(f"torchvision is not installed with torch {torch.__version__}: {ADVICE}")
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise TorchvisionError(
            f"torchvision does not work with torch {torch.__version__} ({error}): {ADVICE}"
        ) from error


class TorchvisionImportHook(MetaPathFinder):
    """Prepares a program's first `import torchvision` as load_torchvision() does; finds no modules itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _prepare_operators()
        return None


def _prepare_operators() -> bool:
    """Load torchvision's compiled operators, or declare them; return False if torchvision is not installed."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.submodule_search_locations is None:
        return False
    if not load_operators(spec.submodule_search_locations):
        _declare_operators()
    return True


def load_operators(folders: Sequence[str]) -> bool:
    """Load torchvision's compiled operators into torch; return True on success."""
    loader = (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES)
    for folder, name in itertools.product(folders, LIBRARIES):
        found = importlib.machinery.FileFinder(folder, loader).find_spec(name)
        if found is not None and found.origin is not None:
            try:
                torch.ops.load_library(found.origin)
            except OSError:
                return False
            return True
    return False


@functools.cache
def _declare_operators() -> torch.library.Library:
    """Declare the operators that torch lacks. They live as long as the returned object, which the cache keeps."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    return library
