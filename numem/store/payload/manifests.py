"""Lance's manifests of a local dataset: where they lie, which versions have one, and what they hash to."""

from pathlib import Path

from blake3 import blake3

MAGIC = b"LANC"
_TOP = 2**64 - 1


def manifest_path(root: Path, version: int) -> Path:
    """Where Lance keeps the manifest of a version."""
    return root / "_versions" / f"{_TOP - version:020d}.manifest"


def manifest_versions(root: Path) -> list[int]:
    """Versions that have a manifest file, newest first."""
    versions = root / "_versions"
    if not versions.is_dir():
        return []
    return sorted((_TOP - int(path.stem) for path in versions.glob("*.manifest") if path.stem.isdigit()), reverse=True)


def digest_file(path: Path) -> str:
    """BLAKE3-256 of a small file, hex."""
    return str(blake3(path.read_bytes()).hexdigest())
