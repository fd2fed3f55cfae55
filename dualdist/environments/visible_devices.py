"""Read from the environment which accelerators it shows to a process: pure functions of its variables.

CUDA_VISIBLE_DEVICES: CUDA C++ programming guide, "CUDA environment variables"; MIG names: NVIDIA's MIG user guide,
"Device names". ROCR_VISIBLE_DEVICES restricts what HIP finds, and HIP_VISIBLE_DEVICES counts among those: ROCm
documentation, "GPU isolation techniques". ZE_AFFINITY_MASK: Level Zero's core programming guide.
"""

from __future__ import annotations

from collections.abc import Mapping

CUDA, HIP, ROCR, LEVEL_ZERO = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
MIG = "MIG-"
# Hides all accelerators from a process, also on HIP, which reads CUDA's variable. Level Zero has no such value.
HIDDEN = {CUDA: ""}


def shown_devices(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the accelerators that a process may use, as they are named to it; None if all that there are.

    HIP's variable goes before CUDA's, which HIP reads too, and counts among the devices that ROCR's leaves.
    """
    runtime = None if ROCR not in environ else _listed(environ[ROCR])
    name = next((each for each in (HIP, CUDA) if each in environ), None)
    if name is not None:
        chosen = _listed(environ[name])
        if runtime is None:
            return chosen
        return tuple(runtime[int(each)] for each in chosen if each.isdecimal() and int(each) < len(runtime))
    if runtime is not None or not environ.get(LEVEL_ZERO):
        return runtime
    return tuple(dict.fromkeys(part.strip() for part in environ[LEVEL_ZERO].split(",") if part.strip()))


def hides_all(environ: Mapping[str, str]) -> bool:
    """Return True if the variables leave no accelerator."""
    return shown_devices(environ) == ()


def describe(environ: Mapping[str, str]) -> str:
    """Return the variables that restrict a process, as NAME=VALUE, for messages."""
    return " ".join(f"{name}={environ[name]}" for name in (CUDA, HIP, ROCR, LEVEL_ZERO) if name in environ)


def _listed(value: str) -> tuple[str, ...]:
    """Return the devices of a list of indices and UUIDs. The list ends before the first word that is neither.

    So "-1" hides all, and so does "NoDevFiles", which Slurm sets for a task without GPUs. CUDA shows a process one MIG
    instance at most.
    """
    found: list[str] = []
    for part in value.split(","):
        name = part.strip()
        is_mig = name.startswith(MIG)
        if name in found or not (name.isdecimal() or name.startswith("GPU-") or is_mig):
            break
        found.append(name)
        if is_mig:
            return (name,)
    return tuple(found)
