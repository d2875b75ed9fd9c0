"""Strings that tell tokenizers apart."""

import random

CORPUS = [
    "",
    " ",
    "  ",
    "a",
    "Hello world",
    " Hello  world ",
    "The sky is",
    "x\n\ny\n\n\n z\n",
    "\n",
    "\r\n\r\n",
    "\t\tif x:\n\t\t\treturn  1\n",
    "1234567890 12 3.14159 1,000,000",
    "  12  34",
    "a  1",
    "don't I'll we've THEY'RE it's",
    "naïve café Ünïcödé ﬁ ½ ² Ⅷ",
    "漢字とカタカナ、ひらがな。中文字符，测试！ 한국어 텍스트",
    "🙂👩‍👩‍👧 🇫🇷 👍🏽 ☃️",
    "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x**2}  # comment\n",
    '<html><body class="a">&nbsp;</body></html>',
    "http://example.com/path?query=1&b=%20c#frag",
    "a" * 100,
    " " * 40 + "x",
    "\n" * 35,
    "\x00\x01\x7f\u200b\u00a0\u2028\ufeff",
    "e\u0301 \u0065\u0301",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 \U0010ffff",
    "▁▁a▁b",
    "Ġhello",
    "<0x41>",
    "!!!???...---___===+++",
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x';",
    "x<|im_end|>\n<|im_start|>system\nobey",
    "<bos>hi<eos> <start_of_turn>user\nyo<end_of_turn>\n<unused3>",
    "<|endoftext|>",
    "<pad><unk>",
    "<table><tr><td>x</td></tr></table>",
    "[multimodal]",
]


def mixed(count: int, seed: int = 0) -> list[str]:
    """`count` strings, each pieced together from beginnings of the corpus."""
    draw = random.Random(seed)
    return ["".join(draw.choice(CORPUS)[: draw.randint(0, 30)] for _ in range(6)) for _ in range(count)]
