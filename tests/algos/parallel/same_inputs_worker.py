"""Prints which input of each job is refused: `same_inputs_worker.py FOLDER CASES JOB`.

Each process has its own home in FOLDER; CASES are (name, method, settings) as JSON, JOB is `module:class`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

os.environ["HOME"] = str(Path(sys.argv[1]) / os.environ["RANK"])

from rlhf_algos import METHODS
from rlhf_algos.process_group import all_gather, is_main_process
from rlhf_data import RunFolder, UserError

module, _, kind = sys.argv[3].partition(":")
job = getattr(importlib.import_module(module), kind)
for name, method, settings in json.loads(sys.argv[2]):
    found = "nothing"
    try:
        job(method, METHODS[method].resolve(settings), RunFolder(Path(sys.argv[1]) / name)).train()
    except UserError as error:
        found = f"{error.code} {Path(error.fields.get('path', '')).name}"
    codes = all_gather([found])
    if is_main_process():
        print(json.dumps([name, *codes]))
