"""Text of tokens one by one: a prefix of the text of all, in linear time."""

import random

import pytest

from nanovllm import LLM, SamplingParams


def test_generate_and_stream_decode_alike(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tokenizer.decode` may clean up spaces by default, which a stream cannot do."""
    decode = embedded.engine.tokenizer.decode

    def cleans(ids: list[int], **options: object) -> str:
        text = decode(ids, **options)
        return text if "clean_up_tokenization_spaces" in options else text.replace(" ", "")

    monkeypatch.setattr(embedded.engine.tokenizer, "decode", cleans)
    params = SamplingParams(temperature=0, max_tokens=8)
    want = embedded.generate("Count from 1 to 9\n", params, use_tqdm=False)[0]["text"]
    assert " " in want
    assert "".join(new.text for new in embedded.stream("Count from 1 to 9\n", params)) == want


def test_detokenizer_on_every_prefix(embedded: LLM) -> None:
    """The text so far is a prefix of the full decode at every token, and all of it at the end."""
    from nanovllm.engine.detokenizer import Detokenizer

    tokenizer = embedded.get_tokenizer()
    rng = random.Random(0)
    pieces = [
        "🙂",
        "日本語",
        "e\u0301",
        "नि",
        "ab c",
        " the",
        "\n",
        "👩‍👩‍👧",
        "ÿ",
        "<|im_end|>",
        "7",
    ]
    size = len(tokenizer)
    for trial in range(150):
        ids: list[int] = []
        while len(ids) < 60:
            if rng.random() < 0.5:
                ids += tokenizer.encode(rng.choice(pieces))
            else:  # broken bytes: any token
                ids += [rng.randrange(256 if trial % 2 else size) for _ in range(rng.randint(1, 8))]
        detokenizer, text = Detokenizer(tokenizer), ""
        for i, token in enumerate(ids):
            text += detokenizer.add([token])
            full = tokenizer.decode(ids[: i + 1], skip_special_tokens=True)
            assert full.startswith(text)
            assert len(full) - len(text) <= 1
        assert text + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


def test_detokenizing_broken_bytes_is_linear(embedded: LLM) -> None:
    from nanovllm.engine.detokenizer import WINDOW, Detokenizer

    detokenizer = Detokenizer(embedded.get_tokenizer())
    broken = embedded.get_tokenizer().encode("\u00e9")[:1]  # the first byte of two
    longest = 0
    for _ in range(2000):
        detokenizer.add(broken)
        longest = max(longest, len(detokenizer.window))
    assert longest <= WINDOW + 1
