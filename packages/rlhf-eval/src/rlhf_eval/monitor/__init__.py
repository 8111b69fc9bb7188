"""Monitoring runs in progress: their logs, alerts, a page."""

from rlhf_eval.monitor.alerts import held_out_keys as held_out_keys
from rlhf_eval.monitor.logs import RunLog as RunLog
from rlhf_eval.monitor.logs import find_runs as find_runs
from rlhf_eval.monitor.logs import open_log as open_log
from rlhf_eval.monitor.page import monitor_page as monitor_page
from rlhf_eval.monitor.summary import Summary as Summary
from rlhf_eval.monitor.summary import shown_keys as shown_keys
from rlhf_eval.monitor.summary import sparkline as sparkline
from rlhf_eval.monitor.summary import summarise as summarise
