"""Routed serving of two models beside what a user would run instead, over HTTP on loopback, in tokens per second.

    python headline.py --llama-server PATH --tokenrouter PATH --small A.gguf --large B.gguf [--requests 4,8] [--rounds 3]

Owner: whoever compares. Invariant: every row answers the same questions with the same number of new tokens, greedily and
past end-of-text, with cold prompts; rows take turns within a round, each with the machine to itself.

Rows: (a) two llama-server processes and a client that sends the ids of a request to the other server at each hop, (b) one
llama-server with the large model and a slot for each request, (c) the same with the small model drafting, (d) ours: routed,
and each model alone. Routing is `p`: with that probability the next token is the large model's, whoever made the last one,
and no token is made in vain; or `r_stitch`: the large model goes on while the entropy of the next token, over ln of the
vocabulary, is above the threshold, and the small model's token is dropped. The entropy of row (a) is of the 20 likeliest tokens.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

WORDS = "river copper engine paper winter garden signal number market bridge window letter island forest mirror".split()
TOP = 20


class Client:
    """One connection that is kept; opened again when the other side closed it."""

    def __init__(self, port):
        self.port, self.connection = port, None

    def post(self, path, body):
        data = json.dumps(body)
        for attempt in (1, 2):
            if self.connection is None:
                self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
            try:
                self.connection.request("POST", path, data, {"Content-Type": "application/json"})
                answer = self.connection.getresponse()
                text = answer.read()
                break
            except (http.client.HTTPException, ConnectionError):
                self.connection = None
                if attempt == 2:
                    raise
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {text[:300]!r}")
        return json.loads(text)


@contextlib.contextmanager
def process(command, port, health):
    """A server, from the moment when it answers until the end of the block."""
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment)
        try:
            for _ in range(1200):
                if server.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(map(str, command))} ended:\n{log.read().decode(errors='replace')[-2000:]}")
                with contextlib.suppress(OSError, http.client.HTTPException):
                    probe = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
                    probe.request("GET", health)
                    if probe.getresponse().status == 200:
                        break
                time.sleep(0.05)
            else:
                raise SystemExit(f"{health} of port {port} never answered 200")
            yield
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def together(requests, work):
    """Seconds until `work(index)` of all requests is done, each in a thread of its own."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(requests)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def llama_server(args, model, port, threads, requests, *more):
    context = requests * args.context
    common = ["-m", model, "--port", port, "-t", threads, "-tb", threads, "-np", requests, "-c", context, "--no-webui"]
    return process([args.llama_server, *common, *more], port, "/health")


def greedy(ids, tokens):
    common = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
    return common | {"return_tokens": True, "samplers": ["temperature"]}


def entropy(answer, vocabulary):
    top = answer["completion_probabilities"][0]["top_logprobs"]
    return -sum(math.exp(one["logprob"]) * one["logprob"] for one in top) / math.log(vocabulary)


def two_servers(args, prompts, routing, seed):
    """(a): the small model at one port, the large one at the next; one token a call."""
    ports = (args.port, args.port + 1)
    requests = len(prompts)
    with (
        llama_server(args, args.small, ports[0], 1, requests),
        llama_server(args, args.large, ports[1], 1, requests),
    ):

        def work(index):
            clients, ids, draw = [Client(port) for port in ports], list(prompts[index]), random.Random(f"{seed} {index}")
            made, at = 0, 0
            while made < args.tokens:
                if routing == "p":
                    at = int(draw.random() < args.p)
                more = {"id_slot": index} | ({"n_probs": TOP} if routing == "r_stitch" else {})
                answer = clients[at].post("/completion", greedy(ids, 1) | more)
                unsure = routing == "r_stitch" and entropy(answer, args.vocabulary) > args.threshold
                if at == 0 and unsure:
                    at = 1
                    continue
                ids.append(answer["tokens"][0])
                made += 1
                at = int(unsure)

        return together(requests, work)


def one_server(args, prompts, *more):
    """(b) and (c): a slot for each request."""
    with llama_server(args, args.large, args.port, 2, len(prompts), *more):

        def work(index):
            answer = Client(args.port).post("/completion", greedy(prompts[index], args.tokens))
            assert len(answer["tokens"]) == args.tokens, answer

        return together(len(prompts), work)


