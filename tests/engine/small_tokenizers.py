"""Small tokenizers of both kinds, trained on the spot, and chat templates with the habits of real ones."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris, and the capital of Italy is Rome. What is the capital of Spain?",
    "def hello(name):\n    return f'hello {name}'\n\n\nfor i in range(10):\n    print(hello(i))\n",
    "Größe, façade, naïve, 東京, привет, 🙂🙂 👩‍👩‍👧 ½ ² ٣ 2,000 tokens; user assistant system think",
] * 3

TEXTS = [
    "",
    " ",
    "  ",
    "Hello, world!",
    " leading and trailing ",
    "two  spaces   three\tand a tab\n\nnew lines \r\n windows",
    "I'm you're they'll it's CAN'T",
    "x = 1\n    y = [1, 23, 456]\n\tz = x+y  # 3.14e-10\n",
    "1234567890 12 345 6.78 1,000,000 v2.0",
    "Größe façade naïve Ångström e\u0301 (combining)",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "Привет мир! Γειά σου Κόσμε! שלום עולם مرحبا ١٢٣",
    "🙂 👩‍👩‍👧‍👦 🇫🇷 👍🏽 e️⃣",
    "½ ² ① Ⅷ ٣ १२",
    "zero\u200bwidth \u00a0nbsp \u2028line \ufeffbom",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|> <|im_end|><|endoftext|>text<|im_end|> text",
    "<s>[INST] hi [/INST]</s> and then",
    "https://example.com/a?b=c&d=%20e#f",
    "if (a && b || !c) { return a->b[3]; } // ok",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x1b[31m\x7f",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 \U0010ffff",
    "...!!!???---===___***",
]


@cache
def byte_level() -> str:
    """tokenizer.json of byte-level BPE in Qwen's manner: NFC, a split regex, ChatML's specials, <think>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(
        pattern=Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        behavior="isolated",
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer.to_str()


@cache
def sentencepiece() -> str:
    """tokenizer.json in Llama-2's manner: ▁ for spaces, bytes as <0xAB>, begin-of-text first."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=[*specials, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    # one language only, so that other letters need their bytes
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in CORPUS[:2]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [entry for entry in state["added_tokens"] if entry["content"] in specials]
    return json.dumps(state)


CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TRIMMING = """\
{{- bos_token }}
{%- set today = strftime_now('%d %b %Y') %}
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nToday: ' + today + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
{% generation %}{{- '<|im_start|>assistant\\n' + message['content'] | trim + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=4) }}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
BYTE_LEVEL_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|endoftext|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
    "pad_token": "<|endoftext|>",
}
SENTENCEPIECE_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


def write(folder: Path, *, template: str | None = CHATML, kind: str = "byte_level", **config: Any) -> Path:
    """A folder with a tokenizer in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    byte = kind == "byte_level"
    (folder / "tokenizer.json").write_text(byte_level() if byte else sentencepiece(), "utf-8")
    settings = {**(BYTE_LEVEL_CONFIG if byte else SENTENCEPIECE_CONFIG), **config}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder
