"""What real models are asked: 20 prompts of 10 to 6,000 tokens, and a text whose perplexity is known."""

from __future__ import annotations

from pathlib import Path

LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
TEXT = " ".join(LICENSE.split())  # one line: the words of the licence, 2,200 tokens of SmolLM2

QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Translate to French: the cat sleeps.",
    "Name three primary colours.",
    "What is 12 plus 30?",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
)
LENGTHS = (
    40,
    60,
    66,
    70,
    260,
    500,
    1200,
    2600,
)  # characters of the licence, each from another word
LONG_LENGTHS = (6_000, 12_000, 18_000, 27_500)  # the licence over and over: up to 6,000 tokens

# Names of a server's models: SmolLM2, all-MiniLM-L6-v2 and one with random weights.
REAL, EMBEDDER, TINY = "smollm2-135m-instruct", "all-minilm", "tiny"

SMOLLM2 = "smollm2-135m-instruct.q4_1"  # in the names of recorded figures
BOS = "<bos>"  # every text that Gemma was trained with begins so
NUM_TOKENS = 24  # of each greedy answer
NUM_LONG = 4  # the last prompts, of 1,200 to 6,000 tokens


def chat_of(question: str) -> str:
    """The question as SmolLM2's own template renders it."""
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def prompts() -> list[str]:
    """Questions in the chat's format, then pieces of text to go on with, the longest last."""
    pieces = [TEXT[start * 97 :][:length] for start, length in enumerate(LENGTHS)]
    text = " ".join([TEXT] * 3)
    return [chat_of(question) for question in QUESTIONS] + pieces + [text[:n] for n in LONG_LENGTHS]


def texts() -> list[str]:
    """Pieces of text for Gemma to go on with, the longest last."""
    pieces = [TEXT[start * 97 :][:length] for start, length in enumerate(LENGTHS)]
    text = " ".join([TEXT] * 3)
    return [BOS + piece for piece in (*pieces, *(text[:n] for n in LONG_LENGTHS))]
