"""A solution of `python -m lessons build m6`: what it adds to m5."""

from collections.abc import Callable, Iterator

import m5
from stop import StopStream


class Engine(m5.Engine):
    def stream(
        self,
        prompts: list[list[int]],
        max_tokens: list[int],
        ends: set[int],
        stops: list[str],
        as_bytes: Callable[[int], bytes],
    ) -> Iterator[tuple[int, str]]:
        texts = {seq: StopStream(stops) for seq in self.add(prompts, max_tokens, ends)}
        try:
            while self.running or self.waiting:
                for seq in self.step():
                    token, text = seq.token_ids[-1], texts[seq]
                    new = "" if token in ends else text.add(as_bytes(token))
                    if text.ended and seq in self.running:
                        self.end(seq)
                    if seq not in self.running:
                        new += text.finish()
                    if new:
                        yield seq.arrival, new
        finally:
            for seq in list(self.running):
                self.end(seq)
