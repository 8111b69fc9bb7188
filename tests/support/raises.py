"""What tests expect of the errors that users see."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_data import UserError
from rlhf_merge import MergeError


def raises_error(code: str, **fields: Any) -> pytest.RaisesExc[Any]:
    """Expect a `UserError` or `MergeError` of this code, with these fields among its own."""

    def check(error: Any) -> bool:
        found = {name: error.fields.get(name) for name in fields}
        assert (error.code, found) == (code, fields), f"{error.code} {error.fields}: {error}"
        return True

    return pytest.raises((UserError, MergeError), check=check)
