"""What the tests of the config share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtrain.config import schema_tools as tools


def of_kind(section: str, kind: str | None, folder: Path) -> list[tuple[str, Any]]:
    """Overlays that choose a variant and give it what it needs."""
    file = folder / "rows.npz"
    file.touch()
    if kind is None:
        return []
    cls = tools.variant(section, kind)
    assert cls is not None
    needed = {"path": str(file), "target": "my_file.py:Thing"}
    required = [name for name, info in cls.model_fields.items() if info.is_required()]
    return [(f"{section}.kind", kind), *[(f"{section}.{name}", needed[name]) for name in required]]
