"""Thinking in the fields of other servers that clients hand back unread: signatures, encrypted and redacted contents.

It is no secret, since it is the client's own policy that thought it: it is only packed, so that it returns whole.
"""

import base64
import hashlib
import zlib

_MARK = b"re1"
_MOST_CHARS = 1 << 22
"""The longest thinking that is unpacked, in characters."""


def seal(text: str) -> str:
    """Pack a text in one that `unseal` recognises."""
    return base64.b64encode(_MARK + zlib.compress(text.encode("utf-8", "surrogatepass"))).decode("ascii")


def unseal(sealed: str) -> str | None:
    """The text that `seal` has packed; None for anything else."""
    try:
        data = base64.b64decode(sealed, validate=True)
        if not data.startswith(_MARK):
            return None
        unpacked = zlib.decompressobj().decompress(data[len(_MARK) :], _MOST_CHARS)
        return unpacked.decode("utf-8", "surrogatepass")
    except (ValueError, zlib.error):
        return None


def sign(text: str) -> str:
    """A signature of a text, for clients that expect one."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()).decode("ascii")
