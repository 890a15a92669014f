"""The comparison with peers: what its figures, ratios and table are made of."""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from xml.etree import ElementTree

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmarks import results
from benchmarks.comparison import VLLM, ratios
from benchmarks.environments import interruptible
from benchmarks.load import Record, mismatch, poisson, summarise
from benchmarks.pages import peers_table
from benchmarks.pictures import Point, scatter, timeline
from benchmarks.results import Run, table
from benchmarks.roofline import Roof, least_seconds
from benchmarks.servers import Driver, running
from benchmarks.workloads import WORDS, Request, Workload, alone, mixed, reworded, warm_up


def record(sent, arrivals, tokens=None, error=None):
    return Record(
        sent, len(arrivals) if tokens is None else tokens, arrivals, arrivals[-1] if arrivals else sent, error
    )


def run(server, workload="A", rate=100.0, others=0.0, start=1.0, number=0, errors=0):
    figures = replace(summarise([record(0.0, [0.5, 1.0])], clients=16), output_tokens_per_second=rate, errors=errors)
    return Run(server, "1", workload, number, figures, start, 100.0, others, 0.1)


def readme_of(runs):
    return peers_table({"runs": json.loads(json.dumps([asdict(one) for one in runs])), "ratios": ratios(runs)})


def test_a_runs_rate_counts_from_the_first_request_to_the_last_end():
    figures = summarise([record(10.0, [11.0, 12.0]), record(11.0, [12.0, 13.0, 14.0])], clients=2)
    assert figures.output_tokens_per_second == pytest.approx(5 / 4)
    assert (figures.ttft_p50, figures.itl_p50) == (1.0, 1.0)


def test_a_failed_request_counts_as_an_error_and_in_nothing_else():
    figures = summarise([record(0.0, [1.0, 2.0]), record(0.0, [9.0], error="reset")], clients=2)
    assert (figures.requests, figures.errors, figures.output_tokens) == (2, 1, 2)
    assert figures.ttft_p99 == 1.0


@pytest.mark.parametrize(
    ("prompt", "output", "said"),
    [
        (10, 5, None),
        (11, 5, "a prompt of 11 tokens instead of 10"),
        (10, 4, "4 tokens instead of 5"),
        (0, 0, "a prompt"),
    ],
)
def test_an_answer_of_other_lengths_than_asked_for_is_an_error(prompt, output, said):
    found = mismatch(Record(0.0, output_tokens=output, prompt_tokens=prompt), Request("words", 10, 5))
    assert found is None if said is None else said in found


def test_a_run_in_which_requests_failed_counts_nowhere_but_is_shown():
    runs = [run("paceline int8", rate=300.0), run("llama.cpp Q4_0", rate=100.0)]
    failed = [run("llama.cpp Q4_0", rate=0.0, errors=64), run("OpenVINO int8", rate=0.0, errors=1)]
    assert ratios(runs + failed) == ratios(runs)
    text = table(runs + failed)
    assert "| A | llama.cpp Q4_0 | 100 (100–100) |" in text
    assert "| A | OpenVINO int8 | requests failed in every run |" in text
    assert "| OpenVINO int8 1 | failed |\n" in readme_of(runs + failed)


def test_the_readmes_start_and_memory_are_those_of_a_or_none():
    text = readme_of([run("x", workload="D"), run("y")])
    assert "| x 1 |  | **100** (100–100) |\n" in text
    assert "| x 1 |  | 0.50 / 0.50 s, 500 ms |  |  |\n" in text
    assert "| y 1 | 0.50 / 0.50 s, 500 ms |  | 1.0 s | 100 MiB |" in text


def test_no_two_workloads_share_a_prompt_and_the_warm_up_none_with_any(tmp_path):
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)} | {"?": 99}, "?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    base = mixed(tmp_path, 64)
    measured = [base, alone(tmp_path, 4), reworded(tmp_path, base, seed=5), reworded(tmp_path, base, seed=6)]
    begins = [{request.prompt[:40] for request in workload.requests} for workload in measured]
    assert sum(map(len, begins)) == len(set.union(*begins)) == 3 * 64 + 4, (
        "no server finds one's prompts cached in another"
    )
    assert [one.prompt_tokens for one in measured[2].requests] == [one.prompt_tokens for one in base.requests]
    assert not set.union(*begins) & {request.prompt[:40] for request in warm_up(tmp_path).requests}


