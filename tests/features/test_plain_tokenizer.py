"""Tokenizers without transformers: the same ids and texts as transformers' own tokenizer."""

import functools
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import fresh
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import pre_tokenizers as pre

from nanovllm.features.plain_tokenizer import QWEN_SPLIT, PlainTokenizer
from nanovllm.loading import tokenizer as loading
from nanovllm.loading.tokenizer import load_full, load_tokenizer

EMBEDDED = Path(loading.__file__).with_name("qwen3-nano")
# The first and the last character of blocks of many scripts, marks, private use, other planes.
RANGES = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF)]
RANGES += [(0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x2000, 0x206F), (0x3040, 0x30FF)]
RANGES += [(0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0x1F300, 0x1FAFF)]
RANGES += [(0x0, 0x1F), (0x590, 0x5FF), (0x200B, 0x200F), (0x1F1E6, 0x1F1FF)]
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</tool_call>",
    "<|im_",
    "\n\n",
]


ZWJ = "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u0915\u094d\u0937 \u0e01\u0e33"


def texts(number: int) -> list[str]:
    chance = random.Random(0)
    found = ["", " ", "a", "  two  spaces ", "12345 6.7", "\r\n\t", "\x00", *SPECIAL, ZWJ]
    found += ["a b" * 3000, "".join(map(chr, range(0x20, 0x2800)))]
    for _ in range(number):
        low, high = chance.choice(RANGES)
        parts = [chr(chance.randint(low, high)) for _ in range(chance.randint(1, 20))]
        parts += [*chance.choices(SPECIAL, k=chance.randint(0, 2)), " ", "word"]
        chance.shuffle(parts)
        found.append("".join(parts))
    return found


ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>"]
ADDED_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def qwen(path: Path, split: str = QWEN_SPLIT, **changes: Any) -> Path:
    """Write the files of a tokenizer like that of Qwen/Qwen3-0.6B, with a smaller vocabulary.

    changes: fields of tokenizer_config.json.
    """
    rules = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    rules.normalizer = normalizers.NFC()
    byte_level = pre.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    rules.pre_tokenizer = pre.Sequence([pre.Split(Regex(split), "isolated"), byte_level])
    rules.post_processor = processors.ByteLevel(trim_offsets=False)
    rules.decoder = decoders.ByteLevel()
    alphabet = sorted(pre.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=800, show_progress=False, initial_alphabet=alphabet)
    rules.train_from_iterator(texts(300), trainer)
    rules.add_special_tokens([AddedToken(name, normalized=False) for name in ADDED])
    rules.add_tokens([AddedToken(name, normalized=False) for name in ADDED_PLAIN])
    path.mkdir()
    rules.save(str(path / "tokenizer.json"))
    stored = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(token.pop("id")): token for token in stored},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|vision_pad|>"],
        "bos_token": None,
        "chat_template": (Path(__file__).with_name("requests") / "tools.jinja").read_text(),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config | changes))
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    return path


@pytest.fixture(scope="module")
def qwen_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen(tmp_path_factory.mktemp("tokenizers") / "qwen")


@pytest.fixture(params=["qwen3-nano", "qwen", "smollm2-135m"])
def directory(request: pytest.FixtureRequest, qwen_path: Path) -> Path:
    """Of the embedded model, of `qwen`, and of smollm2-135m if it has been converted."""
    converted = Path.home() / ".cache" / "nanovllm" / "smollm2-135m-0.1.2"
    if request.param == "smollm2-135m" and not converted.is_dir():
        pytest.skip("smollm2-135m is not converted")
    return {"qwen3-nano": EMBEDDED, "qwen": qwen_path}.get(request.param, converted)


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
    chance = random.Random(1)
    for _ in range(200):
        ids = [chance.randrange(len(full)) for _ in range(20)]
        for skip in (True, False):
            options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert plain.decode(ids, **options) == full.decode(ids, **options)
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    assert plain(every, **options)["input_ids"] == full(every, **options)["input_ids"]


