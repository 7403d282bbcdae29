"""The texts that train qwen3-nano, and the questions that grade it.

A `Sample` is one question with its right answer. An open task (`add`, `sort`, ...) has far more
instances than training draws. `held_out(key)` holds out a fixed 5 % of the keys for the test, by a
checksum. A closed task (`primes`, `table`) has few instances. Training draws all of them, and the
test asks in phrasings that training never saw. No torch.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.training.phrasings import EXPLAIN, IMPERATIVE, QUESTION, UNSEEN, UNSEEN_EXPLAIN
from tools.training.topics import OFF_TOPIC, SELF, SMALL_TALK, TOPICS

MAX_NUMBER = 99
MAX_COUNT = 64  # longest run of `count`: three tokens a number stay under max_new_tokens
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Sample:
    task: str
    question: str
    answer: str
    size: int = 0  # letters or numbers in the instance, where the task has such a size


def held_out(key: Iterable[object]) -> bool:
    """Return whether an instance is one of the 5 % of the test. The order of `key` counts."""
    return zlib.crc32(" ".join(map(str, key)).encode()) % 20 == 0


def _draw(test: bool, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Draw instances until one is of the test or of training. The first item is its key."""
    while True:
        instance = make()
        if held_out(instance[0]) == test:
            return instance


BEFORE = (
    "please ",
    "can you ",
    "could you ",
    "can you please ",
    "now ",
    "hey, ",
    "I want you to ",
    "I need you to ",
)


def _phrase(rng: random.Random, task: str, **values: object) -> str:
    """Draw a phrasing of the task. It varies in case, politeness and punctuation."""
    imperative, question = IMPERATIVE[task], QUESTION[task]
    index = rng.randrange(len(imperative) + len(question))
    if index < len(imperative):
        text = imperative[index].format(**values)
        before = rng.choice(("", "", "", "", *BEFORE))
        asks = before.startswith(("can you", "could you"))
        after = rng.choice(("", " please", "") if "please" not in before else ("",))
        if not after and rng.random() < 0.1:
            after = " for me"
        end = rng.choice(("?", "?", "") if asks else (".", "", "", "!"))
    else:
        text = question[index - len(imperative)].format(**values)
        before = rng.choice(("", "", "", "", "so ", "and ", "tell me, ", "quick: "))
        after = ""
        end = rng.choice(("?", "?", "?", "", "") if not text.endswith("=") else ("", " ?"))
    text = before + text + after + end
    return text if rng.random() < 0.4 else text[0].upper() + text[1:]


# ---- one function for each task: (rng, whether the sample is for the test) -> Sample ----


def _pair(rng: random.Random, test: bool) -> tuple[int, int]:
    """Draw two operands. The unordered pair decides whether they are held out, in every task.

    Equal operands are never held out, because `compare` draws them more often than chance.
    """
    while True:
        small = not test and rng.random() < 0.15  # users begin with small numbers
        top = 12 if small else MAX_NUMBER
        a, b = rng.randint(0, top), rng.randint(0, top)
        if (a != b and held_out(sorted((a, b)))) == test:
            return a, b


def add(rng: random.Random, test: bool = False) -> Sample:
    a, b = _pair(rng, test)
    return Sample("add", _phrase(rng, "add", a=a, b=b), f"{a} + {b} = {a + b}")


def subtract(rng: random.Random, test: bool = False) -> Sample:
    a, b = _pair(rng, test)
    return Sample("subtract", _phrase(rng, "subtract", a=a, b=b), f"{a} - {b} = {a - b}")


def compare(rng: random.Random, test: bool = False) -> Sample:
    a, b = _pair(rng, test)
    if not test:
        if rng.random() < 0.05:
            b = a
        near = rng.random() < 0.4  # the hard ones
        while near and abs(a - b) > 9:
            a, b = _pair(rng, test)
    question = _phrase(rng, "compare", a=a, b=b)
    low = question.lower()
    if a == b:
        answer = f"{a} and {b} are equal."
    elif "which is smaller" in low or "which is less" in low:
        answer = f"{min(a, b)} is smaller than {max(a, b)}."
    else:
        answer = f"{max(a, b)} is larger than {min(a, b)}."
    # Yes or no comes last: it is easy after the fact is written, and hard before.
    if f"is {a} larger" in low or f"is {a} bigger" in low or f"is {a} greater" in low:
        answer = f"{answer[:-1]}, so {'yes' if a > b else 'no'}."
    elif f"is {a} smaller" in low or f"is {a} less" in low:
        answer = f"{answer[:-1]}, so {'yes' if a < b else 'no'}."
    return Sample("compare", question, answer)


