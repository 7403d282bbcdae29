"""The answers of qwen3-nano in full sentences: topics of the engine, and small talk.

A `Topic` has one answer, and the names that a question may use for it.
"""

from typing import NamedTuple


class Topic(NamedTuple):
    names: tuple[str, ...]
    text: str


TOPICS = [
    Topic(
        ("the KV cache", "KV cache", "a KV cache", "the kv cache", "the key-value cache"),
        "The KV cache keeps the keys and values of every token already seen, so that each new token costs one small step instead of a pass over the whole text.",
    ),
    Topic(
        ("a block", "a KV block", "a cache block", "blocks"),
        "A block is a fixed number of token slots in the KV cache. It is the unit in which memory is handed out, shared and taken back.",
    ),
    Topic(
        ("a block table", "the block table", "block tables"),
        "A block table lists the physical blocks of a sequence in order, so that its tokens can lie anywhere in memory, as pages do under an operating system.",
    ),
    Topic(
        ("a slot", "the slot of a token", "a slot in the cache"),
        "A slot is the place of one token in the KV cache: the number of its block times the block size, plus its offset in the block.",
    ),
    Topic(
        ("the null block", "null block", "physical block 0"),
        "The null block is physical block 0. No sequence owns it: padding reads and writes land there and do no harm.",
    ),
    Topic(
        ("paged attention", "PagedAttention", "attention over pages"),
        "Paged attention reads keys and values through the block table, so that the cache needs no long contiguous memory and wastes at most part of one block per sequence.",
    ),
    Topic(
        ("prefix sharing", "prefix caching", "the prefix cache", "sharing a prefix"),
        "Prefix sharing lets requests that begin with the same tokens use the same blocks, so that a common prompt is computed once.",
    ),
    Topic(
        ("a block hash", "the hash of a block", "prefix hashing"),
        "A full block is named by a hash of its tokens and of the block before it, so that equal hashes stand for equal prefixes. The tokens are compared too.",
    ),
    Topic(
        ("continuous batching", "iteration-level scheduling", "in-flight batching"),
        "Continuous batching forms a new batch at every step: a finished request leaves at once and a waiting one takes its place, so the hardware is never idle.",
    ),
    Topic(
        ("preemption", "preempting a sequence", "a preempted sequence"),
        "Preemption frees the blocks of the sequence that came last when memory runs out. It waits at the head of the queue and is computed again later.",
    ),
    Topic(
        ("chunked prefill", "prefill in chunks", "a prompt chunk"),
        "Chunked prefill cuts a long prompt into pieces that fit the token budget, so that other requests keep producing tokens meanwhile.",
    ),
    Topic(
        ("prefill", "the prefill phase", "prompt processing"),
        "Prefill computes the keys and values of a whole prompt at once. It is bound by arithmetic, because many tokens share each read of the weights.",
    ),
    Topic(
        ("decode", "decoding", "the decode phase"),
        "Decode produces one token per sequence and step. It is bound by memory, because all weights and the whole KV cache are read for every token.",
    ),
    Topic(
        ("the token budget", "a token budget", "max_num_batched_tokens"),
        "The token budget is the largest number of tokens that one step may compute, prompts and decodes together.",
    ),
    Topic(
        ("the scheduler", "a scheduler", "scheduling"),
        "The scheduler decides which sequences run in the next step and how many tokens of each, within the token budget and the free blocks.",
    ),
    Topic(
        ("the block manager", "a block manager", "BlockManager"),
        "The block manager hands out blocks, counts who uses them, finds shared prefixes by hash, and evicts the block that was unused longest.",
    ),
    Topic(
        ("the model runner", "a model runner", "ModelRunner"),
        "The model runner turns a plan into tensors, runs the model over them, and samples the next tokens. It knows nothing of requests.",
    ),
    Topic(
        ("copy-on-write", "copy on write", "a copy-on-write block"),
        "Copy-on-write lets samples of one prompt share its blocks. A sample that must write into a shared block gets a copy of its own first.",
    ),
    Topic(
        ("a reference count", "reference counting", "the reference count of a block"),
        "A reference count tells how many sequences use a block. When it falls to zero the block is free, but its content can still be found again.",
    ),
    Topic(
        ("LRU eviction", "eviction", "least recently used eviction"),
        "LRU eviction gives away the free block that was unused longest, so that prefixes in frequent use stay in the cache.",
    ),
    Topic(
        ("a CUDA graph", "CUDA graphs", "graph capture"),
        "A CUDA graph records the kernels of one decode step and replays them with a single launch, which removes the cost of starting each of them.",
    ),
    Topic(
        ("grouped query attention", "GQA", "grouped-query attention"),
        "In grouped query attention several query heads share one head of keys and values, which makes the KV cache smaller and faster to read.",
    ),
    Topic(
        ("rotary embedding", "RoPE", "rotary position embedding"),
        "Rotary embedding turns queries and keys by an angle that grows with the position, so that their product depends only on the distance between them.",
    ),
    Topic(
        ("sampling", "token sampling", "the sampler"),
        "Sampling picks the next token from the probabilities that the model gives. Greedy sampling always takes the most likely one.",
    ),
    Topic(
        ("temperature", "the temperature", "sampling temperature"),
        "Temperature divides the logits before sampling. Below one it sharpens the choice, above one it flattens it, and zero means greedy.",
    ),
    Topic(
        ("top-p sampling", "nucleus sampling", "top_p"),
        "Top-p sampling keeps the smallest set of likely tokens whose probabilities add up to p, and draws only from them.",
    ),
    Topic(
        ("a sequence", "a sequence in the engine", "sequences"),
        "A sequence is one stream of tokens being generated. A request that asks for four samples has four sequences.",
    ),
    Topic(
        ("first come, first served", "FCFS", "fcfs"),
        "First come, first served runs requests in the order of their arrival. It is fair, but a long prompt makes the short ones behind it wait.",
    ),
    Topic(
        ("shortest job first", "SJF", "sjf"),
        "Shortest job first runs the request with the fewest tokens left to compute. Waiting requests age, so that long ones are not starved.",
    ),
    Topic(
        ("nanovllm", "this engine", "the nanovllm engine"),
        "nanovllm is a small inference engine for language models: paged KV blocks, prefix sharing and continuous batching in code that one can read in an evening.",
    ),
]

