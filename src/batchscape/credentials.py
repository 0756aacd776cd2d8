"""What is a secret, how one is told apart from an ordinary text, and how a text is freed of it.

Secrets are known by three signs:

* A name that ends in key, token, secret, pass, password, passwd, pwd or credentials, fused or not
  (`PGPASSWORD`, `--api-key`), promises one; its value is one unless it is shorter than 8
  characters, a path, a placeholder (`${oc.env:X}`, `<|end|>`), a word of batchscape's own, or, for
  a key or a token, words with separators (`SORT_KEY=micro_batch_size`).
* A name with such a word elsewhere (`API_KEY_OLD`) promises less: its value must look random.
* A value has the shape that a service gives its keys, wherever it stands.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

__all__ = [
    "find_secret",
    "holds_secret",
    "is_secret_name",
    "looks_secret",
    "redact",
    "redacted",
    "secret_variables",
]

_NAME_WORDS = frozenset(
    {"key", "keys", "apikey", "accesskey", "secretkey", "token", "tokens", "authtoken"}
    | {"secret", "secrets", "password", "passwd", "passphrase", "pass", "pwd", "pat"}
    | {"credential", "credentials"}
)
"""Words that promise a secret where they stand apart in a name."""
_ENDING = re.compile(
    r"(?:(?P<plain>key|token)|secret|pass|password|passwd|passphrase|pwd|credentials?"
    r"|(?<![a-z0-9])pat)[-_.]?\d*\Z",
    re.IGNORECASE,
)
"""What a name that promises a secret ends in, fused or not; `plain`: words are none there."""
_OTHER_WORDS = re.compile(
    r"(?<![a-z])(?:monkey|donkey|turkey|hockey|jockey|whiskey|lackey|hotkey"
    r"|compass|encompass|bypass|trespass|surpass|overpass|underpass)[-_.]?\d*\Z",
    re.IGNORECASE,
)
_PROSE = frozenset({"key", "Key", "full_key", "token", "Token"})
_SHORTEST = 8
_OWN_WORDS = frozenset(
    """
    accelerate activation_checkpointing adamw_learning_rate arguments attempts attention
    batch_size bucket_cap_mb checkpoint completed concurrent_runs constant contradiction
    damaged_records data_parallel_size data_seed decay_samples deepspeed devices_per_node
    disabled diverged divergence divergence_factor divergence_steps documents
    ema_half_life_tokens ended_at environment equivalence_margin equivalence_margin_steps
    evaluation evaluation_pattern every_samples exception exchange_every_micro_step
    exclusive_devices external final_fraction first_step from_optimizer_step geometry_pattern
    global_batch global_batch_size global_batch_tokens gradient_accumulation_steps
    gradient_clip_norm half_life hang_factor hang_least_s hang_outside_s held_out_path
    held_out_pct hidden_sizes infrastructure init_seed initial_step interrupted keep_last
    label_field last_step launcher learning_rate litgpt_csv loss_chunk lost_connection max_devices
    max_failures max_ranks_per_core max_ranks_per_device max_runs_per_device memory_limit_gib
    micro_batch micro_batch_size momentum n_kv_heads n_layers nesterov newton_schulz_steps
    noise_scale_every optimizer optimizer_steps order_seed out_of_memory padded_vocabulary
    peak_memory_gib
    peak_memory_method peak_tflops precision prefetch pretrained recorder
    reference_global_batch_size rejected reshard_after_forward resumable rope_base schedule
    segments sequence_length settings skip_larger_after_oom started_at stop_on_nan stop_reason
    sweep_dir sweep_name target_loss text_field tie_embeddings time_limit timeout_s timescale
    timing_repeat tokenizer trainer_state transformers updated_at uploaded_step vocabulary_size
    warmup_optimizer_steps warmup_samples weight_decay zero_stage
    """.split()  # noqa: SIM905  (120 words)
)
"""Names and values of settings and of what `status.json` and `wandb.json` hold, of 8 characters or
more: replaced wherever they stand, they would make settings and records unreadable."""
_LONGEST_JUDGED = 512
"""Characters of a value that tell whether it is a secret."""
_LONGEST_REMEMBERED = 256
"""Characters of a value whose judgement is kept."""
_BEFORE_A_REVISION = 100
"""Characters before 40 hexadecimal digits in which a word may name a revision."""
_REFERENCE = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\$?\{[^{}]*\}|\$\w+|\{\{[^{}]*\}\}")
"""A placeholder, a special token of a vocabulary, or what a secret was replaced by."""
_PLACES = frozenset(
    {"path", "paths", "file", "files", "dir", "dirs", "directory", "folder", "folders"}
)
"""Last words of a name that promise where something lies: `--tokens-dir`, `API_KEY_FILE`."""
_LEAST_LENGTH = 16
_LEAST_ENTROPY_BITS = 2.5
"""Of one character, by its frequency in the value: 16 random hexadecimal digits have 3.3 on
average, `aaaaaaaaaaaaaaaa` has none."""
_LONGEST_WORD = 14
_LONGEST_NUMBER = 8
"""Digits: a date, the number of a shard."""
_SIZE = re.compile(r"\d{1,4}(?:[kKmMbBT]|BT)?")
"""How much or which one: `124m`, `10BT`; the `2` and `10B` of `gpt2` and `fineweb10B`."""
_MARKS = re.compile(r"""[{}<>|()\[\]?*\\$'"]""")
"""What a placeholder, a special token or a regular expression has around its words."""
_TELLING = 5
"""Letters of a word that tells a text with such marks from a random password."""

_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("a token of Hugging Face", re.compile(r"hf_[A-Za-z0-9]{20,}")),
    ("a key of the shape sk-...", re.compile(r"\bsk-[A-Za-z0-9_-]{20,}")),
    ("a key of Stripe", re.compile(r"(?:[sr]k_(?:live|test)|whsec)_[A-Za-z0-9]{10,}")),
    ("a token of GitHub", re.compile(r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}")),
    ("a token of GitLab", re.compile(r"glpat-[A-Za-z0-9_-]{20,}")),
    ("a token of Slack", re.compile(r"xox[abpors]-[A-Za-z0-9-]{10,}|xapp-\d-[A-Za-z0-9-]{10,}")),
    ("an access key of AWS", re.compile(r"(?:AKIA|ASIA)[0-9A-Z]{16}")),
    ("a key of Google", re.compile(r"AIza[0-9A-Za-z_-]{35}")),
    ("a key of Weights & Biases", re.compile(r"wandb_v\d_[A-Za-z0-9_]{20,}")),
    (
        "a token of a registry",
        re.compile(r"npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{20,}|dckr_pat_[\w-]{20,}"),
    ),
    (
        "a key of a service",
        re.compile(
            r"\b(?:nvapi-[\w-]{20,}|gsk_\w{20,}|r8_\w{30,}|hvs\.[\w-]{20,}"
            r"|dop_v1_[0-9a-f]{40,}|SG\.[\w-]{16,}\.[\w-]{16,})"
        ),
    ),
    ("a web token", re.compile(r"eyJ[\w-]{10,2000}+\.eyJ[\w-]{10,}\.[\w-]{10,}")),
    (
        "an authorization header",
        re.compile(
            r"(?<=authorization)[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|digest|token)\s+)?"
            r"[^\s\"',;\[\]]{8,}",
            re.IGNORECASE,
        ),
    ),
    (
        "a bearer token",
        re.compile(r"(?<=\bbearer )\s*(?=\S*\d)[A-Za-z0-9._~+/-]{8,}=*", re.IGNORECASE),
    ),
    (
        "a private key",
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL),
    ),
    ("a password in a URL", re.compile(r"(?<=://)[^\s/:@]*:[^\s/@]+(?=@)")),
)
_FORTY_HEX = re.compile(r"(?<![0-9A-Za-z@/])[0-9a-f]{40}(?![0-9A-Za-z])")
"""A key of Weights & Biases, or the name of a git revision: what stands before it tells."""
_NAMES_A_REVISION = re.compile(r"(?:revision|commit|sha1?|hash|digest|ref|git|HEAD)\W*\Z", re.I)
# Names are bounded, so that a long text without any assignment takes no longer than it must.
# `name=`, `name: `, and an option in a command or a list, if what follows it has a digit.
_NAMED = re.compile(
    r"""(?P<dash>(?<![\w.-])--?)?(?P<name>[A-Za-z][\w.-]{0,99}+)"""
    r"""(?P<sign>["']?\s?[=:]\s?|(?(dash)["']?,?\s+(?:-\s+)?(?=["']?[^\s-]\S*\d)|(?!)))"""
)
_VALUE = re.compile(
    r"""(?:"(?P<double>[^"\n]{8,})"|'(?P<single>[^'\n]{8,})'|(?P<bare>[^\s"';&]{8,}))"""
)
_OPTION = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)=(?P<value>.*)", re.DOTALL)


