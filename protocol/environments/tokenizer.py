"""The policy's own tokenizer and chat template: text to token ids, the same on every machine.

Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a policy folder. What an observation looks
like in token ids is consensus critical, because the trainer replays it id for id, so this renders with
`tokenizers` and jinja2 alone (docs/decisions/0002); where a template uses nothing that changes with the day or
the dice, the result equals transformers' apply_chat_template.

Not here: when a turn ends or an episode is over (rollout.py). A template is the trainer's, so a node renders it
in jinja2's sandbox; text of messages is never a template.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
from tokenizers import Tokenizer

from protocol.environments.base import Message
from protocol.errors import PolicyError
from protocol.outputs import cause

# Stands for a finished model turn while an observation is rendered; the template must keep it as it is.
_REPLY: Final = "RLCOMMONS-REPLY"
_PROBE: Final = "RLCOMMONS-OBSERVATION"
_PROMPTS_KEPT: Final = 32
_FILES: Final = (
    "tokenizer.json",
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_TOKENIZERS_KEPT: Final = 4  # a large one takes 100 MB
# What a template may call these by name, as transformers passes them.
_NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class PolicyTokenizer:
    """Turns messages, observations and replies of one policy into token ids and back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: jinja2.Template,
        named_tokens: dict[str, str],
        stop_ids: frozenset[int],
        vocabulary_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._named_tokens = named_tokens
        self.stop_ids = stop_ids
        # Ids the policy can draw are below this: rows of its embedding.
        self.vocabulary_size = vocabulary_size
        # The completions of a group come one after the other and have the same prompt.
        self._prompt_ids = lru_cache(_PROMPTS_KEPT)(self._rendered_ids)

    @classmethod
    def load(cls, policy_dir: Path) -> PolicyTokenizer:
        """The tokenizer of the policy folder. Raises PolicyError naming the file that is missing or wrong.

        One object for every folder with the same files: the versions of a policy differ in their weights alone.
        """
        files = _Files(policy_dir)
        with _loading:
            kept = _kept.pop(files.digest, None) or cls._made_of(files)
            _kept[files.digest] = kept
            if len(_kept) > _TOKENIZERS_KEPT:
                _kept.popitem(last=False)
        return kept

    @classmethod
    def _made_of(cls, files: _Files) -> PolicyTokenizer:
        tokenizer = _tokenizer(files)
        config = files.json("config.json", required=True)
        generation = files.json("generation_config.json")
        fields = files.json("tokenizer_config.json")
        named = {key: _token_text(fields[key]) for key in _NAMED_TOKENS if fields.get(key)}
        return cls(
            tokenizer,
            _compile(_template_source(files, fields), files.folder),
            named,
            _stop_ids(tokenizer, files.folder, generation, config, named),
            _vocabulary_size(tokenizer, config),
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`; tokens written out in it (`<|end|>`) are recognised, none are added."""
        if not _is_unicode(text):
            raise PolicyError(f"there is half a character in {text[:40]!r}: it has no UTF-8 form and no token ids")
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if ids and max(ids) >= self.vocabulary_size:
            raise PolicyError(
                f"the tokenizer gives token id {max(ids)}, the model has {self.vocabulary_size} tokens: "
                "tokenizer.json and config.json do not belong together"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens included. An id that has no text is left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The conversation and what opens the assistant's turn, as the chat template renders them."""
        return self._prompt_ids(tuple(messages))

    def _rendered_ids(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        ids = self.encode(self._render(messages))
        if not ids:
            raise PolicyError("the chat template renders this prompt as nothing")
        return ids

    def observation_ids(self, observation: str) -> tuple[int, ...]:
        """The ids that follow the model's stop token: the rest of its turn, the observation as a message, and
        what opens the next turn. They do not depend on the conversation before them.

        Raises PolicyError when this chat template cannot be used for tasks of more than one turn.
        """
        stop, rest = self._split_after_stop(self._after_reply(self._observation_role, observation))
        # Encoded behind the stop token, as the model meets it: some tokenizers treat a text's start differently.
        ids = self.encode(stop + rest)
        if not ids or ids[0] not in self.stop_ids:
            raise PolicyError(f"the tokenizer does not encode its stop token {stop!r} as one token")
        if len(ids) == 1:
            self._unfit("it puts nothing between two turns of the model")
        return ids[1:]

    @cached_property
    def _observation_role(self) -> str:
        """`tool`, or `user` where the template refuses a tool message or leaves its text out."""
        for role in ("tool", "user"):
            try:
                if _PROBE in self._after_reply(role, _PROBE):
                    return role
            except PolicyError:
                continue
        self._unfit("it shows neither a tool's nor a user's message after the assistant's")

    def _after_reply(self, role: str, observation: str) -> str:
        """What the template renders after the model's own words."""
        conversation = (Message("user", "-"), Message("assistant", _REPLY), Message(role, observation))
        _, reply, rest = self._render(conversation).partition(_REPLY)
        if not reply:
            self._unfit("it leaves out what the assistant said")
        return rest

    def _split_after_stop(self, text: str) -> tuple[str, str]:
        stops = sorted((self.decode([token]) for token in self.stop_ids), key=len, reverse=True)
        for stop in stops:
            if stop and text.startswith(stop):
                return stop, text[len(stop) :]
        self._unfit(f"after the assistant's words it puts {text[:40]!r}, not a stop token ({', '.join(stops)})")

    def _unfit(self, why: str) -> NoReturn:
        raise PolicyError(f"this chat template cannot be used for tasks of more than one turn: {why}")

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._named_tokens,
            )
        except Exception as error:  # a template can make any of Python's operations fail
            roles = ", ".join(message.role for message in messages)
            raise PolicyError(
                f"the chat template cannot render the roles {roles}: {error} (a template that asks for the time "
                "or for random numbers cannot be replayed and is refused)"
            ) from error


# --- the template's world ---


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it shows them."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's own, less names that begin with an underscore: those are a way out of a sandbox."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sandbox() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    world = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    world.filters["tojson"] = _tojson
    world.globals["raise_exception"] = _raise_exception
    world.globals["namespace"] = _Namespace
    # Random by design. `strftime_now`, which transformers offers, is not defined: a template that asks whether
    # it is takes its fixed date.
    del world.filters["random"]
    del world.globals["lipsum"]
    return world


def _compile(source: str, policy_dir: Path) -> jinja2.Template:
    try:
        template = _sandbox().from_string(source)
    except Exception as error:  # beside its own errors, those of compiling the Python that it makes of a template
        raise PolicyError(
            f"the chat template of {policy_dir} does not compile: {error} (a template that asks for the time or "
            "for random numbers cannot be replayed and is refused)"
        ) from error
    # As one dict: every rendering copies them, and of jinja2's chain of dicts that is most of a short prompt's cost.
    template.globals = dict(template.globals)
    return template


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- the folder's files ---


class _Files:
    """Those of a policy folder that decide its tokenizer, read once."""

    def __init__(self, folder: Path) -> None:
        """Raises PolicyError when one cannot be read."""
        self.folder = folder
        self._data: dict[str, bytes] = {}
        whole = hashlib.sha256()
        for name in _FILES:
            path = folder / name
            if not path.is_file():
                continue
            try:
                data = path.read_bytes()
            except OSError as error:
                raise PolicyError(f"{path} cannot be read: {cause(error)}") from error
            self._data[name] = data
            whole.update(name.encode() + len(data).to_bytes(8, "big") + data)
        self.digest: Final = whole.digest()

    def data(self, name: str) -> bytes | None:
        return self._data.get(name)

    def text(self, name: str) -> str | None:
        """None when there is no such file. Raises PolicyError when it is not UTF-8."""
        data = self.data(name)
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError as error:
            raise PolicyError(f"{self.folder / name} cannot be read: {cause(error)}") from error

    def json(self, name: str, required: bool = False) -> dict[str, Any]:
        """Raises PolicyError when it is no JSON object, or is `required` and not there."""
        text = self.text(name)
        if text is None:
            if required:
                raise PolicyError(f"{self.folder / name} cannot be read: there is no such file")
            return {}
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"{self.folder / name} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise PolicyError(f"{self.folder / name} is not a JSON object")
        return fields


_kept: OrderedDict[bytes, PolicyTokenizer] = OrderedDict()
_loading = threading.Lock()


def _tokenizer(files: _Files) -> Tokenizer:
    data = files.data("tokenizer.json")
    if data is None:
        raise PolicyError(
            f"{files.folder} has no tokenizer.json: a policy carries its own tokenizer. Make it with "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises a bare Exception
        raise PolicyError(f"{files.folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _template_source(files: _Files, fields: dict[str, Any]) -> str:
    source = files.text("chat_template.jinja")
    if source is not None:
        return source
    inline = fields.get("chat_template")
    if isinstance(inline, list):  # several templates by name
        named = [
            entry.get("template") for entry in inline if isinstance(entry, dict) and entry.get("name") == "default"
        ]
        inline = named[-1] if named else None
    if isinstance(inline, str):
        return inline
    raise PolicyError(
        f"{files.folder} has no chat_template.jinja and no chat_template in tokenizer_config.json: a base model "
        "needs one to be given tasks; write the template into chat_template.jinja"
    )


def _stop_ids(
    tokenizer: Tokenizer,
    policy_dir: Path,
    generation: dict[str, Any],
    config: dict[str, Any],
    named: dict[str, str],
) -> frozenset[int]:
    """Every token that any of the three files calls the end."""
    found: set[int] = set()
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        ids = value if isinstance(value, list) else [value]
        found.update(token for token in ids if isinstance(token, int) and not isinstance(token, bool))
    if "eos_token" in named:
        token = tokenizer.token_to_id(named["eos_token"])
        found.update([] if token is None else [token])
    if not found:
        raise PolicyError(
            f"{policy_dir} names no stop token: set eos_token_id in generation_config.json or config.json"
        )
    return frozenset(found)


def _vocabulary_size(tokenizer: Tokenizer, config: dict[str, Any]) -> int:
    for fields in (config, config.get("text_config")):
        if isinstance(fields, dict) and isinstance(fields.get("vocab_size"), int):
            return int(fields["vocab_size"])
    return int(tokenizer.get_vocab_size(with_added_tokens=True))


def _token_text(value: object) -> str:
    """A named token is its text, or an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not _is_unicode(text):
        raise PolicyError(f"tokenizer_config.json names a token that is no text: {value!r:.80}")
    return text
