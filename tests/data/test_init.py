import importlib
import subprocess
import sys

import rlhf_data


def test_every_exported_name_resolves():
    for name in rlhf_data.__all__:
        module = importlib.import_module(f"rlhf_data.{rlhf_data._MODULE_OF[name]}")
        assert getattr(rlhf_data, name) is getattr(module, name)


def test_import_loads_no_heavy_library():
    code = (
        "import sys, rlhf_data\n"
        "rlhf_data.load_records, rlhf_data.PreferencePair, rlhf_data.PreferenceRecord\n"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'pyarrow', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
