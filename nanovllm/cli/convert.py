"""Converts a GGUF file to a checkpoint that LLM() loads.

  nanovllm convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2/
  nanovllm chat --model smollm2/

The package gguf (pip install gguf) dequantizes the weights. They are stored in bfloat16 by default,
in files of about 1 GiB. OUT is renamed into place when it is complete. Its generation_config.json
selects greedy sampling.
"""

import argparse
import sys
from pathlib import Path

from nanovllm.config import DTYPES
from nanovllm.utils.log import show_log


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanovllm convert", description=__doc__, formatter_class=raw)
    parser.add_argument("source", metavar="IN.gguf", type=Path, help="a GGUF file")
    parser.add_argument("target", metavar="OUT", type=Path, help="a new directory")
    dtypes = DTYPES[1:]  # without "auto"
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of OUT (%(default)s)")
    args = parser.parse_args(argv)
    show_log()  # with a progress bar
    try:
        # This import comes after --help, because torch takes seconds.
        from nanovllm.features.formats.gguf.convert_gguf import convert

        convert(args.source, args.target, args.dtype)
    except (OSError, ValueError) as error:
        print(f"nanovllm convert: {error}", file=sys.stderr)
        return 1
    print(f"{args.target} is complete; try: nanovllm chat --model {args.target}")
    return 0
