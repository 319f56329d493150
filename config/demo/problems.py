"""Arithmetic word problems with worked answers, bare-equation drills, and the hold-out rule.

Invariant: an operand pair of + or - whose hash falls in the held-out class never occurs in training text
(problem or drill), and every + and - step of a test problem is from that class.
Addition is hashed without order, so `26 + 43` is held out together with `43 + 26`.

    python problems.py --fresh 4000 --seed 7001 > fresh.jsonl    newly drawn problems, to train a router on

Fresh problems are of the training classes (of the held-out class with --held-out), and none of them is shipped.
"""

import argparse
import json
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent

LIMIT = 999  # every number of a problem lies in 1..LIMIT

NAMES = (
    "Emma Ben Mia Leo Anna Paul Nora Tom Lucy Max Ella Sam Ida Jack Rosa Finn Zoe Hugo Clara Oscar Lily Adam Eva Noah"
).split()
OBJECTS = (
    "roses apples books stamps marbles cards pencils shells coins cookies beads stickers plums eggs tiles candles"
).split()
CONTAINERS = "boxes bags baskets crates jars trays packs chests".split()
CURRENCIES = "dollars euros pounds crowns".split()
SHOPS = "shop market bakery kiosk store stall".split()
PLACES = "park museum library zoo cinema harbour".split()


@dataclass(frozen=True)
class Template:
    """One kind of problem.

    `steps` reads like `s=a+b d=s-c`; an operand that no step defines is drawn at random. In the texts `{a}` is a
    number and `{S}` (upper case of a result) is its whole equation, such as `43 + 26 = 69`.
    """

    steps: str
    question: str
    answer: str


TEMPLATES = [
    Template(
        "s=a+b d=s-c",
        "{n} has {a} {o}. {n} buys {b} more and then gives {c} to {m}. How many {o} does {n} have left?",
        "{n} starts with {a} {o} and buys {b} more, so now {n} has {S} {o}. After giving {c} of them to {m}, "
        "{n} still has {D} {o} left.",
    ),
    Template(
        "s=a-b d=s+c",
        "{n} has {a} {o} and loses {b} of them. Later {m} brings {c} more. How many {o} does {n} have now?",
        "{n} has {a} {o} at first and loses {b} of them, so there are {S} {o} left. Then {m} brings {c} "
        "more, and now {n} has {D} {o} in all.",
    ),
    Template(
        "s=a*b d=s+c",
        "{n} fills {a} {k} with {b} {o} each and has {c} {o} left over. How many {o} does {n} have?",
        "There are {a} {k} with {b} {o} in each of them, which makes {S} {o} in the {k}. Together with the "
        "{c} left over, {n} has {D} {o}.",
    ),
    Template(
        "s=a*b d=s-c",
        "{n} packs {a} {k} with {b} {o} each. {m} takes {c} of the {o} away. How many {o} are left?",
        "In the {a} {k} with {b} {o} each there are {S} {o} to begin with. Then {m} takes {c} of them away, "
        "so in the end {D} {o} are left.",
    ),
    Template(
        "s=a+b t=s+c d=t-e",
        "A {p} sells {a} {o} on Monday, {b} on Tuesday and {c} on Friday. Then {e} are brought back. How "
        "many {o} stay sold?",
        "On Monday and Tuesday the {p} sells {S} {o}. With the {o} of Friday that makes {T} {o}. Of these "
        "{e} are brought back, so {D} {o} stay sold.",
    ),
    Template(
        "s=a-b d=s-c",
        "{n} has {a} {u}. {n} pays {b} {u} for {o} and {c} {u} for a coat. How many {u} are left?",
        "First {n} pays {b} of the {a} {u} for the {o}, which leaves {S} {u}. After that {n} pays for the "
        "coat, and so there are {D} {u} left.",
    ),
    Template(
        "s=a+b d=s+c",
        "The {z} has {a} visitors on Friday, {b} on Saturday and {c} on Sunday. How many visitors come in all?",
        "On Friday and Saturday the {z} has {S} visitors. When we add the visitors of Sunday as well, we "
        "find that {D} visitors come to the {z} in all.",
    ),
    Template(
        "s=a+b d=s-c",
        "{n} finds {a} {o} and {m} finds {b}. They put them together and {c} of them break. How many {o} remain?",
        "Together {n} and {m} find {S} {o}. When {c} of them break, the number of {o} that remain for {n} "
        "and {m} is {D}.",
    ),
    Template(
        "s=a-b d=a+s",
        "{n} has {a} {o} and {m} has {b} fewer. How many {o} do they have together?",
        "We know that {m} has {b} {o} fewer than {n}, so {m} has {S} {o}. To find how many they have "
        "together we add both, and that makes {D} {o}.",
    ),
    Template(
        "s=a+b d=a+s",
        "{n} has {a} {u} and {m} has {b} {u} more. How many {u} do they have together?",
        "We know that {m} has {b} {u} more than {n}, so {m} has {S} {u}. To find how many they have together "
        "we add both, and that makes {D} {u}.",
    ),
    Template(
        "s=a*b d=c-s",
        "{n} has {c} {u} and buys {a} {o} for {b} {u} each. How many {u} does {n} have left?",
        "The {a} {o} cost {b} {u} each, so {n} pays {S} {u} for all of them. When we take this from the "
        "money, we see that {n} has {D} {u} left.",
    ),
    Template(
        "s=a*b t=c*e d=s+t",
        "{n} buys {a} {k} of {b} {o} and {m} buys {c} {k} of {e} {o}. How many {o} do they buy in all?",
        "In the {k} of {n} there are {S} {o}. In the {k} of {m} there are {T} {o}. So the number of {o} that "
        "they buy in all is {D}.",
    ),
    Template(
        "s=a+b d=c-s",
        "A train has {c} seats. At the {z} {a} people get on and at the {p} {b} more. How many seats are free?",
        "At the {z} and at the {p} together {S} people get on the train. Each of them takes one of the "
        "seats, so {D} seats are still free.",
    ),
    Template(
        "s=a-b t=s+c d=t-e",
        "A {p} has {a} {o} and sells {b}. Then {c} new ones come in and {e} break. How many {o} remain?",
        "After selling {b} of the {o} the {p} has {S} {o}. With the new ones there are {T} {o}. Then {e} of "
        "them break, so {D} {o} remain.",
    ),
]


