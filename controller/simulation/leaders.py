"""Who leads where: crossovers of curves, the best budget at each load, and Pareto fronts.

Owns comparisons between policies. Must not sum up runs, draw or print.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

from controller.simulation.curves import PolicyReport, Times
from controller.simulation.goodput import LoadPoint, crossovers

EVERYBODY: Final = ""
"""In place of a class's name: all requests."""

# Two policies that both keep nearly everybody change places by luck.
_LEAST_LEAD: Final = 0.01
_WITH_BUDGET: Final = re.compile(r"(.+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Crossover:
    """The offered rate at which the attainment of two policies changes places."""

    first: str
    second: str
    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Front:
    """The policies that no other one beats in both TTFT P90 and TPOT P90, earliest token first.

    At one load, of one class or of `EVERYBODY`.
    """

    load: float
    slo_class: str
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BestBudget:
    """The budget of a family (`edf` of `edf-512`) that keeps most promises at one load."""

    family: str
    load: float
    rate: float
    policy: str
    attainment: float


def all_crossovers(policies: Sequence[PolicyReport]) -> Iterable[Crossover]:
    """Yield every pair in which one of the two is the first policy: the one that is judged."""
    for other in policies[1:]:
        yield from _between(policies[0], other, _LEAST_LEAD)


def _between(first: PolicyReport, second: PolicyReport, least_lead: float) -> Iterable[Crossover]:
    for rate in crossovers(first.curve, second.curve, least_lead):
        yield Crossover(first.policy, second.policy, rate, attainment_at(first.curve, rate))


def attainment_at(curve: Sequence[LoadPoint], rate: float) -> float:
    """Return the attainment at a rate within the curve, interpolated linearly."""
    for low, high in itertools.pairwise(curve):
        if low.rate <= rate <= high.rate:
            share = (rate - low.rate) / (high.rate - low.rate)
            return low.attainment + share * (high.attainment - low.attainment)
    raise ValueError(f"the curve does not reach {rate}")


def budget_of(policy: str) -> tuple[str, int] | None:
    """Return family and budget of a policy with a fixed one: `edf-512` is ("edf", 512)."""
    found = _WITH_BUDGET.fullmatch(policy)
    return None if found is None else (found[1], int(found[2]))


def best_budgets(policies: Sequence[PolicyReport]) -> Iterable[BestBudget]:
    """Yield the best of every family with a choice; of equals the smaller budget: shorter steps."""
    families: dict[str, list[tuple[int, PolicyReport]]] = {}
    for policy in policies:
        found = budget_of(policy.policy)
        if found is not None:
            families.setdefault(found[0], []).append((found[1], policy))
    for family, members in families.items():
        if len(members) < 2:
            continue
        for load in sorted({point.load for _, policy in members for point in policy.points}):
            _, _, policy, point = max(
                (point.attainment.mean, -budget, policy, point)
                for budget, policy in members
                for point in policy.points
                if point.load == load
            )
            yield BestBudget(family, load, point.rate, policy.policy, point.attainment.mean)


def budget_crossovers(
    best: Sequence[BestBudget], policies: Sequence[PolicyReport]
) -> Iterable[Crossover]:
    """Yield where the best budget of a family gives way to the next, between their two loads."""
    by_name = {policy.policy: policy for policy in policies}
    for one, other in itertools.pairwise(best):
        if one.family == other.family and one.policy != other.policy:
            crossings = _between(by_name[one.policy], by_name[other.policy], _LEAST_LEAD)
            yield from (each for each in crossings if one.rate <= each.rate <= other.rate)


def fronts(policies: Sequence[PolicyReport]) -> Iterable[Front]:
    """Yield the Pareto fronts of P90s at each load, of everybody and of each class."""
    groups: dict[tuple[float, str], list[tuple[float, float, str]]] = {}
    for policy in policies:
        for point in policy.points:
            of_all = Times(*(getattr(point, each.name) for each in fields(Times)))
            for name, times in {EVERYBODY: of_all, **point.class_times}.items():
                if times.ttft_p90_s is not None and times.tpot_p90_s is not None:
                    group = groups.setdefault((point.load, name), [])
                    group.append((times.ttft_p90_s, times.tpot_p90_s, policy.policy))
    for (load, name), found in sorted(groups.items()):
        front, least = [], float("inf")
        for _, tpot, policy_name in sorted(found):
            if tpot < least:
                front.append(policy_name)
                least = tpot
        yield Front(load, name, tuple(front))
