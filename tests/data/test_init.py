import importlib
import subprocess
import sys
from typing import Any

import pytest


def test_every_exported_name_resolves():
    package: Any = importlib.import_module("rlhf_data")
    assert "load_records" in package.__all__
    assert dir(package) == package.__all__
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="module 'rlhf_data' has no attribute 'absent'"):
        _ = package.absent


def test_import_loads_no_heavy_library():
    code = (
        "import sys, rlhf_data\n"
        "rlhf_data.load_records, rlhf_data.PreferencePair, rlhf_data.PreferenceRecord\n"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'pyarrow', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