def is_secret_name(name: str) -> bool:
    """Whether a name promises a secret: by its end, or by one of its words.

    Parameters
    ----------
    name : str
        Of a variable, a setting or an option: `HF_TOKEN`, `engine.values.apiKey`, `PGPASSWORD`.
    """
    if _OTHER_WORDS.search(name):
        return False
    if _ENDING.search(name):
        return True
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = re.split(r"[^a-z0-9]+", apart.lower())
    return words[-1] not in _PLACES and not _NAME_WORDS.isdisjoint(words)


def holds_secret(name: str, value: str) -> bool:
    """Whether a value is a secret by the name that it has.

    Parameters
    ----------
    name : str
        As `is_secret_name` takes it.
    value : str
    """
    judged = _remembered if len(value) <= _LONGEST_REMEMBERED else _is_secret
    return judged(name, value)


def _is_secret(name: str, value: str) -> bool:
    if len(value) < _SHORTEST or not is_secret_name(name) or _REFERENCE.fullmatch(value):
        return False
    value, ending = value[:_LONGEST_JUDGED], _ENDING.search(name)
    if ending is None:
        return looks_secret(value)
    if ending["plain"] and _is_words(value):
        return False
    return not (_is_path(value) or value in _OWN_WORDS)


_remembered = lru_cache(maxsize=4096)(_is_secret)


