"""A Docker engine, and the image for CPUs, built once by docker/Dockerfile.

Where no engine runs, one is started, with a base that debootstrap makes. By itself (CI's form) the build takes the
wheel of Horovod that `make setup` has built for the same torch, Python and MPI; DUALDIST_DOCKER=full builds all of it.
DUALDIST_DOCKER_BASE names another base, where an engine runs that reaches no registry.
"""

import os
from collections.abc import Iterator, Mapping

import pytest
from harness.docker import IMAGE, Engine, Image, NoEngineError, build_image, engine, make_base
from harness.jobs import Launch

from dualdist.horovod_build.machine import cache_folder

FORM, BASE = "DUALDIST_DOCKER", "DUALDIST_DOCKER_BASE"


@pytest.fixture(scope="session")
def _engine(
    base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory, _orphans_stay_ours: None
) -> Iterator[Engine]:
    try:
        with engine(tmp_path_factory.mktemp("engine"), base_env) as answering:
            yield answering
    except NoEngineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def image(_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    launch = Launch(_engine.env, tmp_path_factory.mktemp("image"))
    wheels = None if os.environ.get(FORM) == "full" else cache_folder(os.environ) / "wheels"
    base = os.environ.get(BASE) or (make_base(launch, wheels) if _engine.is_ours else None)
    build_image(launch, base)
    network = f"dualdist-test-{os.getpid()}"
    launch(["docker", "network", "create", "--internal", network])
    yield Image(IMAGE, launch, network)
    launch(["docker", "network", "rm", network])
    if not _engine.is_ours:
        launch(["docker", "image", "rm", "--force", IMAGE])
