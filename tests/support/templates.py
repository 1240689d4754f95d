"""Chat templates in the style of public model families, in words of our own.

`{% generation %}` holds what the model writes: from the end of its prompt to the token that ends
the turn. `plain` takes the tags away, as models are published.
"""

from __future__ import annotations

import re

from support.tiny import make_tokenizer

_CALLS = (
    "{% for c in m.tool_calls %}{{ '\n' if not loop.first or m.content else '' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

FAMILIES = {
    "chatml": _TOOLS + "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content or '' }}"
    "{% if m.tool_calls %}" + _CALLS + "{% endif %}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + _PROMPT,
    "llama2": "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first and system %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}"
    "{{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {% generation %}{{ m.content | trim }} {{ eos_token }}"
    "{% endgeneration %}{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}",
    "llama3": "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{{ tools | tojson }}<|eot_id|>{% endif %}{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "gemma": "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<end_of_turn>"
    "{% endgeneration %}{% else %}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{{ part.text | trim }}{% endfor %}{% endif %}<end_of_turn>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "phi": "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    "mistral": "{{ bos_token }}{% set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.index0 == last.user %}[AVAILABLE_TOOLS] "
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{% generation %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]{{ eos_token }}'
    "{% endgeneration %}"
    "{% elif m.role == 'assistant' %} {% generation %}{{ m.content | trim }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    # It forgets the thoughts before the last question, and prints empty ones after it.
    "qwen3": _TOOLS + "{% set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thoughts, content = m.reasoning_content or '', m.content or '' %}"
    "{% if not thoughts and '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% generation %}"
    "{% if loop.index0 > last.user %}<think>\n{{ thoughts }}\n</think>\n\n{% endif %}"
    "{{ content }}{% if m.tool_calls %}" + _CALLS + "{% endif %}<|im_end|>{% endgeneration %}"
    "{{ '\n' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '' }}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{{ '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + _PROMPT
    + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}",
    # Arguments are text, and an answer to tools has no header. The prompt begins the thoughts.
    "deepseek": "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool_output_begin|>{{ m.content }}<|tool_output_end|>"
    "{% else %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|Assistant|>{% endif %}"
    "{% generation %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<|tool_call_begin|>function<|tool_sep|>"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
    "<|tool_call_end|>{% endfor %}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|><think>\n"
    "{% endif %}",
    # Each message of the assistant says whom it addresses, in the style of harmony.
    "channels": "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|start|>assistant{% if m.thinking or m.tool_calls %}"
    "{% generation %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endgeneration %}"
    "{% else %}<|channel|>final<|message|>{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>{{ m.name }} to=assistant<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
}


def plain(template: str) -> str:
    """Return a template without the tags that say what the model writes."""
    return re.sub("{% (end)?generation %}", "", template)


def family_tokenizer():
    """Return a tokenizer that knows the special tokens of all families."""
    found = set(re.findall(r"<\|\w+\|>|</?\w+_of_turn>|\[/?[A-Z_]+\]", "".join(FAMILIES.values())))
    tokenizer = make_tokenizer(50)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(found)})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer
