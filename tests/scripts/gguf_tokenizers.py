"""Compares the tokenizers of GGUF files with the original tokenizers.

  pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
  python tests/scripts/gguf_tokenizers.py llama_cpp_python-*/vendor/llama.cpp/models/*.gguf

llama.cpp's repository has the vocabularies of many models (NAME.gguf), texts (NAME.gguf.inp), and
their token ids by the original tokenizers (NAME.gguf.out). The last text is empty.
"""

import sys
from pathlib import Path
from unittest.mock import patch

from nanovllm.features.formats.gguf import convert_gguf
from nanovllm.features.formats.gguf.gguf_tokenizer import read_tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
for path in map(Path, sys.argv[1:]):
    texts, ids = Path(f"{path}.inp"), Path(f"{path}.out")
    if not texts.exists():
        print(f"{path.name}: no texts")
        continue
    try:
        # A vocabulary of a model that the engine does not run may have a tokenizer of a kind that
        # it does.
        with patch.dict(
            convert_gguf.ARCHITECTURES, dict.fromkeys(("starcoder2", "gpt2", "phi3"), ("", False))
        ):
            tokenizer = read_tokenizer(convert_gguf.GGUF(path))
    except ValueError as error:
        print(f"{path.name}: refused: {error}")
        continue
    pairs = list(
        zip(
            texts.read_text(encoding="utf-8").split(SEPARATOR),
            ids.read_text().splitlines(),
            strict=False,
        )
    )
    equal = sum(
        tokenizer.encode(text, add_special_tokens=False) == [*map(int, line.split())]
        for text, line in pairs
    )
    print(f"{path.name}: {equal} of {len(pairs)} texts are equal; bos: {tokenizer.encode('a')}")
