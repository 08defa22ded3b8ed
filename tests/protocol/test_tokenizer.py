"""The policy's tokenizer without transformers: equal to transformers, or a clear refusal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.environments.base import Message
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import PolicyError

EMBEDDED = Path(__file__).parents[2] / "trainer" / "embedded"

CONVERSATIONS = {
    "one question": (Message("user", "sum of 12 and 30"),),
    "system first": (Message("system", "Be brief."), Message("user", "Hi\n\nthere ")),
    "two turns": (Message("user", "a"), Message("assistant", "b"), Message("tool", "c"), Message("user", "d")),
    "odd text": (Message("user", "<|end|> é \t {{ 1 + 1 }} {% if %} \"'<&>"),),
}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "blocks on lines of their own": """{{ bos_token }}
{%- for message in messages %}
    {% if message.role == 'system' %}
[S] {{ message.content | trim }}{{ eos_token }}
    {% else %}
[{{ message.role | upper }}] {{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}[A]{% endif %}
""",
    "tojson keeps letters and quotes": """{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}
{{ {'b': 1, 'a': [m.role]} | tojson(sort_keys=true) }}<|end|>{% endfor %}{% if not tools %}:{% endif %}""",
    "namespace, break and continue": """{% set ns = namespace(count=0, last='') %}
{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% set ns.count = ns.count + 1 %}
{% set ns.last = m.role %}{{ m.content }}<|end|>{% if ns.count > 2 %}{% break %}{% endif %}{% endfor %}
{{ ns.count }}{{ ns.last }}{{ dict(a=1) | tojson }}""",
    "generation tag": """{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}""",
}


def folder_with(tmp_path: Path, template: str | None = None, edit: Callable[[Path], object] | None = None) -> Path:
    """A copy of the embedded policy's tokenizer with another chat template."""
    folder = tmp_path / "policy"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    source = (EMBEDDED / "chat_template.jinja").read_text() if template is None else template
    (folder / "chat_template.jinja").write_text(source)
    if edit is not None:
        edit(folder)
    return folder


def by_transformers(folder: Path, conversation: tuple[Message, ...]) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    messages = [{"role": message.role, "content": message.content} for message in conversation]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return tuple(ids)


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_embedded_policys_prompts_equal_transformers(conversation: tuple[Message, ...]) -> None:
    assert PolicyTokenizer.load(EMBEDDED).prompt_ids(conversation) == by_transformers(EMBEDDED, conversation)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_construct_of_chat_templates_renders_as_transformers_does(tmp_path: Path, template: str) -> None:
    folder = folder_with(tmp_path, template)
    ours = PolicyTokenizer.load(folder)
    for conversation in CONVERSATIONS.values():
        assert ours.prompt_ids(conversation) == by_transformers(folder, conversation)


def smollm2() -> Path:
    folder = Path(os.environ.get("RLCOMMONS_SMOLLM2", ".cache/smollm2"))
    if not folder.is_dir():
        pytest.skip("no converted SmolLM2: scripts/convert-smollm2 .cache/smollm2, or set RLCOMMONS_SMOLLM2")
    return folder


@pytest.mark.smollm2
def test_smollm2s_prompts_text_and_observations_equal_transformers() -> None:
    from transformers import AutoTokenizer

    folder = smollm2()
    ours, theirs = PolicyTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for conversation in CONVERSATIONS.values():
        assert ours.prompt_ids(conversation) == by_transformers(folder, conversation)
    for text in ("Hello, world", " é 漢字 🙂\n\n", "<|im_end|>x", "a" * 300):
        assert ours.encode(text) == tuple(theirs.encode(text, add_special_tokens=False))
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text, add_special_tokens=False))
    assert ours.stop_ids == {theirs.eos_token_id}
    expected = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert ours.observation_ids("42") == tuple(theirs.encode(expected, add_special_tokens=False))


# --- observations ---


def test_a_whole_conversation_is_the_prompt_the_turns_and_the_observations() -> None:
    """What a rollout strings together equals what the template makes of the finished conversation."""
    tokenizer = PolicyTokenizer.load(EMBEDDED)
    (stop,) = tokenizer.stop_ids
    question, call, result = "sum of 12 and 30", "<|call|>add 12 30", "42"
    strung = (
        *tokenizer.prompt_ids((Message("user", question),)),
        *tokenizer.encode(call),
        stop,
        *tokenizer.observation_ids(result),
    )
    whole = (Message("user", question), Message("assistant", call), Message("tool", result))
    assert strung == tokenizer.prompt_ids(whole)


def test_a_template_that_refuses_tool_messages_gets_user_messages(tmp_path: Path) -> None:
    refusing = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('only user and assistant') }}"
    tokenizer = PolicyTokenizer.load(folder_with(tmp_path, refusing + "{% endif %}{% endfor %}" + CHATML))
    text = tokenizer.decode(tokenizer.observation_ids("seen"))
    assert text.endswith("user\nseen<|end|>\n<|im_start|>assistant\n")


def test_a_template_that_leaves_tool_messages_out_gets_user_messages(tmp_path: Path) -> None:
    ignoring = CHATML.replace("{{ '<|im", "{% if message.role != 'tool' %}{{ '<|im", 1)
    ignoring = ignoring.replace("}}{% endfor %}", "}}{% endif %}{% endfor %}")
    tokenizer = PolicyTokenizer.load(folder_with(tmp_path, ignoring))
    assert "user\nseen<|end|>" in tokenizer.decode(tokenizer.observation_ids("seen"))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}A:", r"it puts '\\n.*', not a stop token \(<\|end\|>\)"),
        ("{{ messages[0].content }}<|end|>A:", "shows neither a tool's nor a user's message"),
        ("{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}", "neither"),
    ],
)
def test_a_template_that_cannot_carry_a_second_turn_is_refused_with_the_reason(
    tmp_path: Path, template: str, why: str
) -> None:
    tokenizer = PolicyTokenizer.load(folder_with(tmp_path, template))
    assert tokenizer.prompt_ids((Message("user", "single turn still works"),))
    with pytest.raises(PolicyError, match=r"cannot be used for tasks of more than one turn: .*" + why):
        tokenizer.observation_ids("seen")


