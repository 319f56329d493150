"""Load: aiperf, unmodified, against `tokenrouter serve` with the demo pair; writes a page of figures.

    python3 tests/clients/load.py --server target/release/tokenrouter --page docs/load.md

aiperf is installed into a virtual environment under target/tmp/load (1.2 GB). It fails when a request fails that was not to.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = ROOT / "target" / "tmp" / "load"
AIPERF = "aiperf==0.13.0"
MODEL = "demo"
INPUT, OUTPUT = 100, 100
TOKENIZER = str(ROOT / "config" / "demo" / "small")


def aiperf():
    """The program, installed if need be."""
    program = WORK / "venv" / "bin" / "aiperf"
    if not program.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(WORK / "venv")], check=True)
        python = str(WORK / "venv" / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", AIPERF], check=True)
    return program


def serve(program):
    """The server and its URL."""
    config = str(ROOT / "config/presets/demo-pair.toml")
    command = [program, "--config", config, "--log-level", "warn", "serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if line.startswith("serving"):
            return server, line.split()[1].removesuffix("/v1")
    sys.exit("the server did not start")


def command(url, concurrency, requests, more=()):
    return [
        "profile", "--model-names", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", TOKENIZER, "--use-server-token-count", "--concurrency", str(concurrency),
        "--request-count", str(requests), "--warmup-request-count", "16", "--random-seed", "1",
        "--isl", str(INPUT), "--osl", str(OUTPUT), "--extra-inputs", "ignore_eos:true", *more,
    ]


def profile(program, arguments, name):
    """Runs aiperf and returns its figures."""
    folder = WORK / name
    environment = dict(os.environ, COLUMNS="120")
    full = [str(program), *arguments, "--output-artifact-dir", str(folder), "--ui", "none"]
    outcome = subprocess.run(full, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = sorted(folder.rglob("*aiperf.json"))
    if outcome.returncode or not found:
        sys.exit(f"{' '.join(full)} failed:\n{outcome.stdout[-3000:]}\n{outcome.stderr[-3000:]}")
    return json.loads(found[-1].read_text())


def figure(figures, name, what="avg"):
    value = (figures.get(name) or {}).get(what)
    return float("nan") if value is None else value


def shell(line):
    return subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def live(url):
    import urllib.request

    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    pages = re.findall(r"^tokenrouter:kv_pages_used\{.*\} (\d+)", text, re.M)
    aborted = re.findall(r'^vllm:request_success_total\{.*finished_reason="abort".*\} (\d+)', text, re.M)
    requests = re.search(r"^tokenrouter:live_requests (\d+)", text, re.M).group(1)
    return int(requests), sum(map(int, pages)), sum(map(int, aborted))


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--server", required=True)
    options.add_argument("--page")
    options.add_argument("--note", default="")
    options.add_argument("--scale", type=int, default=1, help="times as many requests")
    options = options.parse_args()
    program = aiperf()
    server, url = serve(options.server)
    try:
        rows = []
        for concurrency in [1, 4, 8, 16]:
            requests = 60 * min(concurrency, 8) * options.scale
            figures = profile(program, command(url, concurrency, requests), f"c{concurrency}")
            done, failed = figure(figures, "request_count"), figure(figures, "error_request_count")
            if done != requests or failed > 0:
                sys.exit(f"{done} of {requests} requests answered, {failed} failed at {concurrency} at once")
            rows.append([
                f"{concurrency}", f"{done:.0f}",
                f"{figure(figures, 'request_throughput'):.1f}", f"{figure(figures, 'output_token_throughput'):.0f}",
                *(f"{figure(figures, name, what):.1f}" for name in ["time_to_first_token", "inter_token_latency", "request_latency"]
                  for what in ["p50", "p99"]),
            ])
        before = live(url)[2]
        more = ["--request-cancellation-rate", "30", "--request-cancellation-delay", "0.01"]
        cancelling = profile(program, command(url, 8, 300 * options.scale, more), "cancelled")
        requests, pages, aborted = live(url)
    finally:
        server.terminate()
        server.wait()
    if (requests, pages) != (0, 0):
        sys.exit(f"{requests} requests are alive and {pages} pages held after the last one")
    model = shell("sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1")
    cores = f"{os.cpu_count()} cores of {model}"
    shown = " ".join(["aiperf", *command("http://127.0.0.1:8080", "N", "REQUESTS")]).replace(f"{ROOT}/", "")
    page = [
        "# Load", "",
        f"Written by `just load` on {shell('date -u +%F')}, commit {shell('git rev-parse --short HEAD')}, {cores}, load generator "
        f"on the same machine. {options.note}".rstrip(), "",
        f"{AIPERF}, unmodified, against `tokenrouter serve` with the demo pair (r_stitch, threshold 0.05); streamed chats of about "
        f"{INPUT} tokens with {OUTPUT} tokens of answer. The models are tiny, so the figures show what server, router and HTTP cost, "
        "not a model.", "",
        "| at once | requests | requests/s | tokens/s | first token p50, ms | p99 | between tokens p50, ms | p99 | whole p50, ms | p99 |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(f"| {' | '.join(row)} |" for row in rows), "",
        f"With `{' '.join(more)}` at 8 at once: {figure(cancelling, 'request_count'):.0f} of {300 * options.scale} requests answered, the "
        f"rest given up by the client; the server counts {aborted - before} aborted, and afterwards no request is alive and no KV page "
        "held.", "",
        "The command:", "", f"    {shown}", "",
    ]
    text = "\n".join(page)
    print(text)
    if options.page:
        pathlib.Path(options.page).write_text(text)


if __name__ == "__main__":
    main()
