"""From a comparison to the choices that `backend="auto"` will take: one for each way in which ranks are started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dualdist.bench.compare.launches import Launch
from dualdist.bench.compare.verdict import ranking, step_ratio
from dualdist.bench.paired import least_launches
from dualdist.rendezvous.saved_choice import Conditions, Saved

Launches = Mapping[str, Sequence[Launch]]


def chosen(contenders: Launches, at: str) -> Iterator[Saved | str]:
    """The fastest contender, by label, of every launcher that started two or more; or a sentence why there is none.

    auto cannot change the launcher, so contenders of different ones are no choice. Somebody must be slower for sure.
    """
    for conditions, found in _by_conditions(contenders).items():
        if len(found) < 2:
            yield f"nothing saved for {conditions}: {next(iter(found))} was the only one that it started"
            continue
        first, *others = ranking(found)
        pairs = len(found) * (len(found) - 1) // 2  # the first is looked for, and any of them may come out as that
        ratios = {other: step_ratio(found[other], found[first], among=pairs) for other in others}
        slower = {other: each for other, each in ratios.items() if each and each.value > 1 and each.differs_from(1.0)}
        if not slower and not any(each and each.is_sound for each in ratios.values()):
            yield f"nothing saved for {conditions}: {len(found)} contenders need {least_launches(pairs)} runs of each"
            continue
        if not slower:
            yield f"nothing saved for {conditions}: no difference that these runs can show"
            continue
        why = ", ".join(f"{each.value:.2f}x faster than {other}" for other, each in slower.items())
        place = found[first][0].first
        yield Saved(conditions, place.backend, place.transport, at, why)


def _by_conditions(contenders: Launches) -> dict[Conditions, Launches]:
    groups: dict[Conditions, dict[str, Sequence[Launch]]] = {}
    for label, found in contenders.items():
        first = found[0].first
        here = Conditions.here(first.device, first.launcher, first.ranks, threads=first.threads, mpi=first.mpi)
        groups.setdefault(here, {})[label] = found
    return dict(groups)