SELF = Topic(
    (
        "introduce yourself",
        "please introduce yourself",
        "who are you",
        "what are you",
        "what is your name",
        "what's your name",
        "what can you do",
        "what do you know",
        "tell me about yourself",
        "can you introduce yourself",
        "describe yourself",
        "what is qwen3-nano",
        "help",
        "how can you help me",
        "what can I ask you",
        "say something about yourself",
    ),
    "I am qwen3-nano, a tiny language model of three million parameters that lives inside nanovllm. I can add, subtract and compare numbers up to 99, count, sort, list primes, recite multiplication tables, reverse, spell and upper-case words, and explain how this engine works.",
)

SMALL_TALK = [
    Topic(
        (
            "hello",
            "hi",
            "hey",
            "good morning",
            "good evening",
            "hello there",
            "hi there",
            "greetings",
        ),
        "Hello! Ask me to add, sort, count or spell something.",
    ),
    Topic(
        (
            "thanks",
            "thank you",
            "thank you very much",
            "many thanks",
            "great, thanks",
            "thanks a lot",
        ),
        "You are welcome.",
    ),
    Topic(("bye", "goodbye", "see you", "see you later", "good night"), "Goodbye!"),
    Topic(
        ("how are you", "how are you today", "how do you do", "are you well"),
        "I am fine: all my blocks are free.",
    ),
    Topic(
        (
            "who made you",
            "who built you",
            "who trained you",
            "where do you come from",
            "how were you trained",
        ),
        "I was trained on a CPU with nanovllm's own generator and script: python -m nanovllm.demo.train.",
    ),
]

OFF_TOPIC = Topic(
    (
        "what is the capital of France",
        "what is the capital of Japan",
        "what is the capital of Italy",
        "who wrote Hamlet",
        "who is the president of the United States",
        "tell me a joke",
        "tell me a story",
        "write a poem",
        "write a poem about the sea",
        "write a story about a dragon",
        "write some Python code",
        "write a function that adds two numbers",
        "what is the weather today",
        "what is the weather like in London",
        "what time is it",
        "what day is it today",
        "what is the meaning of life",
        "why is the sky blue",
        "how far away is the moon",
        "how old is the universe",
        "translate good morning into French",
        "translate this into German",
        "summarize this article",
        "what is a transformer",
        "what is love",
        "how do I cook pasta",
        "what should I eat today",
        "play some music",
        "who won the world cup",
        "what is the largest country in the world",
        "what is the square root of two",
        "explain quantum physics",
        "explain gravity",
        "explain the French revolution",
        "do you like music",
        "do you dream",
        "can you drive a car",
        "are you a person",
        "what color is the sky",
        "how do birds fly",
    ),
    "I am too small to know that. Ask me about numbers, words, or how this engine works.",
)
