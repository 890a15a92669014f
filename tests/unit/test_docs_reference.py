"""The reference pages say what the code does."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from paceline_server.config import parse
from paceline_server.model.support import FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings_reference", "llmservice_reference"])
def test_a_generated_page_is_what_its_sources_say(name):
    module = script(name)
    assert module.TARGET.read_text(encoding="utf-8") == module.render(), "run `make generate`"


def test_the_manifest_in_the_readme_is_the_file_that_it_names():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    name, shown = re.search(r"`make demo` runs \[`([^`]+)`\].*?^```yaml\n(.*?)^```", readme, re.M | re.S).groups()
    file = (ROOT / name).read_text(encoding="utf-8")
    assert file.endswith(shown)
    assert all(line.startswith("#") for line in file.removesuffix(shown).splitlines())


def test_the_small_file_on_the_page_of_settings_is_one_that_the_server_takes():
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    (sample,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    assert parse(yaml.safe_load(sample)).engine.served_model_names == ("smollm2",)


def test_every_model_family_is_on_the_page_of_models():
    page = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    listed = {family for row in rows for family in re.findall(r"`(\w+)`", row)}
    assert listed == set(FAMILIES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    broken = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not broken


def test_every_make_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M)
    }
    assert named
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_placeholder_left(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"\b[A-Z]+-TABLE\b|\bTODO\b|\bTBD\b|\bFIXME\b|lorem ipsum", text)
