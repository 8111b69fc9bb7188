"""Says which input of a game is refused, for games whose files lie in a home of each process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["HOME"] = str(Path(sys.argv[1]) / os.environ["RANK"])

from rlhf_algos.process_group import all_gather, is_main_process
from rlhf_data import RunFolder, UserError, apply_overrides
from rlhf_minmax import MinMaxConfig, MinMaxJob

for name, settings in json.loads(sys.argv[2]):
    config, found = MinMaxConfig.from_dict(apply_overrides({}, settings)), "nothing"
    try:
        MinMaxJob(config, RunFolder(Path(sys.argv[1]) / "run")).play()
    except UserError as error:
        found = f"{error.code} {Path(error.fields.get('path', '')).name}"
    codes = all_gather([found])
    if is_main_process():
        print(json.dumps([name, *codes]))
