"""Options, parameters, prompts and results of calls, and how they are checked."""