def test_poisson_arrivals_are_seeded_and_have_the_rate_asked_for():
    times = poisson(4.0, 4000)
    assert times == poisson(4.0, 4000) == sorted(times)
    assert times[-1] == pytest.approx(1000, rel=0.1)


def test_a_noisy_run_counts_only_where_no_quiet_one_is():
    noisy, quiet = run("x", rate=50.0, others=0.5), run("x", rate=100.0)
    assert results.median_of([noisy, quiet], "x", "A", "output_tokens_per_second") == 100.0
    assert results.median_of([noisy], "x", "A", "output_tokens_per_second") == 50.0


def test_ratios_set_our_best_against_the_best_peer_and_leave_out_what_was_not_run():
    runs = [run("paceline float32", rate=120.0), run("paceline int8", rate=300.0, start=3.0)]
    runs += [run(VLLM, rate=80.0, start=60.0), run("OpenVINO f32", rate=100.0)]
    found = ratios(runs)
    assert found["A_float_over_best_float"] == pytest.approx(1.2)
    assert found["start_over_vllm"] == pytest.approx(1 / 60)
    assert "A_int8_over_openvino" not in found
    assert "B_over_best" not in found


def test_the_table_says_which_rows_were_noisy():
    text = table([run("x", others=0.5), run("y")])
    assert "| A | x (noisy) |" in text
    assert "| A | y |" in text


def test_the_least_time_is_the_larger_one_of_arithmetic_and_reading(tmp_path):
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 2, "num_key_value_heads": 1}))
    workload = Workload("w", (Request("", 3, 2),))
    layer, head, pairs = 4 * (2 * 4 + 2 * 2) + 3 * 4 * 8, 4 * 10, 4 * 5 // 2
    of_two_unsampled = 2 * (layer - 4 * 2 * 2)  # which only leave keys and values
    arithmetic = 4 * layer - of_two_unsampled + 2 * head + 2 * 4 * pairs
    read = 2 * (layer + head) + 2 * 4 * 2 * 2 * 2
    slow_products, slow_memory = Roof({"int8": 1.0}, 1e9), Roof({"int8": 1e9}, 1.0)
    assert least_seconds(slow_products, tmp_path, workload, 1, "int8") == arithmetic
    assert least_seconds(slow_memory, tmp_path, workload, 1, "int8") == read


def test_pictures_are_well_formed_and_name_every_server(tmp_path):
    points = [Point("ours & more", 0.1, 200.0), Point("theirs", 0.9, 50.0)]
    drawn = [scatter("A", points, tmp_path / "a.svg"), timeline({"ours & more": [(0.0, 0.5, 2.0)]}, tmp_path / "b.svg")]
    texts = ["".join(ElementTree.parse(path).getroot().itertext()) for path in drawn]
    assert all("ours & more" in text for text in texts)
    assert "1 requests in 2.0 s" in texts[1]


def test_the_readmes_table_has_a_row_for_each_server_and_comes_out_of_the_file_alone():
    runs = [run("ours", rate=200.0), run("ours", rate=220.0, number=1), run("theirs", rate=90.0, workload="B")]
    text = readme_of(runs)
    assert "| ours 1 | **210** (200–220) |  |\n" in text
    assert "| theirs 1 |  | **90** (90–90) |\n" in text
    assert "| ours 1 | 0.50 / 0.50 s" in text


def test_runs_are_added_to_those_of_this_machine_only(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert results.earlier("peers") == ({}, [])
    path = results.write("peers", {"A": "mixed"}, [run("x")], {})
    assert results.earlier("peers") == ({"A": "mixed"}, [run("x")])
    path.write_text(path.read_text().replace('"cores": ', '"cores": 9'))
    with pytest.raises(RuntimeError, match="another machine"):
        results.earlier("peers")


def test_a_benchmark_that_is_ended_kills_its_server_at_once_and_says_what_it_leaves(tmp_path, capsys):
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint({}, flush=True)\ntime.sleep(600)\n"
    )
    begun, before = time.monotonic(), signal.getsignal(signal.SIGTERM)
    pids = []

    def benchmark():
        with (
            interruptible("all is kept"),
            running(Driver("stubborn", (sys.executable, str(script)), "1"), tmp_path / "log") as up,
        ):
            pids.append(up.pid)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(SystemExit, match="130"):
        benchmark()
    assert "interrupted; all is kept" in capsys.readouterr().err
    assert time.monotonic() - begun < 25, "it does not wait for the server to stop by itself, which takes 30 s"
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert signal.getsignal(signal.SIGTERM) is before
