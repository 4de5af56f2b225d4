"""Chat templates as transformers renders them."""

import json

import pytest

from ralm_jax.chat import around, render
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.tokenizer import load_tokenizer
from tests import tiny

LLAMA = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' "
    "+ message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TURNS = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}{% generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content + '\\n' }}
    {%- endif %}
    {%- if loop.index > 100 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{{- {"é": [1, 2]} | tojson if tools else '' }}
"""
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": " What is “it”? "},
    {"role": "assistant", "content": "A <b>."},
    {"role": "user", "content": "And\nthen?"},
]


def save(folder, template=None, *, bos=False, **config):
    folder.mkdir()
    tiny.backend(bos=bos).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({} if template is None else {"chat_template": template}))
    )
    return str(folder)


@pytest.mark.parametrize("template", [LLAMA, TURNS], ids=["llama", "turns"])
@pytest.mark.parametrize("ask", [True, False])
@pytest.mark.parametrize("messages", [TALK, TALK[:3], TALK[1:2]], ids=["four", "three", "one"])
def test_as_transformers(tmp_path, template, ask, messages):
    transformers = pytest.importorskip("transformers")
    folder = save(tmp_path / "t", template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=ask
    )
    assert render(load_tokenizer(folder), messages, ask=ask) == theirs


class TestWhereItIs:
    def test_a_file_of_its_own_comes_first(self, tmp_path):
        folder = save(tmp_path / "t", "stated")
        (tmp_path / "t" / "chat_template.jinja").write_text("in a file")
        assert render(load_tokenizer(folder), TALK, ask=False) == "in a file"

    def test_of_several_the_default(self, tmp_path):
        named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
        assert render(load_tokenizer(save(tmp_path / "t", named)), TALK, ask=False) == "b"

    def test_a_saved_tokenizer_keeps_it(self, tmp_path):
        first = load_tokenizer(save(tmp_path / "t", LLAMA))
        (tmp_path / "saved").mkdir()
        first.save(tmp_path / "saved")
        again = load_tokenizer(str(tmp_path / "saved"))
        assert render(again, TALK, ask=True) == render(first, TALK, ask=True)
        assert again.named_tokens == first.named_tokens

    def test_none(self, tmp_path):
        with pytest.raises(UsageError, match="has no chat template"):
            render(load_tokenizer(save(tmp_path / "t")), TALK, ask=True)


def test_bos_stands_once(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path / "t", LLAMA, bos=True))
    text = render(tokenizer, TALK[1:2], ask=True)
    assert text == "[INST] What is “it”? [/INST]"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{% for %}", "{{ messages[0].content.x.y }}", "{{ ''.__class__.mro() }}"],
)
def test_a_broken_template_is_named(tmp_path, template):
    with pytest.raises(RalmError, match="the chat template does not take messages of system, user"):
        render(load_tokenizer(save(tmp_path / "t", template)), TALK, ask=True)


class TestAround:
    def test_before_and_behind(self, tmp_path):
        assert around(load_tokenizer(save(tmp_path / "t", TURNS))) == ("<|user|>\n", "\n<|assistant|>\n")

    def test_a_message_that_is_written_twice(self, tmp_path):
        with pytest.raises(RalmError, match="writes a user's message 2 times"):
            around(load_tokenizer(save(tmp_path / "t", "{{ messages[0].content }} {{ messages[0].content }}")))
