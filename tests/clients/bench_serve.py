"""`tokenrouter bench serve` and aiperf, in turns, against one server: do they measure the same?

    python3 tests/clients/bench_serve.py --server target/release/tokenrouter --bench target/release/tokenrouter

Both send the same prompts of the demo pair, greedily, with as many tokens of answer. Every step of both models takes 30 ms
longer ([faults] of the launch file), as that of a real model would: the demo pair as it is answers so fast that what is
measured on few cores is how much of them the load generator takes (--fast shows that). Medians over the rounds are compared.
Beside each figure stands what the server's own histograms say of the same requests (those before the measured ones included): a
load generator that needs much of the machine slows the server down, and that is no error of measurement. So the last column
compares both with what the server said at the time, where it says it.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import urllib.request

from load import MODEL, ROOT, TOKENIZER, WORK, aiperf, figure, profile

OUTPUT = 100
AT_ONCE = [1, 4, 8]
SLOWER = "".join(f'\n[[faults.steps]]\nmodel = "{model}"\nkind = "slow"\nevery = 1\nms = 30\n' for model in ["small", "large"])
# Name, figure of aiperf, figure of bench serve, histogram of the server. aiperf's time between tokens is the mean of a request:
# TPOT elsewhere.
FIGURES = [
    ("TTFT, mean ms", ("time_to_first_token", "avg"), ("ttft_ms", "mean"), "time_to_first_token_seconds"),
    ("TTFT, median ms", ("time_to_first_token", "p50"), ("ttft_ms", "median"), None),
    ("TPOT (aiperf: ITL), mean ms", ("inter_token_latency", "avg"), ("tpot_ms", "mean"), "request_time_per_output_token_seconds"),
    ("E2EL, mean ms", ("request_latency", "avg"), ("e2el_ms", "mean"), "e2e_request_latency_seconds"),
    ("requests/s", ("request_throughput", "avg"), ("request_throughput", None), None),
    ("output tokens/s", ("output_token_throughput", "avg"), ("output_throughput", None), None),
]


def serve(program, faults):
    """The server and its URL."""
    text = (ROOT / "config/presets/demo-pair.toml").read_text().replace("../demo", str(ROOT / "config/demo")) + faults
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / "bench.toml").write_text(text)
    command = [program, "--config", str(WORK / "bench.toml"), "--log-level", "error", "serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, TOKENROUTER_FAULTS="1"))
    for line in server.stdout:
        if line.startswith("serving"):
            return server, line.split()[1].removesuffix("/v1")
    sys.exit("the server did not start")


def prompts(requests):
    """The same prompts in the forms of both programs."""
    lines = (ROOT / "config/demo/problems.jsonl").read_text().splitlines()
    texts = [json.loads(line)["question"] for line in lines if line.strip()]
    texts = [texts[index % len(texts)] for index in range(requests)]
    theirs, ours = WORK / "asked-aiperf.jsonl", WORK / "asked.jsonl"
    theirs.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ours.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return theirs, ours


def theirs(url, at_once, requests, path):
    command = [
        "profile", "--model-names", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", TOKENIZER, "--use-server-token-count", "--concurrency", str(at_once), "--request-count", str(requests),
        "--warmup-request-count", str(at_once), "--input-file", str(path), "--custom-dataset-type", "single_turn",
        "--dataset-sampling-strategy", "sequential", "--extra-inputs",
        json.dumps({"ignore_eos": True, "temperature": 0, "max_completion_tokens": OUTPUT}),
    ]
    figures = profile(aiperf(), command, f"compared-{at_once}")
    return [figure(figures, *name) for _, name, _, _ in FIGURES]


def ours(program, url, at_once, requests, path):
    command = [
        program, "bench", "serve", "--url", url, "--concurrency", str(at_once), "--requests", str(requests), "--warmup",
        str(at_once), "--prompts", str(path), "--output-tokens", str(OUTPUT), "--ignore-eos", "--extra", '{"temperature": 0}', "--json", "-",
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(outcome.stdout)["servers"][0]["summary"]
    if summary["completed"] != requests:
        sys.exit(f"{summary['completed']} of {requests} requests answered: {summary['failures']}")
    return [summary[name] if part is None else summary[name][part] for _, _, (name, part), _ in FIGURES]


def histograms(url):
    """Sum and count of every histogram of the server that is compared."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    of = lambda name, part: sum(float(value) for value in re.findall(rf"^vllm:{name}_{part}\{{.*\}} (\S+)", text, re.M))
    return {name: (of(name, "sum"), of(name, "count")) for _, _, _, name in FIGURES if name}


def means(before, after):
    """Means in ms of what came between; none for figures that the server does not have."""
    def mean(name):
        (sum_before, count_before), (sum_after, count_after) = before[name], after[name]
        return 1e3 * (sum_after - sum_before) / (count_after - count_before)

    return [mean(name) if name else None for _, _, _, name in FIGURES]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--server", required=True)
    options.add_argument("--bench", required=True)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE)
    options.add_argument("--fast", action="store_true")
    options = options.parse_args()
    faults, per_request = ("", 60) if options.fast else (SLOWER, 4)
    server, url = serve(options.server, faults)
    try:
        print("| at once | figure | aiperf | server then | bench serve | server then | bench serve over aiperf |")
        print("|--:|---|--:|--:|--:|--:|--:|")
        for at_once in options.at_once:
            requests = per_request * at_once
            paths = prompts(requests)
            both = [lambda: theirs(url, at_once, requests, paths[0]), lambda: ours(options.bench, url, at_once, requests, paths[1])]
            rounds, told = [[], []], [[], []]
            for turn in range(options.rounds):
                for side in [0, 1] if turn % 2 == 0 else [1, 0]:
                    before = histograms(url)
                    rounds[side].append(both[side]())
                    told[side].append(means(before, histograms(url)))
            for index, (name, _, _, own) in enumerate(FIGURES):
                median = lambda sides: [statistics.median(figures[index] for figures in side) for side in sides]
                a, b = median(rounds)
                c, d = median(told) if own else (1, 1)
                c_shown, d_shown = (f"{value:.2f}" if own else "" for value in (c, d))
                print(f"| {at_once} | {name} | {a:.2f} | {c_shown} | {b:.2f} | {d_shown} | {(b / d) / (a / c):.3f} |", flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
