"""Runs a workload in llama.cpp, in an environment with llama-cpp-python and without nanovllm.

It follows the protocol of turn.py, as vllm_peer.py does. Sequences are added to a batch when others
end, as in llama.cpp's server, and a slot keeps the KV of its last sequence: a conversation that is
continued in the same slot computes only what is new. Tokens are chosen greedily.
"""

import json
import os
import sys
import time
from typing import Any

BATCH = 512  # tokens of a call, llama.cpp's default


class Engine:
    """A model of llama.cpp with room for `parallel` sequences."""

    def __init__(
        self, model: str, parallel: int, longest: int, threads: int, kind: str | None = None
    ) -> None:
        """`kind` is a type to which llama.cpp's quantizer converts the file first, as "Q4_0"."""
        import llama_cpp

        self.api: Any = llama_cpp
        self.parallel = parallel
        if kind:
            model, source = f"{model}.{kind}", model
            how = self.api.llama_model_quantize_default_params()
            how.ftype = getattr(self.api, f"LLAMA_FTYPE_MOSTLY_{kind}")
            if self.api.llama_model_quantize(source.encode(), model.encode(), how) != 0:
                raise RuntimeError("llama_model_quantize failed")
        loaded = self.api.llama_model_load_from_file(
            model.encode(), self.api.llama_model_default_params()
        )
        params = self.api.llama_context_default_params()
        params.n_ctx = parallel * (longest + 1)
        params.n_seq_max = parallel
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        self.context = self.api.llama_init_from_model(loaded, params)
        self.memory = self.api.llama_get_memory(self.context)
        self.vocab_size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(loaded))
        self.batch = self.api.llama_batch_init(BATCH, 0, 1)
        self.stored: list[list[int]] = [[] for _ in range(parallel)]

    def reset(self) -> None:
        self.api.llama_memory_clear(self.memory, True)
        self.stored = [[] for _ in range(self.parallel)]

    def run(self, prompts: list[list[int]], lengths: list[int]) -> list[int]:
        """Complete the prompts. Returns the number of tokens of each output."""
        import numpy as np

        outputs: list[list[int]] = [[] for _ in prompts]
        waiting = list(range(len(prompts)))
        slots: dict[int, int] = {}  # slot -> request
        while waiting or slots:
            for slot in range(self.parallel):
                if waiting and slot not in slots:
                    slots[slot] = waiting.pop(0)
                    self.keep_prefix(slot, prompts[slots[slot]])
            batch = self.batch
            batch.n_tokens = 0
            last: dict[int, int] = {}  # slot -> its place in the batch, if a token follows
            for slot, request in slots.items():
                known = prompts[request] + outputs[request]
                new = known[len(self.stored[slot]) :][: BATCH - batch.n_tokens]
                for token in new:
                    i = batch.n_tokens
                    batch.token[i] = token
                    batch.pos[i] = len(self.stored[slot])
                    batch.n_seq_id[i] = 1
                    batch.seq_id[i][0] = slot
                    batch.logits[i] = len(self.stored[slot]) == len(known) - 1
                    if batch.logits[i]:
                        last[slot] = i
                    self.stored[slot].append(token)
                    batch.n_tokens += 1
            if self.api.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for slot, i in last.items():
                pointer = self.api.llama_get_logits_ith(self.context, i)
                logits = np.ctypeslib.as_array(pointer, (self.vocab_size,))
                request = slots[slot]
                outputs[request].append(int(logits.argmax()))
                if len(outputs[request]) == lengths[request]:
                    del slots[slot]
        return [len(output) for output in outputs]

    def keep_prefix(self, slot: int, prompt: list[int]) -> None:
        """Remove the KV of the slot from the first difference on; the last token is computed."""
        pairs = enumerate(zip(self.stored[slot], prompt, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(self.stored[slot]), len(prompt)))
        same = min(same, len(prompt) - 1)
        self.api.llama_memory_seq_rm(self.memory, slot, same, -1)
        del self.stored[slot][same:]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of libraries is not an answer
    job = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    engine = Engine(**job["options"])
    load_seconds = time.perf_counter() - start

    def run() -> float:
        engine.reset()
        start = time.perf_counter()
        for prompts, outputs in job["rounds"]:
            lengths = engine.run(prompts, outputs)
            if lengths != outputs:
                raise RuntimeError(f"llama.cpp generated {lengths} tokens instead of {outputs}")
        return time.perf_counter() - start

    print(json.dumps({"load_seconds": load_seconds, "first_seconds": run()}), file=answers)
    for _ in sys.stdin:
        print(json.dumps({"seconds": run()}), file=answers)


if __name__ == "__main__":
    sys.path.pop(0)  # modules next to this script are not for import
    main()
