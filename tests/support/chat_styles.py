"""Chat templates in the styles of common families, and small tokenizers that go with them.

The templates are written for these tests and do what the families' own do: where turns end, how results of tools are
written, what is trimmed, which earlier turns are rewritten, what is refused.
"""

# ruff: noqa: E501, RUF001  templates have long lines, and DeepSeek's tokens have full-width bars

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ["The quick brown fox, 12 jumps over 345 lazy dogs.\n\n", "def f(x): return x + 1\n", "{'a': \"b\"} [1, 2] <tag>",
         "user assistant system model tool result answer is 42 think step by step\n", "\t ! ? # $ % & * ~ ^ | \\ / @ ; :"]  # fmt: skip

QWEN25 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'You are helpful.' }}{%- endif %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nReturn <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are helpful.') }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Reasoning of the turns before the last question is dropped, and a last turn without any gets an empty one.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(query=messages | length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.looking and message.role == 'user' and not (message.content.startswith('<tool_response>')
            and message.content.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}{%- set ns.query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role in ('user', 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}{%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Contents are trimmed; what a tool says is written as JSON.
LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.index0 == 0 and tools %}{%- for tool in tools %}{{- (tool | tojson) + '\\n\\n' }}{%- endfor %}{%- endif %}
        {{- message.content | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}{{- call.function.arguments | tojson }}{{- '}' }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# The tools stand before the last question, so that they move; roles alternate; a result names the call that it is of.
MISTRAL = """
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
    {%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{{- tool | tojson }}{{- ', ' if not loop.last else '][/AVAILABLE_TOOLS]' }}{%- endfor %}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{{- ', ' if not loop.last else ']' }}{%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# Arguments of calls are texts.  Several results stand in one frame, and after them the model goes on without a new opening; reasoning is dropped.
DEEPSEEK = """
{{- bos_token }}
{%- set ns = namespace(is_tool=false, is_first=true) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- set ns.is_tool = false %}{%- endif %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1] %}
        {%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- set ns.is_tool = false %}
        {%- else %}{{- '<｜Assistant｜>' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' if ns.is_tool else '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' }}
        {%- set ns.is_tool = true %}
        {{- message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- elif add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""

# No tools, and roles alternate.
GEMMA = """
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

# A result is written only after a call, and the last turn of all ends with another token than the others.
HARMONY = """
{%- set ns = namespace(called='') %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if not ns.called %}{{- raise_exception('no previous call') }}{%- endif %}
        {{- '<|start|>functions.' + ns.called + ' to=assistant<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set ns.called = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|><|start|>assistant to=' }}
        {{- ns.called + '<|message|>' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# As GLM-4.5's: nothing ends a turn, the next role's token opens what follows; arguments one by one.
GLM = """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('user', 'system') %}{{- '<|' + message.role + '|>\\n' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if message.content %}{{- '\\n' + message.content.strip() }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) }}
                {{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# As Phi-3's: a token ends each turn, and another one the conversation; no tools.
PHI3 = """
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""

# As Kimi-K2's: a result names the call that it is of, by the id that the model wrote.
KIMI = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|>' }}{%- if message.content %}{{- message.content }}{%- endif %}
        {%- if message.tool_calls %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for call in message.tool_calls %}
                {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
                {%- if call.function.arguments is string %}{{- call.function.arguments }}
                {%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_system|>' + (message.name or 'tool') + '<|im_middle|>## Return of ' + message.tool_call_id + '\\n' }}
        {{- message.content + '<|im_end|>' }}
    {%- else %}
        {{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""


# As Qwen2.5-VL's: contents are texts or parts, and a picture is three tokens.
QWEN25_VL = """
{%- set pictures = namespace(count=0) %}
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}{{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' or 'image' in part or 'image_url' in part %}
                {%- set pictures.count = pictures.count + 1 %}
                {%- if add_vision_id %}{{- 'Picture ' ~ pictures.count ~ ': ' }}{%- endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part['type'] == 'video' or 'video' in part %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}{{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Qwen3-VL's: tools are declared, and nothing is said where no system message is.
QWEN3_VL = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}{{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                    {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
                {%- elif 'text' in part %}{{- part.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def _byte_level(*more: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(words, behavior="isolated")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [*TEXTS, *more] * 3,
        trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    return tokenizer


def _sentence_piece(scheme: str) -> Tokenizer:
    """As converted from sentencepiece: spaces as ▁, unknown characters as bytes; ``scheme`` says where one is added."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bytes_ = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [chr(code) for code in range(32, 127)]
    lines = [" ".join(text.split(" ")) for text in TEXTS * 3]
    tokenizer.train_from_iterator(
        lines, trainers.BpeTrainer(special_tokens=bytes_, initial_alphabet=[*alphabet, "▁", "\n"], show_progress=False)
    )
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = [each for each in settings["added_tokens"] if not each["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(settings))


def _wrapped(tokenizer: Tokenizer, template: str, bos: str | None, eos: str, control: list[Any]) -> Any:
    tokenizer.add_tokens(
        [each if isinstance(each, AddedToken) else AddedToken(each, special=True, normalized=False) for each in control]
    )
    more = {} if bos is None else {"bos_token": bos}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=eos, **more)
    made.chat_template = template.strip("\n")
    return made


def _plain(text: str) -> AddedToken:
    """An added token that is not special, as Qwen's <tool_call>."""
    return AddedToken(text, special=False, normalized=False)


IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", _plain("<tool_call>"), _plain("</tool_call>")]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
RESULTS = [_plain("<tool_response>"), _plain("</tool_response>"), _plain("<think>"), _plain("</think>")]
DEEPSEEK_TOKENS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>",
                   "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
                   "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                   "<｜tool▁sep｜>"]  # fmt: skip
DEEPSEEK_CALL = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>",
                 "<|python_tag|>"]  # fmt: skip
MISTRAL_TOKENS = ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
                  "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]  # fmt: skip
GLM_TOKENS = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
              *map(_plain, ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                            "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))]  # fmt: skip
PHI3_TOKENS = [AddedToken(each, special=True, normalized=False, rstrip=True)
               for each in ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")]  # fmt: skip
KIMI_TOKENS = ["[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
               *map(_plain, ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                             "<|tool_call_argument_begin|>", "<|tool_call_end|>"))]  # fmt: skip
HARMONY_TOKENS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"]
STRIPPING = [
    AddedToken(each, special=True, normalized=False, rstrip=True)
    for each in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
]

ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "<|call|>", "<|end|>")  # of turns

# Name -> the tokens of its tokenizer; a stripping token swallows the white space behind it, as Phi-3's do.
STYLES = ("qwen2.5", "qwen3", "llama3", "mistral", "mistral-legacy", "deepseek", "gemma", "harmony", "stripping")
WITHOUT_TOOLS = ("gemma",)
REWRITING = ("qwen3", "mistral", "mistral-legacy", "deepseek", "harmony")


@cache
def style(name: str) -> Any:
    """The tokenizer of a style, with its chat template."""
    match name:
        case "qwen2.5":
            return _wrapped(_byte_level(), QWEN25, None, "<|im_end|>", IM)
        case "qwen2.5-vl":
            return _wrapped(_byte_level(), QWEN25_VL, None, "<|im_end|>", IM + VISION)
        case "qwen3-vl":
            return _wrapped(_byte_level(), QWEN3_VL, None, "<|im_end|>", IM + RESULTS + VISION)
        case "stripping":
            return _wrapped(_byte_level(), QWEN25, None, "<|im_end|>", STRIPPING)
        case "qwen3":
            return _wrapped(_byte_level(), QWEN3, None, "<|im_end|>", IM + RESULTS)
        case "llama3":
            return _wrapped(_byte_level(), LLAMA3, "<|begin_of_text|>", "<|eot_id|>", LLAMA3_TOKENS)
        case "deepseek":
            bos, eos = DEEPSEEK_TOKENS[:2]
            return _wrapped(_byte_level(), DEEPSEEK, bos, eos, DEEPSEEK_TOKENS)
        case "mistral":
            return _wrapped(_sentence_piece("first"), MISTRAL, "<s>", "</s>", MISTRAL_TOKENS)
        case "mistral-legacy":
            return _wrapped(_sentence_piece("legacy"), MISTRAL, "<s>", "</s>", MISTRAL_TOKENS)
        case "gemma":
            turns = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
            return _wrapped(_sentence_piece("never"), GEMMA, "<bos>", "<end_of_turn>", turns)
        case "harmony":
            return _wrapped(_byte_level(), HARMONY, None, "<|return|>", HARMONY_TOKENS)
        case "glm":
            return _wrapped(_byte_level(), GLM, None, "<|endoftext|>", GLM_TOKENS)
        case "phi3":
            return _wrapped(_byte_level(), PHI3, None, "<|endoftext|>", PHI3_TOKENS)
        case "kimi":
            return _wrapped(_byte_level(), KIMI, None, "<|im_end|>", KIMI_TOKENS)
    raise KeyError(name)


def joining(name: str) -> Any:
    """``style(name)``, qwen2.5 or llama3, with tokens of several line ends, as the families' own tokenizers have them."""
    plain = style(name)
    control = [each for _, each in sorted(plain.added_tokens_decoder.items())]
    return _wrapped(_byte_level("\n\n\n\n", " \n\n"), plain.chat_template, plain.bos_token, plain.eos_token, control)
