#!/usr/bin/env python3
"""Perplexity of llama.cpp on a text, for `cargo run -p tokenrouter-gpu --example perplexity`, which reads what this writes.

usage: reference.py MODEL.gguf [TEXT] [--context 512] [--threads 2] > windows.json
The text (default: text.txt beside this file) is cut into windows of `context` tokens, a rest is left out; in each window the second
half is predicted, as llama.cpp's own `llama-perplexity` counts. The JSON holds the token ids, so that both sides see the same.
Needs `pip install llama-cpp-python numpy`.
"""
import argparse, ctypes, json, math, pathlib
import llama_cpp as L
import numpy as np


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("text", nargs="?", default=pathlib.Path(__file__).with_name("text.txt"))
    ap.add_argument("--context", type=int, default=512)
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    quiet = L.llama_log_callback(lambda level, text, data: None)
    L.llama_log_set(quiet, ctypes.c_void_p(0))
    model = L.Llama(a.model, n_ctx=a.context, n_batch=a.context, n_threads=a.threads, n_threads_batch=a.threads,
                    logits_all=True, verbose=False)
    ids = model.tokenize(pathlib.Path(a.text).read_bytes(), add_bos=False, special=False)
    windows = [ids[i:i + a.context] for i in range(0, len(ids) - a.context + 1, a.context)]
    if L.llama_vocab_get_add_bos(L.llama_model_get_vocab(model.model)):  # such models expect every sequence to begin with it
        windows = [[model.token_bos()] + window[1:] for window in windows]
    means = []
    for window in windows:
        model.reset()
        model.eval(window)
        logits = model.scores[a.context // 2:a.context - 1].astype(np.float64)
        targets = window[a.context // 2 + 1:]
        high = logits.max(axis=1)
        log_sums = high + np.log(np.exp(logits - high[:, None]).sum(axis=1))
        means.append(float((log_sums - logits[np.arange(len(targets)), targets]).mean()))
    answer = {"llama_cpp_python": L.__version__, "context": a.context, "perplexity": math.exp(sum(means) / len(means)),
              "mean_nll": means, "windows": windows}
    print(json.dumps(answer))
    model.close()


main()
