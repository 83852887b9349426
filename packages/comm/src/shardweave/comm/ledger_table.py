"""A ledger as people and programs read it."""

from __future__ import annotations

from typing import Any

from .ledger import Ledger, LedgerKey, Traffic
from .text import bytes_text

__all__ = ["ledger_dict", "ledger_table"]

_HEAD = ("axis", "kind", "link", "dtype", "calls", "bytes", "sent", "seconds", "exposed", "hidden")


def ledger_dict(ledger: Ledger) -> list[dict[str, Any]]:
    """The entries as plain values, ready for JSON: the key's fields, the sums, and the share that was hidden."""
    return [_row(key, traffic) for key, traffic in _ordered(ledger)]


def ledger_table(ledger: Ledger) -> str:
    """The entries as lines of text, one for each axis, kind, link and dtype, with a sum at the end.

    ``hidden`` is the share of the seconds in which nobody waited. Seconds of what a backend runs by itself last until
    it was seen complete, so of a call that was waited for late they are an upper bound, and so is the share.
    """
    rows = [
        (key.axis, key.kind, key.link, key.dtype, *_numbers(traffic)) for key, traffic in _ordered(ledger)
    ]
    rows.append(("all", "", "", "", *_numbers(ledger.total())))
    widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < 4 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (_HEAD, *rows)
    )


def _ordered(ledger: Ledger) -> list[tuple[LedgerKey, Traffic]]:
    return sorted(ledger, key=lambda entry: (entry[0].axis, entry[0].kind, entry[0].link, entry[0].dtype))


def _row(key: LedgerKey, traffic: Traffic) -> dict[str, Any]:
    return {
        "axis": key.axis,
        "kind": key.kind,
        "link": key.link,
        "dtype": key.dtype,
        "calls": traffic.calls,
        "elements": traffic.elements,
        "bytes": traffic.bytes,
        "sent": traffic.sent,
        "seconds": traffic.seconds,
        "exposed": traffic.exposed,
    }


def _numbers(traffic: Traffic) -> tuple[str, ...]:
    hidden = f"{1 - traffic.exposed / traffic.seconds:.0%}" if traffic.seconds else "-"
    return (
        str(traffic.calls),
        bytes_text(traffic.bytes),
        bytes_text(traffic.sent),
        f"{traffic.seconds:.3f}",
        f"{traffic.exposed:.3f}",
        hidden,
    )
