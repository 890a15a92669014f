"""The page of claims says what the result file says, and every claim has a source."""

from pathlib import Path

from benchmarks.claims.page import PAGE, filled, read_result, table
from benchmarks.claims.rows import CLAIMS

RESULT = {
    "date": "2030-01-02T03:04:05",
    "machine": {"processor": "Abacus", "cores": 2},
    "ratios": {"prefix_cache": 2.345},
}


def test_the_table_of_the_page_is_made_from_the_result_file():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, read_result()) == page


def test_the_table_has_a_row_for_what_was_measured_and_none_for_what_was_not():
    lines = table(RESULT).splitlines()
    assert [line for line in lines if "prefix" in line and "**2.35x**" in line and "SGLang" in line]
    assert len(lines) == 5
    assert "Abacus, 2 cores, 2030-01-02." in lines


def test_without_a_result_the_page_has_no_table():
    page = filled(PAGE.read_text(encoding="utf-8"), None)
    assert "| technique |" not in page


def test_every_source_of_a_claim_is_named_in_full_on_the_page():
    page = Path(PAGE).read_text(encoding="utf-8")
    for claim in CLAIMS:
        for name in ("Orca", "vLLM", "SGLang", "SARATHI", "BucketServe"):
            assert name not in claim.source or f"- {name}: " in page
