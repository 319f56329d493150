"""Token rows for training: the tokenizer, and seeded blocks of packed rows with loss weights.

Invariant: a block depends on (seed, block number, mix) only, so a resumed run sees the same data.
"""

from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from problems import draw_drill, draw_problem, problem_text, prompt_text

EOS = "<|endoftext|>"
VOCAB = 688
ROW = 128  # longest problem text and length of a plain row, in tokens


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE in which every digit is a token of its own; words and signs carry their leading space."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = Random(f"{seed}/tokenizer")
    texts = (problem_text(*draw_problem(rng, test=False)[:2]) for _ in range(10_000))
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(f"the texts give only {tokenizer.get_vocab_size()} tokens: lower VOCAB in rows.py")
    return tokenizer


@dataclass(frozen=True)
class Mix:
    """How rows are filled and weighted."""

    drill_rows: float  # share of rows made of drills alone
    fill: bool  # fill short rows up with drills
    result_weight: float  # loss weight of the digits of a result
    copy_weight: float  # loss weight of the other digits of an answer, copied from the question or an earlier step
    question_weight: float = 0.1


class RowMaker:
    """Draws rows of `length` tokens; longer rows hold several problems, as a chat of several turns does."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.tokenizer, self.seed = tokenizer, seed
        self.eos = tokenizer.token_to_id(EOS)
        self.equals, self.space = tokenizer.encode(" = 1").ids[:2]
        self.digits = [tokenizer.token_to_id(digit) for digit in "0123456789"]

    def problem(self, rng: Random) -> tuple[list[int], list[bool]]:
        """Ids of a problem with its end, and whether each belongs to the answer."""
        while True:
            question, worked, _ = draw_problem(rng, test=False)
            prompt = self.tokenizer.encode(prompt_text(question)).ids
            answer = self.tokenizer.encode(f" {worked}").ids + [self.eos]
            if len(prompt) + len(answer) <= ROW:
                return prompt + answer, [False] * len(prompt) + [True] * len(answer)

    def drills(self, rng: Random, room: int) -> list[int]:
        """At least `room` ids of drills."""
        ids: list[int] = []
        while len(ids) < room:
            ids += self.tokenizer.encode(draw_drill(rng) + "\n").ids
        return ids

    def row(self, rng: Random, length: int, mix: Mix) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        answer: list[bool] = []
        if rng.random() >= mix.drill_rows:
            while len(ids) + ROW <= length:
                more = self.problem(rng)
                ids, answer = ids + more[0], answer + more[1]
        if mix.fill or not ids:
            ids = ids + self.drills(rng, length - len(ids))
        ids = (ids + [self.eos] * length)[:length]
        return ids, (answer + [False] * length)[:length]

    def result_digits(self, ids: np.ndarray) -> np.ndarray:
        """Mask of the digits that follow ` = `."""
        digit = np.isin(ids, self.digits)
        result = np.zeros(ids.shape, bool)
        for column in range(2, ids.shape[1]):
            first = (ids[:, column - 1] == self.space) & (ids[:, column - 2] == self.equals)
            result[:, column] = digit[:, column] & (first | result[:, column - 1])
        return result

    def block(self, key: str, rows: int, length: int, mix: Mix) -> tuple[np.ndarray, np.ndarray]:
        """(ids, loss weights) of shape [rows, length]; weight i is that of predicting id i."""
        rng = Random(f"{self.seed}/{key}")
        pairs = [self.row(rng, length, mix) for _ in range(rows)]
        ids = np.array([pair[0] for pair in pairs], np.int32)
        answer = np.array([pair[1] for pair in pairs])
        result = self.result_digits(ids)
        ends_number = np.zeros_like(result)
        ends_number[:, 1:] = result[:, :-1] & ~result[:, 1:]
        weights = np.where(answer | ends_number, 1.0, mix.question_weight)
        weights[answer & np.isin(ids, self.digits)] = mix.copy_weight
        weights[result] = mix.result_weight
        if not mix.fill:  # padding after the last text teaches nothing
            last = np.where(answer, np.arange(length), -1).max(axis=1, keepdims=True)
            weights[np.arange(length) > np.where(last < 0, length, last)] = 0.0
        return ids, weights.astype(np.float32)
