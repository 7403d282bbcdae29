"""The text that qwen3-nano learns from, and the questions that it is graded on.

Owns: the tasks, their phrasings, and the line between what training sees and what it never sees.
Given: a `random.Random`. Mutates: nothing else; imports no torch.

A `Sample` is one question with its right answer. An open task (`add`, `sort`, ...) has far more
instances than training shows: `held_out(key)` puts a fixed 5 % of the keys on the test side, by a
checksum, so that no list of them has to be kept. A closed task (`primes`, `table`) has few
instances, all of them trained, and is graded in phrasings that training never saw.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nanovllm.demo.lessons import LESSONS, OFF_TOPIC, SELF, SMALL_TALK

MAX_NUMBER = 99
MAX_COUNT = 64  # longest run of `count`: three tokens a number stay under max_new_tokens
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ORDINALS = ("first", "second", "third", "fourth", "fifth")


@dataclass(frozen=True)
class Sample:
    task: str
    question: str
    answer: str
    size: int = 0  # letters or numbers in the instance, where the task has such a size


def held_out(key: Iterable[object]) -> bool:
    """True for the 5 % of the instances that only the test sees. Order in `key` counts."""
    return zlib.crc32(" ".join(map(str, key)).encode()) % 20 == 0


def _draw(test: bool, make: Callable[[], tuple]) -> tuple:
    """Draw instances (their first item is the key) until one is on the wanted side."""
    while True:
        instance = make()
        if held_out(instance[0]) == test:
            return instance


# ---- phrasings: {x} is filled in; imperatives can take "please", questions cannot ----

IMPERATIVE: dict[str, list[str]] = {
    "add": [
        "add {a} and {b}",
        "add {a} to {b}",
        "compute {a} + {b}",
        "calculate {a} + {b}",
        "calculate the sum of {a} and {b}",
        "tell me the sum of {a} and {b}",
        "tell me what {a} plus {b} is",
        "work out {a}+{b}",
        "solve {a} + {b}",
    ],
    "subtract": [
        "subtract {b} from {a}",
        "take {b} away from {a}",
        "compute {a} - {b}",
        "calculate {a} - {b}",
        "tell me what {a} minus {b} is",
        "calculate the difference {a} minus {b}",
        "work out {a}-{b}",
        "solve {a} - {b}",
    ],
    "compare": [
        "compare {a} and {b}",
        "compare {a} with {b}",
        "tell me which is larger, {a} or {b}",
        "tell me which number is bigger: {a} or {b}",
        "compare the numbers {a} and {b}",
    ],
    "count": [
        "count from {a} to {b}",
        "count up from {a} to {b}",
        "list the numbers from {a} to {b}",
        "write the numbers from {a} to {b}",
        "list all whole numbers from {a} to {b}",
        "count {a} to {b}",
        "give me every number between {a} and {b} inclusive",
        "start at {a} and count to {b}",
    ],
    "sort": [
        "sort {items}",
        "sort these numbers: {items}",
        "sort the numbers {items}",
        "sort the list {items}",
        "sort this list: {items}",
        "put these numbers in order: {items}",
        "order the numbers {items}",
        "arrange {items} in ascending order",
        "sort {items} from smallest to largest",
        "sort the following numbers in ascending order: {items}",
    ],
    "primes": [
        "list all prime numbers within {n}",
        "list the primes up to {n}",
        "list the prime numbers up to {n}",
        "list all primes below or equal to {n}",
        "give me all primes up to {n}",
        "write down the prime numbers up to {n}",
        "show me the primes up to {n}",
        "name every prime number up to {n}",
        "tell me all prime numbers from 1 to {n}",
        "find all primes within {n}",
        "print the primes up to and including {n}",
        "enumerate the prime numbers not larger than {n}",
    ],
    "table": [
        "give me the multiplication table of {n}",
        "write the multiplication table of {n}",
        "show the multiplication table for {n}",
        "write the {n} times table",
        "show me the {n} times table",
        "list the multiples of {n} as a table",
        "recite the times table of {n}",
        "print the multiplication table of {n}",
        "make a multiplication table for {n}",
        "multiply {n} by 1 to 10",
    ],
    "reverse": [
        "reverse {w}",
        "reverse the word {w}",
        "reverse the letters of {w}",
        "write {w} backwards",
        "write the word {w} backwards",
        "write {w} in reverse",
        "turn the word {w} around",
        "spell {w} backwards in one word",
        "flip the word {w}",
    ],
    "spell": [
        "spell {w}",
        "spell the word {w}",
        "spell out {w}",
        "spell out the word {w}",
        "spell {w} letter by letter",
        "tell me how to spell {w}",
        "tell me the letters of {w}",
        "write {w} letter by letter",
    ],
    "upper": [
        "uppercase {w}",
        "upper-case the word {w}",
        "upper-case {w}",
        "write {w} in capital letters",
        "write {w} in upper case",
        "write the word {w} in uppercase",
        "capitalize every letter of {w}",
        "convert {w} to uppercase",
        "convert the word {w} to upper case",
        "put {w} in capitals",
        "turn {w} into uppercase",
        "make {w} uppercase",
    ],
}
QUESTION: dict[str, list[str]] = {
    "add": [
        "what is {a} + {b}",
        "what is {a} plus {b}",
        "what's {a} + {b}",
        "how much is {a} + {b}",
        "how much is {a} plus {b}",
        "what is the sum of {a} and {b}",
        "what do you get if you add {a} and {b}",
        "{a} + {b}",
        "{a}+{b}",
        "{a} plus {b}",
        "{a} + {b} =",
    ],
    "subtract": [
        "what is {a} - {b}",
        "what is {a} minus {b}",
        "what's {a} - {b}",
        "how much is {a} - {b}",
        "how much is {a} minus {b}",
        "what is left if you take {b} from {a}",
        "{a} - {b}",
        "{a}-{b}",
        "{a} minus {b}",
        "{a} - {b} =",
    ],
    "compare": [
        "which is larger, {a} or {b}",
        "which is bigger: {a} or {b}",
        "which is greater, {a} or {b}",
        "which is smaller, {a} or {b}",
        "which is less, {a} or {b}",
        "which number is larger, {a} or {b}",
        "what is larger, {a} or {b}",
        "is {a} larger than {b}",
        "is {a} bigger than {b}",
        "is {a} greater than {b}",
        "is {a} smaller than {b}",
        "is {a} less than {b}",
        "{a} or {b}, which is larger",
    ],
    "count": [
        "can you count from {a} to {b}",
        "what are the numbers from {a} to {b}",
        "how do you count from {a} to {b}",
    ],
    "sort": [
        "what is the sorted order of {items}",
        "what is {items} sorted",
        "how do you sort {items}",
    ],
    "primes": [
        "what are the primes up to {n}",
        "what are the prime numbers up to {n}",
        "which numbers up to {n} are prime",
        "which primes are there up to {n}",
        "which prime numbers are within {n}",
    ],
    "table": [
        "what is the multiplication table of {n}",
        "what is the {n} times table",
        "what does the times table of {n} look like",
    ],
    "reverse": [
        "what is {w} backwards",
        "what is {w} reversed",
        "what is the word {w} spelled backwards",
        "how do you write {w} backwards",
        "what is the reverse of {w}",
    ],
    "spell": [
        "how do you spell {w}",
        "how is {w} spelled",
        "what letters are in {w}",
        "what is the spelling of {w}",
    ],
    "upper": [
        "what is {w} in uppercase",
        "what is {w} in capital letters",
        "how do you write {w} in capitals",
        "what does {w} look like in upper case",
    ],
}
# Phrasings of the closed tasks that training never sees; whole, as a person would type them.
UNSEEN: dict[str, list[str]] = {
    "primes": [
        "I would like a list of the prime numbers up to {n}.",
        "Primes up to {n}?",
        "Please list every prime number that is at most {n}.",
        "show all primes within {n} please",
    ],
    "table": [
        "Could you show me the multiplication table of {n} please?",
        "{n} times table",
        "I need the multiplication table for {n}.",
        "Please recite the {n} times table.",
    ],
}


def _phrase(rng: random.Random, task: str, **values: object) -> str:
    """One of the task's phrasings, decorated as people do: case, politeness, punctuation."""
    imperative, question = IMPERATIVE[task], QUESTION[task]
    index = rng.randrange(len(imperative) + len(question))
    if index < len(imperative):
        text = imperative[index].format(**values)
        before = rng.choice(("", "", "", "please ", "can you ", "could you ", "now ", "hey, "))
        asks = before in ("can you ", "could you ")
        after = rng.choice(("", " please", "") if before != "please " else ("",))
        if not after and rng.random() < 0.1:
            after = " for me"
        end = rng.choice(("?", "?", "") if asks else (".", "", "", "!"))
    else:
        text = question[index - len(imperative)].format(**values)
        before = rng.choice(("", "", "", "", "so ", "and ", "tell me, ", "quick: "))
        after, end = "", rng.choice(("?", "?", "?", "", "") if not text.endswith("=") else ("", " ?"))
    text = before + text + after + end
    return text if rng.random() < 0.4 else text[0].upper() + text[1:]


