"""What would not work here, and what to type; nothing is started, and torch may be broken or missing.

Facts are gathered in host.py and look.py; findings are pure functions of them, a family a file (of_torch.py and its
kin); explain.py tells where a topology came from; cells.py starts ranks and hosts.py asks other hosts when told to.
"""

from dualdist.doctor.context import Availability
from dualdist.doctor.diagnosis import Diagnosis, diagnose, installed_backends, judge, to_json
from dualdist.doctor.findings import Finding

__all__ = ["Availability", "Diagnosis", "Finding", "diagnose", "installed_backends", "judge", "to_json"]
