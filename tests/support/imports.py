"""What a piece of code imports on its way."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "pydantic", "rich", "yaml", "numpy")


def imported_by(code: str, names: tuple[str, ...] = HEAVY) -> list[str]:
    """Those of some modules that are loaded once the code has run, in a process of its own."""
    program = f"import sys\n{code}\nprint(*sorted({set(names)!r} & set(sys.modules)))\n"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-1].split()
