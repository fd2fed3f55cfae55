"""The patches applied to excerpts of Horovod 0.28.1's sources, and to other text."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualdist.errors import BuildError
from dualdist.horovod_build.patches import SourcePatch, apply, digest, patch_text, patches_for

# From the sdist of Horovod 0.28.1, around each patch.
SOURCES = {
    "CMakeLists.txt": """\
project(horovod CXX)

set(CMAKE_CXX_STANDARD 14)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -pthread -fPIC -Wall -ftree-vectorize")
""",
    "horovod/torch/CMakeLists.txt": """\
execute_process(COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; print(get_python_inc())"
                OUTPUT_VARIABLE PYTHON_INCLUDE_PATH OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")
    set(CMAKE_CXX_STANDARD 14)
endif()
set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES PREFIX "")
set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib_v2")
""",
    "setup.py": """\
        config = 'Debug' if self.debug or os.environ.get('HOROVOD_DEBUG') == "1" else 'RelWithDebInfo'
      python_requires='>=3.6',
      zip_safe=False,
""",
    "horovod/common/gloo/gloo_context.cc": """\
  assert(global_context.IsEnabled());

  attr device_attr;
  device_attr.iface = gloo_iface_;
""",
    "horovod/common/process_set.cc": """\
  std::lock_guard<std::recursive_mutex> guard(mutex);

  auto locally_registered_count = (int)ids_.size();
  global_controller.Allgather2Ints(pair_to_transmit, recv_buffer);
    for (auto id : Ids()) {
      bool newly_registered = Get(id).Initialize(global_context);
std::vector<int32_t> ProcessSetTable::Ids() const {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  return ids_;
  for (auto id : Ids()) {
    if (Get(id).registered_global_ranks == ranks) {
""",
    "horovod/common/ops/cuda/CMakeLists.txt": "set(CMAKE_CUDA_STANDARD 11)\nset(CMAKE_CUDA_STANDARD_REQUIRED ON)\n",
    "horovod/runner/js_run.py": "from horovod.runner.util import lsf\nfrom distutils.spawn import find_executable\n",
    "horovod/runner/http/http_server.py": """\
                        self.server.cache.get(scope, {}).clear()
                        self.server.finished_list.clear()
        with self.finished_list_lock:
            self.finished_list.clear()
""",
    "horovod/runner/mpi_run.py": """\
_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']
""",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_patches_change_horovod_s_sources(source: Path) -> None:
    apply(source, patches_for(20, ("/opt/mpi/lib",)))
    texts = {name: (source / name).read_text() for name in SOURCES}
    assert "set(CMAKE_CXX_STANDARD 20)" in texts["CMakeLists.txt"]
    assert "set(CMAKE_CXX_STANDARD 20)" in texts["horovod/torch/CMakeLists.txt"]
    assert 'torch/lib;$ORIGIN/../../nvidia/nccl/lib;/opt/mpi/lib")' in texts["horovod/torch/CMakeLists.txt"]
    assert "self.finished_list.clear()" in texts["horovod/runner/http/http_server.py"]
    assert "self.server.finished_list[scope].clear()" in texts["horovod/runner/http/http_server.py"]
    assert not any("distutils" in text for text in texts.values())


def test_every_patched_file_has_an_excerpt_here() -> None:
    assert {patch.path for patch in patches_for(17, ())} == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_other_text_is_an_error_and_changes_nothing(source: Path, name: str) -> None:
    (source / name).write_text("another version\n")
    with pytest.raises(BuildError, match=rf"{name} has .* 0 times, expected 1"):
        apply(source, patches_for(17, ()))
    assert all((source / other).read_text() == text for other, text in SOURCES.items() if other != name)


def test_a_missing_file_is_named(source: Path) -> None:
    (source / "horovod/runner/js_run.py").unlink()
    with pytest.raises(BuildError, match=r"no horovod/runner/js_run\.py"):
        apply(source, patches_for(17, ()))


def test_text_that_occurs_twice_is_an_error() -> None:
    with pytest.raises(BuildError, match="2 times, expected 1"):
        patch_text("a a", SourcePatch("f", "a", "b", "why"))


def test_different_patches_have_different_digests() -> None:
    assert digest(patches_for(17, ())) == digest(patches_for(17, ()))
    assert len({digest(patches_for(*case)) for case in ((17, ()), (20, ()), (17, ("/opt/mpi/lib",)))}) == 3
