"""The comparison behind `make leaks` finds what grows, and only that."""

from __future__ import annotations

from tests.helpers.leaks import Look, grown


def looks(who: str, **per_step: float) -> list[Look]:
    """A process that starts with 100 of everything and gains so much in each of 40 steps."""
    names = {"memory_mib", "descriptors", "threads"}
    return [
        Look(who=who, step=step, held={name: 100 + step * per_step.get(name, 0.0) for name in names})
        for step in range(40)
    ]


def test_growth_is_found_by_process_and_kind():
    seen = looks("1 worker", descriptors=1.0) + looks("2 worker") + looks("3 worker", memory_mib=1.0)
    assert list(grown(seen, steps=40)) == ["1 worker: descriptors 114 -> 134", "3 worker: memory_mib 114 -> 134"]


def test_rays_servers_may_keep_their_records_and_early_growth_is_none():
    early = [Look(who="4 worker", step=s, held={"threads": float(min(s, 9))}) for s in range(40)]
    assert not list(grown(looks("5 /ray/core/src/ray/gcs/gcs_server", memory_mib=1.0) + early, steps=40))


def test_a_process_that_was_not_there_all_the_time_is_left_out():
    assert not list(grown(looks("6 worker", threads=9.0)[:15], steps=40))
