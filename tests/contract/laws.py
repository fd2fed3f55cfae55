"""All laws: importing this module imports the other files *_laws.py, whose decorators fill LAWS and ALONE."""

from importlib import import_module
from pathlib import Path

from contract.oracle import ALONE, LAWS

__all__ = ["ALONE", "LAWS"]

for path in sorted(Path(__file__).parent.glob("*_laws.py")):
    if path.stem != "test_laws":
        import_module(f"contract.{path.stem}")
