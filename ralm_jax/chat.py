"""Chat templates: Jinja in a tokenizer's files, which writes the turns of a conversation as its model was tuned to read
them (Hugging Face's `apply_chat_template`)."""

import functools
import json
from collections.abc import Sequence
from datetime import datetime

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.tokenizer import Tokenizer

Message = dict[str, str]  # role, content


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks what a model wrote, stands for what is in it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def environment() -> ImmutableSandboxedEnvironment:
    """What templates are written for: whitespace, filters and functions as transformers has them."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


@functools.lru_cache
def compiled(template: str) -> Template:
    return environment().from_string(template)


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, ask: bool) -> str:
    """`messages` as the text that a model reads, without the BOS that `tokenizer` puts in front itself.

    Args:
        messages: of {"role", "content"}.
        ask: end with what makes the model answer.

    Raises:
        UsageError: the tokenizer has no template.
        RalmError: its template is broken, or does not take such messages.
    """
    if not tokenizer.chat_template:
        raise UsageError(f"{tokenizer.origin}: has no chat template; name a model that was tuned for chats")
    names = dict(tokenizer.named_tokens)
    try:
        text = compiled(tokenizer.chat_template).render(messages=list(messages), add_generation_prompt=ask, **names)
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise RalmError(f"{tokenizer.origin}: the chat template does not take messages of {roles} ({error})") from None
    return text.removeprefix(names.get("bos_token", "")) if tokenizer.prefix else text


def around(tokenizer: Tokenizer) -> tuple[str, str]:
    """What stands before a user's message, and behind it up to the answer.

    Raises:
        UsageError, RalmError: as `render`; or the message is not whole in what is rendered.
    """
    mark = "0c4f7b19"  # a template may strip a message, but has no reason to change this
    before, *after = render(tokenizer, [{"role": "user", "content": mark}], ask=True).split(mark)
    if len(after) != 1:
        raise RalmError(f"{tokenizer.origin}: the chat template writes a user's message {len(after)} times, not once")
    return before, after[0]
