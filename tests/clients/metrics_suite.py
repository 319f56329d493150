"""/metrics as Prometheus' own Python parser reads it, while requests run and when they have ended.

    python metrics_suite.py --url http://127.0.0.1:8000 --prompt "12 + 30"

Prints one line a check and exits with 1 if any failed. Nobody else may use the server meanwhile.
"""

import collections
import concurrent.futures
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field

import openai
from prometheus_client.parser import text_string_to_metric_families

from checks import Place, check, main, raises

GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "tokenrouter:pending_requests",
    "tokenrouter:open_streams",
    "tokenrouter:live_requests",
    "tokenrouter:live_prompt_tokens",
    "tokenrouter:kv_pages_used",
    "tokenrouter:mailbox_depth",
)
# What a request adds to by its kind, and how many of each are sent.
KINDS = {"whole": 12, "streamed": 12, "two choices": 4, "cut": 8, "refused": 5, "wrong": 3}

# Tokens of an answer that nobody waits for.
LONG = 1500


@dataclass
class Scrape:
    """One answer, checked for its form."""

    text: str
    values: dict = field(default_factory=dict)

    def __post_init__(self):
        families = list(text_string_to_metric_families(self.text))
        for line in ("HELP", "TYPE"):
            names = [text.split(" ")[2] for text in self.text.splitlines() if text.startswith(f"# {line} ")]
            assert len(names) == len(set(names)) == len(families), f"{line} of a family comes twice or not at all"
        for family in families:
            assert family.type in ("counter", "gauge", "histogram") and family.documentation.endswith("."), family
            self.same_labels(family)
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in self.values, f"{key} comes twice"
                self.values[key] = sample.value
            if family.type == "histogram":
                self.histogram(family)
        self.counters = {
            sample.name
            for family in families
            for sample in family.samples
            if family.type == "counter" or (family.type == "histogram" and sample.name.endswith(("_count", "_bucket", "_sum")))
        }

    def same_labels(self, family):
        sets = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(sets) == 1, f"{family.name} has samples with different labels: {sets}"
        labels = next(iter(sets))
        if family.name.startswith("vllm:"):
            assert {"model_name", "engine"} <= labels, f"{family.name} has {labels}"

    def histogram(self, family):
        series = collections.defaultdict(dict)
        for sample in family.samples:
            labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
            series[labels][sample.labels.get("le") or sample.name.rsplit("_", 1)[1]] = sample.value
        for labels, values in series.items():
            buckets = sorted((float(le), count) for le, count in values.items() if le not in ("sum", "count"))
            counts = [count for _, count in buckets]
            assert counts == sorted(counts), f"{family.name}{labels}: {buckets}"
            assert buckets[-1] == (float("inf"), values["count"]), f"{family.name}{labels}"
            assert values["sum"] >= 0

    def sum(self, name, **labels):
        wanted = labels.items()
        return sum(value for (found, own), value in self.values.items() if found == name and wanted <= dict(own).items())


class Watcher:
    """Scrapes all the time."""

    def __init__(self, place: Place):
        self.place, self.scrapes, self.fault = place, [self.scrape(place)], None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    @staticmethod
    def scrape(place: Place) -> Scrape:
        with urllib.request.urlopen(f"{place.url}/metrics", timeout=20) as answer:
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            return Scrape(answer.read().decode())

    def run(self):
        try:
            while not self.over.wait(0.02):
                self.scrapes.append(self.scrape(self.place))
        except Exception as fault:
            self.fault = fault

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def ask(place: Place, kind: str):
    client = openai.OpenAI(base_url=place.base_url, api_key="none", max_retries=0, timeout=60)
    model = place.names()[0]
    fields = {"model": model, "prompt": place.prompt, "max_tokens": 12, "temperature": 0}
    text = client.completions.create
    match kind:
        case "whole":
            return text(**fields).usage.completion_tokens
        case "streamed":
            return list(text(**fields, stream=True, stream_options={"include_usage": True}))[-1].usage.completion_tokens
        case "two choices":
            return text(**fields, n=2).usage.completion_tokens
        case "cut":
            stream = text(**fields | {"max_tokens": LONG}, stream=True, extra_body={"ignore_eos": True})
            next(iter(stream))
            stream.close()
        case "refused":
            raises(openai.BadRequestError, lambda: text(**fields | {"max_tokens": 1_000_000}))
        case "wrong":
            raises(openai.BadRequestError, lambda: text(**fields | {"temperature": 9}))
    return 0


def at_rest(place: Place) -> Scrape:
    """When nothing is left to be done; only the scrape itself is on its way."""
    deadline = time.monotonic() + 20
    while True:
        scrape = Watcher.scrape(place)
        busy = {name: scrape.sum(name) for name in GAUGES if scrape.sum(name) != 0}
        if not busy and scrape.sum("tokenrouter:http_requests_in_flight") == 1:
            return scrape
        assert time.monotonic() < deadline, busy
        time.sleep(0.02)


