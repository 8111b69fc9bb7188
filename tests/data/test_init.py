import importlib
import subprocess
import sys
from typing import Any


def test_every_exported_name_resolves():
    package: Any = importlib.import_module("rlhf_data")
    for name in package.__all__:
        module = importlib.import_module(f"rlhf_data{package._MODULE_OF[name]}")
        assert getattr(package, name) is getattr(module, name)


def test_import_loads_no_heavy_library():
    code = (
        "import sys, rlhf_data\n"
        "rlhf_data.load_records, rlhf_data.PreferencePair, rlhf_data.PreferenceRecord\n"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'pyarrow', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
