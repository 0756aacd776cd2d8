"""What a model is trained on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from batchscape.config.command import ExternalData
from batchscape.config.types import STRICT, Affects, Count, Percent, SequenceLength

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

    name: Annotated[Literal["stdlib"], Affects.ALL]
    sequence_length: Annotated[SequenceLength, Affects.ALL] = 64
    """Tokens a sample."""
    tokenizer: Annotated[str | None, Affects.ALL] = None
    """Folder of a `transformers` tokenizer; null: bytes are the tokens. Its content counts."""
    layout: Annotated[Layout, Affects.ALL] = "packed"
    """`packed`: every sample is full; `padded`: a sample is one block of text of its own length,
    padded to `sequence_length`, and only its real tokens count."""
    held_out_pct: Annotated[Percent, Affects.LOSS] = 5.0
    """Share of the files kept for evaluation, in percent."""


@dataclass(frozen=True, config=STRICT)
class TextFiles:
    """A plain-text file, or of all text files under a folder."""

    name: Annotated[Literal["text"], Affects.ALL]
    path: Annotated[str, Affects.LOSS]
    """The file or folder. A single file is split by position. Its content counts."""
    sequence_length: Annotated[SequenceLength, Affects.ALL] = 64
    """Tokens a sample."""
    tokenizer: Annotated[str | None, Affects.ALL] = None
    """Folder of a `transformers` tokenizer; null: bytes are the tokens. Its content counts."""
    layout: Annotated[Layout, Affects.ALL] = "packed"
    """As for the standard library."""
    held_out_pct: Annotated[Percent, Affects.LOSS] = 5.0
    """Share of the files (of the bytes, for a single file) kept for evaluation, in percent."""


@dataclass(frozen=True, config=STRICT)
class Digits:
    """scikit-learn's 1797 images of handwritten digits, 8 x 8 pixels, 10 classes."""

    name: Annotated[Literal["digits"], Affects.ALL]
    held_out_pct: Annotated[Percent, Affects.LOSS] = 20.0
    """Share of the images kept for evaluation, in percent."""


@dataclass(frozen=True, config=STRICT)
class TokenFiles:
    """Token files (`.bin`) as nanoGPT, LitGPT and llm.c write them; mapped, never copied."""

    name: Annotated[Literal["tokens"], Affects.ALL]
    path: Annotated[str, Affects.LOSS]
    """A file, or shards, which are read in the order of their names: a folder, or a pattern such as
    `folder/train_*.bin`. Its content counts."""
    held_out_path: Annotated[str | None, Affects.LOSS] = None
    """The same for evaluation; null: the last `held_out_pct` percent of each file. Its content
    counts."""
    dtype: Annotated[Literal["uint16", "uint32"], Affects.LOSS] = "uint16"
    """Type of the tokens in files without a header."""
    vocabulary_size: Annotated[Count | None, Affects.ALL] = None
    """Above every token; null: the largest token + 1."""
    sequence_length: Annotated[SequenceLength, Affects.ALL] = 1024
    """Tokens a sample."""
    held_out_pct: Annotated[Percent, Affects.LOSS] = 1.0
    """Share of the tokens kept for evaluation, in percent."""


@dataclass(frozen=True, config=STRICT)
class Documents:
    """Records with a text: JSON Lines, Parquet, or a folder that `datasets` has saved."""

    name: Annotated[Literal["documents"], Affects.ALL]
    path: Annotated[str, Affects.LOSS]
    """A file, a folder of such files, or a folder of `Dataset.save_to_disk`. Its content counts."""
    text_field: Annotated[str, Affects.LOSS] = "text"
    """Field that holds the text."""
    label_field: Annotated[str | None, Affects.ALL] = None
    """Field that holds a class: the data are then for sequence classification, one padded document
    a sample. Null: for language modelling."""
    tokenizer: Annotated[str | None, Affects.ALL] = None
    """Folder of a `transformers` tokenizer; null: bytes are the tokens. Its content counts."""
    sequence_length: Annotated[SequenceLength, Affects.ALL] = 64
    """Tokens a sample; longer documents are continued in further samples, or cut where they have a
    label."""
    layout: Annotated[Layout, Affects.ALL] = "packed"
    """`packed`: documents one after the other, every sample full; `padded`: a sample is one
    document, and only its real tokens count."""
    held_out_pct: Annotated[Percent, Affects.LOSS] = 5.0
    """Share of the documents kept for evaluation, in percent."""

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

    name: Annotated[Literal["custom"], Affects.ALL]
    target: Annotated[str, Field(alias="_target_"), Affects.ALL]
    """Import path of a callable, `package.module.name`. Its source counts too."""
    arguments: Annotated[dict[str, Any], Affects.ALL] = Field(default_factory=dict)
    """Its keyword arguments."""
    sequence_length: Annotated[SequenceLength | None, Affects.ALL] = None
    """Tokens a sample, where samples are full sequences; null: they are not. Given to `_target_`
    where it is not null."""


Data = Annotated[
    StandardLibrary | TextFiles | TokenFiles | Documents | Digits | CustomData | ExternalData,
    Field(discriminator="name"),
]
