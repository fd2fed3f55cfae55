"""Build record of the installed Horovod, read without importing it or torch."""

import importlib.util
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dualdist.utils.horovod_names import real_horovod
from dualdist.utils.machine import package_version

# The record is a file in the wheel; setup.py is patched to include it.
RECORD_NAME = "dualdist_build.json"
# Horovod's setup.py writes the torch version there, also without dualdist.
METADATA_NAME = "metadata.json"
# Types of the fields that are not strings.
FIELD_TYPES: dict[str, type] = {"cxx11_abi": bool, "gloo": bool, "mpi": bool, "patches": tuple}


@dataclass(frozen=True)
class BuildRecord:
    """The versions and options of a Horovod build; None for unknown, such as in a build without dualdist."""

    horovod: str
    torch: str | None = None
    torch_git: str | None = None
    cxx11_abi: bool | None = None
    python: str | None = None
    gloo: bool | None = None
    mpi: bool | None = None
    mpi_version: str | None = None
    nccl: str | None = None
    cuda: str | None = None
    patches: tuple[str, ...] | None = None
    key: str | None = None

    def fits(self, torch_version: str) -> bool:
        """Return True if this was built for that torch; pip omits the "+cu130" of PyPI's CUDA builds."""
        if self.torch is None or ("+" in self.torch and "+" in torch_version):
            return self.torch in (None, torch_version)
        return self.torch.partition("+")[0] == torch_version.partition("+")[0]


def to_json(record: BuildRecord) -> str:
    return json.dumps(asdict(record), indent=2) + "\n"


def from_json(text: str) -> BuildRecord:
    """Parse a record, ignoring unknown fields; raise ValueError or TypeError if it is damaged."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    known = {field.name: data[field.name] for field in fields(BuildRecord) if field.name in data}
    if known.get("patches") is not None:
        known["patches"] = tuple(known["patches"])
    wrong = [name for name, value in known.items() if not isinstance(value, (FIELD_TYPES.get(name, str), type(None)))]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: wrong types")
    return BuildRecord(**known)


@real_horovod()
def read_record() -> BuildRecord | None:
    """Return the build record of the installed Horovod; None without one."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        return from_json((folder / RECORD_NAME).read_text())
    except (OSError, ValueError, TypeError):
        return _foreign_record(folder)


def _foreign_record(folder: Path) -> BuildRecord | None:
    """Return the versions of a Horovod that dualdist did not build."""
    if (version := package_version("horovod")) is None:
        return None
    try:
        torch_version = json.loads((folder / METADATA_NAME).read_text()).get("pytorch")
    except (OSError, ValueError, AttributeError, RecursionError):
        torch_version = None
    return BuildRecord(horovod=version, torch=torch_version)
