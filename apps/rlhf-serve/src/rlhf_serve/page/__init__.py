"""The page at `/`: a prompt, its candidates side by side with their scores, and the winner."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.responses import HTMLResponse

_INLINE = r"<{0}>(.*?)</{0}>"


def response() -> HTMLResponse:
    """The page, with a Content-Security-Policy that lets only what it contains run or load."""
    html, policy = _page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


@cache
def _page() -> tuple[str, str]:
    html = (resources.files(__name__) / "index.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_sources(html, 'script')}",
            f"style-src {_sources(html, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    return html, policy


def _sources(html: str, tag: str) -> str:
    """The hashes of the inline elements `tag`, as a policy names them."""
    texts = re.findall(_INLINE.format(tag), html, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