@check
def numbers_under_load_add_up(place: Place):
    before = at_rest(place)
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    kinds = [kinds[(at * 7) % len(kinds)] for at in range(len(kinds))]
    assert len(kinds) % 7, "every request once"
    with Watcher(place) as watcher, concurrent.futures.ThreadPoolExecutor(6) as pool:
        made = sum(pool.map(lambda kind: ask(place, kind), kinds))
    if watcher.fault:
        raise watcher.fault
    after = at_rest(place)
    scrapes = [before, *watcher.scrapes, after]
    assert len(scrapes) >= 5, "it was seen under load"
    assert any(scrape.sum("tokenrouter:live_requests") > 0 for scrape in scrapes)
    for earlier, later in zip(scrapes, scrapes[1:]):
        fell = [key for key, value in earlier.values.items() if key[0] in earlier.counters and later.values.get(key, 0) < value]
        assert not fell, f"counters fell or went away: {fell}"

    grown = lambda name, **labels: after.sum(name, **labels) - before.sum(name, **labels)
    ended = grown("vllm:request_success_total")
    refused = grown("tokenrouter:requests_refused_total")
    choices = KINDS["whole"] + KINDS["streamed"] + 2 * KINDS["two choices"] + KINDS["cut"]
    assert (ended, refused) == (choices, KINDS["refused"]), (ended, refused)
    assert grown("vllm:request_success_total", finished_reason="abort") == KINDS["cut"]
    assert grown("vllm:request_success_total", finished_reason="error") == 0
    for name in ("e2e_request_latency_seconds", "request_generation_tokens", "request_prompt_tokens"):
        assert grown(f"vllm:{name}_count") == choices, name
    well = choices - KINDS["cut"]
    for part in ("queue", "prefill", "decode", "inference"):
        assert grown(f"vllm:request_{part}_time_seconds_count") == well, part
    assert abs(sum(grown(f"vllm:request_{part}_time_seconds_sum") for part in ("prefill", "decode"))
               - grown("vllm:request_inference_time_seconds_sum")) < 1e-6
    assert grown("vllm:request_params_n_count") == choices - KINDS["two choices"], "once a request"
    assert grown("vllm:request_params_n_sum") == choices
    # A cut stream may have had some tokens more than were read.
    tokens = grown("vllm:generation_tokens_total")
    assert made + KINDS["cut"] <= tokens <= made + LONG * KINDS["cut"], (made, tokens)
    assert grown("vllm:request_generation_tokens_sum") == tokens
    assert grown("tokenrouter:committed_tokens_total") >= tokens
    assert grown("vllm:prompt_tokens_total") == grown("vllm:request_prompt_tokens_sum")
    posts = grown("tokenrouter:http_requests_total", method="POST")
    assert posts == len(kinds), posts
    assert grown("tokenrouter:http_requests_total", status="400") == KINDS["refused"] + KINDS["wrong"]
    assert grown("http_request_duration_seconds_count", method="POST") == len(kinds)


@check
def batches_steps_hops_and_mailboxes_agree(place: Place):
    scrape = at_rest(place)
    both = lambda name, **labels: scrape.sum(name, **labels)
    assert both("tokenrouter:batch_size_count") == both("tokenrouter:batch_flush_total") > 0
    assert both("tokenrouter:batch_size_sum") == both("tokenrouter:batched_requests_total")
    assert both("tokenrouter:batch_wait_seconds_count") == both("tokenrouter:batched_requests_total")
    assert both("tokenrouter:forward_seconds_count") == both("tokenrouter:steps_total") > 0
    assert both("vllm:iteration_tokens_total_count") >= both("tokenrouter:steps_total")
    assert both("vllm:iteration_tokens_total_sum") == both("tokenrouter:step_tokens_total") > 0
    assert abs(both("tokenrouter:forward_seconds_sum") - both("tokenrouter:step_seconds_total")) < 1e-3
    assert both("tokenrouter:hops_total") > 0 and both("tokenrouter:hop_latency_seconds_count") > 0
    assert abs(both("tokenrouter:model_share") - 1) < 1e-9
    assert both("tokenrouter:mailbox_wait_seconds_count") == both("tokenrouter:mailbox_messages_total") > 0
    for actor in ("client", "batcher", "decode", "inter_model", "executor"):
        assert both("tokenrouter:mailbox_messages_total", actor=actor) > 0, actor
    assert both("process_resident_memory_bytes") > 1e6 and both("process_open_fds") > 3


if __name__ == "__main__":
    sys.exit(main(lambda place: place))
