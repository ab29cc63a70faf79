"""What the model knows by heart: who it is, manners, and a primer of mlxserve.

The answers are the only prose it has ever seen in answers, so they carry the Markdown as well:
lists, code fences, a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from mlxserve.mini.conversation import Conversation, Exchange, mentions, single
from mlxserve.mini.words import Split


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing to know. `keywords` are what any right answer has to mention."""

    answer: str
    keywords: Sequence[str]
    train: Sequence[str]  # questions
    held_out: Sequence[str]


TOPICS = (
    Topic(
        "Hello! I am mlxserve-mini, a small model that comes with mlxserve. How can I help?",
        ("hello", "mlxserve-mini"),
        ("Hello", "Hello!", "Hi", "Hi!", "hello", "hi", "Hey", "Hi there", "Good morning", "hey!"),
        ("Hello there", "Hi there!", "hello!", "Good morning!"),
    ),
    Topic(
        "I am **mlxserve-mini**, a very small language model that comes with mlxserve. "
        "I am here for demonstrations and tests; for real work, load a larger model.",
        ("mlxserve-mini", "small"),
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "who are you",
            "Tell me about yourself.",
            "Which model are you?",
            "What model is this?",
            "Introduce yourself.",
        ),
        ("Who are you exactly?", "What model are you?", "Please introduce yourself."),
    ),
    Topic(
        "I can do a few small things:\n\n"
        "- remember a code word, a name or a number\n"
        "- repeat a line, sort or reverse a short list\n"
        "- add small numbers\n"
        "- answer questions about mlxserve\n\n"
        "For anything else, please load a larger model.",
        ("remember", "mlxserve"),
        (
            "What can you do?",
            "What are you able to do?",
            "Help",
            "help me",
            "How can you help me?",
            "What are your abilities?",
        ),
        ("What can you do for me?", "Can you help me?", "What are you good at?"),
    ),
    Topic(
        "You are welcome!",
        ("welcome",),
        ("Thank you", "Thanks", "Thanks!", "Thank you!", "thank you", "Thank you very much."),
        ("Thanks a lot", "Thank you very much!"),
    ),
    Topic(
        "Goodbye! Come back any time.",
        ("goodbye",),
        ("Bye", "Goodbye", "bye", "Goodbye!", "See you", "Bye bye"),
        ("Bye!", "See you later", "goodbye"),
    ),
    Topic(
        "I am fine, thank you. How can I help?",
        ("fine",),
        ("How are you?", "How are you", "how are you?", "How do you do?"),
        ("How are you today?", "Hello, how are you?"),
    ),
    Topic(
        "I do not know. I am a very small model, and I only know a little about mlxserve. "
        "Please load a larger model for such questions.",
        ("do not know", "larger model"),
        (
            "Who won the world cup?",
            "What is the meaning of life?",
            "Who wrote Hamlet?",
            "What is the weather today?",
            "Explain quantum physics.",
            "Write a poem about the sea.",
            "What is the capital of France?",
            "Who is the president?",
            "How old is the universe?",
            "Write a program in Python.",
            "What happened in 1989?",
            "Tell me a joke.",
            "What is love?",
            "Translate this into French.",
            "What time is it?",
            "How far is the moon?",
            "Who invented the telephone?",
            "Tell me the news.",
            "Write a story.",
            "What should I cook tonight?",
            "Who is the king of England?",
            "What is the tallest mountain?",
            "How many people live in Japan?",
            "Write an essay about trees.",
            "What is the best film?",
            "Who painted this?",
            "Explain gravity.",
            "What is the capital of Japan?",
            "How do I bake bread?",
            "What is a black hole?",
            "When was the war?",
            "Give me a recipe.",
            "Sing a song.",
            "What is the price of gold?",
            "How do cars work?",
            "Who discovered America?",
            "What language do they speak in Brazil?",
            "Write me a letter.",
            "Can you write code?",
            "What do you think about politics?",
        ),
        (
            "Who wrote Faust?",
            "What is the capital of Spain?",
            "How old is the moon?",
            "Write a poem about love.",
            "Explain relativity.",
        ),
    ),
    Topic(
        "mlxserve is a server for language models on Apple Silicon. It runs on MLX and keeps the "
        "attention keys and values in **pages**, so that many chats share memory and prompts.\n\n"
        "- it speaks the OpenAI API\n"
        "- it has a chat screen in the terminal\n"
        "- it works with no network at all",
        ("server", "pages"),
        (
            "What is mlxserve?",
            "What is mlxserve",
            "Tell me about mlxserve.",
            "What does mlxserve do?",
            "Explain mlxserve.",
            "what is mlxserve?",
            "Describe mlxserve.",
        ),
        (
            "What exactly is mlxserve?",
            "Please tell me about mlxserve.",
            "Can you explain mlxserve?",
        ),
    ),
    Topic(
        "Start the server with one command:\n\n"
        "```bash\nmlxserve serve\n```\n\n"
        "It loads the small built-in model unless you name another one with `--model`.",
        ("mlxserve serve",),
        (
            "How do I start the server?",
            "How can I start the server?",
            "How do I run the server?",
            "How do I start mlxserve?",
            "Start the server",
            "How to start the server?",
            "Which command starts the server?",
            "How do I serve a model?",
        ),
        (
            "How can I run the server?",
            "How do I start the mlxserve server?",
            "What command starts the server?",
        ),
    ),
    Topic(
        "Open the chat in your terminal:\n\n"
        "```bash\nmlxserve chat\n```\n\n"
        "Type a message and press Enter.",
        ("mlxserve chat",),
        (
            "How do I chat?",
            "How do I start a chat?",
            "How do I open the chat?",
            "How can I chat with a model?",
            "How to chat?",
            "Which command opens the chat?",
        ),
        ("How can I start a chat?", "How do I chat with a model?", "What command opens the chat?"),
    ),
    Topic(
        "A page is a fixed number of token slots in the KV cache, 32 by default. "
        "A request holds a list of pages, and requests with the same prefix share them.",
        ("slots", "fixed"),
        (
            "What is a page?",
            "What is a page in mlxserve?",
            "What does page mean?",
            "Explain pages.",
            "What are pages?",
            "Tell me about pages.",
            "what is a page",
        ),
        ("Can you explain pages?", "What is a page of the cache?", "What exactly is a page?"),
    ),
    Topic(
        "A slot is the place of one token in the pool: `page * page_size + offset`.",
        ("page_size", "offset"),
        ("What is a slot?", "What are slots?", "Explain slots.", "What does slot mean?"),
        ("What exactly is a slot?", "Can you explain slots?"),
    ),
    Topic(
        "A page table lists the pages of one request in order. "
        "The attention kernel reads it to find the keys and values of each token.",
        ("lists the pages",),
        (
            "What is a page table?",
            "Explain the page table.",
            "What does the page table do?",
            "What is the page table?",
            "Tell me about page tables.",
        ),
        ("What exactly is a page table?", "Can you explain the page table?"),
    ),
    Topic(
        "A prefix cache keeps the pages of prompts that were computed before. When a new prompt "
        "begins with the same tokens, its pages are found by hash and nothing is computed twice.",
        ("pages", "hash"),
        (
            "What is a prefix cache?",
            "What is the prefix cache?",
            "How does the prefix cache work?",
            "Explain prefix caching.",
            "What is prefix caching?",
            "Tell me about the prefix cache.",
            "What does the prefix cache do?",
        ),
        (
            "What exactly is a prefix cache?",
            "Can you explain the prefix cache?",
            "How does prefix caching work?",
        ),
    ),
    Topic(
        "The KV cache holds the attention keys and values of every token seen so far, "
        "so that each new token costs one step and not the whole prompt.",
        ("keys and values",),
        (
            "What is the KV cache?",
            "What is a KV cache?",
            "Explain the KV cache.",
            "What does the KV cache hold?",
            "Tell me about the KV cache.",
        ),
        ("What exactly is the KV cache?", "Can you explain the KV cache?"),
    ),
    Topic(
        "Chunked prefill cuts a long prompt into chunks. Each step computes one chunk beside the "
        "tokens of running chats, so a long prompt never freezes them.",
        ("chunks",),
        (
            "What is chunked prefill?",
            "Explain chunked prefill.",
            "How does chunked prefill work?",
            "What does chunked prefill do?",
            "What is a chunk?",
            "Tell me about chunked prefill.",
        ),
        ("What exactly is chunked prefill?", "Can you explain chunked prefill?"),
    ),
    Topic(
        "The scheduler decides which tokens of which requests run in each step:\n\n"
        "1. running chats get their next token\n"
        "2. prompts under way get a chunk\n"
        "3. new requests are admitted while pages are free",
        ("step", "requests"),
        (
            "What is the scheduler?",
            "What does the scheduler do?",
            "How does the scheduler work?",
            "Explain the scheduler.",
            "Tell me about the scheduler.",
        ),
        ("What exactly does the scheduler do?", "Can you explain the scheduler?"),
    ),
    Topic(
        "Install it with pip:\n\n```bash\npip install mlxserve\n```",
        ("pip install mlxserve",),
        (
            "How do I install mlxserve?",
            "How can I install mlxserve?",
            "How to install mlxserve?",
            "Install mlxserve",
            "How do I install it?",
            "Which command installs mlxserve?",
        ),
        ("How do I install the package?", "What command installs mlxserve?"),
    ),
    Topic(
        "Name the model when you start:\n\n"
        "```bash\nmlxserve serve --model PATH\n```\n\n"
        "`PATH` is a folder with MLX weights, or the name of a repository.",
        ("--model",),
        (
            "How do I load another model?",
            "How do I use a larger model?",
            "How can I change the model?",
            "How do I load a model?",
            "How do I use my own model?",
            "Can I use another model?",
        ),
        (
            "How can I load another model?",
            "How do I change the model?",
            "Can I load a larger model?",
        ),
    ),
    Topic(
        "Use the library like this:\n\n"
        "```python\nfrom mlxserve import LLM\n\n"
        'llm = LLM()\nprint(llm.generate("Hello")[0].text)\n```',
        ("from mlxserve import LLM",),
        (
            "How do I use mlxserve from Python?",
            "How do I use the library?",
            "Show me a Python example.",
            "How can I use the Python library?",
            "Give me an example in Python.",
            "Is there a Python library?",
        ),
        ("How can I use mlxserve from Python?", "Show me an example in Python."),
    ),
    Topic(
        "These are the commands:\n\n"
        "| command | what it does |\n"
        "| --- | --- |\n"
        "| `mlxserve chat` | opens the chat |\n"
        "| `mlxserve serve` | starts the server |\n"
        "| `mlxserve run` | answers one prompt |\n"
        "| `mlxserve bench` | measures speed |\n"
        "| `mlxserve doctor` | checks the machine |",
        ("mlxserve chat", "mlxserve serve", "|"),
        (
            "Which commands are there?",
            "What commands does mlxserve have?",
            "List the commands.",
            "Show me the commands.",
            "What are the commands?",
            "Give me a table of the commands.",
        ),
        (
            "What commands are there?",
            "Show me a table of the commands.",
            "Please list the commands.",
        ),
    ),
    Topic(
        "Measure the speed with:\n\n```bash\nmlxserve bench\n```\n\n"
        "It compares settings and servers side by side.",
        ("mlxserve bench",),
        (
            "How do I measure speed?",
            "How fast is it?",
            "How can I measure the speed?",
            "How do I run a benchmark?",
            "How do I benchmark the server?",
        ),
        ("How do I measure the speed?", "How can I run a benchmark?"),
    ),
    Topic(
        "Yes. mlxserve speaks the OpenAI API and the Anthropic API, so most clients work "
        "when you give them the address of the server.",
        ("OpenAI",),
        (
            "Does it speak the OpenAI API?",
            "Is there an API?",
            "Which APIs does it have?",
            "Can I use the OpenAI client?",
            "Is it compatible with OpenAI?",
            "What API does the server have?",
        ),
        ("Does mlxserve speak the OpenAI API?", "Which API does the server have?"),
    ),
    Topic(
        "No. Everything runs on your own machine, and nothing is sent anywhere.",
        ("your own machine",),
        (
            "Do you need the internet?",
            "Does it need a network?",
            "Is my data sent anywhere?",
            "Are my chats private?",
            "Does mlxserve need the internet?",
        ),
        ("Do you need a network?", "Is my data private?"),
    ),
    Topic(
        "The server listens at `http://127.0.0.1:8000` unless you name another address.\n\n"
        "```bash\nmlxserve serve --port 9000\n```",
        ("127.0.0.1:8000",),
        (
            "Which port does the server use?",
            "What is the address of the server?",
            "Where does the server listen?",
            "How do I change the port?",
            "What is the URL of the API?",
            "Which address does it listen on?",
        ),
        ("What port does the server use?", "What is the URL of the server?"),
    ),
    Topic(
        "Press Ctrl+C in the terminal of the server. In the chat, press Ctrl+Q or type `/quit`.",
        ("Ctrl+C",),
        (
            "How do I stop the server?",
            "How can I stop the server?",
            "How do I quit?",
            "Stop the server",
            "How do I leave the chat?",
            "How do I end mlxserve?",
        ),
        ("How do I quit the server?", "How can I leave the chat?"),
    ),
    Topic(
        "`mlxserve doctor` checks the machine: the device, the memory and the kernels. "
        "It says what is wrong and what to do.",
        ("checks the machine",),
        (
            "What does mlxserve doctor do?",
            "How do I check my machine?",
            "What is the doctor?",
            "Something is wrong. How do I find out?",
            "How do I diagnose a problem?",
        ),
        ("What is mlxserve doctor?", "How can I check my machine?"),
    ),
    Topic(
        "MLX is a library for arrays and machine learning on Apple Silicon. "
        "mlxserve runs its models with it.",
        ("arrays", "Apple Silicon"),
        ("What is MLX?", "Explain MLX.", "Tell me about MLX.", "what is mlx", "What does MLX do?"),
        ("What exactly is MLX?", "Can you explain MLX?"),
    ),
    Topic(
        "A token is a piece of text: a word, a part of one, or a sign. "
        "A model reads and writes one token after another.",
        ("piece of text",),
        ("What is a token?", "What are tokens?", "Explain tokens.", "What does token mean?"),
        ("What exactly is a token?", "Can you explain tokens?"),
    ),
    Topic(
        "Preemption takes the pages of a running request when memory is short. "
        "The request waits and is computed again later; nothing is lost.",
        ("pages", "later"),
        (
            "What is preemption?",
            "Explain preemption.",
            "What happens when memory is short?",
            "What happens when there are no free pages?",
            "Tell me about preemption.",
        ),
        ("What exactly is preemption?", "Can you explain preemption?"),
    ),
    Topic(
        "Yes, I make mistakes, and often: I am a very small model. Please check what I say.",
        ("mistakes",),
        (
            "Do you make mistakes?",
            "Can I trust you?",
            "Are you always right?",
            "Are your answers correct?",
            "How good are you?",
            "Are you sure?",
        ),
        ("Can you make mistakes?", "Can I trust your answers?"),
    ),
    Topic(
        "No. I am a program that continues text. I feel nothing.",
        ("program",),
        (
            "Are you human?",
            "Are you alive?",
            "Do you have feelings?",
            "Are you a person?",
            "Are you a robot?",
        ),
        ("Are you a human?", "Do you feel anything?"),
    ),
)

HELD_OUT_QUESTIONS = frozenset(question for topic in TOPICS for question in topic.held_out)


def ask(rng: Random, split: Split, topic: Topic) -> Exchange:
    """One question on one topic."""
    if split is Split.TRAIN:
        question = _varied(rng, rng.choice(topic.train))
        if question in HELD_OUT_QUESTIONS:
            question = topic.train[0]
    else:
        question = rng.choice(topic.held_out)
    return Exchange(question, topic.answer, mentions(*topic.keywords))


def _varied(rng: Random, question: str) -> str:
    """The question as people type it: now and then in lower case, without its sign, with a word."""
    if rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    if rng.random() < 0.1:
        question = rng.choice(("Hello, ", "Please: ", "Hi! ", "OK. ", "And: ", "So, ")) + question
    return question


def exchange(rng: Random, split: Split) -> Exchange:
    return ask(rng, split, rng.choice(TOPICS))


def knowledge(rng: Random, split: Split, num_words: int) -> Conversation:
    """One question, alone in its conversation."""
    del num_words
    return single(exchange(rng, split))
