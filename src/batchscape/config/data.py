"""The data that a model is trained on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from batchscape.config.command import ExternalData
from batchscape.config.types import (
    Affects,
    Count,
    Percent,
    SequenceLength,
    keyword_settings,
    settings,
)

IGNORED = -100
"""Label that bears no loss: padding."""

Layout = Literal["packed", "padded"]


@keyword_settings
class _HeldOut:
    """Data of which a part is held out."""

    held_out_pct: Annotated[Percent, Affects.LOSS] = 5.0
    """Share kept for evaluation, in percent: of the files (of the bytes, for a single file), of
    each file's tokens, of the documents or of the images."""


@keyword_settings
class _Sequences(_HeldOut):
    """Data for language models."""

    sequence_length: SequenceLength = 64
    """Tokens a sample; longer documents are continued in further samples, or cut where they have a
    label."""


@keyword_settings
class _Text(_Sequences):
    """Data whose tokens are made here."""

    tokenizer: str | None = None
    """Folder of a `transformers` tokenizer; null: bytes are the tokens. Its content counts."""
    layout: Layout = "packed"
    """`packed`: every sample is full; `padded`: a sample is one document, or one block of text, of
    its own length, padded to `sequence_length`, and only its real tokens count."""


@settings
class TextFiles(_Text):
    """A plain-text file, or all text files under a folder; `stdlib`: Python's own source."""

    name: Literal["text", "stdlib"]
    path: Annotated[str | None, Affects.LOSS] = None
    """The file or folder; null: the source of Python's standard library, real text that is always
    there. A single file is split by position. Its content counts."""

    def __post_init__(self) -> None:
        """Refuse `text` without a path, and `stdlib` with one."""
        if (self.path is None) != (self.name == "stdlib"):
            raise ValueError(
                "data=text reads the text at data.path, and data=stdlib that of Python's standard "
                f"library; got name={self.name}, path={self.path}; use data=text data.path=FILE, "
                "or data=stdlib without a path"
            )


@keyword_settings
class Digits(_HeldOut):
    """scikit-learn's 1797 images of handwritten digits, 8 x 8 pixels, 10 classes."""

    name: Literal["digits"]
    held_out_pct: Annotated[Percent, Affects.LOSS] = 20.0


@keyword_settings
class TokenFiles(_Sequences):
    """Token files (`.bin`) as nanoGPT, LitGPT and llm.c write them; mapped, never copied."""

    name: Literal["tokens"]
    path: Annotated[str, Affects.LOSS]
    """A file, or shards, which are read in the order of their names: a folder, or a pattern such as
    `folder/train_*.bin`. Its content counts."""
    held_out_path: Annotated[str | None, Affects.LOSS] = None
    """The same for evaluation; null: the last `held_out_pct` percent of each file. Its content
    counts."""
    vocabulary_size: Count | None = None
    """Above every token; null: the largest token + 1."""
    sequence_length: SequenceLength = 1024
    held_out_pct: Annotated[Percent, Affects.LOSS] = 1.0


@settings
class Documents(_Text):
    """Records with a text: JSON Lines, Parquet, or a folder that `datasets` has saved."""

    name: Literal["documents"]
    path: Annotated[str, Affects.LOSS]
    """A file, a folder of such files, or a folder of `Dataset.save_to_disk`. Its content counts."""
    text_field: Annotated[str, Affects.LOSS] = "text"
    """Field that holds the text."""
    label_field: str | None = None
    """Field that holds a class: the data are then for sequence classification, one padded document
    a sample. Null: for language modelling."""

    def __post_init__(self) -> None:
        """Refuse packed documents that have a class each."""
        if self.label_field is not None and self.layout == "packed":
            raise ValueError(
                f"label_field={self.label_field} gives every document a class, so documents cannot "
                "be packed; use layout=padded"
            )


@settings
class CustomData:
    """Data of your own: `_target_` is called with `part` and the arguments and returns them."""

    name: Literal["custom"]
    target: Annotated[str, Field(alias="_target_")]
    """Import path of a callable, `package.module.name`. Its source counts too."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    sequence_length: SequenceLength | None = None
    """Tokens a sample, where samples are full sequences; null: they are not. Given to `_target_`
    where it is not null."""


DataSettings = Annotated[
    TextFiles | TokenFiles | Documents | Digits | CustomData | ExternalData,
    Field(discriminator="name"),
]
