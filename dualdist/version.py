"""The version, read by the package and by its build."""

__version__ = "0.2.0"
