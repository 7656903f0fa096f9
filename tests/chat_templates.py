"""Small tokenizers with chat templates in the style of well-known models."""

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from es_cookbook.rl.messages.tools import tool

CHATML = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As of Qwen2.5."""

LLAMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' or tools %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}
{%- for tool in tools or [] %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) }}
{{- '<|end_header_id|>\n\n' }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{ message.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
"""As of Llama 3.1."""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""
"""As of Mistral 7B: no system role, no tools, no opening of the assistant's turn."""

GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}
{%- endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\n' + (message.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""As of Gemma 2: no system role, no tools."""

THINKING = CHATML.replace(
    "{{ message.content }}\n{%- for", "{{ message.content.split('</think>')[-1] }}\n{%- for"
)
"""As of Qwen3: what was thought in earlier turns is left out."""

_SPECIAL = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    THINKING: ("<|im_start|>", "<|im_end|>"),
    LLAMA: ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
    MISTRAL: ("[INST]", "[/INST]", "</s>"),
    GEMMA: ("<start_of_turn>", "<end_of_turn>"),
}
"""The last ends a turn."""


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with words of several letters and the template's special tokens."""
    special = _SPECIAL.get(template, ("<eos>",))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_words()),
        bos_token="<bos>",
        eos_token=special[-1],
        extra_special_tokens=list(special[:-1]),
        chat_template=template,
    )


@cache
def _words() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    return tokenizer.to_str()


@tool(quick=True)
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b