def held_out(left: int, op: str, right: int) -> bool:
    """Whether this pair of operands belongs to the held-out class (one of ten). Products are never held out."""
    if op == "*":
        return False
    if op == "+" and left > right:
        left, right = right, left
    return zlib.crc32(f"{left}{op}{right}".encode()) % 10 == 7


def compute(left: int, op: str, right: int) -> int:
    return left + right if op == "+" else left - right if op == "-" else left * right


def equation(left: int, op: str, right: int) -> str:
    return f"{left} {'x' if op == '*' else op} {right} = {compute(left, op, right)}"


def draw_operand(rng: Random) -> int:
    """Mostly three digits, about a third two, few one."""
    kind = rng.random()
    return rng.randint(100, LIMIT) if kind < 0.6 else rng.randint(10, 99) if kind < 0.93 else rng.randint(2, 9)


def draw_steps(rng: Random, steps: str, test: bool) -> tuple[dict, list] | None:
    """Values of every variable and the list of (result, left, op, right), or None when the draw breaks a rule."""
    values, done = {}, []
    for step in steps.split():
        result, left, op, right = step[0], step[2], step[3], step[4]
        for side in (left, right):
            if side not in values:
                product = rng.randint(11, 99) if side == left else rng.randint(2, 9)
                values[side] = product if op == "*" else draw_operand(rng)
        operands = values[left], op, values[right]
        value = compute(*operands)
        if not 1 < value <= LIMIT or (op != "*" and held_out(*operands) != test):
            return None
        values[result] = value
        done.append((result, *operands))
    return values, done


def draw_problem(rng: Random, test: bool) -> tuple[str, str, str]:
    """(question, worked answer ending in `#### number`, number). Training and test draw from disjoint operand pairs."""
    template = rng.choice(TEMPLATES)
    drawn = None
    while drawn is None:
        drawn = draw_steps(rng, template.steps, test)
    values, steps = drawn
    first, second = rng.sample(NAMES, 2)
    words = dict(
        n=first,
        m=second,
        o=rng.choice(OBJECTS),
        k=rng.choice(CONTAINERS),
        u=rng.choice(CURRENCIES),
        p=rng.choice(SHOPS),
        z=rng.choice(PLACES),
    )
    equations = {result.upper(): equation(*operands) for result, *operands in steps}
    slots = {**words, **values, **equations}
    number = str(values[steps[-1][0]])
    return template.question.format(**slots), f"{template.answer.format(**slots)}\n#### {number}", number


def prompt_text(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def problem_text(question: str, worked: str) -> str:
    """The full text without its end-of-text token."""
    return f"{prompt_text(question)} {worked}"


def set_tens(number: int, tens: int) -> int:
    return number - number // 10 % 10 * 10 + tens * 10


def draw_drill(rng: Random) -> str:
    """One bare equation from the training classes; half of the sums carry or borrow across the tens digit."""
    while True:
        op = rng.choice("+++---*")
        if op == "*":
            return equation(rng.randint(11, 99), op, rng.randint(2, 9))
        left, right = draw_operand(rng), draw_operand(rng)
        if rng.random() < 0.5 and min(left, right) >= 10:
            tens = left // 10 % 10
            right = set_tens(right, 9 - tens if op == "+" else tens)
        if op == "-" and left < right:
            left, right = right, left
        if 1 < compute(left, op, right) <= LIMIT and not held_out(left, op, right):
            return equation(left, op, right)


def fresh_problems(seed: int, count: int, held_out: bool) -> list[dict]:
    """Different problems that are not among the shipped ones; the first ones are the same at any count."""
    seen = {json.loads(line)["question"] for line in (HERE / "problems.jsonl").read_text().splitlines()}
    rng, problems = Random(f"{seed}/router"), []
    while len(problems) < count:
        question, worked, number = draw_problem(rng, test=held_out)
        if question not in seen:
            seen.add(question)
            problems.append({"question": question, "answer": number, "worked": worked})
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", type=int, required=True, metavar="N", help="how many problems to print, one a line")
    parser.add_argument("--seed", type=int, default=7001, help="the same seed gives the same problems")
    parser.add_argument("--held-out", action="store_true", help="of the held-out class instead of the training classes")
    args = parser.parse_args()
    for problem in fresh_problems(args.seed, args.fresh, args.held_out):
        sys.stdout.write(json.dumps(problem) + "\n")


if __name__ == "__main__":
    main()