# ---- one maker per task: (rng, test side?) -> Sample ----


def _pair(rng: random.Random, test: bool) -> tuple[int, int]:
    """Two operands; the unordered pair decides the side, for every task that takes a pair."""

    def make() -> tuple:
        a, b = rng.randint(0, MAX_NUMBER), rng.randint(0, MAX_NUMBER)
        return sorted((a, b)), a, b

    return _draw(test, make)[1:]


def add(rng: random.Random, test: bool = False) -> Sample:
    a, b = _pair(rng, test)
    return Sample("add", _phrase(rng, "add", a=a, b=b), f"{a} + {b} = {a + b}")


def subtract(rng: random.Random, test: bool = False) -> Sample:
    a, b = _pair(rng, test)
    return Sample("subtract", _phrase(rng, "subtract", a=a, b=b), f"{a} - {b} = {a - b}")


def compare(rng: random.Random, test: bool = False) -> Sample:
    a, b = _pair(rng, test)
    if not test and rng.random() < 0.03:
        b = a
    question = _phrase(rng, "compare", a=a, b=b)
    low = question.lower()
    if a == b:
        answer = f"{a} and {b} are equal."
    elif "which is smaller" in low or "which is less" in low:
        answer = f"{min(a, b)} is smaller than {max(a, b)}."
    else:
        answer = f"{max(a, b)} is larger than {min(a, b)}."
    if f"is {a} larger" in low or f"is {a} bigger" in low or f"is {a} greater" in low:
        answer = ("Yes, " if a > b else "No, ") + answer
    elif f"is {a} smaller" in low or f"is {a} less" in low:
        answer = ("Yes, " if a < b else "No, ") + answer
    return Sample("compare", question, answer)


