"""Names of children: valid for every name an LLMService may have, distinct, and the same for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_operator import names

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
segment = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
object_names = st.lists(segment, min_size=1, max_size=4).map(".".join).filter(lambda name: len(name) <= 253)


@given(object_names)
def test_every_object_name_gives_a_valid_service_name(name: str) -> None:
    """A Service name is the narrowest: RFC 1035 label, 63 characters."""
    child = names.child_name(name)
    assert LABEL.fullmatch(child)
    assert len(child) <= 63


@given(object_names, object_names)
def test_different_services_never_share_children(one: str, other: str) -> None:
    """Cutting and replacing alone would make them meet; the hash keeps them apart."""
    assert (names.child_name(one) == names.child_name(other)) == (one == other)


@pytest.mark.parametrize(
    ("name", "child"),
    [
        ("smollm2", "smollm2"),
        ("a" * 63, "a" * 63),
        ("a" * 64, f"{'a' * 54}-ffe054fe"),
        ("qwen2.5-7b", "qwen2-5-7b-5f5e975c"),
        ("7b", "llm-7b-925a7bf1"),
        (f"{'a' * 53}-{'b' * 20}", f"{'a' * 53}-af3ec493"),
    ],
)
def test_names_are_stable_across_releases(name: str, child: str) -> None:
    """A changed rule would orphan the children of running services: these pairs must hold for ever."""
    assert names.child_name(name) == child


def test_the_selector_string_selects_what_the_selector_labels_say() -> None:
    """The HPA counts the pods that the Deployment owns."""
    assert names.selector_string("qwen2.5-7b") == "paceline.dev/service=qwen2-5-7b-5f5e975c"
