"""Stop strings: how much of the text may be shown after each token.

The task. Write `StopStream`. `add` takes the bytes of one token and returns the text to show now.
Text that may begin a stop string is held back. When a stop string is complete, `add` sets `ended`,
and the output ends before it. `finish` returns what is held back when no token follows.

Example: the stop string is "END". The tokens "in E", "N", "g", "l" and "ENDs" give "in ", "",
"ENg", "l" and "". Then `ended` is true, and nothing is shown any more. "€" has the bytes E2 82 AC:
the tokens E2 82 and AC give "" and "€".

What must stay true:
  - Hold back only the longest suffix of the text that is a prefix of a stop string.
  - As if characters came one by one, the stop string that is complete first ends the output, which
    has only what is before it. If one character completes several, the first in the list counts.
  - `finish` leaves out a character that is not complete. It returns "" after a stop string.
  - Invalid bytes give "\ufffd", as often as the decoder in the hint says. All other text stays as
    it is: case, white space, line ends.
  - A token may have no bytes, and the list may have no stop string; none is empty. `StopStream`
    does not change the list.

In the engine: Detokenizer in nanovllm/engine/detokenizer.py. Hints: add the characters to the text
that is held back one by one. codecs.getincrementaldecoder("utf-8")("replace") keeps the bytes of an
incomplete one.
"""


class StopStream:
    def __init__(self, stops: list[str]) -> None:
        self.ended = False
        raise NotImplementedError("__init__ is to be written; see the top of this file")

    def add(self, token: bytes) -> str:
        raise NotImplementedError("add is to be written; see the top of this file")

    def finish(self) -> str:
        raise NotImplementedError("finish is to be written; see the top of this file")
