"""Directories of generated files that tests use instead of the user's."""

from pathlib import Path

from sync.own_files import cache_directory


def cache_without(name: str, directory: Path) -> Path:
    """Make `directory` a cache with all that the user's has, compiled kernels above all, but for files of one kind."""
    usual = cache_directory("")
    (usual / "kernels").mkdir(parents=True, exist_ok=True)
    directory.mkdir()
    for path in usual.iterdir():
        if path.name != name:
            (directory / path.name).symlink_to(path)
    return directory
