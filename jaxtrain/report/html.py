"""report.html, plain for now."""

from __future__ import annotations

import html
import json
from pathlib import Path

from jaxtrain.checkpoint.files import write_text
from jaxtrain.hooks.folder import RunFolder


def write_report(folder: RunFolder) -> Path:
    """One HTML file of a run."""
    text = html.escape(json.dumps({"status": folder.read_status(), "result": folder.read_result()}, indent=1))
    write_text(folder.report, f"<!doctype html><meta charset=utf-8><title>run</title><pre>{text}</pre>")
    return folder.report