def looks_secret(value: str) -> bool:
    """Whether a value is long and varied enough for a secret, and neither words nor a path."""
    if len(value) < _LEAST_LENGTH or _entropy_bits(value) < _LEAST_ENTROPY_BITS:
        return False
    return not (_is_path(value) or _is_words(value))


def secret_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that hold secrets, longest value first.

    Parameters
    ----------
    environment : mapping, optional
        This process's own by default.
    """
    environment = os.environ if environment is None else environment
    found = {name: value for name, value in environment.items() if holds_secret(name, value)}
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def find_secret(
    text: str, environment: Mapping[str, str] | None = None, *, of: str = ""
) -> str | None:
    """Say which secret a text contains, never the secret; None if it contains none.

    Parameters
    ----------
    text : str
    environment : mapping, optional
        As `secret_variables` takes it; what that returns will do as well.
    of : str
        Name of the setting or option whose value the text is.
    """
    for name, value in secret_variables(environment).items():
        if value in text:
            return f"the value of the environment variable {name}"
    for kind, shape in _SHAPES:
        if any(not _is_only_a_name(match[0]) for match in shape.finditer(text)):
            return kind
    if any(_is_a_key(match, of) for match in _FORTY_HEX.finditer(text)):
        return "a key of the shape of Weights & Biases' (40 hexadecimal digits)"
    option = _OPTION.fullmatch(text)
    for name, value in [(of, text), *([(option["name"], option["value"])] if option else [])]:
        if holds_secret(name, value):
            return f"a value that looks like a secret, under the name {name}"
    for name, _, _ in _assigned(text):
        return f"a value that looks like a secret, under the name {name}"
    return None


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text with every secret in it replaced by what it was: `[WANDB_API_KEY]`.

    For what others say: 40 hexadecimal digits count as a key unless a word before them tells
    otherwise.

    Parameters
    ----------
    text : str
    environment : mapping, optional
        As `secret_variables` takes it.
    """
    text = _without_secrets(text, secret_variables(environment))
    return _FORTY_HEX.sub(lambda m: "[40 hexadecimal digits]" if _is_a_key(m) else m[0], text)


