"""The tests of a cell run one after the other, so that its ranks are started once."""

import pytest


def cell_of(item: pytest.Item) -> object:
    """Return the cell in which the item runs, if it runs in one."""
    return item.callspec.params.get("ranks") if hasattr(item, "callspec") else None


@pytest.hookimpl(trylast=True)  # pytest itself orders by the number of a parameter, which differs between tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    numbers: dict[object, int] = {}
    for item in items:
        numbers.setdefault(cell_of(item), len(numbers))
    in_cells = iter(sorted((item for item in items if cell_of(item)), key=lambda item: numbers[cell_of(item)]))
    items[:] = [next(in_cells) if cell_of(item) else item for item in items]