def count(rng: random.Random, test: bool = False) -> Sample:
    def make() -> tuple[Any, ...]:
        size = rng.randint(2, MAX_COUNT if test or rng.random() < 0.35 else 20)
        a = rng.randint(0, 100 - size + 1)
        return ("count", a, a + size - 1), a, a + size - 1

    _, a, b = _draw(test, make)
    answer = ", ".join(map(str, range(a, b + 1)))
    return Sample("count", _phrase(rng, "count", a=a, b=b), answer, b - a + 1)


def sort(rng: random.Random, test: bool = False) -> Sample:
    size = rng.randint(2, 8) if test else rng.choice((2, 3, 4, 5, 6, 6, 7, 7, 8, 8, 8))

    def make() -> tuple[Any, ...]:
        top = MAX_NUMBER if test or rng.random() < 0.9 else 20
        items = [rng.randint(0, top) for _ in range(size)]
        return sorted(items), items

    items: list[int] = _draw(test, make)[1]
    comma = ", " if test else rng.choice((", ", ", ", ", ", " ", ","))
    text = comma.join(map(str, items))
    if not test and rng.random() < 0.1:
        text = f"[{text}]"
    if comma == ", " and rng.random() < 0.1:
        text = " and ".join(text.rsplit(", ", 1))
    answer = ", ".join(map(str, sorted(items)))
    return Sample("sort", _phrase(rng, "sort", items=text), answer, size)


def word(rng: random.Random, test: bool = False, size: int = 0) -> str:
    """Draw a word of 3 to 12 letters: pronounceable, random, or (training) of three letters."""
    size = size or rng.randint(3, 12)

    def make() -> tuple[Any, ...]:
        if rng.random() < 0.5:
            text = "".join(
                rng.choice("bcdfghjklmnprstvwz")
                + rng.choice("aeiou")
                + rng.choice(("", "", "n", "r", "s", "l", "ck"))
                for _ in range(size)
            )
            start = rng.randint(0, 1)
            text = text[start : start + size]
        elif test or rng.random() < 0.7:
            text = "".join(rng.choice(LETTERS) for _ in range(size))
        else:  # few different letters: the model must tell them apart by their positions
            few = rng.sample(LETTERS, 3)
            text = "".join(rng.choice(few) for _ in range(size))
        return (text,), text

    while True:
        text: str = _draw(test, make)[1]
        if not (test and text in KNOWN_WORDS):
            return text


def _word_sample(task: str, rng: random.Random, test: bool, change: Callable[[str], str]) -> Sample:
    text = word(rng, test) if test or rng.random() < 0.88 else rng.choice(KNOWN_WORDS)
    if not test and rng.random() < 0.05:
        text = text.capitalize()
    shown = text
    if not test and rng.random() < 0.1:
        shown = rng.choice(("'{}'", '"{}"')).format(text)
    return Sample(task, _phrase(rng, task, w=shown), change(text), len(text))


def reverse(rng: random.Random, test: bool = False) -> Sample:
    return _word_sample("reverse", rng, test, lambda w: w[::-1])


def spell(rng: random.Random, test: bool = False) -> Sample:
    return _word_sample("spell", rng, test, "-".join)


def upper(rng: random.Random, test: bool = False) -> Sample:
    return _word_sample("upper", rng, test, str.upper)


def primes_up_to(n: int) -> list[int]:
    return [p for p in range(2, n + 1) if all(p % d for d in range(2, int(p**0.5) + 1))]


def primes(rng: random.Random, n: int = 0) -> Sample:
    n = n or (100 if rng.random() < 0.1 else rng.randint(2, 100))
    return Sample("primes", _phrase(rng, "primes", n=n), primes_answer(n))


def primes_answer(n: int) -> str:
    return ", ".join(map(str, primes_up_to(n)))


def table(rng: random.Random, n: int = 0) -> Sample:
    n = n or rng.randint(1, 12)
    return Sample("table", _phrase(rng, "table", n=n), table_answer(n))


def table_answer(n: int) -> str:
    return ", ".join(f"{n} x {i} = {n * i}" for i in range(1, 11))