def redacted(content: Any, environment: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401  (of JSON)
    """Return a JSON value in which no text, and no key, carries a secret.

    A record may well hold 40 hexadecimal digits: they stay, unless a variable has them.

    Parameters
    ----------
    content : mapping, list, str, number or None
        Not changed.
    environment : mapping, optional
        As `secret_variables` takes it.
    """
    return _walk(content, secret_variables(environment))


def _walk(content: Any, variables: Mapping[str, str], of: str = "") -> Any:  # noqa: ANN401  (anything of JSON)
    if isinstance(content, str):
        # By its end alone: under `train_tokens.npy` there is a checksum.
        is_secret = _ENDING.search(of) is not None and holds_secret(of, content)
        return f"[{of}]" if is_secret else _without_secrets(content, variables)
    if isinstance(content, Mapping):
        return {_walk(k, variables): _walk(v, variables, str(k)) for k, v in content.items()}
    if isinstance(content, list | tuple):
        return [_walk(value, variables, of) for value in content]
    return content


def _without_secrets(text: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(value, f"[{name}]")
    if len(text) < _SHORTEST:
        return text
    for kind, shape in _SHAPES:
        text = shape.sub(partial(_unless_only_a_name, f"[{kind}]"), text)
    pieces: list[str] = []
    rest = 0
    for name, begin, end in _assigned(text):
        pieces += [text[rest:begin], f"[{name}]"]
        rest = end
    return "".join([*pieces, text[rest:]])


def _assigned(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the names under which a text has a secret, and where that begins and ends."""
    place = 0
    while (named := _NAMED.search(text, place)) is not None:
        # There may be another one in what this one has: `https://host?token=...`.
        place = named.end()
        value = _VALUE.match(text, place) if is_secret_name(named["name"]) else None
        if value is not None and _assigns_secret(named, value):
            yield named["name"], place, value.end()
            place = value.end()


def _assigns_secret(named: re.Match[str], value: re.Match[str]) -> bool:
    """Whether what is written as `name=value` or `name: value` is a secret."""
    text = value[value.lastgroup or 0]
    # Of a message, where a word follows: "unknown key: evaluatoin".
    is_prose = named["sign"] == ": " and named["name"] in _PROSE and text.isalpha()
    return holds_secret(named["name"], text) and not is_prose


def _is_a_key(forty: re.Match[str], of: str = "") -> bool:
    """Whether 40 hexadecimal digits are a key: drawn at random, and not said to be a revision."""
    first = max(0, forty.start() - _BEFORE_A_REVISION)
    before = f"{of}={forty.string[first : forty.start()]}"
    return len(set(forty[0])) > 4 and not _NAMES_A_REVISION.search(before)


def _unless_only_a_name(instead: str, match: re.Match[str]) -> str:
    return match[0] if _is_only_a_name(match[0]) else instead


def _is_only_a_name(match: str) -> bool:
    """Whether what has the shape `sk-...` is words, as `sk-parallel-corpus-of-news` is."""
    return match.startswith("sk-") and not re.search(r"\d", match) and _is_words(match)


def _entropy_bits(value: str) -> float:
    shares = [count / len(value) for count in Counter(value).values()]
    return -sum(share * math.log2(share) for share in shares)


def _is_path(value: str) -> bool:
    """Whether a value leads to a place of this machine: a secret is not kept in a name of it."""
    if value.startswith(("~/", "./", "../")):
        return True
    try:
        path = Path(value)
        if value.startswith("/"):
            return Path("/", *path.parts[1:2]).is_dir()
        return "/" in value and path.exists()
    except (OSError, ValueError):
        return False


def _is_words(value: str) -> bool:
    """Whether a value is words with separators, as identifiers and sentences are."""
    plain = _MARKS.sub(" ", value)
    pieces = [piece for piece in re.split(r"[\s_./,:=+-]+|(?<=[a-z])(?=[A-Z])", plain) if piece]
    if plain != value and not any(len(p) >= _TELLING and p.isalpha() for p in pieces):
        return False
    return len(pieces) > 1 and all(_is_word(piece) for piece in pieces)


def _is_word(piece: str) -> bool:
    if piece.isdecimal():
        return len(piece) <= _LONGEST_NUMBER
    first_digit = re.search(r"\d", piece)
    if first_digit is not None:
        if _SIZE.fullmatch(piece, first_digit.start()) is None:
            return False
        piece = piece[: first_digit.start()]
    letters = piece
    if letters and (len(letters) > _LONGEST_WORD or not letters.isalpha()):
        return False
    if not letters or not letters.isascii():
        return True
    if not (letters.islower() or letters.isupper() or letters.istitle()):
        return False
    has_vowel = re.search(r"[aeiouy]", letters, re.I)
    tangled = re.search(r"[bcdfghjklmnpqrstvwxz]{5,}", letters, re.I)
    return len(letters) <= 3 or (has_vowel is not None and tangled is None)
