"""What the installed Horovod was built for, read without importing it or torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dualdist.utils.horovod_names import real_horovod

# The record lies inside the wheel; setup.py is patched to pack it.
RECORD_NAME = "dualdist_build.json"
# Horovod's own build leaves the torch version there, also where somebody else built it.
METADATA_NAME = "metadata.json"
# Of the fields that are no texts.
KINDS: dict[str, type] = {"cxx11_abi": bool, "gloo": bool, "mpi": bool, "patches": tuple}


@dataclass(frozen=True)
class BuildRecord:
    """One built Horovod; None where nothing is known, as for a Horovod that dualdist did not build."""

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
        """Whether this was built for that torch; pip leaves out the "+cu130" of PyPI's CUDA builds."""
        if self.torch is None or ("+" in self.torch and "+" in torch_version):
            return self.torch in (None, torch_version)
        return self.torch.partition("+")[0] == torch_version.partition("+")[0]


def to_json(record: BuildRecord) -> str:
    """The record as the text of its file."""
    return json.dumps(asdict(record), indent=2) + "\n"


def from_json(text: str) -> BuildRecord:
    """The record of a file's text; fields of a later dualdist are passed over. ValueError or TypeError if damaged."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("lists stand too deep in one another") from error
    known = {field.name: data[field.name] for field in fields(BuildRecord) if field.name in data}
    if known.get("patches") is not None:
        known["patches"] = tuple(known["patches"])
    wrong = [name for name, value in known.items() if not isinstance(value, (KINDS.get(name, str), type(None)))]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: expected other kinds of values")
    return BuildRecord(**known)


@real_horovod()
def read_record() -> BuildRecord | None:
    """What the Horovod that `import horovod` would find was built for; None if there is none."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        return from_json((folder / RECORD_NAME).read_text())
    except (OSError, ValueError, TypeError):
        return _foreign_record(folder)


def _foreign_record(folder: Path) -> BuildRecord | None:
    """The little that a Horovod built without dualdist says about itself."""
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        torch_version = json.loads((folder / METADATA_NAME).read_text()).get("pytorch")
    except (OSError, ValueError, AttributeError, RecursionError):
        torch_version = None
    return BuildRecord(horovod=version, torch=torch_version)