def explain(rng: random.Random) -> Sample:
    """Draw a question about a topic of the engine."""
    topic = rng.choice(TOPICS)
    name = rng.choice(topic.names)
    text = rng.choice(EXPLAIN).format(x=name)
    asks = text.startswith(("what", "how", "why"))
    if text.split()[0] in ("explain", "define", "describe"):
        text = rng.choice(("", "", "", "please ")) + text
    text += rng.choice(("?", "?", "") if asks else ("?", ".", ""))
    return Sample("explain", text if rng.random() < 0.4 else text[0].upper() + text[1:], topic.text)


def talk(rng: random.Random) -> Sample:
    """Draw a greeting, an introduction, or a question that a model of this size cannot answer."""
    kind = rng.random()
    if kind < 0.4:
        question, answer = rng.choice(SELF.names), SELF.text
    elif kind < 0.6:
        topic = rng.choice(SMALL_TALK)
        question, answer = rng.choice(topic.names), topic.text
    else:
        question, answer = rng.choice(OFF_TOPIC.names), OFF_TOPIC.text
    asks = question.startswith(("what", "who", "how", "why"))
    question += rng.choice(("?", "?", "") if asks else ("", "", ".", "!"))
    question = question if rng.random() < 0.4 else question[0].upper() + question[1:]
    return Sample("talk", question, answer)


def _known_words() -> list[str]:
    """Return the words of all phrasings and topics. Each is one token and has to be learned."""
    topics = [*TOPICS, *SMALL_TALK, SELF, OFF_TOPIC]
    texts = [text for topic in topics for text in (*topic.names, topic.text)]
    for phrasings in (*IMPERATIVE.values(), *QUESTION.values(), EXPLAIN):
        texts += phrasings
    words = {w.lower() for w in re.findall(r"[A-Za-z]+", " ".join(texts))}
    return sorted(w for w in words if 3 <= len(w) <= 12)


KNOWN_WORDS = _known_words()

OPEN_TASKS: dict[str, Callable[[random.Random, bool], Sample]] = {
    task.__name__: task for task in (add, subtract, compare, count, sort, reverse, spell, upper)
}

# How often training draws each task. Tasks that are harder to learn have larger weights.
WEIGHTS: dict[Callable[..., Sample], float] = {
    add: 14,
    subtract: 18,
    compare: 30,
    count: 5,
    sort: 20,
    reverse: 20,
    spell: 6,
    upper: 5,
    primes: 7,
    table: 2,
    explain: 5,
    talk: 5,
}


def draw(rng: random.Random) -> Sample:
    """Draw a sample for training. It is never one of the test."""
    return rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0](rng)


def corpus(rng: random.Random, number: int = 20_000) -> Iterator[str]:
    """Yield texts for training the tokenizer: phrasings and topics without their instances."""
    blank = dict.fromkeys(("a", "b", "n", "w", "items"), "0")
    for _ in range(number):
        yield _phrase(rng, rng.choice(list(IMPERATIVE)), **blank)
        for sample in (compare(rng), explain(rng), talk(rng)):
            yield sample.question
            yield sample.answer


def graded_samples(task: str, number: int = 200, seed: int = 1) -> list[Sample]:
    """Return the test of a task: `number` held-out questions, or all instances if it is closed."""
    rng = random.Random(f"{task}/{seed}")
    if task in OPEN_TASKS:
        return [OPEN_TASKS[task](rng, True) for _ in range(number)]
    if task == "primes":
        pairs = [(n, text) for n in range(2, 101) for text in UNSEEN["primes"]]
        return [Sample(task, text.format(n=n), primes_answer(n)) for n, text in pairs]
    if task == "table":
        pairs = [(n, text) for n in range(1, 13) for text in UNSEEN["table"]]
        return [Sample(task, text.format(n=n), table_answer(n)) for n, text in pairs]
    if task == "explain":
        return [
            Sample(task, text.format(x=topic.names[0]), topic.text)
            for topic in TOPICS
            for text in UNSEEN_EXPLAIN
        ]
    if task == "talk":
        return [Sample(task, name[0].upper() + name[1:], SELF.text) for name in SELF.names]
    raise ValueError(f"unknown task {task!r}; known: {', '.join(ALL_TASKS)}")


ALL_TASKS = [*OPEN_TASKS, "primes", "table", "explain", "talk"]
