"""The alias `horovod`: after install(), `import horovod.torch` finds dualdist.hvd, with or without a Horovod."""

import sys
from collections.abc import Mapping
from types import MappingProxyType

from dualdist.utils.horovod_names import HorovodAlias, installed_alias
from dualdist.utils.torchvision_import import TorchvisionImportHook

SAME_NAMES = ("compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm")
# The package `horovod` is in the folder named; parents of these names that are not listed are empty.
TABLE: Mapping[str, str] = MappingProxyType(
    {
        "horovod.torch": "dualdist.hvd",
        **{f"horovod.torch.{name}": f"dualdist.hvd.{name}" for name in SAME_NAMES},
        "horovod.torch.elastic.sampler": "dualdist.hvd.elastic",
        "horovod.torch.elastic.state": "dualdist.hvd.elastic",
        "horovod.common.basics": "dualdist.hvd.basics",
        "horovod.common.elastic": "dualdist.hvd.elastic",
        "horovod.common.exceptions": "dualdist.hvd.common",
        "horovod.common.process_sets": "dualdist.hvd.process_sets",
        "horovod.common.util": "dualdist.hvd.common",
        "horovod.runner.util.threads": "dualdist.hvd.common",
    }
)
ABSENT = frozenset(f"horovod.{name}" for name in ("tensorflow", "keras", "_keras", "mxnet", "spark", "ray"))


def install() -> None:
    """Let `import horovod...` find dualdist.hvd, here and in child processes of multiprocessing.

    Names that dualdist.hvd lacks are those of an installed Horovod. A second call changes nothing.
    """
    if installed_alias() is None:
        sys.meta_path.insert(0, TorchvisionImportHook())  # programs for Horovod import torchvision as it is
        HorovodAlias(TABLE, ABSENT).install()
