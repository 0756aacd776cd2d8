"""Sweep folders beside one that is not there."""

from __future__ import annotations

from pathlib import Path

from batchscape.text import did_you_mean, near_names

__all__ = ["no_runs"]

_MOST_NAMED = 3


def no_runs(sweep_dir: Path) -> str:
    """Say that a folder holds no runs, and which sweep folders beside it may be meant.

    Parameters
    ----------
    sweep_dir : Path

    Returns
    -------
    str
        First those whose name goes on with a hash, as that of a sweep with further settings does.
    """
    what = "holds no runs" if sweep_dir.is_dir() else "is no folder"
    what = what if sweep_dir.exists() else "does not exist"
    text = f"{sweep_dir} {what}; a sweep folder has a 'runs' folder with runs in it"
    near = [str(sweep_dir.with_name(name)) for name in _near(sweep_dir)]
    return text + did_you_mean(near).removesuffix(".")


def _near(sweep_dir: Path) -> list[str]:
    if not sweep_dir.name:
        return []
    try:
        names = sorted(path.name for path in sweep_dir.parent.iterdir() if (path / "runs").is_dir())
    except OSError:
        return []
    names = [name for name in names if name != sweep_dir.name]
    longer = [name for name in names if name.startswith(f"{sweep_dir.name}-")]
    alike = near_names(sweep_dir.name, names, _MOST_NAMED)
    return list(dict.fromkeys([*longer, *alike]))[:_MOST_NAMED]
