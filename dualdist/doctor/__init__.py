"""Checks of an installation, its host and its job, and what to type; torch may be broken or missing.

host.py and collect.py gather facts; checks/ has pure functions from facts to findings, one module per subject;
explain.py traces the topology to its variables; smoke_test.py starts ranks and hosts.py probes other hosts, on request.
"""

from dualdist.doctor.context import Finding
from dualdist.doctor.diagnosis import Diagnosis, diagnose, evaluate, installed_backends, to_json

__all__ = ["Diagnosis", "Finding", "diagnose", "evaluate", "installed_backends", "to_json"]
