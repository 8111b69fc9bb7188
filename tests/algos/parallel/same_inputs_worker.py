"""Says which input of a job is refused, for jobs whose files lie in a home of each process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["HOME"] = str(Path(sys.argv[1]) / os.environ["RANK"])

from rlhf_algos import METHODS, TrainingJob
from rlhf_algos.process_group import all_gather, is_main_process
from rlhf_data import RunFolder, UserError

for name, method, settings in json.loads(sys.argv[2]):
    found = "nothing"
    try:
        TrainingJob(method, METHODS[method].resolve(settings), RunFolder(Path(sys.argv[1]) / name)).prepare()
    except UserError as error:
        found = f"{error.code} {Path(error.fields.get('path', '')).name}"
    codes = all_gather([found])
    if is_main_process():
        print(json.dumps([name, *codes]))
