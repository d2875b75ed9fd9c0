"""Twenty varied prompts, two of them longer than 700 tokens."""

from __future__ import annotations

from pathlib import Path

_LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text()

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Q: What is the boiling point of water at sea level?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Liebe Grüße aus München! Heute ist das Wetter",
    "El perro corre por el parque y",
    "日本の首都は",
    "🙂 Emoji and symbols: ∑ ∫ √ →",
    "    indented\n\n\n\ttabs and    spaces",
    "SELECT name, COUNT(*) FROM users WHERE",
    "<html>\n<head>\n<title>",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, humans first",
    '{"name": "Ada", "born": 1815, "known for":',
    "List three uses of a paperclip:\n1.",
    "A",
    _LICENSE[200:4200],
    _LICENSE[5000:9600] + "\n\nIn short, this licence says that",
)
