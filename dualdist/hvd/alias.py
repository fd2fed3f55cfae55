"""Horovod's module names for this face: after install(), `import horovod.torch` finds it, with or without a Horovod."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

from dualdist.utils.horovod_names import HorovodAlias, installed_alias
from dualdist.utils.torchvision_import import TorchvisionImportHook

# What Horovod's names mean. Those that have no module elsewhere are files in the folder named.
TABLE: Mapping[str, str] = MappingProxyType(
    {
        "horovod.torch": "dualdist.hvd",
        "horovod.torch.compression": "dualdist.hvd.compression",
        "horovod.torch.elastic": "dualdist.hvd.elastic",
        "horovod.torch.elastic.sampler": "dualdist.hvd.elastic.sampler",
        "horovod.torch.elastic.state": "dualdist.hvd.elastic.state",
        "horovod.torch.functions": "dualdist.hvd.functions",
        "horovod.torch.mpi_ops": "dualdist.hvd.mpi_ops",
        "horovod.torch.optimizer": "dualdist.hvd.optimizer",
        "horovod.torch.sync_batch_norm": "dualdist.hvd.sync_batch_norm",
        "horovod.common.elastic": "dualdist.hvd.elastic.common",
        "horovod.common.exceptions": "dualdist.hvd.exceptions",
        "horovod.common.process_sets": "dualdist.hvd.process_sets",
    }
)
ABSENT = frozenset(f"horovod.{face}" for face in ("tensorflow", "keras", "_keras", "mxnet", "spark", "ray"))


def install() -> None:
    """From here on `import horovod...` finds this face, here and in children started by multiprocessing.

    Names that the face lacks are taken from an installed Horovod. A second call changes nothing.
    """
    if installed_alias() is None:
        sys.meta_path.insert(0, TorchvisionImportHook())  # the programs of old import torchvision without our help
        HorovodAlias(TABLE, ABSENT).install()
