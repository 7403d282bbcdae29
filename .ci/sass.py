"""Read what the assembler has made of a kernel: registers, and the instructions of its loops."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


def dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, f"--dump-{what}", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a kernel; without spills it uses no local memory."""
    out = dump(cubin, "resource-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", out)
    assert match, out
    return int(match[1]), int(match[2]) + int(match[3])


def product_loops(cubin: bytes) -> list[Counter[str]]:
    """How often each instruction is in each loop that uses the matrix units.

    A loop ends with a branch to an earlier instruction.
    """
    found = [(int(m[1], 16), m[2], m[3]) for m in INSTRUCTION.finditer(dump(cubin, "sass"))]
    loops = []
    for end, name, operands in found:
        target = re.search(r"0x([0-9a-f]+)\s*$", operands)
        if name.startswith("BRA") and target and (start := int(target[1], 16)) < end:
            loops.append(Counter(op for address, op, _ in found if start <= address <= end))
    return [loop for loop in loops if any("MMA" in op for op in loop)]
