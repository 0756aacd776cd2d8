"""What a model is trained on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from batchscape.config.command import ExternalData
from batchscape.config.types import STRICT, Count, Percent, SequenceLength

__all__ = [
    "CustomData",
    "Data",
    "Digits",
    "Documents",
    "StandardLibrary",
    "TextFiles",
    "TokenFiles",
]


Layout = Literal["packed", "padded"]


@dataclass(frozen=True, config=STRICT)
class StandardLibrary:
    """The Python standard library's own source: real text that is always there."""

    name: Literal["stdlib"]
    sequence_length: SequenceLength = 64
    """Tokens a sample. Scope: trajectory."""
    tokenizer: str | None = None
    """Folder of a `transformers` tokenizer; null: bytes are the tokens. Scope: trajectory (its
    content)."""
    layout: Layout = "packed"
    """`packed`: every sample is full; `padded`: a sample is one block of text of its own length,
    padded to `sequence_length`, and only its real tokens count. Scope: trajectory."""
    held_out_pct: Percent = 5.0
    """Share of the files kept for evaluation, in percent. Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class TextFiles:
    """A plain-text file, or of all text files under a folder."""

    name: Literal["text"]
    path: str
    """The file or folder. A single file is split by position. Scope: trajectory (its content)."""
    sequence_length: SequenceLength = 64
    """Tokens a sample. Scope: trajectory."""
    tokenizer: str | None = None
    """Folder of a `transformers` tokenizer; null: bytes are the tokens. Scope: trajectory (its
    content)."""
    layout: Layout = "packed"
    """As for the standard library. Scope: trajectory."""
    held_out_pct: Percent = 5.0
    """Share of the files (of the bytes, for a single file) kept for evaluation, in percent.
    Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class Digits:
    """scikit-learn's 1797 images of handwritten digits, 8 x 8 pixels, 10 classes."""

    name: Literal["digits"]
    held_out_pct: Percent = 20.0
    """Share of the images kept for evaluation, in percent. Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class TokenFiles:
    """Token files (`.bin`) as nanoGPT, LitGPT and llm.c write them; mapped, never copied."""

    name: Literal["tokens"]
    path: str
    """A file, or shards, which are read in the order of their names: a folder, or a pattern such as
    `folder/train_*.bin`. Scope: trajectory (its content)."""
    held_out_path: str | None = None
    """The same for evaluation; null: the last `held_out_pct` percent of each file. Scope:
    trajectory (its content)."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the tokens in files without a header. Scope: trajectory."""
    vocabulary_size: Count | None = None
    """Above every token; null: the largest token + 1. Scope: trajectory."""
    sequence_length: SequenceLength = 1024
    """Tokens a sample. Scope: trajectory."""
    held_out_pct: Percent = 1.0
    """Share of the tokens kept for evaluation, in percent. Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class Documents:
    """Records with a text: JSON Lines, Parquet, or a folder that `datasets` has saved."""

    name: Literal["documents"]
    path: str
    """A file, a folder of such files, or a folder of `Dataset.save_to_disk`. Scope: trajectory
    (its content)."""
    text_field: str = "text"
    """Field that holds the text. Scope: trajectory."""
    label_field: str | None = None
    """Field that holds a class: the data are then for sequence classification, one padded document
    a sample. Null: for language modelling. Scope: trajectory."""
    tokenizer: str | None = None
    """Folder of a `transformers` tokenizer; null: bytes are the tokens. Scope: trajectory (its
    content)."""
    sequence_length: SequenceLength = 64
    """Tokens a sample; longer documents are continued in further samples, or cut where they have a
    label. Scope: trajectory."""
    layout: Layout = "packed"
    """`packed`: documents one after the other, every sample full; `padded`: a sample is one
    document, and only its real tokens count. Scope: trajectory."""
    held_out_pct: Percent = 5.0
    """Share of the documents kept for evaluation, in percent. Scope: trajectory."""

    def __post_init__(self) -> None:
        """Check the rule that no single field can state."""
        if self.label_field is not None and self.layout == "packed":
            msg = (
                f"label_field={self.label_field} gives every document a class, so documents cannot "
                "be packed; use layout=padded"
            )
            raise ValueError(msg)


@dataclass(frozen=True, config=STRICT)
class CustomData:
    """Data of your own: `_target_` is called with `part` and the arguments and returns them."""

    name: Literal["custom"]
    target: Annotated[str, Field(alias="_target_")]
    """Import path of a callable, `package.module.name`. Scope: trajectory (and its source)."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments. Scope: trajectory."""
    sequence_length: SequenceLength | None = None
    """Tokens a sample, where samples are full sequences; null: they are not. Given to `_target_`
    where it is not null. Scope: trajectory."""


Data = Annotated[
    StandardLibrary | TextFiles | TokenFiles | Documents | Digits | CustomData | ExternalData,
    Field(discriminator="name"),
]
