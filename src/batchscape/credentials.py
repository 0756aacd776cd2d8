"""What is a secret, how a text is freed of it, and which settings are refused because of it.

A secret is known by one of three signs, and by nothing else:

* The name of a variable, a setting, an option or a header that ends in key, token, secret, pass,
  password, passwd, passphrase, pwd, pat or credentials, also before a number, and in `KEYS` and
  `api_keys`: `PGPASSWORD`, `--api-key`. What has this name is a secret if it has 8 characters or
  more and is neither a path nor a placeholder. A key or a token that is no variable in capitals has
  letters and digits, and is no dotted name: `text_key=document`, `n_token=10000000` and
  `key=fp16.enabled` hold none. Nor do words in small letters: `METRIC_KEY=eval_loss`,
  `image_key=image_224`.
  Of `--wandb` and the like 40 hexadecimal digits are one: an older key of Weights & Biases.
* A published shape, wherever it stands: `_SHAPES`.
* The value of an environment variable whose name is such a one, wherever it stands but in a key of
  a mapping.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from batchscape.errors import ConfigError

__all__ = ["is_secret", "redact", "redact_json", "refuse_secrets", "secret_variables"]

_ENDING = (
    r"(?:(?P<machine_made>(?-i:(?<![a-z])key|(?<=api|ess|ret|ate)key|Key|KEY)|token"
    r"|(?P<many>(?-i:KEYS)|api[-_.]?keys)|(?<![a-z0-9_])pass|(?<![a-z0-9])pat)"
    r"|secret|(?-i:(?<![a-z])pass|(?<=ssh)pass|(?<=db)pass|Pass|PASS)"
    r"|password|passwd|passphrase|pwd|credentials?|(?P<older>wandb))[-_.]?\d{0,4}"
)
"""What a name ends in. "Forward pass: ..." is prose, unless what follows was made by a machine.

