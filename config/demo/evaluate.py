"""Greedy evaluation of the saved pair: each model alone, the oracle share, and R-Stitch at several thresholds.

Weights are read back from the saved BF16 files and computed in f32. There is no KV cache: every step is a full forward.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from model import forward, load_model
from problems import prompt_text
from rows import EOS

TAUS = (0.10, 0.06, 0.05, 0.02, 0.005)
ROOM = 192  # tokens of prompt and answer together


class Scorer:
    """One saved model: next-token argmax and normalised entropy for some rows of a token table."""

    def __init__(self, folder: Path):
        self.shape, self.params = load_model(folder)

        def last(ids: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = forward(self.params, self.shape, ids)[jnp.arange(len(ids)), lengths - 1]
            return jnp.argmax(logits, -1), normalised_entropy(logits)

        self.last = jax.jit(last)
        self.every = jax.jit(lambda ids: forward(self.params, self.shape, ids))

    def next(self, table: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, entropies) for `rows`. Rows and length are padded to a few sizes, so little is compiled."""
        padded = 16
        while padded < len(rows):
            padded = padded * 3 // 2
        width = min(ROOM, -(-int(lengths[rows].max()) // 32) * 32)
        chosen = np.concatenate([rows, np.full(padded - len(rows), rows[0])])
        tokens, entropies = self.last(table[chosen, :width], lengths[chosen])
        return np.asarray(tokens)[: len(rows)], np.asarray(entropies)[: len(rows)]


@dataclass(frozen=True)
class Pair:
    small: Scorer
    large: Scorer
    eos: int


def normalised_entropy(logits: jax.Array) -> jax.Array:
    """-sum p ln p / ln V over the last axis, in [0, 1]."""
    logp = jax.nn.log_softmax(logits, -1)
    return -(jnp.exp(logp) * logp).sum(-1) / np.log(logits.shape[-1])


def decode(pair: Pair, prompts: list[list[int]], tau: float) -> tuple[list[list[int]], float]:
    """R-Stitch on all prompts at once: (token ids of each answer, share of tokens from the large model).

    A threshold of 1 or more is the small model alone; one below 0 is the large model alone.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    table = np.zeros((len(prompts), ROOM), np.int32)
    for row, prompt in enumerate(prompts):
        table[row, : len(prompt)] = prompt
    on_large = np.full(len(prompts), tau < 0)
    running = np.ones(len(prompts), bool)
    by_model = [0, 0]
    while running.any():
        token = np.zeros(len(prompts), np.int32)
        rows = np.flatnonzero(running & ~on_large)
        if len(rows):
            token[rows], entropy = pair.small.next(table, lengths, rows)
            on_large[rows] = entropy > tau
        emitted_small = running & ~on_large
        rows = np.flatnonzero(running & on_large)
        if len(rows):
            token[rows], entropy = pair.large.next(table, lengths, rows)
            on_large[rows] = entropy > tau
        by_model[0] += int(emitted_small.sum())
        by_model[1] += len(rows)
        table[running, lengths[running]] = token[running]
        lengths[running] += 1
        running &= (token != pair.eos) & (lengths < ROOM)
    answers = [list(map(int, table[row, len(prompt) : lengths[row]])) for row, prompt in enumerate(prompts)]
    return answers, by_model[1] / sum(by_model)


def oracle(small: Scorer, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, float]:
    """How the small model sees the large model's `answers`.

    `share` is the share of tokens at which the two argmaxes differ: routing exactly there gives the large model's text.
    """
    table = np.zeros((len(prompts), ROOM), np.int32)
    target = np.zeros((len(prompts), ROOM), bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        text = prompt + answer
        table[row, : len(text)] = text
        target[row, len(prompt) - 1 : len(text) - 1] = True
    logits = small.every(table)
    wrong = (np.asarray(jnp.argmax(logits, -1))[:, :-1] != table[:, 1:])[target[:, :-1]]
    entropy = np.asarray(normalised_entropy(logits))[:, :-1][target[:, :-1]]
    ranks = entropy.argsort().argsort()
    right_count, wrong_count = (~wrong).sum(), wrong.sum()
    auroc = (ranks[wrong].sum() - wrong_count * (wrong_count - 1) / 2) / max(1, right_count * wrong_count)
    return {
        "share": wrong.mean(),
        "entropy_where_wrong": entropy[wrong].mean(),
        "entropy_where_right": entropy[~wrong].mean(),
        "auroc": auroc,
    }


def report(folder: Path, problems: list[dict]) -> None:
    """Prints accuracy (exact final number) and the large model's share of tokens for every setting."""
    tokenizer = Tokenizer.from_file(str(folder / "large" / "tokenizer.json"))
    pair = Pair(Scorer(folder / "small"), Scorer(folder / "large"), tokenizer.token_to_id(EOS))
    prompts = [tokenizer.encode(prompt_text(problem["question"])).ids for problem in problems]

    def score(answers: list[list[int]]) -> tuple[float, list[str]]:
        texts = [tokenizer.decode(answer) for answer in answers]
        right = [text.rpartition("#### ")[2] == problem["answer"] for text, problem in zip(texts, problems)]
        return 100 * float(np.mean(right)), [text for text, ok in zip(texts, right) if not ok]

    print(f"{len(problems)} problems | accuracy % | % of tokens from large", flush=True)
    settings = [("small alone", 1.0), ("large alone", -1.0)] + [(f"r_stitch {tau}", tau) for tau in TAUS]
    for name, tau in settings:
        answers, share = decode(pair, prompts, tau)
        accuracy, wrong = score(answers)
        print(f"{name:15} | {accuracy:5.1f} | {100 * share:5.2f}", flush=True)
        if name == "large alone":
            facts = oracle(pair.small, prompts, answers)
            print(f"{'oracle':15} | {accuracy:5.1f} | {100 * facts['share']:5.2f}")
            print("small on the large model's answers: " + ", ".join(f"{k} {v:.4f}" for k, v in facts.items()))
            print("wrong: " + repr(wrong[:5]), flush=True)