def ours(args, prompts, model, algorithm, params):
    """(d): the launch file says everything; `model` is the routed name or that of one model."""
    lines = ["[server]", f"port = {args.port}", f"live_max = {max(8, len(prompts))}"]
    lines += ["[router]", 'name = "routed"', f'algorithm = "{algorithm}"', 'models = ["small", "large"]']
    lines += ["[router.params]", params, "[batching]", args.batching]
    for name, path in (("small", args.small), ("large", args.large)):
        lines += ["[[models]]", f'name = "{name}"', f'path = "{Path(path).resolve()}"']
        lines += [f"context_length = {args.context}", f"kv_tokens = {args.context * len(prompts)}"]
    with tempfile.TemporaryDirectory() as folder:
        launch = Path(folder) / "launch.toml"
        launch.write_text("\n".join(lines) + "\n")
        with process([args.tokenrouter, "serve", "--config", launch], args.port, "/v1/models"):

            def work(index):
                body = {"model": model, "prompt": prompts[index], "max_tokens": args.tokens, "temperature": 0}
                answer = Client(args.port).post("/v1/completions", body | {"ignore_eos": True})
                assert answer["usage"]["completion_tokens"] == args.tokens, answer["usage"]

            return together(len(prompts), work)


def rows(args):
    """(name, what runs it: seconds for these prompts and this seed)."""
    chances = [1 - args.p, args.p]
    same = f"p = {[chances, chances]}\nkeep = [[true, true], [true, true]]"
    routers = {
        "p": (f"p = {args.p}", "bernoulli", same),
        "r_stitch": (f"threshold = {args.threshold}", "r_stitch", f"threshold = {args.threshold}"),
    }
    for routing, (shown, algorithm, params) in routers.items():
        yield (
            f"(a) two llama-servers and a client, {shown}",
            lambda prompts, seed, routing=routing: two_servers(args, prompts, routing, seed),
        )
        yield (
            f"(d) TokenRouter, {algorithm} {shown}",
            lambda prompts, seed, a=algorithm, p=params: ours(args, prompts, "routed", a, p),
        )
    yield "(b) llama-server, large model alone", lambda prompts, seed: one_server(args, prompts)
    draft = ["-md", args.small, "-td", 2, *args.draft.split()]
    yield "(c) llama-server, speculative decoding", lambda prompts, seed: one_server(args, prompts, *draft)
    for model in ("large", "small"):
        yield (
            f"(d) TokenRouter, {model} model alone",
            lambda prompts, seed, model=model: ours(args, prompts, model, "bernoulli", f"p = {args.p}"),
        )


def prompts_of(args, requests, seed):
    """Questions that nobody has asked before, as ids."""
    draw = random.Random(f"prompts {seed} {requests}")
    texts = [
        "<|im_start|>user\nWrite a Python function about "
        + " and ".join(draw.sample(WORDS, 3))
        + f" that returns {draw.randrange(1000)}, and explain it.<|im_end|>\n<|im_start|>assistant\n"
        for _ in range(requests)
    ]
    with llama_server(args, args.small, args.port, 1, 1):
        client = Client(args.port)
        return [client.post("/tokenize", {"content": text, "parse_special": True})["tokens"] for text in texts]


def table(args, seconds):
    counts = args.requests
    text = f"| tokens/s, {args.tokens} new tokens | " + " | ".join(f"N = {n}" for n in counts) + " |\n"
    text += "|---" * (len(counts) + 1) + "|\n"
    for name, by_count in seconds.items():
        cells = []
        for n in counts:
            rates = sorted(n * args.tokens / s for s in by_count.get(n, []))
            cells.append(f"{statistics.median(rates):.1f} ({rates[0]:.1f} to {rates[-1]:.1f})" if rates else "-")
        text += f"| {name} | " + " | ".join(cells) + " |\n"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("llama-server", "tokenrouter", "small", "large"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--requests", type=lambda text: [int(n) for n in text.split(",")], default=[4, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--p", type=float, default=0.15)
    parser.add_argument("--threshold", type=float, default=0.03)
    parser.add_argument("--batching", default='policy = "eager"', help="lines of [batching] for ours")
    parser.add_argument("--draft", default="--spec-type draft-simple --spec-draft-n-max 2", help="more options of llama-server for row (c)")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--port", type=int, default=18471)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--out", help="file for the seconds of all runs as JSON")
    args = parser.parse_args()
    seconds = {}
    for turn in range(args.rounds):
        for n in args.requests:
            prompts = prompts_of(args, n, turn)
            for name, run in rows(args):
                if args.only in name:
                    took = run(prompts, turn)
                    seconds.setdefault(name, {}).setdefault(n, []).append(took)
                    print(f"round {turn + 1}, N = {n}, {name}: {n * args.tokens / took:.1f} tokens/s", flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(seconds, indent=1))
    print("\n" + table(args, seconds))


if __name__ == "__main__":
    main()
