"""Sets our step times beside llama.cpp's: both in turn, round after round, and the ratios as Markdown.

    python compare.py --binary PATH/TO/tokenrouter MODEL.gguf… [--threads 2,1] [--rounds 3] [--out results.json]

Owner: whoever compares. Invariant: the two take turns within a round, on the same file, steps, context and threads, so a
slow spell of the machine falls on both; the ratio of a round is llama.cpp's median over ours, and the table shows the
median of the rounds. A ratio above 1 says that ours is faster.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

PEER = Path(__file__).with_name("llama_cpp_steps.py")


def answer(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return json.loads(done.stdout)


def ours(args, model, threads):
    common = ["--model", model, "--threads", str(threads), "--json"]
    steps = ["--context", str(args.context), "--steps", args.steps, "--repeat", str(args.repeat)]
    limit = ["--roofline"] if args.roofline else []
    found = answer([args.binary, "bench", "step", *common, *steps, *limit])
    prompt = ["--tokens", str(args.prefill), "--repeat", str(args.prefill_repeat)]
    found["prefill_tokens_per_s"] = answer([args.binary, "bench", "prefill", *common, *prompt])["prefill_tokens_per_s"]
    return found


def theirs(args, model, threads):
    steps = ["--context", str(args.context), "--steps", args.steps, "--repeat", str(args.repeat)]
    prompt = ["--prefill", str(args.prefill), "--prefill-repeat", str(args.prefill_repeat)]
    return answer([sys.executable, PEER, model, "--threads", str(threads), *steps, *prompt])


def milliseconds(found, args):
    """By step; a prefill counts as one."""
    steps = {name: of["median_ms"] for name, of in found["steps"].items()}
    return steps | {f"prefill {args.prefill}": 1e3 * args.prefill / found["prefill_tokens_per_s"]}


def table(results, args, threads):
    """One line a step, one column a model: ratio, ours and theirs in ms."""
    models = [model for model in args.models if results.get((threads, model))]
    lines = [f"| {threads} thread(s), ms: ours, llama.cpp | " + " | ".join(Path(model).stem for model in models) + " |"]
    lines.append("|---" * (len(models) + 1) + "|")
    sides = {}
    for model in models:
        sides[model] = [[milliseconds(side, args) for side in pair] for pair in results[threads, model]]
    for step in next(iter(sides.values()))[0][0] if models else []:
        cells = []
        for model in models:
            ratio = statistics.median(peer[step] / own[step] for own, peer in sides[model])
            own, peer = (statistics.median(pair[side][step] for pair in sides[model]) for side in (0, 1))
            cells.append(f"**{ratio:.2f}x** ({own:.2f}, {peer:.2f})")
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--binary", default="tokenrouter")
    parser.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[2, 1])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", default="1:1,4:1,8:1,1:4,4:4")
    parser.add_argument("--repeat", type=int, default=8, help="steps of every shape in a round")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--prefill-repeat", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--roofline", action="store_true", help="measure the machine's ceilings with ours")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing more after this")
    parser.add_argument("--out", type=Path, help="all answers as JSON")
    args = parser.parse_args()
    began, results = time.monotonic(), {}
    for turn in range(args.rounds):
        for threads in args.threads:
            for model in args.models:
                if time.monotonic() - began > 60 * args.minutes:
                    continue
                pair = (ours(args, model, threads), theirs(args, model, threads))
                results.setdefault((threads, model), []).append(pair)
                passed = time.monotonic() - began
                print(f"{passed:6.0f} s  round {turn + 1}, {threads} thread(s), {Path(model).stem}", file=sys.stderr)
    for threads in args.threads:
        print(table(results, args, threads), end="\n\n")
    if args.out:
        keys = ("ours", "llama.cpp")
        cells = [
            {"threads": threads, "model": model, "rounds": [dict(zip(keys, pair)) for pair in pairs]}
            for (threads, model), pairs in results.items()
        ]
        args.out.write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
