"""The typed LLMService: what is accepted, what is refused and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_operator.errors import InvalidSpec
from paceline_operator.model_uri import Claim, Folder, Hub, ModelUri, parse_model_uri
from paceline_operator.spec import parse_spec

MODEL = {"model": "hf://org/name"}


def errors_of(spec: dict[str, Any]) -> dict[str, str]:
    """The mistakes found in a specification, by path."""
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(spec)
    return {error.path: error.message for error in caught.value.errors}


def test_the_model_is_the_only_required_field() -> None:
    """Everything else has the documented default."""
    spec = parse_spec(MODEL)
    assert (spec.replicas, spec.drain_seconds, spec.startup_seconds, spec.autoscaling) == (1, 60, 1800, None)
    assert spec.resources.limits == {"nvidia.com/gpu": "1"}
    assert set(spec.resources.requests) == {"cpu", "memory"}, "a pod without these is evicted first"
    assert errors_of({}) == {"spec.model": "required"}


def test_all_mistakes_are_reported_at_once_with_their_paths() -> None:
    """A user corrects one file once, not one mistake at a time."""
    found = errors_of(
        {
            "model": "gpt2",
            "replicas": -1,
            "engine": {"maxModelLn": 1},
            "autoscaling": {"minReplicas": 3, "maxReplicas": 2},
        }
    )
    assert found == {
        "spec.model": "'gpt2' is not a model URI; write hf://ORG/NAME, pvc://CLAIM/PATH or file:///PATH",
        "spec.replicas": "input should be greater than or equal to 0, not -1",
        "spec.engine.maxModelLn": "unknown field, did you mean maxModelLen?",
        "spec.autoscaling": "minReplicas (3) must not exceed maxReplicas (2)",
    }


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"maxModelLen": 4096}, "unknown field, did you mean spec.engine.maxModelLen?"),
        ({"policy": "sjf"}, "unknown field, did you mean spec.scheduling.policy?"),
        ({"engine": {"drainSeconds": 5}}, "unknown field, did you mean spec.drainSeconds?"),
        ({"name": "x"}, "unknown field"),
    ],
)
def test_a_field_in_the_wrong_section_is_told_where_it_belongs(spec: dict[str, Any], says: str) -> None:
    """`spec.maxModelLen` is not a misspelt `spec.model`; what no section of settings has is said to be unknown."""
    assert list(errors_of({**MODEL, **spec}).values()) == [says]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"replicas": "2"}, 'input should be a valid integer, not "2"'),
        ({"engine": {"prefixCaching": "yes"}}, 'input should be a valid boolean, not "yes"'),
        ({"engine": {"dtype": "x" * 100}}, "input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ({"replicas": True}, "input should be a valid integer, not true"),
        ({"engine": {"threads": [1]}}, "input should be a valid integer"),
    ],
)
def test_a_refused_value_is_quoted_as_yaml_has_it(spec: dict[str, Any], says: str) -> None:
    """`"2"` in quotes is no number, which the message shows; what is long or no scalar is not repeated."""
    assert list(errors_of({**MODEL, **spec}).values()) == [says]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"resources": {"limits": {"cpu": 0.5}}}, "spec.resources.limits.cpu"),
        ({"resources": {"limits": {"memory": "4 GiB"}}}, "spec.resources.limits.memory"),
        ({"replicas": True}, "spec.replicas"),
        ({"replicas": "2"}, "spec.replicas"),
        ({"engine": {"overloadStatus": 500}}, "spec.engine.overloadStatus"),
        ({"engine": {"gpuMemoryFraction": 0}}, "spec.engine.gpuMemoryFraction"),
        ({"modelSecretRef": {}}, "spec.modelSecretRef.name"),
        ({"autoscaling": {}}, "spec.autoscaling.maxReplicas"),
        ({"template": {"metadata": {"labels": {"paceline.dev/service": "x"}}}}, "spec.template.metadata.labels"),
    ],
)
def test_a_bad_value_is_refused_under_its_path(spec: dict[str, Any], path: str) -> None:
    """Nothing is coerced and nothing is ignored."""
    assert list(errors_of({**MODEL, **spec})) == [path]


SERVER = {"name": "server"}


@pytest.mark.parametrize(
    ("overlay", "says"),
    [
        ({"containers": ["server"]}, "containers[0]: 'server' must be an item with `name`"),
        ({"containers": [{"image": "x"}]}, "containers[0]: {'image': 'x'} must be an item with `name`"),
        ({"containers": [{"name": ["server"]}]}, "containers[0]: {'name': ['server']} must be an item with `name`"),
        ({"containers": [{"name": 1}]}, "containers[0]: {'name': 1} must be an item with `name`"),
        ({"containers": {"server": {}}}, "containers: must be a list of items with `name`"),
        ({"containers": None}, "containers: the container server cannot be removed"),
        ({"volumes": "models"}, "volumes: must be a list of items with `name`"),
        ({"containers": [{**SERVER, "env": {"A": "1"}}]}, "containers[0].env: must be a list of items with `name`"),
        ({"containers": [{**SERVER, "env": ["A=1"]}]}, "containers[0].env[0]: 'A=1' must be an item with `name`"),
        (
            {"containers": [{**SERVER, "env": [{"name": "A", "value": 1}]}]},
            "containers[0].env[0].value: 1 is no text; write it in quotes",
        ),
        (
            {"containers": [{**SERVER, "ports": [8000]}], "initContainers": [1]},
            "initContainers[0]: 1 must be an item with `name`; "
            "containers[0].ports[0]: 8000 must be an item with `containerPort`",
        ),
    ],
)
def test_an_overlay_that_cannot_be_merged_is_refused_with_the_place_of_each_mistake(
    overlay: dict[str, Any], says: str
) -> None:
    """The CRD lets any overlay through; merging one of these failed for ever, and only the log said so."""
    assert errors_of({**MODEL, "template": {"spec": overlay}}) == {"spec.template.spec": says}


def test_an_overlay_may_use_the_names_of_lists_elsewhere_and_take_lists_away() -> None:
    overlay = {
        "nodeSelector": {"env": "prod", "ports": "many"},
        "imagePullSecrets": None,
        "containers": [{**SERVER, "ports": None, "env": [{"name": "A", "valueFrom": {"fieldRef": {}}}, {"name": "B"}]}],
    }
    assert parse_spec({**MODEL, "template": {"spec": overlay}}).template.spec == overlay


@pytest.mark.parametrize(
    ("uri", "parsed"),
    [
        ("hf://org/na.me_v1.5", Hub("org/na.me_v1.5", None)),
        ("hf://org/name@refs/pr/3", Hub("org/name", "refs/pr/3")),
        ("pvc://claim", Claim("claim", "")),
        ("pvc://claim/a//b/", Claim("claim", "a/b")),
        ("file:///srv/model/", Folder("/srv/model")),
    ],
)
def test_model_uris_are_taken_apart(uri: str, parsed: ModelUri) -> None:
    """Each supported scheme has its type."""
    assert parse_model_uri(uri) == parsed


@pytest.mark.parametrize(
    "uri", ["s3://bucket/x", "oci://image", "org/name", "hf://name", "file://relative", "file:///"]
)
def test_other_model_uris_are_refused_with_what_to_write(uri: str) -> None:
    """Unsupported schemes by name, all others with the supported forms."""
    with pytest.raises(ValueError, match=r"hf://ORG/NAME, pvc://CLAIM/PATH or file:///PATH"):
        parse_model_uri(uri)


def test_a_model_path_cannot_leave_its_volume() -> None:
    """`..` would read what was not mounted for it."""
    with pytest.raises(ValueError, match=r"'\.\.'"):
        parse_model_uri("pvc://claim/a/../../b")


@pytest.mark.parametrize(
    ("resource", "gpu", "accelerator"),
    [
        ("cpu", False, False),
        ("nvidia.com/gpu", True, True),
        ("nvidia.com/mig-1g.5gb", True, True),
        ("example.com/gpu", False, True),
        ("hugepages-2Mi", False, False),
    ],
)
def test_devices_are_known_by_their_resource_name(resource: str, gpu: bool, accelerator: bool) -> None:
    """CUDA means NVIDIA's resources; any extended resource is a device that a second pod may not get."""
    spec = parse_spec({**MODEL, "resources": {"limits": {resource: 1}}})
    assert (spec.uses_gpu, spec.uses_accelerator) == (gpu, accelerator)
