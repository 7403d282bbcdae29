"""Makes the tokenizer of qwen3-nano: byte-level BPE, trained on the texts of data.py.

A digit is one token. A word is either one token or single letters, never a mixture. The shorter
pieces that BPE learns are therefore dropped after training, and `ignore_merges` looks up complete
words. To reverse "planet", a model must see p-l-a-n-e-t. With "plan" + "et" it would have to learn
the spelling of every piece.
"""

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.training.data import corpus

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)
# Qwen3 keeps these visible when special tokens are skipped.
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s"

# ChatML. As in Qwen3's template, enable_thinking=False begins the answer with an empty thought.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}\
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


def build() -> PreTrainedTokenizerFast:
    """Train the tokenizer. The result is always the same."""
    texts = list(corpus(random.Random(0)))
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = split
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=8192, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    words = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    learned = sorted(token for token in trained.get_vocab() if len(token) > 1 and token in words)
    tokens = alphabet + learned

    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(MARKUP))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