def test_an_observation_that_holds_the_sentinel_is_kept() -> None:
    tokenizer = PolicyTokenizer.load(EMBEDDED)
    assert "RLCOMMONS-REPLY" in tokenizer.decode(tokenizer.observation_ids("RLCOMMONS-REPLY"))


def test_every_stop_token_of_the_three_files_counts(tmp_path: Path) -> None:
    def name_more(folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 0]}))

    tokenizer = PolicyTokenizer.load(folder_with(tmp_path, edit=name_more))
    assert tokenizer.stop_ids == {0, 3}


# --- templates that cannot be replayed, or that try to get out ---


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%Y') }}",
        "{{ messages | map(attribute='role') | list | random }}",
        "{{ lipsum() }}",
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{% include 'config.json' %}",
        # Python's compiler, not jinja2, finds these wrong.
        "{% for m in messages %}{% endfor %}{% continue %}",
        "{% macro twice(a, a) %}{% endmacro %}",
        "{% if a %}" * 200 + "{% endif %}" * 200,
        "{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}",
        "{{ " + "9" * 5_000 + " }}",
        "{{ 10 ** 100000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_asks_for_time_chance_or_a_way_out_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(PolicyError, match="chat template"):
        PolicyTokenizer.load(folder_with(tmp_path, template)).prompt_ids((Message("user", "x"),))


def test_a_template_that_only_asks_whether_there_is_a_clock_takes_its_fixed_date(tmp_path: Path) -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
    tokenizer = PolicyTokenizer.load(folder_with(tmp_path, dated))
    assert tokenizer.decode(tokenizer.prompt_ids((Message("user", "x"),))) == "2024"


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"])
def test_folders_with_the_same_files_have_one_tokenizer(tmp_path: Path, name: str) -> None:
    first = folder_with(tmp_path)
    again = Path(shutil.copytree(first, tmp_path / "again"))
    (again / "model.safetensors").write_bytes(b"another version's weights")
    other = Path(shutil.copytree(first, tmp_path / "other"))
    (other / name).write_text((first / name).read_text() + "\n")

    assert PolicyTokenizer.load(again) is PolicyTokenizer.load(first)
    assert PolicyTokenizer.load(other) is not PolicyTokenizer.load(first)


# --- folders that are no policy ---


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (remove("tokenizer.json"), r"no tokenizer\.json: .*save_pretrained"),
        (remove("chat_template.jinja"), r"no chat_template\.jinja .*write the template"),
        (remove("config.json"), r"config\.json cannot be read"),
        (write("tokenizer.json", "{"), r"tokenizer\.json is not a tokenizer"),
        (write("config.json", "[]"), r"config\.json is not a JSON object"),
        (write("tokenizer_config.json", "{,}"), r"tokenizer_config\.json is not JSON"),
        (write("tokenizer_config.json", '{"a": ' + "[" * 5_000), r"tokenizer_config\.json is not JSON"),
        (write("tokenizer_config.json", '{"eos_token": 3}'), "names a token that is no text"),
        (write("tokenizer_config.json", r'{"eos_token": "\ud800"}'), "names a token that is no text"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_says_what_is_missing(
    tmp_path: Path, edit: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        PolicyTokenizer.load(folder_with(tmp_path, edit=edit))


@pytest.mark.parametrize("names", [[], {}, 3, None])
def test_templates_under_names_that_are_no_text_are_passed_over(tmp_path: Path, names: object) -> None:
    def misname(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        fields = {"eos_token": "<|end|>", "chat_template": [{"name": names, "template": CHATML}]}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))

    with pytest.raises(PolicyError, match=r"has no chat_template\.jinja"):
        PolicyTokenizer.load(folder_with(tmp_path, edit=misname))


def test_a_template_that_renders_half_a_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="half a character"):
        PolicyTokenizer.load(folder_with(tmp_path, r"{{ '\ud800' }}")).prompt_ids((Message("user", "x"),))


def test_a_policy_that_names_no_stop_token_is_refused(tmp_path: Path) -> None:
    def silence(folder: Path) -> None:
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            (folder / name).write_text("{}")

    with pytest.raises(PolicyError, match="names no stop token: set eos_token_id"):
        PolicyTokenizer.load(folder_with(tmp_path, edit=silence))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, edit=write("config.json", '{"vocab_size": 50, "eos_token_id": 3}'))
    with pytest.raises(PolicyError, match="do not belong together"):
        PolicyTokenizer.load(folder).encode("zebra")


def test_a_template_inside_the_tokenizers_configuration_is_found(tmp_path: Path) -> None:
    def move(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        fields = json.loads((folder / "tokenizer_config.json").read_text())
        fields["chat_template"] = [
            {"name": "tool_use", "template": "other"},
            {"name": "default", "template": CHATML},
        ]
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))

    tokenizer = PolicyTokenizer.load(folder_with(tmp_path, edit=move))
    assert tokenizer.decode(tokenizer.prompt_ids((Message("user", "x"),))).endswith("assistant\n")