def test_the_file_can_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_tokenizer(EMBEDDED)
    monkeypatch.setitem(sys.modules, "nanovllm.features.plain_tokenizer", None)
    full = load_tokenizer(EMBEDDED)
    assert type(full).__module__.startswith("transformers.")
    assert full.encode("12 + 30?") == plain.encode("12 + 30?")


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
    calls: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
        (chat, {"documents": [{"title": "t", "text": "x"}]}),
        ([{"role": "user", "content": "a", "reasoning": "r"}], {}),
        ([{"role": "user", "content": ("a", "b")}], {}),
        (chat, {"chat_template": "{{ messages[0].content }}!"}),
        (chat, {"another": "variable"}),
        (chat, {"tokenize": True, "return_dict": False}),
        ([{"role": "user", "content": "b", "name": None}], {}),
        ([{"role": "user", "content": "b"}], {"continue_final_message": True}),
    ]
    for messages, options in calls:
        options = {"tokenize": False} | options
        vars(plain).pop("full", None)
        found = plain.apply_chat_template(messages, **options)
        assert "full" in vars(plain)
        wanted = plain.full.apply_chat_template(messages, **options)
        assert found == wanted
    assert plain.get_vocab() == plain.full.get_vocab()  # any other attribute


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"added_tokens_decoder": {}}),
        ("tokenizer_config.json", {"pad_token": "<pad>"}),
        ("tokenizer_config.json", {"bos_token": "<think>"}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<think>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"x_token": "<|im_end|>"}}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("config.json", {"model_type": "mistral"}),
        ("config.json", {"model_type": "qwen2"}),
    ],
)
def test_tokenizers_that_transformers_may_change(file: str, changes: dict, tmp_path: Path) -> None:
    path = Path(shutil.copytree(EMBEDDED, tmp_path / "copy"))
    raw = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(raw | changes))
    assert not isinstance(load_tokenizer(path), PlainTokenizer)


def test_files_that_are_read_without_added_tokens_decoder(qwen_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(EMBEDDED, tmp_path / "copy"))
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert load_tokenizer(path).eos_token_id == 1033
    path = Path(shutil.copytree(qwen_path, tmp_path / "qwen"))
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert isinstance(load_tokenizer(path), PlainTokenizer)  # it has added_tokens_decoder
    assert load_tokenizer(path).eos_token_id == load_tokenizer(path).full.eos_token_id


def test_a_class_that_makes_its_own_rules(qwen_path: Path, tmp_path: Path) -> None:
    """Qwen2Tokenizer ignores a split of tokenizer.json, for example that of Qwen3.5."""
    other = qwen(tmp_path / "other", QWEN_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+"))
    assert not isinstance(load_tokenizer(other), PlainTokenizer)
    (other / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert isinstance(load_tokenizer(other), PlainTokenizer)
    # transformers uses Qwen2Tokenizer for all models of this type.
    (other / "config.json").write_text('{"model_type": "qwen2"}')
    loaded = load_tokenizer(other)
    assert type(loaded).__name__ == "Qwen2Tokenizer"
    for name in ("normalizer", "post_processor", "decoder", "added_tokens_decoder"):
        path = Path(shutil.copytree(qwen_path, tmp_path / name))
        file = path / f"tokenizer{'_config' * (name == 'added_tokens_decoder')}.json"
        raw = json.loads(file.read_text())
        raw[name] = None
        file.write_text(json.dumps({key: value for key, value in raw.items() if key != name}))
        assert isinstance(load_tokenizer(path), PlainTokenizer) == (name == "post_processor")


loaded = functools.cache(load_tokenizer)


@given(st.text(max_size=30), st.sampled_from(["", *ADDED, *ADDED_PLAIN]), st.text(max_size=30))
def test_any_text(qwen_path: Path, head: str, token: str, tail: str) -> None:
    found = loaded(qwen_path)
    wanted = found.full.encode(head + token + tail)
    assert found.encode(head + token + tail) == wanted
    assert found.decode(wanted) == found.full.decode(wanted)


def test_a_lone_surrogate_is_the_same_error(qwen_path: Path) -> None:
    plain = load_tokenizer(qwen_path)
    for tokenizer in (plain, plain.full):
        with pytest.raises(TypeError, match="must be"):
            tokenizer.encode("a\ud800b")


TOOL = {"name": "find", "description": "<b> & 'é'", "parameters": {"type": "object", "n": [1, 2.5]}}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"x": None, "y": True}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a <tool_response>"},
    {"role": "assistant", "content": "<think>\nx\n</think>\n\nb", "tool_calls": [CALL]},
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "c"}]},
]


