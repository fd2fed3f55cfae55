"""Build dualdist/csrc for the torch of this environment, where there is one and a C++ compiler; else nothing.

The extension is optional: dualdist runs without it, with Python in its place. It takes half a minute to compile, so
it is kept in the user's cache, under a name that has the versions of its sources, of torch and of Python, unless the
environment sets flags of the compiler.
"""

import contextlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

# pip builds in an environment of its own, in which torch is missing; the extension is for the one it installs into.
sys.path.append(sysconfig.get_path("platlib"))


def extension() -> dict:
    """Return setup()'s arguments that describe the extension; {} where it cannot be built."""
    if (
        shutil.which((os.environ.get("CXX") or "g++").split()[0]) is None
        or os.environ.get("DUALDIST_NO_EXTENSION") == "1"
    ):
        return {}
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except Exception:  # a broken torch raises OSError or ValueError, too
        return {}
    spec = importlib.util.spec_from_file_location("extension", "dualdist/utils/extension.py")
    naming = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(naming)
    core = CppExtension(
        naming.module_name(torch.__version__),
        [f"dualdist/csrc/{name}.cpp" for name in ("module", "arithmetic", "gradients", "shared_memory")],
        depends=["dualdist/csrc/arithmetic.h", "dualdist/csrc/modules.h"],
        extra_compile_args=["-O3", "-g0"],
        optional=True,
    )

    class BuildOrTakeFromCache(BuildExtension.with_options(use_ninja=False)):
        def build_extension(self, ext) -> None:
            built = Path(self.get_ext_fullpath(ext.name))
            kept = cache() / built.name
            if kept.is_file():
                built.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(kept, built)
                return
            super().build_extension(ext)
            if not any(os.environ.get(flags) for flags in ("CFLAGS", "CPPFLAGS", "CXXFLAGS")):
                keep(built, kept)

    return {"ext_modules": [core], "cmdclass": {"build_ext": BuildOrTakeFromCache}}


def cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "dualdist" / "extensions" / "".join(platform.libc_ver())


def keep(built: Path, kept: Path) -> None:
    with contextlib.suppress(OSError):  # a full or a read-only disk costs a later compilation only
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(built, partial)
        partial.replace(kept)


setup(**extension())
