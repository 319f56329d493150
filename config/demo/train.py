"""Trains the embedded demo pair: data, tokenizer, the two models and the held-out problems, all from one seed.

    python train.py                 trains and writes large/, small/ and problems.jsonl beside this file
    python train.py --eval          scores the saved weights on problems.jsonl
    python train.py --eval --fresh 1000   scores them on newly drawn held-out problems

Invariant: both directories hold the same tokenizer.json, byte for byte; a killed run resumes from its last checkpoint.
"""

import argparse
import json
import pickle
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Tokenizer

import evaluate
from model import Shape, forward, init, is_layer_matrix, save_weights
from problems import draw_problem
from rows import EOS, ROW, VOCAB, Mix, RowMaker, train_tokenizer

HERE = Path(__file__).resolve().parent
PROBLEMS = 200
BATCH_TOKENS = 16 * ROW
CHECKPOINT = 500  # steps between checkpoints

# Earlier turns appear as full texts and every question ends with the cue the models were trained on.
# System messages are skipped: the models know nothing but these texts.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- 'Question: ' + (message['content'] | trim) + '\\nAnswer:' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- ' ' + (message['content'] | trim) + '<|endoftext|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


@dataclass(frozen=True)
class Recipe:
    """One training run. `drills` is the share of drill rows at the start, falling linearly to a tenth."""

    name: str
    shape: Shape
    steps: int
    rate: float
    drills: float
    result_weight: float
    copy_weight: float

    def mix(self, step: int) -> Mix:
        done = step / self.steps
        share = self.drills + (min(0.1, self.drills) - self.drills) * done
        fill = self.drills > 0.0
        return Mix(drill_rows=share, fill=fill, result_weight=self.result_weight, copy_weight=self.copy_weight)


# The small model sees no drills and its copied digits weigh more than its results: it learns the language and to copy
# numbers, and stays unsure exactly where something must be computed.
RECIPES = [
    Recipe(
        name="small",
        shape=Shape(VOCAB, hidden=64, layers=2, heads=2, kv_heads=1, ffn=176),
        steps=3500,
        rate=6e-3,
        drills=0.0,
        result_weight=1.0,
        copy_weight=2.0,
    ),
    Recipe(
        name="large",
        shape=Shape(VOCAB, hidden=128, layers=4, heads=4, kv_heads=2, ffn=352),
        steps=4500,
        rate=4e-3,
        drills=0.5,
        result_weight=4.0,
        copy_weight=1.0,
    ),
]


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon on the matrices of the layers, Adam on embeddings and norms; warm-up, then linear decay to 2 %."""
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, recipe.rate, 100),
            optax.linear_schedule(recipe.rate, 0.02 * recipe.rate, recipe.steps - 100),
        ],
        [100],
    )

    def dimensions(params: dict) -> dict:
        return {name: MuonDimensionNumbers(1, 0) if is_layer_matrix(name) else None for name in params}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(rate, weight_decay=0.01, adam_b2=0.98, consistent_rms=0.2, muon_weight_dimension_numbers=dimensions),
    )


def loss(params: dict, shape: Shape, ids: jax.Array, weights: jax.Array) -> jax.Array:
    logits = forward(params, shape, ids)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()


def row_length(step: int) -> int:
    """Every eighth step trains on rows of two problems, so that a second turn of a chat works."""
    return 2 * ROW if step % 8 == 7 else ROW


def batches(maker: RowMaker, recipe: Recipe, start: int):
    """Yields (step, ids, weights) from step `start` on; the mix changes every hundred steps."""
    for step in range(start, recipe.steps):
        length = row_length(step)
        mix = recipe.mix(step - step % 100)
        yield step, *maker.block(f"{recipe.name}/{step}", BATCH_TOKENS // length, length, mix)


def train(recipe: Recipe, maker: RowMaker, seed: int, work: Path) -> dict:
    """Trains one model, or resumes it from its checkpoint, and returns its parameters."""
    tx = optimizer(recipe)
    params = init(recipe.shape, seed)
    state, start = tx.init(params), 0
    checkpoint = work / f"{recipe.name}.pickle"
    if checkpoint.exists():
        params, state, start = pickle.loads(checkpoint.read_bytes())
        print(f"{recipe.name}: resuming at step {start}", flush=True)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, ids, weights):
        value, grads = jax.value_and_grad(loss)(params, recipe.shape, ids, weights)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    began = time.time()
    for step, ids, weights in batches(maker, recipe, start):
        params, state, value = update(params, state, jnp.asarray(ids), jnp.asarray(weights))
        if step % 100 == 0:
            print(f"{recipe.name}: step {step} loss {value:.4f} {time.time() - began:.0f} s", flush=True)
        if (step + 1) % CHECKPOINT == 0 or step + 1 == recipe.steps:
            partial_file = checkpoint.with_suffix(".partial")
            partial_file.write_bytes(pickle.dumps(jax.device_get((params, state, step + 1))))
            partial_file.rename(checkpoint)
    return params


def save_model(params: dict, recipe: Recipe, tokenizer: Tokenizer, eos: int) -> None:
    """Writes one Hugging Face directory."""
    folder = HERE / recipe.name
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": recipe.shape.config(eos),
        "generation_config.json": {"eos_token_id": eos, "pad_token_id": eos, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": None,
            "eos_token": EOS,
            "pad_token": EOS,
            "model_max_length": recipe.shape.config(eos)["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    save_weights(params, folder)


def held_out_problems(seed: str, count: int) -> list[dict]:
    rng = Random(seed)
    drawn = (draw_problem(rng, test=True) for _ in range(count))
    return [{"question": question, "answer": number, "worked": worked} for question, worked, number in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="folder of the checkpoints")
    parser.add_argument("--eval", action="store_true", help="score the saved weights instead of training")
    parser.add_argument("--fresh", type=int, default=0, metavar="N", help="with --eval: N newly drawn problems")
    args = parser.parse_args()
    if args.eval:
        lines = (HERE / "problems.jsonl").read_text().splitlines()
        problems = [json.loads(line) for line in lines]
        evaluate.report(HERE, held_out_problems(f"{args.seed}/fresh", args.fresh) if args.fresh else problems)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    problems = held_out_problems(f"{args.seed}/test", PROBLEMS)
    (HERE / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    tokenizer = train_tokenizer(args.seed)
    maker = RowMaker(tokenizer, args.seed)
    for recipe in RECIPES:
        save_model(train(recipe, maker, args.seed, args.work), recipe, tokenizer, maker.eos)
    evaluate.report(HERE, problems)


if __name__ == "__main__":
    main()
