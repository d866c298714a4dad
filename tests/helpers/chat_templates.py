"""Chat templates in the shapes of well-known ones, on small tokenizers that have their control tokens."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cache

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.tokenizer import build_tokenizer

NOW = datetime(2025, 3, 4, 5, 6, 7)
CORPUS = (
    "system user assistant tool ipython analysis commentary final calculator lookup name arguments parameters "
    "You are a helpful assistant. Today Date: 04 Mar 2025 Cutting Knowledge hello world the result is higher lower "
    "expression 2*21 42 error timeout think about it then answer {} [] \"\" '' : , ."
)

CALL_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' }}<tool_call>\n" + CALL_JSON + "\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge\nToday Date: {{ strftime_now('%d %b %Y') }}\n\n"
    "{{ system }}<|eot_id|>"
    "{% if tools %}{% if rest[0].role != 'user' %}{{ raise_exception('tools need a first user message') }}{% endif %}"
    "<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n\n{% for t in tools %}"
    "{{ t | tojson(indent=4) + '\\n\\n' }}{% endfor %}{{ rest[0].content | trim }}<|eot_id|>"
    "{% set rest = rest[1:] %}{% endif %}"
    "{% for m in rest %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only single tool calls at once') }}{% endif %}{% set c = m.tool_calls[0] %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}<|eot_id|>"
    "{% elif m.role in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{% if m.content is mapping %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    "{# the model may end a call of a built-in tool with <|eom_id|> #}"
)

QWEN3 = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n<tools>{% for t in tools %}{{ '\\n' + t | tojson }}{% endfor %}{{ '\\n' }}</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=messages | length - 1, seeking=true) %}"
    "{% for m in messages[::-1] %}{% if ns.seeking and m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.seeking = false %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set ns.text = m.content %}{% set ns.thoughts = '' %}"
    "{% if '</think>' in m.content %}{% set ns.text = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{% set ns.thoughts = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or ns.thoughts) %}"
    "<think>\n{{ ns.thoughts.strip('\\n') }}\n</think>\n\n{{ ns.text.lstrip('\\n') }}{% else %}{{ ns.text }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or ns.text %}{{ '\\n' }}{% endif %}<tool_call>\n"
    + CALL_JSON
    + "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

GPT_OSS = (
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}\n# Valid channels: analysis, commentary, "
    "final.<|end|>{% set rest = messages %}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% endif %}{% if tools or messages[0].role == 'system' %}<|start|>developer<|message|>"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for t in tools or [] %}{{ '\\ntype ' + t.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% set ns = namespace(called=none) %}{% for m in rest %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call in a turn') }}{% endif %}"
    "{% set later = namespace(final=false) %}{% for n in rest[loop.index:] %}"
    "{% if n.role == 'assistant' and not n.tool_calls %}{% set later.final = true %}{% endif %}{% endfor %}"
    "{% if m.thinking and not later.final %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% set ns.called = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ ns.called }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% if loop.last and not add_generation_prompt %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if not ns.called %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}<tool_call>[{% for c in m.tool_calls %}" + CALL_JSON + "{% if not loop.last %}, {% endif %}"
    "{% endfor %}]</tool_call>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TemplateCase:
    """A template, and what is known about it."""

    name: str
    template: str
    controls: tuple[str, ...]
    """Special tokens."""
    markers: tuple[str, ...] = ()
    """Added tokens that are not special."""
    end: str
    """The end of a turn of text."""
    end_of_call: str
    bos: str | None = None
    other_stop: str = "<|endoftext|>"
    """A stop token that the template does not know."""
    seam: str = ""
    """Text that the template puts behind an end of turn."""
    max_calls: int = 3
    """Most calls of a turn."""

    @property
    def ends(self) -> tuple[str, ...]:
        """The ends of turns."""
        return self.end, self.end_of_call


CASES = {
    case.name: case
    for case in (
        TemplateCase(
            name="chatml",
            template=CHATML,
            controls=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
            end="<|im_end|>",
            end_of_call="<|im_end|>",
            seam="\n",
        ),
        TemplateCase(
            name="llama3",
            template=LLAMA3,
            controls=(
                "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
                "<|end_of_text|>",
            ),
            end="<|eot_id|>",
            end_of_call="<|eot_id|>",
            bos="<|begin_of_text|>",
            other_stop="<|end_of_text|>",
            max_calls=1,
        ),
        TemplateCase(
            name="qwen3",
            template=QWEN3,
            controls=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
            markers=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            end="<|im_end|>",
            end_of_call="<|im_end|>",
            seam="\n",
        ),
        TemplateCase(
            name="gpt_oss",
            template=GPT_OSS,
            controls=(
                "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>",
            ),
            end="<|return|>",
            end_of_call="<|call|>",
            max_calls=1,
        ),
        TemplateCase(
            name="smollm2",
            template=SMOLLM2,
            controls=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
            end="<|im_end|>",
            end_of_call="<|im_end|>",
            seam="\n",
        ),
    )
}  # fmt: skip


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """Return a small byte-level tokenizer with the control tokens and the template of a case."""
    case = CASES[name]
    made = build_tokenizer([CORPUS] * 3, max_vocab_size=420)
    made.add_special_tokens({"additional_special_tokens": list(case.controls)})
    made.add_tokens([AddedToken(marker, normalized=False) for marker in case.markers])
    made.eos_token = case.end
    if case.bos is not None:
        made.bos_token = case.bos
    made.chat_template = case.template
    return made


def stop_ids_of(name: str) -> tuple[int, ...]:
    """Return the tokens that end turns of the model."""
    case = CASES[name]
    known = (*case.ends, case.other_stop, *(("<|eom_id|>",) if name == "llama3" else ()))
    return tuple(dict.fromkeys(int(token) for token in tokenizer_of(name).convert_tokens_to_ids(list(known))))
