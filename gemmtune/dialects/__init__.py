"""Tuned CSVs in their dialects: which one a text is, faults, conversion, merging. Pure.

`te-v1`, `te-v2` and `te-v3` are Transformer Engine's (te.py); `gemmtune` is our own tuned.csv,
TE's twenty columns and then ours (table.Tuned), which TE itself does not read. Two more are
converted from and to: `override`, hipBLASLt's tuning file, and `tunableop`, PyTorch's.
"""

from __future__ import annotations

from gemmtune.dialects import te
from gemmtune.table import COLUMNS, Tuned, split_lines

GEMMTUNE = "gemmtune"
DIALECTS = (*te.COLUMNS, GEMMTUNE)
OVERRIDE, TUNABLEOP = "override", "tunableop"


def detect(text: str) -> str | None:
    """The dialect of a table, by its header; None where it is none of ours or TE's.

    TE's headers count only to the byte, as TE itself compares them.
    """
    if dialect := te.detect(text):
        return dialect
    for line in split_lines(text.removeprefix("\ufeff")):
        if line.strip() and not line.lstrip().startswith("#"):
            columns = {cell.strip() for cell in line.split(",")}
            ours = columns - set(te.COLUMNS["te-v1"])
            return GEMMTUNE if "config" in ours and ours <= set(COLUMNS[Tuned]) else None
    return None
