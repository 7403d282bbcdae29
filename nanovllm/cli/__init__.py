"""The commands of the program `nanovllm`.

chat         a conversation in the terminal
check        a table of all kernels, each compared with plain torch and timed
check_cases  the rows of this table
convert      makes a checkpoint from a GGUF file
options      the options that several commands share
jobs         files of requests, Ray Data and lm_eval
trace        records the steps of an engine, and shows them
"""