Key and pass in small letters also end words: turkey, bypass. So they begin anew there, or follow
api, access, secret, private (key), ssh and db (pass). `LABEL_KEYS` are many of anything, and are
judged as a key in small letters.
"""
_NAME = re.compile(rf"{_ENDING}\Z", re.IGNORECASE)
_SHORTEST = 8
_PLACEHOLDER = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\$?\{[^{}]*\}|\$\w+|\*+")
"""Also a special token of a vocabulary, and what a secret was replaced by."""
_WORDS = re.compile(r"[a-z]+|[a-z]+\d{0,4}(?:_\d{0,4}[a-z]*\d{0,4})+")
"""Also with short numbers: `gpt2_small`, `label_2_class`, `attention_v2`."""
_NOT_MACHINE_MADE = re.compile(
    rf"(?s:\D*|[^A-Za-z]*|.*\s.*|[a-z]\w*(?:\.[a-z0-9_]+)+|{_WORDS.pattern})"
)

_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(shape, re.DOTALL))
    for kind, shape in (
        # https://github.blog/changelog/2021-03-31-authentication-token-format-updates-are-generally-available/
        ("a token of GitHub", r"gh[pousr]_\w{20,}|github_pat_\w{20,}"),
        # https://docs.gitlab.com/security/tokens/#token-prefixes
        ("a token of GitLab", r"glpat-[\w-]{20,}"),
        # https://huggingface.co/docs/hub/security-tokens
        ("a token of Hugging Face", r"hf_[A-Za-z0-9]{20,}"),
        # https://docs.wandb.ai/support/models/articles/why-does-my-api-key-fail-with-must-be-40-characters
        # The older ones have no beginning of their own; `wandb login` is told them bare.
        (
            "a key of Weights & Biases",
            r"wandb_v\d_\w{20,}|(?<=login )\s*[0-9a-f]{40}\b",
        ),
        # Of OpenAI, Anthropic, OpenRouter and others:
        # https://openrouter.ai/docs/guides/features/guardrails/secret-formats
        (
            "a key of the shape sk-...",
            r"(?<![\w-])sk-(?:(?:proj|svcacct|admin|ant|or)-[\w-]{20,}|[A-Za-z0-9]{20,})",
        ),
        # https://docs.stripe.com/keys
        ("a key of Stripe", r"[sr]k_(?:live|test)_\w{10,}|whsec_\w{10,}"),
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
        ("an access key of AWS", r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}"),
        # https://cloud.google.com/docs/authentication/api-keys, .../authentication/token-types
        ("a key of Google", r"AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"),
        # https://docs.slack.dev/authentication/tokens and
        # https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
        (
            "a token of Slack",
            r"xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|(?<=hooks\.slack\.com/services/)[\w/]+",
        ),
        # https://docs.npmjs.com/about-access-tokens, https://pypi.org/help/#apitoken,
        # https://docs.docker.com/reference/api/hub/latest,
        # https://docs.nvidia.com/nemo/retriever/latest/extraction/api-keys
        (
            "a token of a registry",
            r"npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{20,}|dckr_pat_[\w-]{20,}|nvapi-[\w-]{20,}",
        ),
        # https://developer.hashicorp.com/vault/docs/concepts/tokens
        ("a token of Vault", r"(?<![A-Za-z0-9])hv[sbr]\.[\w-]{20,}"),
        # As these services make them today.
        ("a key of Groq", r"(?<![A-Za-z0-9])gsk_[A-Za-z0-9]{20,}"),
        ("a key of SendGrid", r"(?<![A-Za-z0-9])SG\.[\w-]{16,}\.[\w-]{16,}"),
        ("a token of Replicate", r"(?<![A-Za-z0-9])r8_[A-Za-z0-9]{30,}"),
        ("a token of DigitalOcean", r"(?<![A-Za-z0-9])do[opr]_v1_[0-9a-f]{40,}"),
        # RFC 7519: three parts in base64, the first two of which begin with `{"`.
        ("a web token", r"eyJ[\w-]{10,2000}+\.eyJ[\w-]{10,}\.[\w-]{10,}"),
        # RFC 9110, section 11.6.2
        (
            "an authorization header",
            r"(?i:(?<=authorization)[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|digest|token)\s+)?)"
            r"[^\s\"',;\[\]]{8,}",
        ),
        # RFC 6750, section 2.1
        ("a bearer token", r"(?i:(?<=\bbearer ))\s*(?=\S*\d)[A-Za-z0-9._~+/-]{8,}=*"),
        # RFC 7468
        ("a private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)"),
        # RFC 3986, section 3.2.1
        ("a password in a URL", r"(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"),
    )
)
"""Kinds of secrets and how they look, from what their services publish."""

_NAMED = re.compile(
    # `name=`, `name: `, and an option in a command or a list, if what follows it has a digit.
    rf"""(?<![\w.-])(?P<dash>--?)?(?P<name>[\w.-]{{0,100}}?{_ENDING})"""
    r"""(?:["']?\s?[=:]\s?|(?(dash)["']?,?\s+(?:-\s+)?(?=["']?[^\s-]\S*\d)|(?!)))""",
    re.IGNORECASE,
)
_VALUE = re.compile(r""""[^"\n]{8,}"?|'[^'\n]{8,}'?|[^\s"';&]{8,}""")
_LONGEST_JUDGED = 512
"""Characters of a value that tell whether it is a secret."""
_MOST_SHOWN = 5
_DEEPEST = 64
"""Levels of nested settings; JSON, hashes and every reader of the settings go down them."""


@lru_cache(maxsize=4096)
def is_secret(name: str, value: str) -> bool:
    """Whether a value is a secret by the name that it has.

    Parameters
    ----------
    name : str
        Of a variable, a setting, an option or a header: `HF_TOKEN`, `engine.values.apiKey`.
    value : str
    """
    named = _ending(name) if len(value) >= _SHORTEST else None
    if named is None or _PLACEHOLDER.fullmatch(value) or _is_path(value):
        return False
    if named["older"]:
        return re.fullmatch(r"[0-9a-f]{40}", value) is not None
    if named["machine_made"] is None:
        return True
    variable = name.isupper() and named["many"] is None
    return (_WORDS if variable else _NOT_MACHINE_MADE).fullmatch(value) is None


@lru_cache(maxsize=4096)
def _ending(name: str) -> re.Match[str] | None:
    """Find in a name what a secret's ends in; every text that leaves asks this of all variables."""
    return _NAME.search(name)


def secret_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that hold secrets, longest value first.

    Parameters
    ----------
    environment : mapping, optional
        This process's own by default.
    """
    environment = os.environ if environment is None else environment
    named = [name for name in environment if _ending(name)]
    found = {name: environment[name] for name in named if is_secret(name, environment[name])}
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text with every secret in it replaced by what it was: `[WANDB_API_KEY]`.

    Parameters
    ----------
    text : str
    environment : mapping, optional
        As `secret_variables` takes it.
    """
    if len(text) < _SHORTEST:  # as most cells of a table
        return text
    return _redacted(text, tuple(secret_variables(environment).items()))


