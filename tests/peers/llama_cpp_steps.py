"""llama.cpp's side of `tokenrouter bench step` and `bench prefill`: the same steps, the same JSON.

    python llama_cpp_steps.py MODEL.gguf [--threads 2] [--context 128] [--steps 1:1,8:1,1:4] [--repeat 20] [--prefill 512]

Owner: whoever compares. Invariant: what is timed is one `llama_decode` with one row of logits for each sequence, read
back; shapes take turns round after round, as ours do, and a first round (and a first prefill) warms up. The KV cache is
f16, as ours is.
"""

import argparse
import ctypes
import json
import statistics
import time

import llama_cpp as L

CHUNK = 512
quiet = L.llama_log_callback(lambda level, text, data: None)


class Engine:
    """A model with `sequences` sequences of at most `length` tokens."""

    def __init__(self, path, threads, sequences, length):
        L.llama_log_set(quiet, ctypes.c_void_p(0))
        L.llama_backend_init()
        self.model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = L.llama_context_default_params()
        params.n_seq_max = sequences
        # A sequence gets an equal share, rounded to whole blocks of 256 cells.
        params.n_ctx = sequences * (-(-length // 256) * 256)
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = threads
        self.context = L.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp refuses a context of this size")
        self.memory = L.llama_get_memory(self.context)
        self.vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        self.batch = L.llama_batch_init(CHUNK, 0, 1)

    def put(self, slot, sequence, position, wanted):
        batch = self.batch
        batch.token[slot] = (position * 7919 + sequence * 104_729 + 13) % min(self.vocab, 32_000)
        batch.pos[slot] = position
        batch.n_seq_id[slot] = 1
        batch.seq_id[slot][0] = sequence
        batch.logits[slot] = wanted

    def decode(self, tokens):
        """Seconds for the batch, one value of its last logits included."""
        self.batch.n_tokens = tokens
        began = time.perf_counter()
        if L.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama_decode failed")
        L.llama_synchronize(self.context)
        float(L.llama_get_logits_ith(self.context, -1)[0])
        return time.perf_counter() - began

    def step(self, sequences, start, tokens):
        slot = 0
        for sequence in range(sequences):
            for j in range(tokens):
                self.put(slot, sequence, start + j, j == tokens - 1)
                slot += 1
        seconds = self.decode(slot)
        for sequence in range(sequences):
            L.llama_memory_seq_rm(self.memory, sequence, start, -1)
        return seconds

    def prefill(self, sequence, tokens):
        seconds = 0.0
        for start in range(0, tokens, CHUNK):
            end = min(tokens, start + CHUNK)
            for position in range(start, end):
                self.put(position - start, sequence, position, position == end - 1)
            seconds += self.decode(end - start)
        return seconds

    def forget(self, sequence):
        L.llama_memory_seq_rm(self.memory, sequence, -1, -1)


def timing(seconds):
    ordered = sorted(1e3 * value for value in seconds)
    p90 = ordered[round(0.9 * (len(ordered) - 1))]
    return {"median_ms": statistics.median(ordered), "min_ms": ordered[0], "p90_ms": p90}


def steps_of(text):
    return [tuple(int(part) for part in step.split(":")) for step in text.split(",")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=steps_of, default="1:1,2:1,4:1,8:1,16:1,1:4,4:4")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--prefill", type=int, default=0, help="time a cold prefill of this many tokens too")
    parser.add_argument("--prefill-repeat", type=int, default=3)
    args = parser.parse_args()
    if any(rows * tokens > CHUNK for rows, tokens in args.steps):
        parser.error(f"--steps: at most {CHUNK} tokens in a step")
    sequences = max(rows for rows, _ in args.steps)
    length = max(args.context + max(tokens for _, tokens in args.steps), args.prefill)
    engine = Engine(args.model, args.threads, sequences, length)
    for sequence in range(sequences):
        engine.prefill(sequence, args.context)
    seconds = {step: [] for step in args.steps}
    for turn in range(args.repeat + 1):
        for rows, tokens in args.steps:
            took = engine.step(rows, args.context, tokens)
            if turn > 0:
                seconds[rows, tokens].append(took)
    found = {"model": args.model, "threads": args.threads, "context": args.context, "steps": {}}
    for (rows, tokens), values in seconds.items():
        of = timing(values)
        found["steps"][f"{rows}:{tokens}"] = of | {"tokens_per_s": 1e3 * rows * tokens / of["median_ms"]}
    if args.prefill:
        values = []
        for _ in range(args.prefill_repeat + 1):
            engine.forget(0)
            values.append(engine.prefill(0, args.prefill))
        found["prefill_tokens_per_s"] = args.prefill / statistics.median(values[1:])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