def count(rng: random.Random, test: bool = False) -> Sample:
    def make() -> tuple:
        size = rng.randint(2, MAX_COUNT if test or rng.random() < 0.35 else 20)
        a = rng.randint(0, 100 - size + 1)
        return ("count", a, a + size - 1), a, a + size - 1

    _, a, b = _draw(test, make)
    answer = ", ".join(map(str, range(a, b + 1)))
    return Sample("count", _phrase(rng, "count", a=a, b=b), answer, b - a + 1)


def sort(rng: random.Random, test: bool = False) -> Sample:
    size = rng.randint(2, 8) if test else rng.choice((2, 3, 4, 5, 6, 6, 7, 7, 8, 8, 8))

    def make() -> tuple:
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
    """A word of 3 to 12 letters: pronounceable, or letters at random, or (training) a repeat."""
    size = size or rng.randint(3, 12)

    def make() -> tuple:
        if rng.random() < 0.5:
            text = "".join(
                rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(("", "", "n", "r", "s", "l", "ck"))
                for _ in range(size)
            )
            start = rng.randint(0, 1)
            text = text[start : start + size]
        elif test or rng.random() < 0.7:
            text = "".join(rng.choice(LETTERS) for _ in range(size))
        else:  # few different letters: position, not identity, must tell them apart
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
    """One idea of the engine, asked by one of its names."""
    lesson = rng.choice(LESSONS)
    name = rng.choice(lesson.names)
    text = rng.choice(EXPLAIN).format(x=name)
    before = rng.choice(("", "", "", "please ")) if text.split()[0] in ("explain", "define", "describe") else ""
    text = before + text + rng.choice(("?", ".", "") if not text.startswith(("what", "how", "why")) else ("?", "?", ""))
    return Sample("explain", text if rng.random() < 0.4 else text[0].upper() + text[1:], lesson.text)


