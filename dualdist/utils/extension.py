"""Load the C++ extension that setup.py builds from dualdist/csrc, if there is one for this torch.

Its name has torch's version and a checksum of its sources in it, so that one that was built for another torch, or from
other sources, is never loaded. setup.py takes the name from here.
"""

import functools
import importlib
import importlib.util
import os
import zlib
from pathlib import Path
from types import ModuleType

VARIABLE = "DUALDIST_NO_EXTENSION"  # set to 1, it turns the extension off


PACKAGE = Path(__file__).resolve().parents[1]
PREFIX = "_core_"


def module_name(torch_version: str) -> str:
    """Return the name of the extension for a version of torch."""
    tag = "".join(character if character.isalnum() else "_" for character in torch_version)
    files = sorted(path for path in (PACKAGE / "csrc").iterdir() if path.suffix in (".cpp", ".h"))
    sources = b"".join(path.read_bytes() for path in files)
    return f"dualdist.{PREFIX}{tag}_{zlib.crc32(sources):08x}"


@functools.cache
def load() -> ModuleType | None:
    """Return the extension; None if it was not built for this torch, or is turned off."""
    import torch

    return importlib.import_module(module_name(torch.__version__)) if is_used(torch.__version__) else None


def is_used(torch_version: str | None) -> bool:
    """Return True if there is an extension for this version of torch, and it is not turned off."""
    if torch_version is None or os.environ.get(VARIABLE) == "1":
        return False
    return importlib.util.find_spec(module_name(torch_version)) is not None


def built_for() -> tuple[str, ...]:
    """Return for which versions of torch and sources extensions are installed, as their file names give them."""
    return tuple(sorted({path.name.split(".")[0].removeprefix(PREFIX) for path in PACKAGE.glob(f"{PREFIX}*.so")}))
