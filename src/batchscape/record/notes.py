"""What ranks have to say about their files, until the launcher writes it into `status.json`."""

from __future__ import annotations

from batchscape.record.files import JsonLines, read_json_lines
from batchscape.record.folder import RunFolder
from batchscape.record.status import RunStatus

__all__ = ["add_note", "fold_notes"]


def add_note(folder: RunFolder, attempt: int, note: str) -> None:
    """Leave a note for the status of a run.

    Parameters
    ----------
    folder : RunFolder
    attempt : int
        Which start of the run it is about, from 0.
    note : str
    """
    lines = JsonLines(folder.notes)
    lines.append([{"attempt": attempt, "note": f"attempt {attempt + 1}: {note}"}])
    lines.close()


def fold_notes(folder: RunFolder, status: RunStatus) -> None:
    """Add the notes that ranks have left to a status, each once.

    Raises
    ------
    DamageError
        If the notes are damaged.
    """
    for row in read_json_lines(folder.notes):
        if row.get("note") not in status.notes:
            status.notes.append(str(row.get("note")))