def redact_json(content: Any, environment: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401  (of JSON)
    """Return a JSON value in which no text carries a secret, and no key one that has a shape.

    Parameters
    ----------
    content : mapping, list, str, number or None
        Not changed.
    environment : mapping, optional
        As `secret_variables` takes it.
    """
    return _walk(content, tuple(secret_variables(environment).items()), {})


def refuse_secrets(
    settings: Iterable[Mapping[str, Any]], environment: Mapping[str, str] | None = None
) -> None:
    """Refuse settings that contain a secret, before anything is written.

    Parameters
    ----------
    settings : iterable of mapping
        Plain nested settings of cells.
    environment : mapping, optional
        As `secret_variables` takes it.

    Raises
    ------
    ConfigError
        With the keys of the settings and their values without the secrets. If settings are nested
        too deeply to be looked through.
    """
    variables = tuple(secret_variables(environment).items())
    found: dict[str, str] = {}
    looked_at: dict[tuple[str, int], Any] = {}
    for cell in settings:
        for name, value in cell.items():
            # Cells share the objects that they do not vary.
            if (name, id(value)) not in looked_at:
                looked_at[name, id(value)] = value
                _walk({name: value}, variables, found)
    if not found:
        return
    lines = [f"  {key} holds {shown}" for key, shown in found.items()]
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"  and {len(lines) - _MOST_SHOWN} further settings"]
    msg = "\n".join(
        (
            "Settings are written to the run folders, to reports and to Weights & Biases, so none "
            "may hold a secret:",
            *lines,
            "Leave it out of the settings and pass it by an environment variable: runs, and the "
            "programs of engine=command, inherit those of batchscape.",
        )
    )
    raise ConfigError(msg)


_Variables = tuple[tuple[str, str], ...]


def _walk(  # noqa: PLR0917  (down the levels)
    content: Any,  # noqa: ANN401  (of JSON)
    variables: _Variables,
    found: dict[str, str],
    key: str = "",
    of: str = "",
    depth: int = 0,
) -> Any:  # noqa: ANN401
    """Redact what stands under a dotted key as the value `of` a name; add it to `found`."""
    if depth > _DEEPEST:
        group = key.partition(".")[0].partition("[")[0]
        msg = f"{group} is nested more than {_DEEPEST} levels deep"
        raise ConfigError(msg)
    if isinstance(content, str):
        option, _, value = content.partition("=")
        if is_secret(of, content):
            clean = f"[{of}]"
        elif (
            option.split() == [option]
            # `--password=two words` is one value; `HF_TOKEN=... python train.py` is a command.
            and (option.startswith("-") or len(value.split()) == 1)
            and is_secret(option, value)
        ):
            clean = f"{option}=[{option}]"
        else:
            clean = _redacted(content, variables)
        if clean != content:
            found[key] = clean
        return clean
    if isinstance(content, Mapping):
        names = f"a key of {key or 'the settings'}"
        return {
            _walk(name, (), found, names): _walk(
                value, variables, found, f"{key}.{name}" if key else str(name), str(name), depth + 1
            )
            for name, value in content.items()
        }
    if isinstance(content, list | tuple):
        # Of an option `--api-key VALUE` the value stands in the next argument.
        options = [
            each if isinstance(each, str) and each.startswith("-") else of for each in content[:-1]
        ]
        return [
            _walk(value, variables, found, f"{key}[{number}]", name, depth + 1)
            for number, (value, name) in enumerate(zip(content, [of, *options], strict=False))
        ]
    return content


@lru_cache(maxsize=4096)
def _redacted(text: str, variables: _Variables) -> str:
    for name, value in variables:
        text = text.replace(value, f"[{name}]")
    if len(text) < _SHORTEST:
        return text
    for kind, shape in _SHAPES:
        text = shape.sub(f"[{kind}]", text)
    pieces: list[str] = []
    rest = place = 0
    while (named := _NAMED.search(text, place)) is not None:
        # There may be another one in what this one has: `https://host?token=...`.
        place = named.end()
        begin = _VALUE.match(text, place, place + _LONGEST_JUDGED)
        if begin is not None and is_secret(named["name"], begin[0].strip("\"'").rstrip(",.")):
            pieces += [text[rest:place], f"[{named['name']}]"]
            rest = place = (_VALUE.match(text, place) or begin).end()
    return "".join([*pieces, text[rest:]])


def _is_path(value: str) -> bool:
    """Whether a value leads to a place of this machine: a secret is not kept in a name of it."""
    if value.startswith(("~/", "./", "../")):
        return True
    try:
        return "/" in value and Path("/".join(value.split("/")[:2])).exists()
    except (OSError, ValueError):
        return False
