"""Base environment of launched programs: without any launcher's variables."""

import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTUP = str(Path(__file__).with_name("startup"))
"""On PYTHONPATH: makes processes import torch faster, counts them, and has them write whole lines."""
LAUNCHER_NAMES = {"RANK", "WORLD_SIZE", "NODE_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"}
UNCOMPILED = "PYTHONDONTWRITEBYTECODE"
"""With this variable every process compiles the modules that it imports, half a second per rank."""
UNBUFFERED = "PYTHONUNBUFFERED"
"""With this variable each word of a print() is a write of its own, between which another rank writes."""
LAUNCHER_PREFIXES = (
    *("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_"),
    *("HOROVOD_", "DUALDIST_"),
    *("OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "MPI_", "HYDRA_", "HYDI_", "I_MPI_", "MV2_"),
    *("SLURM_", "SLURMD_", "SALLOC_", "SBATCH_", "PALS_", "JSM_", "FLUX_"),
)


def base_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environ without launcher variables, with this interpreter's programs first and one thread per rank."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in (*LAUNCHER_NAMES, UNCOMPILED, UNBUFFERED)
        and not name.startswith(LAUNCHER_PREFIXES)
        and "PYTEST" not in name
    }
    programs = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    return kept | {
        "PATH": ":".join([*dict.fromkeys(programs), kept.get("PATH", "/usr/bin:/bin"), "/usr/sbin", "/sbin"]),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{STARTUP}",
        "OMP_NUM_THREADS": "1",
        # Hides choices that the user has saved with dualdist compare.
        "XDG_CONFIG_HOME": str(Path(tempfile.gettempdir(), "dualdist-tests-config")),
    }
