"""`tokenrouter bench serve` and aiperf, in turns, against one server: do they measure the same?

    python3 tests/clients/bench_serve.py --server target/release/tokenrouter --bench target/release/tokenrouter

Both send the same prompts of the demo pair, greedily, with as many tokens of answer. Every step of both models takes 30 ms
longer ([faults] of the launch file), as that of a real model would: the demo pair as it is answers so fast that what is
measured on few cores is how much of them the load generator takes (--fast shows that). Medians over the rounds are compared.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from load import MODEL, ROOT, TOKENIZER, WORK, aiperf, figure, profile

OUTPUT = 100
AT_ONCE = [1, 4, 8]
SLOWER = "".join(f'\n[[faults.steps]]\nmodel = "{model}"\nkind = "slow"\nevery = 1\nms = 30\n' for model in ["small", "large"])
# Name, figure of aiperf, figure of bench serve. aiperf's time between tokens is the mean of a request: TPOT elsewhere.
FIGURES = [
    ("TTFT, mean ms", ("time_to_first_token", "avg"), ("ttft_ms", "mean")),
    ("TTFT, median ms", ("time_to_first_token", "p50"), ("ttft_ms", "median")),
    ("TPOT (aiperf: ITL), mean ms", ("inter_token_latency", "avg"), ("tpot_ms", "mean")),
    ("E2EL, mean ms", ("request_latency", "avg"), ("e2el_ms", "mean")),
    ("requests/s", ("request_throughput", "avg"), ("request_throughput", None)),
    ("output tokens/s", ("output_token_throughput", "avg"), ("output_throughput", None)),
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
    return [figure(figures, *name) for _, name, _ in FIGURES]


def ours(program, url, at_once, requests, path):
    command = [
        program, "bench", "serve", "--url", url, "--concurrency", str(at_once), "--requests", str(requests), "--warmup",
        str(at_once), "--prompts", str(path), "--output-tokens", str(OUTPUT), "--ignore-eos", "--extra", '{"temperature": 0}', "--json", "-",
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(outcome.stdout)["servers"][0]["summary"]
    if summary["completed"] != requests:
        sys.exit(f"{summary['completed']} of {requests} requests answered: {summary['failures']}")
    return [summary[name] if part is None else summary[name][part] for _, _, (name, part) in FIGURES]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--server", required=True)
    options.add_argument("--bench", required=True)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--fast", action="store_true")
    options = options.parse_args()
    faults, per_request = ("", 60) if options.fast else (SLOWER, 4)
    server, url = serve(options.server, faults)
    try:
        print("| at once | figure | aiperf | bench serve | ratio |\n|--:|---|--:|--:|--:|")
        for at_once in AT_ONCE:
            requests = per_request * at_once
            paths = prompts(requests)
            both = [lambda: theirs(url, at_once, requests, paths[0]), lambda: ours(options.bench, url, at_once, requests, paths[1])]
            rounds = [[], []]
            for turn in range(options.rounds):
                for side in [0, 1] if turn % 2 == 0 else [1, 0]:
                    rounds[side].append(both[side]())
            for index, (name, _, _) in enumerate(FIGURES):
                a, b = (statistics.median(figures[index] for figures in side) for side in rounds)
                print(f"| {at_once} | {name} | {a:.2f} | {b:.2f} | {b / a:.3f} |", flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
