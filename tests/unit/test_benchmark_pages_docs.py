"""Pages with measured tables say what the result files say, and every claim has a source."""

import pytest

from benchmarks.claims.rows import CLAIMS
from benchmarks.pages import DOCS, TABLES, filled, read_result

MACHINE = {"date": "2030-01-02T03:04:05", "machine": {"processor": "Abacus", "cores": 2}}
RUN = {
    "output_tokens_per_second": 10.0,
    "ttft_p50": 0.5,
    "ttft_p99": 1.5,
    "e2e_p50": 2.5,
    "sequences_per_step": 3.0,
    "wasted": 0.25,
    "noisy": False,
}


def page_of(name):
    return (DOCS / TABLES[name][0]).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_pages_are_made_from_the_result_files(name):
    assert filled(page_of(name), name, read_result(name)) == page_of(name)


@pytest.mark.parametrize("name", TABLES)
def test_without_a_result_a_page_has_no_table(name):
    empty = filled(page_of(name), name, None)
    assert f"<!-- made from benchmarks/results/{name}.json -->\n<!-- end -->" in empty


def test_the_table_of_claims_has_a_row_for_what_was_measured_and_none_for_what_was_not():
    page = filled(page_of("claims"), "claims", MACHINE | {"ratios": {"prefix_cache": 2.345}})
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == 2
    assert "**2.35x**" in rows[1]
    assert "SGLang" in rows[1]
    assert "Abacus, 2 cores, 2030-01-02." in page


def test_a_batcher_is_shown_by_its_quiet_run_of_median_throughput():
    rates = [(9.0, False), (10.0, False), (11.0, False), (99.0, True)]
    runs = [RUN | {"batcher": "dynamic", "output_tokens_per_second": rate, "noisy": noisy} for rate, noisy in rates]
    page = filled(page_of("batching"), "batching", MACHINE | {"runs": runs})
    assert "| dynamic | 10 | 0.50 / 1.50 | 2.50 | 3.0 | 25% |" in page


def test_every_source_of_a_claim_is_named_in_full_on_the_page():
    for claim in CLAIMS:
        for name in ("Orca", "vLLM", "SGLang", "SARATHI", "BucketServe"):
            assert name not in claim.source or f"- {name}: " in page_of("claims")