def test_chats_with_tools(qwen_path: Path) -> None:
    plain, full = load_tokenizer(qwen_path), load_full(qwen_path)
    for start in range(len(CHAT)):
        for tools in (None, [], [{"type": "function", "function": TOOL}]):
            for flags in ({}, {"add_generation_prompt": True, "enable_thinking": False}):
                chat = CHAT[start : start + 3], CHAT[:1] + CHAT[start:]
                for messages in chat:
                    options: dict[str, Any] = {"tokenize": False, "tools": tools, **flags}
                    found = plain.apply_chat_template(messages, **options)
                    assert found == full.apply_chat_template(messages, **options)
    assert "full" not in vars(plain)


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}",
        "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
        "{{ strftime_now('%Y') }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{{ tools is defined }} {{ documents is none }} {{ add_generation_prompt is defined }}",
        "{{ enable_thinking is defined }} {{ date_string is defined }} {{ bos_token is defined }}",
        "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{% for i in range(3) %}{{ i }}{% endfor %}",
        "{% macro f(m) %}{{ m.role }}{% endmacro %}\n  {{ f(messages[0]) }}\n",
    ],
)
def test_templates_that_are_simple(template: str, tmp_path: Path, qwen_path: Path) -> None:
    path = Path(shutil.copytree(qwen_path, tmp_path / "copy"))
    (path / "chat_template.jinja").write_text(template)
    plain = load_tokenizer(path)
    assert plain.template is not None
    chat = [{"role": "user", "content": "é <b>"}]
    wanted = plain.full.apply_chat_template(chat, tokenize=False)
    assert plain.apply_chat_template(chat, tokenize=False) == wanted


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace(x=1) %}{% set n._x = 1 %}",
        "{% set n = namespace({'_x': 1}) %}",
        "{% set f = namespace %}{% set n = f({'_x': 1}) %}",
        "{{ dict(a=1) }}",
        "{{ cycler }}",
        "{{ image_token }}",
        "{{ extra_special_tokens }}",
        "{% for %}",
    ],
)
def test_templates_that_are_not_simple(template: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(EMBEDDED, tmp_path / "copy"))
    (path / "chat_template.jinja").write_text(template)
    plain = load_tokenizer(path)
    assert isinstance(plain, PlainTokenizer)
    assert plain.template is None


def test_an_error_of_a_template_is_that_of_transformers(tmp_path: Path) -> None:
    path = Path(shutil.copytree(EMBEDDED, tmp_path / "copy"))
    (path / "chat_template.jinja").write_text("{{ raise_exception('no ' + messages[0].role) }}")
    plain, errors = load_tokenizer(path), []
    for tokenizer in (plain, plain.full):
        with pytest.raises(Exception, match="no user") as error:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        errors.append(type(error.value))
    assert plain.template is not None
    assert errors[0] is errors[1]


def test_the_first_answer_does_not_import_transformers() -> None:
    done = fresh.run(
        "import sys\n"
        "from nanovllm import LLM\n"
        "llm = LLM()\n"
        "chat = [{'role': 'user', 'content': 'What is 34 + 58?'}]\n"
        "assert llm.chat(chat, use_tqdm=False)[0].outputs[0].text == '34 + 58 = 92'\n"
        "assert llm.generate(['What is 12 + 30?\\n', 'a'], use_tqdm=False)\n"
        "import io, nanovllm.cli.chat as program\n"
        "sys.stdin = io.StringIO('What is 2 + 3?')\n"
        "assert program.main([]) == 0\n"
        "assert 'transformers' not in sys.modules\n"
        "assert type(llm.get_tokenizer()).__module__.startswith('transformers.')\n"
    )
    assert done.returncode == 0, done.stderr
