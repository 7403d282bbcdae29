"""Lesson 1b: from tokens to text.

Lesson 1a ended with a text, as if each token were a piece of it. It is not so simple. A stream that
shows text while tokens are generated must sometimes wait, although it has a token:

    token --> Detokenizer --> text --> stop strings --> text to show
              waits for                wait for
              whole characters         longer text
"""

from typing import Any

from lessons.lesson import ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams
from nanovllm.engine.detokenizer import Detokenizer

PROMPT = "What is 12 + 30?\n"
STOPS = ["= 43", "42"]
CHARACTERS = "5 € für 2"
ENDS: tuple[dict[str, Any], ...] = ({}, {"stop_token_ids": [15]}, {"max_tokens": 3}, {"stop": "42"})


def stream(llm: LLM, stops: list[str]) -> list[tuple[str, str, str]]:
    """Stream an answer -> after each token: the token, the text shown so far, and held back."""
    decode = llm.get_tokenizer().decode
    rows = list[tuple[str, str, str]]()
    ids = []
    shown = ""
    for new in llm.stream(PROMPT, SamplingParams(temperature=0, stop=stops)):
        ids += new.token_ids
        shown += new.text
        held = "" if new.finish_reason else decode(ids)[len(shown) :]
        rows.append((repr(decode(new.token_ids)), repr(shown), repr(held)))
    return rows


def run() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    QUESTIONS.show(1)
    say(f"""Characters: the tokens of {CHARACTERS!r}. Some characters have a token for each of their
        bytes. Such a token, decoded alone, gives the sign for invalid text, \ufffd. The Detokenizer
        keeps the tokens of a character that is not complete, and returns the character with the
        last of them:""")
    tokenizer = llm.get_tokenizer()
    rows = []
    detokenizer = Detokenizer(tokenizer, [])
    for token in tokenizer.encode(CHARACTERS):
        rows.append((token, repr(tokenizer.decode([token])), repr(detokenizer.add([token]))))
    show_table(("token", "alone", "new text"), rows)
    QUESTIONS.show(2)
    say(f"""Stop strings: the answer to {PROMPT!r} is streamed with stop={STOPS}. The longest has
        {max(map(len, STOPS))} characters, so at most the last {max(map(len, STOPS)) - 1} can be the
        beginning of one. The engine does not check whether they are: it holds back that many in any
        case, as vLLM does. When the request ends, the rest is shown, or a stop string is cut
        off:""")
    show_table(("token", "shown so far", "held back"), stream(llm, STOPS))
    say("""The end: the scheduler sees token ids, so it finds stop tokens and counts tokens. It has
        no text, so the engine looks for stop strings after the Detokenizer. A stop token is not
        shown either. stop_reason is the stop token or string that was found, and otherwise None:
        the model ended the text by its end-of-text token, or the limit was reached. The same
        request with four sets of parameters (15 is the token of "0"):""")
    ends = [ask(llm, [PROMPT], **params)[0].outputs[0] for params in ENDS]
    cells = [(str(end.finish_reason), repr(end.stop_reason), repr(end.text)) for end in ends]
    head = ("parameters", "finish_reason", "stop_reason", "text")
    show_table(head, [(str(params), *row) for params, row in zip(ENDS, cells, strict=True)])
    show_source(
        link("engine.detokenizer.Detokenizer._add_token", "self.stream.step"),
        link("engine.sampling.Sampling.read_sample", "max(map(len, stops))"),
        link("engine.sampling.Sampling._ends_with_stop", "sample.text.find"),
        link("engine.scheduler.Scheduler.finish_if_complete", "seq.stop_token_ids"),
    )
    say("""In lesson 12, `python -m lessons build stop` asks for a stream that holds back as little
        as possible.""")


QUESTIONS = Questions("""
    The euro sign has the bytes E2 82 AC in UTF-8. The vocabulary has a token for each byte, and
    none for the sign. A model generates its three tokens. With which of them can the stream show
    the sign: 1, 2 or 3?
    Answer: 3. Two bytes are not a character yet. They could also begin another one, such as E2 82
    BD.
    Hint: How many characters begin with the bytes E2 82?

    The stop string is "END", and the text so far is "The E". Why may the stream not show the "E"?
    (a) It may be the beginning of the stop string.
    (b) A stream shows a word when it is complete.
    (c) The text of a token needs the token after it.
    Answer: a. A stop string is not shown, and what has been shown cannot be taken back. If the next
    token is "nd", the "E" is shown one token late.
    Hint: What should a user have seen if the next two tokens are "N" and "D"?
""")

IN_VLLM = """`BaseIncrementalDetokenizer.update` in `v1/engine/detokenizer.py` holds back as many
characters (`stop_buffer_length`). It runs in the front end, and `OutputProcessor.process_outputs`
in `v1/engine/output_processor.py` then asks the engine process to abort the request."""
