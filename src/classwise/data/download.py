"""Files by their official address, through torchvision's downloader, which checks them."""

from pathlib import Path

from classwise.errors import UserError


def fetch(address: str, md5: str, root: Path) -> None:
    """Download an archive into `root` and unpack it there, unless that cannot be done: then say what to do."""
    from classwise.data.vision import torchvision

    try:
        torchvision.datasets.utils.download_and_extract_archive(address, str(root), md5=md5)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{address} could not be downloaded ({error}); unpack it by hand in {root.resolve()}, "
            "or set `data_root` in config/config.yaml to the folder that has it"
        ) from error
