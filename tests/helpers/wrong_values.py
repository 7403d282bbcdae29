"""Values that files and parameters must not have."""

NAN, INF = float("nan"), float("inf")

WRONG = {
    int: ["a", 1.5, True, [], -7, NAN],
    float: ["a", True, [1.0], -1, NAN, INF, 10**400],
    bool: [1, "yes"],
    str: [3, ["silu"]],
    list: ["Qwen3ForCausalLM", 3, {}],
    dict: ["linear", 3, [[]]],
}
GENERATION = {
    "do_sample": bool,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
    "min_new_tokens": int,
}

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"
