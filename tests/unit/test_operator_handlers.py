"""What the operator watches."""

from __future__ import annotations

import itertools

from paceline_operator import handlers


async def no_credentials() -> handlers.Credentials:
    raise AssertionError("nothing is watched here")


def test_of_everything_but_services_only_what_is_ours_is_watched() -> None:
    """Chosen by the API server: a filter in the process would still be sent every pod of the cluster."""
    watched = handlers._registry(lambda key: None, no_credentials)._watching.get_all_selectors()
    chosen = handlers._settings(()).watching.label_selectors
    (everything,) = (selector for selector in watched if selector not in chosen)
    assert everything.group == "paceline.dev"
    assert len(watched) == 7
    assert {chosen[selector] for selector in watched if selector in chosen} == {"app.kubernetes.io/managed-by=paceline"}


def test_a_watch_that_is_refused_is_tried_for_ever() -> None:
    """At the end of its patience kopf would end, and with it an operator that could still tell what it lacks."""
    delays = handlers._settings(()).networking.error_backoffs
    for _ in range(2):  # requests share them
        assert list(itertools.islice(delays, 1000))[-1] == 15
