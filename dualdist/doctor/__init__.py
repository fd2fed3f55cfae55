"""Checks of an installation, its host and its job: what would not work and what to type; nothing is started.

host.py and collect.py gather facts; checks/ has pure functions from facts to findings, one module per subject;
explain.py says where the topology came from; smoke_test.py starts ranks and hosts.py asks other hosts, on request.
torch may be broken or missing.
"""

from dualdist.backends.availability import Availability
from dualdist.doctor.diagnosis import Diagnosis, diagnose, installed_backends, judge, to_json
from dualdist.doctor.findings import Finding

__all__ = ["Availability", "Diagnosis", "Finding", "diagnose", "installed_backends", "judge", "to_json"]
