"""Test tiers: `make test` takes minutes, `make test-all` also runs tests marked `full`.

Unit tests and laws are in the first tier unless they are marked `full`. Tests in FOLDERS, which start real launchers,
are in the second one unless they are marked `smoke`. `smoke("id", ...)` takes only these cases of a parametrized test.
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest

FOLDERS = ("launch", "faults", "docker")


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark tests that only the second tier runs as `full`.

    Raises:
        pytest.UsageError: A marker names a case that its test does not have.
    """
    cases: dict[str, set[str]] = defaultdict(set)
    named: dict[str, set[str]] = {}
    for item in items:
        smoke = item.get_closest_marker("smoke")
        name, _, case = item.nodeid.removesuffix("]").partition("[")
        if smoke is not None:
            cases[name].add(case)
            named[name] = set(smoke.args)
        if (smoke.args and case not in smoke.args) if smoke else item.path.parent.name in FOLDERS:
            item.add_marker(pytest.mark.full)
    for name, wanted in named.items():
        if unknown := wanted - cases[name]:
            raise pytest.UsageError(f"{name} has no cases {sorted(unknown)}, expected some of {sorted(cases[name])}")
