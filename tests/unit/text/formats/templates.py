"""Chat templates in the shapes of published ones, each as short as its shape allows."""

_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_ROLE = "<|im_start|>{{ m.role }}\n"

HERMES = (  # as Qwen 2.5: content and calls, results in a user's turn
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}"
    + _ROLE
    + "{{ m.content }}"
    + _CALLS
    + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES_THINKING = (  # as Qwen 3: thinking stays until a user speaks
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}Tools: {{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = m.reasoning_content or '' %}{% set words = m.content %}"
    "{% if '</think>' in words %}{% set thought = words.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set words = words.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.asked and thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ words }}"
    + _CALLS
    + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% else %}" + _ROLE + "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (  # as V3: a section of calls, results in a section of their own
    "{% if tools %}Tools: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>"
    "{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    + _CALLS
    + "{{ '' if loop.first else '\n' }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
    "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}"
)
DEEPSEEK_THINKING = (
    DEEPSEEK.replace(  # as R1: the prompt opens thinking, and earlier answers lose theirs
        "{% elif m.role == 'assistant' %}{{ m.content }}",
        "{% elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}",
    )
    + "{% if add_generation_prompt %}<think>\n{% endif %}"
)
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>" + _CALLS + "<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
MISTRAL = (  # as Small 3.2: ids of calls, and results only behind calls
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != "
    "'tool' %}{{ raise_exception('a result without a call') }}{% endif %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}"
    + _CALLS
    + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
)
GEMMA = (  # as FunctionGemma
    "<bos>{% if tools %}<start_of_turn>developer\n{{ tools | tojson }}<end_of_turn>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<start_function_response>{{ m.content }}<end_function_response>"
    "{% else %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    + _CALLS
    + "<start_function_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | items %}"
    "{{ '' if loop.first else ',' }}{{ k }}:{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v | tojson }}"
    "{% endif %}{% endfor %}{{ '}' }}<end_function_call>{% endfor %}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
HARMONY = (  # as gpt-oss: a call names its tool before the channel, and thinking is left out behind a final answer
    "<|start|>developer<|message|>{{ tools | tojson if tools else 'No tools.' }}<|end|>"
    "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% set f = m.tool_calls[0].function %}{% set ns.name = f.name %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}"
    "<|call|>"
    "{% else %}{% if '<|channel|>' in m.content %}{{ raise_exception('channels in the content') }}{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MINIMAX = (
    "{% if tools %}]~b]system\n{{ tools | tojson }}[e~[\n{% endif %}{% for m in messages %}"
    "]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{% set parts = m.content.split('</think>') %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}\n<minimax:tool_call>\n" + _CALLS + '<invoke name="{{ f.name }}">\n'
    '{% for k, v in f.arguments | items %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}'
    "</parameter>\n"
    "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)
NEMOTRON = (
    "{% if tools %}<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>{% endif %}"
    "{% for m in messages %}<SPECIAL_{{ m.role }}>{{ m.content }}{% if m.tool_calls %}<TOOLCALL>["
    + _CALLS
    + '{{ \'\' if loop.first else \', \' }}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "{% endfor %}]</TOOLCALL>{% endif %}<SPECIAL_12>{% endfor %}"
    "{% if add_generation_prompt %}<SPECIAL_assistant>{% endif %}"
)

TEMPLATES = {
    "hermes": HERMES,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "harmony": HARMONY,
    "minimax": MINIMAX,
    "nemotron": NEMOTRON,
}
"""Name of the format that a template teaches -> the template."""
ENDS = {
    "hermes": ["<|im_end|>"],
    "deepseek": ["<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
    "kimi": ["<|im_end|>", "<|im_middle|>"],
    "mistral": ["</s>", "[INST]", "[/INST]"],
    "gemma": ["<end_of_turn>", "<start_of_turn>"],
    "harmony": [],
    "minimax": ["[e~[", "]~b]"],
    "nemotron": ["<SPECIAL_12>"],
}
"""Further tokens of the family: the first ends an answer."""
