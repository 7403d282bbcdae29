"""A solution of `python -m lessons build stop`."""

import codecs


class StopStream:
    def __init__(self, stops: list[str]) -> None:
        self.stops, self.ended, self.held = stops, False, ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: bytes) -> str:
        shown = ""
        for character in self.decoder.decode(token):
            if self.ended:
                break
            self.held += character
            for stop in self.stops:
                if self.held.endswith(stop):
                    self.ended = True
                    shown, self.held = shown + self.held[: -len(stop)], ""
                    break
            while self.held and not any(stop.startswith(self.held) for stop in self.stops):
                shown, self.held = shown + self.held[0], self.held[1:]
        return shown

    def finish(self) -> str:
        return self.held
