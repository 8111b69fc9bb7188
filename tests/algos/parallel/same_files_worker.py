"""Says for every folder of cases whether the processes, each of which sees its own, see the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rlhf_algos.parallel.same_files import check_same_on_all
from rlhf_algos.process_group import all_gather, is_main_process, rank
from rlhf_data import UserError

for case in sorted(Path(sys.argv[1]).iterdir()):
    found = "same"
    try:
        check_same_on_all(case / str(rank()))
    except UserError as error:
        found = str(error.code)
    codes = all_gather([found])
    if is_main_process():
        print(json.dumps([case.name, *codes]))
