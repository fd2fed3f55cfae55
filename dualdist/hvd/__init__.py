"""The Horovod API: `import dualdist.hvd as hvd` in place of `import horovod.torch as hvd`, and nothing else changes.

It has every public name of horovod.torch 0.28.1, with its signature. The ranks work over torch.distributed, without an
installed Horovod, or over a real Horovod with DUALDIST_BACKEND=horovod. Where Horovod is known to be wrong, this is
right; the README lists the differences.
"""

from dualdist.hvd import compression as compression
from dualdist.hvd import elastic as elastic
from dualdist.hvd import functions as functions
from dualdist.hvd import mpi_ops as mpi_ops
from dualdist.hvd import optimizer as optimizer
from dualdist.hvd import sync_batch_norm as sync_batch_norm
from dualdist.hvd.common import HorovodInternalError as HorovodInternalError
from dualdist.hvd.compression import Compression as Compression
from dualdist.hvd.functions import allgather_object as allgather_object
from dualdist.hvd.functions import broadcast_object as broadcast_object
from dualdist.hvd.functions import broadcast_optimizer_state as broadcast_optimizer_state
from dualdist.hvd.functions import broadcast_parameters as broadcast_parameters
from dualdist.hvd.mpi_ops import Adasum as Adasum
from dualdist.hvd.mpi_ops import Average as Average
from dualdist.hvd.mpi_ops import Max as Max
from dualdist.hvd.mpi_ops import Min as Min
from dualdist.hvd.mpi_ops import ProcessSet as ProcessSet
from dualdist.hvd.mpi_ops import Product as Product
from dualdist.hvd.mpi_ops import Sum as Sum
from dualdist.hvd.mpi_ops import add_process_set as add_process_set
from dualdist.hvd.mpi_ops import allgather as allgather
from dualdist.hvd.mpi_ops import allgather_async as allgather_async
from dualdist.hvd.mpi_ops import allreduce as allreduce
from dualdist.hvd.mpi_ops import allreduce_ as allreduce_
from dualdist.hvd.mpi_ops import allreduce_async as allreduce_async
from dualdist.hvd.mpi_ops import allreduce_async_ as allreduce_async_
from dualdist.hvd.mpi_ops import alltoall as alltoall
from dualdist.hvd.mpi_ops import alltoall_async as alltoall_async
from dualdist.hvd.mpi_ops import barrier as barrier
from dualdist.hvd.mpi_ops import broadcast as broadcast
from dualdist.hvd.mpi_ops import broadcast_ as broadcast_
from dualdist.hvd.mpi_ops import broadcast_async as broadcast_async
from dualdist.hvd.mpi_ops import broadcast_async_ as broadcast_async_
from dualdist.hvd.mpi_ops import ccl_built as ccl_built
from dualdist.hvd.mpi_ops import cross_rank as cross_rank
from dualdist.hvd.mpi_ops import cross_size as cross_size
from dualdist.hvd.mpi_ops import cuda_built as cuda_built
from dualdist.hvd.mpi_ops import ddl_built as ddl_built
from dualdist.hvd.mpi_ops import gloo_built as gloo_built
from dualdist.hvd.mpi_ops import gloo_enabled as gloo_enabled
from dualdist.hvd.mpi_ops import grouped_allgather as grouped_allgather
from dualdist.hvd.mpi_ops import grouped_allgather_async as grouped_allgather_async
from dualdist.hvd.mpi_ops import grouped_allreduce as grouped_allreduce
from dualdist.hvd.mpi_ops import grouped_allreduce_ as grouped_allreduce_
from dualdist.hvd.mpi_ops import grouped_allreduce_async as grouped_allreduce_async
from dualdist.hvd.mpi_ops import grouped_allreduce_async_ as grouped_allreduce_async_
from dualdist.hvd.mpi_ops import grouped_reducescatter as grouped_reducescatter
from dualdist.hvd.mpi_ops import grouped_reducescatter_async as grouped_reducescatter_async
from dualdist.hvd.mpi_ops import init as init
from dualdist.hvd.mpi_ops import is_initialized as is_initialized
from dualdist.hvd.mpi_ops import join as join
from dualdist.hvd.mpi_ops import local_rank as local_rank
from dualdist.hvd.mpi_ops import local_size as local_size
from dualdist.hvd.mpi_ops import mpi_built as mpi_built
from dualdist.hvd.mpi_ops import mpi_enabled as mpi_enabled
from dualdist.hvd.mpi_ops import mpi_threads_supported as mpi_threads_supported
from dualdist.hvd.mpi_ops import nccl_built as nccl_built
from dualdist.hvd.mpi_ops import poll as poll
from dualdist.hvd.mpi_ops import rank as rank
from dualdist.hvd.mpi_ops import reducescatter as reducescatter
from dualdist.hvd.mpi_ops import reducescatter_async as reducescatter_async
from dualdist.hvd.mpi_ops import remove_process_set as remove_process_set
from dualdist.hvd.mpi_ops import rocm_built as rocm_built
from dualdist.hvd.mpi_ops import shutdown as shutdown
from dualdist.hvd.mpi_ops import size as size
from dualdist.hvd.mpi_ops import sparse_allreduce_async as sparse_allreduce_async
from dualdist.hvd.mpi_ops import start_timeline as start_timeline
from dualdist.hvd.mpi_ops import stop_timeline as stop_timeline
from dualdist.hvd.mpi_ops import synchronize as synchronize
from dualdist.hvd.optimizer import DistributedOptimizer as DistributedOptimizer
from dualdist.hvd.process_sets import global_process_set as global_process_set
from dualdist.hvd.sync_batch_norm import SyncBatchNorm as SyncBatchNorm


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Do nothing: there is no compiled extension that could be missing."""
