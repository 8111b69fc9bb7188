"""Runs as they go on: their logs, read while they are written, what looks wrong in them, a page."""

from rlhf_eval.monitor.held_out import held_out_keys
from rlhf_eval.monitor.logs import RunLog, find_runs, open_log
from rlhf_eval.monitor.page import monitor_page
from rlhf_eval.monitor.summary import Summary, shown_keys, sparkline, summarise

__all__ = [
    "RunLog",
    "Summary",
    "find_runs",
    "held_out_keys",
    "monitor_page",
    "open_log",
    "shown_keys",
    "sparkline",
    "summarise",
]
