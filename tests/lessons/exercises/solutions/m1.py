"""A solution of `python -m lessons build m1`."""

from cache import KVCache

from lessons.lesson02_model import Model


class Engine:
    def __init__(
        self, model: Model, num_blocks: int, size: int, max_num_seqs: int, budget: int
    ) -> None:
        self.model = model

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], ends: set[int]
    ) -> list[list[int]]:
        pairs = zip(prompts, max_tokens, strict=True)
        return [self.answer(prompt, number, ends) for prompt, number in pairs]

    def answer(self, prompt: list[int], max_tokens: int, ends: set[int]) -> list[int]:
        c = self.model.config
        caches = [KVCache(c.num_kv_heads, c.head_dim) for _ in range(c.num_layers)]
        ids, output, start = prompt, list[int](), 0
        while True:
            positions = range(start, start + len(ids))
            logits = self.model.logits(ids, positions, lambda i, *qkv: caches[i].attend(*qkv))
            output.append(int(logits[-1].argmax()))
            if output[-1] in ends or len(output) == max_tokens:
                return output
            start, ids = start + len(ids), output[-1:]
