"""The CRD and the typed specification say the same."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from paceline_operator.conditions import Condition, ConditionType, Truth, settle
from paceline_operator.errors import InvalidSpec
from paceline_operator.spec import LLMServiceSpec, parse_spec
from paceline_operator.testing import NOW

PATH = Path(__file__).parents[2] / "crds/llmservices.paceline.dev.yaml"
CRD = yaml.safe_load(PATH.read_text())
(VERSION,) = CRD["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def sections() -> list[tuple[str, type[BaseModel], dict[str, Any]]]:
    """Every section of the specification: its path, its type and its schema in the CRD."""
    found = []
    pending: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
        ("spec", LLMServiceSpec, SCHEMA["properties"]["spec"])
    ]
    while pending:
        path, model, schema = pending.pop()
        found.append((path, model, schema))
        for info in model.model_fields.values():
            nested = section_of(info)
            if nested:
                field = schema["properties"][info.alias]
                items = field.get("items")  # of a list of sections
                pending.append((f"{path}.{info.alias}{'[]' if items else ''}", nested, items or field))
    return found


def plain_type(info: FieldInfo) -> Any:
    """A field's type without None."""
    annotation: Any = info.annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The type of a nested section."""
    plain = plain_type(info)
    if typing.get_origin(plain) is list:
        (plain,) = typing.get_args(plain)
    return plain if isinstance(plain, type) and issubclass(plain, BaseModel) else None


@pytest.mark.parametrize(
    ("path", "model", "schema"), sections(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_crd_has_the_fields_of_the_typed_specification(
    path: str, model: type[BaseModel], schema: dict[str, Any]
) -> None:
    """The same fields, required ones, types, choices and defaults; and nothing unknown gets in."""
    fields = {info.alias: info for info in model.model_fields.values()}
    assert set(schema["properties"]) == set(fields), path
    assert set(schema.get("required", ())) == {alias for alias, info in fields.items() if info.is_required()}
    assert not schema.get("x-kubernetes-preserve-unknown-fields")
    for alias, info in fields.items():
        assert alias
        field = schema["properties"][alias]
        plain = plain_type(info)
        if typing.get_origin(plain) is typing.Literal:
            assert field["enum"] == list(typing.get_args(plain)), f"{path}.{alias}"
        elif plain in JSON_TYPES:
            assert field["type"] == JSON_TYPES[plain], f"{path}.{alias}"
        elif typing.get_origin(plain) is list:
            assert field["type"] == "array", f"{path}.{alias}"
            (item,) = typing.get_args(plain)
            if typing.get_origin(item) is typing.Literal:
                assert field["items"]["enum"] == list(typing.get_args(item)), f"{path}.{alias}"
        else:
            assert field["type"] == "object", f"{path}.{alias}"
        if info.default not in (None, PydanticUndefined):
            assert field["default"] == info.default, f"{path}.{alias}"


def test_the_default_resources_are_the_same() -> None:
    """One GPU, said twice."""
    default = SCHEMA["properties"]["spec"]["properties"]["resources"]["default"]
    assert (
        parse_spec({"model": "hf://a/b"}).resources == parse_spec({"model": "hf://a/b", "resources": default}).resources
    )


@pytest.mark.parametrize(
    ("section", "field"),
    [(path, name) for path, _, schema in sections() for name, one in schema["properties"].items() if "minimum" in one],
)
def test_the_bounds_are_the_same(section: str, field: str) -> None:
    """The type too refuses a number just outside the CRD's bounds, and takes the bound itself."""
    schema = next(schema for path, _, schema in sections() if path == section)["properties"][field]
    lowest, highest = schema["minimum"], schema.get("maximum")
    if schema.get("exclusiveMinimum"):
        assert refused(section, field, lowest)
    else:
        assert refused(section, field, lowest - 1)
        assert not refused(section, field, lowest)
    if highest is not None:
        assert refused(section, field, highest + 1)
        assert refused(section, field, highest) is bool(schema.get("exclusiveMaximum"))


def refused(section: str, field: str, value: float) -> bool:
    """Whether the typed specification refuses this value, other fields being fine."""
    spec: dict[str, Any] = {"model": "hf://a/b"}
    inner = spec
    for part in section.split(".")[1:]:
        inner = inner.setdefault(part.removesuffix("[]"), {})
    if section == "spec.autoscaling":
        inner |= {"minReplicas": 1, "maxReplicas": 2**31 - 1}
    inner[field] = value
    if "tenants" in spec:
        spec["tenants"] = [{"name": "a", "anonymous": True, **spec["tenants"]}]
    try:
        parse_spec(spec)
    except InvalidSpec as error:
        return any(one.path == f"{section}.{field}".replace("[]", "[0]") for one in error.errors)
    return False