EXPLAIN = [
    "what is {x}",
    "what's {x}",
    "what does {x} mean",
    "what do you know about {x}",
    "explain {x}",
    "explain {x} to me",
    "explain the idea of {x}",
    "describe {x}",
    "define {x}",
    "tell me about {x}",
    "tell me what {x} is",
    "can you explain {x}",
    "can you tell me what {x} is",
    "how does {x} work",
    "why is there {x}",
    "what is {x} for",
    "what is meant by {x}",
    "{x}",
]
UNSEEN_EXPLAIN = ["Could you explain {x}?", "Please tell me what {x} is.", "What is {x} in nanovllm?"]


def talk(rng: random.Random) -> Sample:
    """Greetings, introductions, and questions that a model of this size cannot answer."""
    kind = rng.random()
    if kind < 0.4:
        question, answer = rng.choice(SELF.names), SELF.text
    elif kind < 0.6:
        lesson = rng.choice(SMALL_TALK)
        question, answer = rng.choice(lesson.names), lesson.text
    else:
        question, answer = rng.choice(OFF_TOPIC.names), OFF_TOPIC.text
    question += rng.choice(("", "", ".", "!") if not question.startswith(("what", "who", "how", "why")) else ("?", "?", ""))
    return Sample("talk", question if rng.random() < 0.4 else question[0].upper() + question[1:], answer)


def _known_words() -> list[str]:
    """Every word of the phrasings and lessons: one token each, so its spelling must be learned."""
    lessons = [*LESSONS, *SMALL_TALK, SELF, OFF_TOPIC]
    texts = [text for lesson in lessons for text in (*lesson.names, lesson.text)]
    for phrasings in (*IMPERATIVE.values(), *QUESTION.values(), EXPLAIN):
        texts += phrasings
    words = {w.lower() for w in re.findall(r"[A-Za-z]+", " ".join(texts))}
    return sorted(w for w in words if 3 <= len(w) <= 12)


KNOWN_WORDS = _known_words()

OPEN_TASKS: dict[str, Callable[[random.Random, bool], Sample]] = {
    "add": add,
    "subtract": subtract,
    "compare": compare,
    "count": count,
    "sort": sort,
    "reverse": reverse,
    "spell": spell,
    "upper": upper,
}

# How often training draws each task: the harder it is to learn, the more of it.
WEIGHTS: dict[Callable[..., Sample], float] = {
    add: 12,
    subtract: 14,
    compare: 5,
    count: 6,
    sort: 24,
    reverse: 22,
    spell: 6,
    upper: 5,
    primes: 6,
    table: 3,
    explain: 6,
    talk: 5,
}


def draw(rng: random.Random) -> Sample:
    """One training sample; never one of the test side."""
    return rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0](rng)


def corpus(rng: random.Random, number: int = 20_000) -> Iterator[str]:
    """Text for training the tokenizer: all phrasings and lessons, with no instance filled in."""
    blank = dict.fromkeys(("a", "b", "n", "w", "items"), "0")
    for _ in range(number):
        yield _phrase(rng, rng.choice(list(IMPERATIVE)), **blank)
        for sample in (compare(rng), explain(rng), talk(rng)):
            yield sample.question
            yield sample.answer


def test_samples(task: str, number: int = 200, seed: int = 1) -> list[Sample]:
    """The graded questions of a task: `number` held-out ones, or, if closed, every instance."""
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
        return [Sample(task, text.format(x=lesson.names[0]), lesson.text) for lesson in LESSONS for text in UNSEEN_EXPLAIN]
    if task == "talk":
        return [Sample(task, name[0].upper() + name[1:], SELF.text) for name in SELF.names]
    raise ValueError(f"unknown task {task!r}; known: {', '.join(ALL_TASKS)}")


ALL_TASKS = [*OPEN_TASKS, "primes", "table", "explain", "talk"]
