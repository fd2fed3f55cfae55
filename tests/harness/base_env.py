"""An environment in which no launcher is at work, for the launchers that tests start."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_NAMES = {"RANK", "WORLD_SIZE", "NODE_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"}
# The prefixes end where a word ends, so that PMI_RANK goes and PMIXED stays.
LAUNCHER_PREFIXES = (
    "DUALDIST_ GROUP_ HOROVOD_ HYDI_ HYDRA_ I_MPI_ JSM_ LOCAL_ MASTER_ MPI_ MV2_ OMPI_ OPAL_ ORTE_ PALS_ PMIX_ PMI_ "
    "PRTE_ ROLE_ SALLOC_ SBATCH_ SLURMD_ SLURM_ TORCHELASTIC_ TORCH_ELASTIC_ FLUX_"
).split()


def base_env(environ: Mapping[str, str]) -> dict[str, str]:
    """environ without what launchers set, with this interpreter's programs first and one thread a rank."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(tuple(LAUNCHER_PREFIXES)) and "PYTEST" not in name
    }
    programs = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    return kept | {
        "PATH": ":".join([*dict.fromkeys(programs), kept.get("PATH", "/usr/bin:/bin"), "/usr/sbin", "/sbin"]),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
