"""What tells mistakes and hangs in words: agreement before each call, and a watchdog.

==================  ==============================================================================
calls, call_sites   a call as a value; the user's line that made it
records             what ranks show each other, and the error when they differ; pure
agreement           the exchange of records before a call, in debug mode
progress            how far this rank has come, and what it waits in
processes           whether another rank's process lives, asked of the kernel
status, board       what a rank answers to an alarm, and the corner of the store where it does
watchdog, report    the thread that raises and answers alarms; its report as text, pure
guard               all of it behind the three functions that collectives and messages call
==================  ==============================================================================
"""

from __future__ import annotations

from .guard import Guard, watch_limit
from .progress import Ticket
from .records import CollectiveMismatch
from .report import news
from .watchdog import stop_watchdogs

__all__ = ["CollectiveMismatch", "Guard", "Ticket", "news", "stop_watchdogs", "watch_limit"]