@pytest.mark.parametrize("field", ["tracePath", "diskPath"])
def test_a_relative_path_is_refused_in_the_words_of_the_crd_s_rule(field: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec({"model": "hf://a/b", "engine": {field: "here"}})
    (rule,) = SCHEMA["properties"]["spec"]["properties"]["engine"]["properties"][field]["x-kubernetes-validations"]
    assert any(one.message == rule["message"] for one in caught.value.errors)


TENANTS = [
    ([{"name": "a"}], "give keysFrom, or anonymous: true"),
    ([{"name": "a", "anonymous": False}], "give keysFrom, or anonymous: true"),
    ([{"name": "a", "anonymous": True}, {"name": "b", "anonymous": True}], "only one tenant may be anonymous"),
    ([{"name": "a", "anonymous": True, "tier": "batch", "tiers": ["standard"]}], "must be one of tiers"),
    ([{"name": "a", "anonymous": True, "tiers": ["batch"]}], "must be one of tiers"),
]


@pytest.mark.parametrize(("tenants", "says"), TENANTS, ids=[says for _, says in TENANTS])
def test_tenants_that_make_no_sense_are_refused_in_the_words_of_the_crd_s_rules(
    tenants: list[dict[str, Any]], says: str
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec({"model": "hf://a/b", "tenants": tenants})
    assert says in str(caught.value)
    schema = SCHEMA["properties"]["spec"]["properties"]["tenants"]
    rules = [*schema["x-kubernetes-validations"], *schema["items"]["x-kubernetes-validations"]]
    assert any(says in rule["message"] for rule in rules)


def test_a_mistake_in_a_tenant_has_its_place_in_the_list_and_a_suggestion() -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec({"model": "hf://a/b", "tenants": [{"name": "a", "anonymous": True, "wieght": 1}, {"name": "_"}]})
    paths = {error.path: error.message for error in caught.value.errors}
    assert paths["spec.tenants[0].wieght"] == "unknown field, did you mean weight?"
    assert "spec.tenants[1].name" in paths


def test_every_field_is_described() -> None:
    """`kubectl explain` is the reference that a user has at hand."""
    undescribed = [
        f"{path}.{name}"
        for path, _, schema in sections()
        for name, field in schema["properties"].items()
        if "description" not in field
    ]
    assert undescribed == []


def test_the_status_has_all_that_the_operator_writes() -> None:
    """A field that the schema lacks would be pruned in silence."""
    status = SCHEMA["properties"]["status"]["properties"]
    (condition,) = settle([], [Condition(ConditionType.READY, Truth.TRUE, "Serving", "")], 1, NOW)
    assert set(status["conditions"]["items"]["properties"]) == set(condition)
    scale = VERSION["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.replicas"
    assert scale["statusReplicasPath"].removeprefix(".status.") in status
    assert status[scale["labelSelectorPath"].removeprefix(".status.")]["type"] == "string"


def test_a_message_is_cut_where_the_crd_ends_it() -> None:
    """A specification may have any number of mistakes; a status that is too long would be refused for ever."""
    (condition,) = settle([], [Condition(ConditionType.READY, Truth.FALSE, "InvalidSpec", "ö" * 100_000)], 1, NOW)
    limits = SCHEMA["properties"]["status"]["properties"]["conditions"]["items"]["properties"]
    assert len(condition["message"]) == limits["message"]["maxLength"]


def test_the_crd_fits_into_a_client_side_apply() -> None:
    """Client-side kubectl keeps the whole object in an annotation, which may not exceed 256 KiB."""
    assert len(PATH.read_bytes()) < 100_000


def test_no_description_was_cut_in_two_by_a_comma() -> None:
    """In YAML's flow style an unquoted comma ends a value, and the rest becomes a key that the API server refuses."""
    assert list(empty_keys(CRD, "crd")) == []


def empty_keys(value: Any, path: str) -> Iterator[str]:
    """Paths of the keys without a value."""
    if isinstance(value, dict):
        for key, nested in value.items():
            if nested is None:
                yield f"{path}.{key}"
            yield from empty_keys(nested, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from empty_keys(item, f"{path}[]")
