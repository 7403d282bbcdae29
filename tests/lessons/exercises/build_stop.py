"""Checks `StopStream`: python -m lessons build stop --check FILE"""

import codecs
from itertools import pairwise, product

import pytest
from build_check import expect, load, same

from lessons.lesson import ask, make_llm

StopStream = load("stop.py", "StopStream")


def decode(tokens: list[bytes]) -> str:
    """The text of tokens, without an incomplete character at the end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(tokens))


def by_definition(stops: list[str], tokens: list[bytes]) -> tuple[str, bool]:
    """What is shown after these tokens, and whether a stop string is complete."""
    text = decode(tokens)
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    held = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(held, default=0)], False


def compare(stops: list[str], *tokens: bytes) -> None:
    """Add the tokens one by one, and compare what is shown."""
    given, shown, ended = list(stops), "", False
    stream = StopStream(given)
    for number, token in enumerate(tokens, 1):
        said = [*tokens[:number]]
        text = stream.add(token)
        expect(isinstance(text, str), f"`add` should return a string, but it returns {text!r}.")
        shown += text
        want, ended = by_definition(stops, said)
        what = f"Stop strings {stops}, tokens {said}: "
        expect(shown == want, f"{what}{want!r} should be shown by now, but it is {shown!r}.")
        same(stream.ended, ended, f"{what}`ended`")
    want = want if ended else decode([*tokens])
    last = stream.finish()
    expect(
        shown + last == want,
        f"{what}and no more follow: {want!r} should be shown in all, but with {last!r} from "
        f"`finish` it is {shown + last!r}.",
    )
    same(given, stops, "The list of stop strings, which is the caller's,")


def cut(data: bytes, *ends: int) -> list[bytes]:
    return [data[a:b] for a, b in zip((0, *ends), (*ends, len(data)), strict=True)]


def test_the_example() -> None:
    compare(["END"], b"in E", b"N", b"g", b"l", b"ENDs", b"more")
    compare(["END"], b"an E")


def test_two_streams_are_independent() -> None:
    one, other = StopStream(["ab"]), StopStream(["ab"])
    one.add(b"a")
    same(other.add(b"b"), "b", "Another stream has held back 'a'. What this one shows of 'b'")
    one.add(b"\xe2\x82")
    same(other.add(b"c"), "c", "Another stream has two bytes of '€'. What this one shows of 'c'")


def test_characters_of_several_tokens() -> None:
    for text in ("€", "a€b", "né", "😀!"):
        data = text.encode()
        for end in range(1, len(data)):
            compare([], *cut(data, end))
        compare([], *cut(data, *range(1, len(data))))
    compare([], b"a", b"\xe2\x82")
    compare(["b"], b"a\xff", b"\xe2A", b"b")  # invalid bytes


@pytest.mark.parametrize(
    "stops",
    [["b"], ["ab"], ["aab"], ["aba"], ["ab", "b"], ["b", "ab"], ["abb", "ba"], ["ab", "abb"]],
)
def test_all_short_texts(stops: list[str]) -> None:
    """Texts of two letters, in one token, in any two and letter by letter, the shortest first."""
    for length in range(1, 7):
        for letters in map(bytes, product(b"ab", repeat=length)):
            compare(stops, letters)
            for end in range(1, length):
                compare(stops, *cut(letters, end))
            compare(stops, *cut(letters, *range(1, length)))


def test_several_stop_strings_and_bytes() -> None:
    compare(["abcd", "bc"], b"xabcd")
    compare(["cd", "b"], b"abcd")
    compare(["aaaa", "ab"], b"aaab")
    compare(["x", "\n\n"], b"1\n", b"2\n", b"\n3")
    compare(["é"], b"a\xc3", b"\xa9b")
    for end in range(1, 7):
        compare(["€€"], *cut("a€€b".encode(), end))
    compare(["E€"], b"xE", b"\xe2\x82", b"\xac y")
    compare(["END"], b"xE", b"\xe2")
    compare(["END"], b"xE", b"", b"ND")
    compare([*"uvwxyz"], b"az")
    compare(["\ufffd!"], b"\xff")


def test_text_stays_as_it_is() -> None:
    compare(["END"], b"The end. ", b" ENd ", b"END")
    compare([" ab", "a"], b"1 a")
    compare(["\n\n"], b"1\n")
    compare([], b"\xef\xbb\xbf1\r\n", b"2\n\n")
    compare([], "e\u0301".encode())
    compare(["\r\n"], b"1\n2\r", b"\n")


def test_long_stop_strings() -> None:
    stop = b"This is a long line of forty characters\n"
    for end in range(1, len(stop)):
        compare([stop.decode()], b"1", *cut(stop, end), b"2")
        compare([stop.decode()], b"1", stop[:end], b"2")


def test_answers_of_the_model() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    for question, stops in (
        ("Count from 1 to 9\n", ["4, 5", ", 7"]),
        ("What is 12 + 30?\n", ["= 42", "+"]),
        ("What is prefix sharing?\n", [" the ", "\n", "a"]),
    ):
        [plain] = ask(llm, [question], max_tokens=30)
        [wanted] = ask(llm, [question], max_tokens=30, stop=stops)
        ids, stream, shown = plain.outputs[0].token_ids, StopStream(stops), ""
        texts = [llm.get_tokenizer().decode(ids[:end]) for end in range(len(ids) + 1)]
        for before, after in pairwise(texts):
            shown += stream.add(after.removeprefix(before).encode())
        what = f"The answer to {question!r} with stop={stops}, as the engine shows it,"
        same(shown + stream.finish(), wanted.outputs[0].text, what)
