"""Tokenizers without transformers: the same ids and texts as transformers' own tokenizer."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import fresh
import pytest

from nanovllm.loading import tokenizer as loading
from nanovllm.loading.tokenizer import PlainTokenizer, load_tokenizer

EMBEDDED = Path(loading.__file__).with_name("qwen3-nano")
# The first and the last character of blocks of many scripts, marks, private use, other planes.
RANGES = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF)]
RANGES += [(0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x2000, 0x206F), (0x3040, 0x30FF)]
RANGES += [(0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0x1F300, 0x1FAFF)]
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</tool_call>",
    "<|im_",
    "\n\n",
]


def texts(number: int) -> list[str]:
    chance = random.Random(0)
    found = ["", " ", "a", "  two  spaces ", "12345 6.7", "\r\n\t", "\x00", *SPECIAL]
    for _ in range(number):
        low, high = chance.choice(RANGES)
        parts = [chr(chance.randint(low, high)) for _ in range(chance.randint(1, 20))]
        parts += [*chance.choices(SPECIAL, k=chance.randint(0, 2)), " ", "word"]
        chance.shuffle(parts)
        found.append("".join(parts))
    return found


def directories() -> list[Path]:
    """Of the embedded model, and of smollm2-135m if it has been converted."""
    converted = Path.home() / ".cache" / "nanovllm" / "smollm2-135m-0.1.2"
    return [EMBEDDED, *([converted] if converted.is_dir() else [])]


@pytest.mark.parametrize("directory", directories(), ids=lambda path: path.name)
def test_ids_and_texts_are_those_of_transformers(directory: Path) -> None:
    plain = load_tokenizer(directory)
    assert isinstance(plain, PlainTokenizer)
    full = plain.full
    assert plain.eos_token_id == full.eos_token_id
    every = texts(2000)
    for text in every:
        for special in (True, False):
            ids = plain.encode(text, add_special_tokens=special, verbose=False)
            assert ids == full.encode(text, add_special_tokens=special)
        for skip in (True, False):
            options: Any = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert plain.decode(ids, **options) == full.decode(ids, **options)
            cut = ids[1 : len(ids) // 2]
            assert plain.decode(cut, **options) == full.decode(cut, **options)
        assert plain.decode(ids) == full.decode(ids)
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    assert plain(every, **options)["input_ids"] == full(every, **options)["input_ids"]


@pytest.mark.parametrize("directory", directories(), ids=lambda path: path.name)
def test_chats_are_rendered_as_by_transformers(directory: Path) -> None:
    plain = load_tokenizer(directory)
    roles = ["system", "user", "assistant", "user"]
    for i, text in enumerate(texts(100)):
        chat = [{"role": role, "content": text} for role in roles[i % 2 : 2 + i % 3]]
        for flags in ({}, {"add_generation_prompt": True}, {"enable_thinking": False}):
            for unset in ({}, {"tools": None, "chat_template": None, "documents": None}):
                found = plain.apply_chat_template(chat, tokenize=False, **flags, **unset)
                assert found == plain.full.apply_chat_template(chat, tokenize=False, **flags)
    assert plain.template is not None


def test_other_chats_are_left_to_transformers() -> None:
    plain = load_tokenizer(EMBEDDED)
    chat: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    calls: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
        (chat, {"tools": [tool]}),
        (chat, {"chat_template": "{{ messages[0].content }}!"}),
        (chat, {"another": "variable"}),
        (chat, {"tokenize": True, "return_dict": False}),
        ([{"role": "user", "content": [{"type": "text", "text": "b"}]}], {}),
        ([{"role": "user", "content": "b", "name": None}], {}),
        ([{"role": "user", "content": "b"}], {"continue_final_message": True}),
    ]
    for messages, options in calls:
        options = {"tokenize": False} | options
        wanted = plain.full.apply_chat_template(messages, **options)
        assert plain.apply_chat_template(messages, **options) == wanted
    assert plain.get_vocab() == plain.full.get_vocab()  # any other attribute


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"added_tokens_decoder": {}}),
        ("tokenizer_config.json", {"pad_token": "<pad>"}),
        ("tokenizer_config.json", {"bos_token": "<think>"}),
        ("config.json", {"model_type": "mistral"}),
    ],
)
def test_tokenizers_that_transformers_may_change(file: str, changes: dict, tmp_path: Path) -> None:
    path = Path(shutil.copytree(EMBEDDED, tmp_path / "copy"))
    raw = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(raw | changes))
    assert not isinstance(load_tokenizer(path), PlainTokenizer)


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(x=1) %}{{ n.x }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ messages | tojson }}",
        "{{ strftime_now('%Y') }}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{% break %}{% endfor %}",
    ],
)
def test_templates_that_are_not_simple(template: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(EMBEDDED, tmp_path / "copy"))
    (path / "chat_template.jinja").write_text(template)
    plain = load_tokenizer(path)
    assert isinstance(plain, PlainTokenizer)
    assert plain.template is None


def test_the_first_answer_does_not_import_transformers() -> None:
    done = fresh.run(
        "import sys\n"
        "from nanovllm import LLM\n"
        "llm = LLM()\n"
        "chat = [{'role': 'user', 'content': 'What is 34 + 58?'}]\n"
        "assert llm.chat(chat, use_tqdm=False)[0].outputs[0].text == '34 + 58 = 92'\n"
        "assert llm.generate(['What is 12 + 30?\\n', 'a'], use_tqdm=False)\n"
        "assert 'transformers' not in sys.modules\n"
        "assert type(llm.get_tokenizer()).__module__.startswith('transformers.')\n"
    )
    assert done.returncode == 0, done.stderr
