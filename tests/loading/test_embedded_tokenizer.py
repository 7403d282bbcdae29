"""The tokenizer of the embedded model: the same ids and texts as by transformers."""

import random
from pathlib import Path

import fresh
import pytest

from nanovllm import LLM
from nanovllm.loading import tokenizer as loading
from nanovllm.loading.embedded_tokenizer import EmbeddedTokenizer
from nanovllm.loading.tokenizer import load_full

EMBEDDED = Path(loading.__file__).with_name("qwen3-nano")
TEXTS = [" ", "a", "  two  spaces ", "12345 6.7", "\r\n\t", "\x00", "日本語 🙂", "e\u0301 न\u093f"]
TEXTS += ["<|im_start|>user\n", "<|im_end|><think>\n\n</think>", "<|im_"]


@pytest.fixture(scope="module")
def tokenizer() -> EmbeddedTokenizer:
    return EmbeddedTokenizer(EMBEDDED, load_full)


def test_ids_equal_transformers(tokenizer: EmbeddedTokenizer) -> None:
    full, rng = tokenizer.full, random.Random(0)
    texts = TEXTS + ["".join(rng.choices([*TEXTS, "word", ","], k=9)) for _ in range(300)]
    wanted = [full.encode(text) for text in texts]
    assert [tokenizer.encode(text, verbose=False) for text in texts] == wanted
    assert tokenizer(texts, verbose=False)["input_ids"] == wanted
    assert tokenizer.encode("a", add_special_tokens=False) == full.encode("a")
    assert tokenizer.eos_token_id == full.eos_token_id


def test_chats_equal_transformers(tokenizer: EmbeddedTokenizer) -> None:
    roles = ["system", "user", "assistant", "user"]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for i, content in enumerate([*TEXTS, parts]):
        chat = [{"role": role, "content": content} for role in roles[i % 2 : 2 + i % 3]]
        for variables in (
            {},
            {"add_generation_prompt": True},
            {"add_generation_prompt": True, "enable_thinking": False},
            {"tools": None, "chat_template": None, "enable_thinking": None, "x": 0},
            {"chat_template": "{{ messages[0].content }}{{ x }}", "x": False},
            {"continue_final_message": i < len(TEXTS)},
        ):
            if variables.get("continue_final_message") and not str(content).strip():
                continue
            found = tokenizer.apply_chat_template(chat, tokenize=False, **variables)
            assert found == tokenizer.full.apply_chat_template(chat, tokenize=False, **variables)


def test_a_chat_template_that_is_set(embedded: LLM) -> None:
    tokenizer = embedded.get_tokenizer()
    before, tokenizer.chat_template = tokenizer.chat_template, "{{ messages[0].content }}!"
    try:
        [out] = embedded.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        assert out.prompt == "hi!"
    finally:
        tokenizer.chat_template = before


def test_the_example_does_not_import_transformers() -> None:
    code = """
import sys
from nanovllm import LLM
llm = LLM(dtype="float32", device="cpu", num_kv_cache_blocks=64)
outputs = llm.chat([[{"role": "user", "content": "Reverse cab"}]] * 2, use_tqdm=False)
print([output["text"] for output in outputs], "transformers" in sys.modules)
llm.get_tokenizer()
print("transformers" in sys.modules)
"""
    done = fresh.run(code)
    assert done.stdout.split("\n")[:2] == ["['bac', 'bac'] False", "True"], done
